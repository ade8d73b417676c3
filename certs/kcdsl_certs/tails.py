"""Exact-enough binomial tails, so that a verifier can re-derive a sampled verdict by itself."""

from __future__ import annotations

from decimal import Context, Decimal, DivisionByZero, InvalidOperation, Overflow
from fractions import Fraction

from kcdsl_certs.rejected import Rejected

_CONTEXT = Context(
    prec=50,
    Emin=-(10**9),
    Emax=10**9,
    traps=[DivisionByZero, InvalidOperation, Overflow],
)
_MARGIN = Decimal("1e-30")
"""Relative; the sum of at most 10^7 terms of 50 digits is off by far less."""
_MOST_UNITS = 10_000_000


def lower_tail(k: int, n: int, p: Fraction) -> Decimal:
    """Return an upper bound (tight to 1e-30) of P(X <= k) for X ~ Binomial(n, p), 0 < p < 1.

    The Clopper-Pearson upper limit at level α lies at or below p exactly when this is <= α.
    """
    if not (0 <= k <= n and 0 < p < 1) or n > _MOST_UNITS:
        raise Rejected("clause/counts", f"{k} of {n} at a rate of {p}")
    c = _CONTEXT
    one = c.divide(Decimal(p.numerator), Decimal(p.denominator))
    other = c.divide(Decimal(p.denominator - p.numerator), Decimal(p.denominator))
    odds = c.divide(one, other)
    term = c.power(other, n)
    total = term
    for i in range(1, k + 1):
        term = c.multiply(term, c.divide(c.multiply(odds, Decimal(n - i + 1)), Decimal(i)))
        total = c.add(total, term)
    return min(c.multiply(total, c.add(Decimal(1), _MARGIN)), Decimal(1))


def certifies(k: int, n: int, rate: Fraction, alpha: Fraction) -> bool:
    """Say whether k exceedances of n units show a rate below `rate` at level α (one look, fixed n).

    Clopper-Pearson: P(X <= k | rate) <= α.
    """
    if k * rate.denominator >= n * rate.numerator:
        return False
    tail = lower_tail(k, n, rate)
    return Fraction(tail) <= alpha
