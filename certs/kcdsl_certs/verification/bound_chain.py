"""Independent evaluation of the bound chain in decimal arithmetic, for checkers.

No code is shared with the program that wrote the certificate: the formulas are evaluated in
exponential form with as many digits as the argument needs (at least 60 significant ones in the
result) and rounded up. docs/proofs/bound-chain.md states them and their conditions.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import (
    MAX_EMAX,
    MIN_EMIN,
    ROUND_CEILING,
    ROUND_HALF_EVEN,
    Context,
    Decimal,
    DivisionByZero,
    InvalidOperation,
    Overflow,
)
from fractions import Fraction

from kcdsl_certs.encoding.reals import parse_hex
from kcdsl_certs.encoding.rejected import Rejected

METRICS = (
    "tv",
    "kl",
    "jeffreys",
    "chi2",
    "hellinger2",
    "js",
    "abs_log_ratio",
    "log_ratio",
    "w_log_w",
    "reward_delta",
    "grad_bias",
)
"""The metrics whose magnitude is bounded by the span of the logit drift."""

_DIGITS = 60
_ENLARGE = Fraction(1) + Fraction(1, 10**50)
_SATURATED = Fraction(4000)
_CONSTANTS = {
    "reward_delta": ("reward_range",),
    "grad_bias": ("advantage_max", "score_norm_max"),
}


def span_of_norm(kind: str, bound: str) -> Fraction:
    """Return an upper bound of span(dz) from a bound (hex float) on a norm of dz.

    "span" keeps it, "inf" doubles it, "2" multiplies it by sqrt(2), rounded up.
    """
    value = _nonnegative(bound)
    match kind:
        case "span":
            return value
        case "inf":
            return 2 * value
        case "2":
            root = Decimal(2).sqrt(_context(_DIGITS))
            return value * Fraction(root) * _ENLARGE
        case _:
            raise Rejected("chain/norm", f"no span follows from the norm {kind!r}")


def implied_bound(
    metric: str,
    span: str | Fraction,
    temperature: Fraction,
    constants: Mapping[str, Fraction] | None = None,
) -> Fraction | None:
    """Return an upper bound of |metric| for one token, or None where none is finite.

    `span` bounds span(dz) of the logits, a hexadecimal float or an exact number; s = span/T.
    `constants` may hold reward_range (osc R), advantage_max and score_norm_max. Raises Rejected
    (`chain/…`) for an unknown metric, a missing or negative constant, T <= 0 and a span that is
    negative or not a number.
    """
    if metric not in METRICS:
        raise Rejected("chain/metric", f"the chain does not bound {metric!r}")
    width = span if isinstance(span, Fraction) else _nonnegative(span)
    if width < 0:
        raise Rejected("chain/span", "a span is not negative")
    if temperature <= 0:
        raise Rejected("chain/temperature", f"T = {temperature}: the chain needs T > 0")
    scale = Fraction(1)
    for name in _CONSTANTS.get(metric, ()):
        value = (constants or {}).get(name)
        if value is None or value < 0:
            raise Rejected("chain/constant", f"{metric} needs {name} >= 0, not {value}")
        scale *= value
    s = width / temperature
    if s == 0:
        return Fraction(0)
    match metric:
        case "abs_log_ratio" | "log_ratio":
            return s
        case "reward_delta":
            return scale * _total_variation(s)
        case "grad_bias":
            return 2 * scale * _total_variation(s)
        case "tv":
            return _total_variation(s)
        case "jeffreys":
            return s * _total_variation(s)
        case "hellinger2" | "js":
            return _saturating(metric, s)
        case _:
            return _growing(metric, s)


def _nonnegative(text: str) -> Fraction:
    value = parse_hex(text)
    if value < 0.0:
        raise Rejected("chain/span", f"{text} is negative")
    return Fraction(value)


def _context(digits: int) -> Context:
    return Context(
        prec=digits,
        rounding=ROUND_HALF_EVEN,
        Emin=MIN_EMIN,
        Emax=MAX_EMAX,
        traps=[InvalidOperation, DivisionByZero, Overflow],
    )


def _working(s: Fraction) -> tuple[Context, Decimal]:
    """Return a context with enough digits for the cancellation at s, and s rounded up.

    The smallest bound, 1 - sech(s/4), is about s^2/32 and comes from terms near 1, and the largest
    terms are e^s; so twice the decimal exponent of s is lost, three times leaves room.
    """
    exponent = len(str(s.numerator)) - len(str(s.denominator))
    digits = _DIGITS + 3 * max(0, 1 - exponent) + 10
    up = _context(digits)
    up.rounding = ROUND_CEILING
    return _context(digits), up.divide(Decimal(s.numerator), Decimal(s.denominator))


def _total_variation(s: Fraction) -> Fraction:
    """Return tanh(s/4) = (e^(s/2) - 1)/(e^(s/2) + 1), rounded up, at most 1."""
    if s > _SATURATED:
        return Fraction(1)
    c, x = _working(s)
    e = c.exp(c.divide(x, Decimal(2)))
    return min(Fraction(1), _up(c.divide(c.subtract(e, Decimal(1)), c.add(e, Decimal(1)))))


def _saturating(metric: str, s: Fraction) -> Fraction:
    """Return 1 - sech(s/4), or ln 2 - h2(1/(1 + e^(s/2))), rounded up."""
    c, x = _working(min(s, _SATURATED))
    one = Decimal(1)
    if metric == "hellinger2":
        if s > _SATURATED:
            return Fraction(1)
        root = c.exp(c.divide(x, Decimal(4)))
        sech = c.divide(Decimal(2), c.add(root, c.divide(one, root)))
        return min(Fraction(1), _up(c.subtract(one, sech)))
    ceiling = _up(c.ln(Decimal(2)))
    if s > _SATURATED:
        return ceiling
    share = c.divide(one, c.add(one, c.exp(c.divide(x, Decimal(2)))))
    other = c.subtract(one, share)
    entropy = c.minus(c.add(c.multiply(share, c.ln(share)), c.multiply(other, c.ln(other))))
    return min(ceiling, _up(c.subtract(c.ln(Decimal(2)), entropy)))


def _growing(metric: str, s: Fraction) -> Fraction | None:
    """Return the bound of kl (logarithm of the Specht ratio at e^s), chi2 or w_log_w."""
    c, x = _working(s)
    one = Decimal(1)
    if s > _SATURATED:
        if metric != "kl":
            return None
        # s/(e^s - 1) + ln(1 - e^-s) is below 10^-1000 here.
        return _up(c.subtract(c.subtract(x, one), c.ln(x))) + Fraction(1, 10**1000)
    e = c.exp(x)
    match metric:
        case "kl":
            grown = c.subtract(e, one)
            log_mean = c.ln(c.divide(grown, x))
            return _up(c.add(c.subtract(c.divide(x, grown), one), log_mean))
        case "chi2":
            half = c.divide(c.add(e, c.divide(one, e)), Decimal(2))
            return _up(c.divide(c.subtract(half, one), Decimal(2)))
        case "w_log_w":
            return _up(c.multiply(x, e))
        case _:
            raise Rejected("chain/metric", f"the chain does not bound {metric!r}")


def _up(value: Decimal) -> Fraction:
    """Enlarge a computed value > 0 beyond the error of its computation."""
    return Fraction(value) * _ENLARGE
