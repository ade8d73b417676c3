"""Clopper-Pearson: exact binomial limits for a number of units that was fixed in advance.

Decisions are made on the binomial tail itself, near its level with 50 digits; the limits that are
printed are rounded outward. Source: Clopper and Pearson 1934.
"""

from __future__ import annotations

import math
from fractions import Fraction

from scipy import stats

from kcdsl_backends.empirical.statistics.estimates import check_counts, check_rate
from kcdsl_certs.rejected import Rejected
from kcdsl_certs.statement import lower_tail

_NEAR = 1e-9
"""Relative error that the float64 tail is far within; nearer to the level it is not trusted."""
_OUTWARD = 1e-12


def shows_below(k: int, n: int, rate: Fraction, error: Fraction) -> bool:
    """Say whether k of n show a rate of at most `rate`: P(X <= k | n, rate) <= error.

    False wherever the tail is not known well enough. Exact in its three arguments.
    """
    check_counts(k, n)
    check_rate(rate)
    if Fraction(k) >= n * rate:
        return False
    tail, level = float(stats.binom.cdf(k, n, float(rate))), float(error)
    if abs(tail - level) > _NEAR * level:
        return tail < level
    try:
        return Fraction(lower_tail(k, n, rate)) <= error
    except Rejected:
        return False


def shows_above(k: int, n: int, rate: Fraction, error: Fraction) -> bool:
    """Say whether k of n show a rate of at least `rate`: P(X >= k | n, rate) <= error."""
    check_counts(k, n)
    return shows_below(n - k, n, 1 - rate, error)


def upper_limit(k: int, n: int, error: Fraction) -> float:
    """Return the largest rate that k of n do not exclude, rounded up; 1 for n of n."""
    check_counts(k, n)
    if k == n:
        return 1.0
    if k == 0:
        limit = -math.expm1(math.log(float(error)) / n)
    else:
        limit = float(stats.beta.ppf(float(1 - error), k + 1, n - k))
    return min(1.0, _up(limit))


def lower_limit(k: int, n: int, error: Fraction) -> float:
    """Return the smallest rate that k of n do not exclude, rounded down; 0 for 0 of n."""
    check_counts(k, n)
    if k == 0:
        return 0.0
    if k == n:
        limit = math.exp(math.log(float(error)) / n)
    else:
        limit = float(stats.beta.ppf(float(error), k, n - k + 1))
    return max(0.0, limit * (1 - _OUTWARD))


def most_exceedances(n: int, rate: Fraction, error: Fraction) -> int | None:
    """Return the largest k that still shows at most `rate`, or None where not even 0 does."""
    check_rate(rate)
    if n <= 0:
        return None
    k = min(n, int(stats.binom.ppf(float(error), n, float(rate))) + 1)
    while k >= 0 and not shows_below(k, n, rate, error):
        k -= 1
    return None if k < 0 else k


def _up(limit: float) -> float:
    return limit * (1 + _OUTWARD)
