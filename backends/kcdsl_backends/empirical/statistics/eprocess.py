"""Limits of a rate that hold at every look at growing data.

The state is two integers, k of n units beyond the threshold, so it merges across shards and does
not depend on the order of anything. Evidence against "the rate is at least δ" is the mixture of
likelihood ratios over p < δ with a Beta(1/2, 1/2) prior cut off at δ; against "at most δ" the same
over p > δ. Each is a non-negative supermartingale that starts at 1, so (Ville 1939) the chance that
it ever reaches 1/α is at most α, whatever rule stops the data.
"""

from __future__ import annotations

import math
from fractions import Fraction

from scipy import special

from kcdsl_backends.empirical.statistics.estimates import check_counts, check_rate

_A = _B = 0.5
_STEPS = 200
_PRECISION = 1e-12


def log_certify(k: int, n: int, rate: Fraction) -> float:
    """Return ln E against "the true rate is at least `rate`" after k of n.

    0 where k/n is not below the rate: there is nothing against it. Raises ValueError for a rate of
    0 or 1: no number of units without a failure shows that none ever comes.
    """
    check_counts(k, n)
    check_rate(rate)
    return 0.0 if k >= n * rate else _log_mixture(k, n, rate, below=True)


def log_alarm(k: int, n: int, rate: Fraction) -> float:
    """Return ln E against "the true rate is at most `rate`" after k of n."""
    check_counts(k, n)
    check_rate(rate)
    return 0.0 if k <= n * rate else _log_mixture(k, n, rate, below=False)


def shows_below(k: int, n: int, rate: Fraction, error: Fraction) -> bool:
    """Say whether k of n show, at this and every other look, a rate of at most `rate`."""
    return _reaches(log_certify(k, n, rate), n, error)


def shows_above(k: int, n: int, rate: Fraction, error: Fraction) -> bool:
    """Say whether k of n show, at this and every other look, a rate of at least `rate`."""
    return _reaches(log_alarm(k, n, rate), n, error)


def upper_limit(k: int, n: int, error: Fraction) -> float:
    """Return the least rate above k/n that is excluded, rounded up; 1 where none is."""
    check_counts(k, n)
    if k == n or not shows_below(k, n, Fraction(math.nextafter(1.0, 0.0)), error):
        return 1.0
    low, high = k / n, math.nextafter(1.0, 0.0)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if high - low <= _PRECISION * high or not low < middle < high:
            break
        if shows_below(k, n, Fraction(middle), error):
            high = middle
        else:
            low = middle
    return high


def lower_limit(k: int, n: int, error: Fraction) -> float:
    """Return the greatest rate below k/n that is excluded, rounded down; 0 where none is."""
    check_counts(k, n)
    least = 2.0**-1000
    if k == 0 or not shows_above(k, n, Fraction(least), error):
        return 0.0
    low, high = least, k / n
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if high - low <= _PRECISION * high or not low < middle < high:
            break
        if shows_above(k, n, Fraction(middle), error):
            low = middle
        else:
            high = middle
    return low


def most_exceedances(n: int, rate: Fraction, error: Fraction) -> int | None:
    """Return the largest k that still shows at most `rate`, or None where not even 0 does."""
    check_rate(rate)
    if n <= 0 or not shows_below(0, n, rate, error):
        return None
    low, high = 0, math.ceil(n * rate)
    while high - low > 1:
        middle = (low + high) // 2
        if shows_below(middle, n, rate, error):
            low = middle
        else:
            high = middle
    return low


def _log_mixture(k: int, n: int, rate: Fraction, *, below: bool) -> float:
    """Return the logarithm of the mixture, without any floor: no mass below δ is no evidence."""
    delta = float(rate)
    complement = math.log1p(-delta) if delta < 0.5 else math.log(float(1 - rate))
    mass = special.betainc if below else special.betaincc
    posterior, prior = float(mass(k + _A, n - k + _B, delta)), float(mass(_A, _B, delta))
    if posterior <= 0 or prior <= 0:
        return -math.inf
    return (
        float(special.betaln(k + _A, n - k + _B))
        + math.log(posterior)
        - float(special.betaln(_A, _B))
        - math.log(prior)
        - k * math.log(delta)
        - (n - k) * complement
    )


def _reaches(evidence: float, n: int, error: Fraction) -> bool:
    """Compare ln E with ln 1/α, less what rounding may have added to it."""
    slack = 64 * 2.0**-52 * (n + 2) * math.log(n + 2)
    return evidence - slack >= -math.log(float(error))
