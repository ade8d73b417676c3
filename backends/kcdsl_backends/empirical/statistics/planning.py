"""Numbers of units that a statement needs, before they are measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from scipy import stats

from kcdsl_backends.empirical.statistics.bootstrap import COCHRAN, FEWEST_CLUSTERS, skewness
from kcdsl_backends.empirical.statistics.estimates import ONE_LOOK, Array, Confidence, check_rate
from kcdsl_backends.empirical.statistics.rates import limits, shows_below

MOST_UNITS = 10**12
"""Largest number of units that is reported."""


def units_for_budget(
    rate: Fraction, confidence: Confidence = ONE_LOOK, *, k: int = 0
) -> int | None:
    """Return the fewest units with which k beyond still show a rate of at most `rate`.

    None for more than `MOST_UNITS`. Raises ValueError for a rate of 0, which no sample shows.
    """
    check_rate(rate)
    return _least(k + 1, lambda n: shows_below(k, n, rate, confidence))


def units_at_rate(rate: Fraction, true: Fraction, confidence: Confidence = ONE_LOOK) -> int | None:
    """Return the fewest units that show at most `rate` if a share `true` of them is beyond.

    A fraction of a unit counts as one. None if `true` is not clearly below the rate.
    """
    check_rate(rate)
    if not 0 <= true < rate:
        return None
    return _by_count(rate, confidence, lambda k, n: n * true <= k)


def units_with_power(
    rate: Fraction, true: Fraction, power: float, confidence: Confidence = ONE_LOOK
) -> int | None:
    """Return the fewest units that show at most `rate` with the probability `power`, if each is
    beyond with the probability `true`.

    With limits at every look the power is higher; None as in `units_at_rate`.
    """
    check_rate(rate)
    if not 0 <= true < rate:
        return None
    chance = float(true)
    return _by_count(rate, confidence, lambda k, n: float(stats.binom.cdf(k, n, chance)) >= power)


def units_for_mean(
    variance: float,
    distance: float,
    power: float,
    confidence: Confidence = ONE_LOOK,
    residuals: Array | None = None,
) -> int | None:
    """Return the number of requests that show a mean at `distance` within its threshold.

    `variance` is that of one request, `residuals` are those of an earlier sample, positive towards
    the threshold. Without a long tail there, the normal approximation: ((z_α + z_β) σ /
    distance)^2, at least as many as a bootstrap needs; with one, as many as its wider limits need.
    None if the distance is not positive, and for limits at every look.
    """
    if not distance > 0 or not math.isfinite(variance) or confidence.anytime:
        return None
    z_error, z_power = float(stats.norm.isf(float(confidence.error))), float(stats.norm.ppf(power))
    needed = variance * ((z_error + z_power) / distance) ** 2
    if needed > MOST_UNITS:
        return None
    normal = max(FEWEST_CLUSTERS, math.ceil(needed))
    if residuals is None or not residuals.any() or not (skew := skewness(residuals)) > 0:
        return normal
    ordered = np.sort(residuals / math.sqrt(float(np.mean(residuals**2))))

    def enough(n: int) -> bool:
        limit = _studentised_limit(n, skew, ordered, z_error)
        error = math.sqrt((1 + limit * skew) / n)  # of mean and limit, which vary together
        return math.sqrt(variance) * (limit + z_power * error) <= distance

    return _least(normal, enough)


def _studentised_limit(n: int, skew: float, ordered: Array, z: float) -> float:
    """Return the expected distance of the limit of `bootstrap.clustered_ratio` from the mean of n
    requests, in standard deviations of one; `ordered` are standardised residuals.

    The quantile of the studentised mean has the term of its skewness (Hall 1992). If n requests are
    too few for it, the worst one counts twice.
    """
    shift, variance = 0.0, 1.0
    if n <= COCHRAN * skew**2:
        worst = float(ordered[int(ordered.size * (1 - 1 / n))])
        shift, variance = worst / n, 1 + worst**2 / n
        skew = (skew + worst**3 / n) / variance**1.5
    return shift + math.sqrt(variance / n) * (z + skew * (2 * z**2 + 1) / (6 * math.sqrt(n)))


def units_with_some(share: Fraction, power: float, confidence: Confidence = ONE_LOOK) -> int | None:
    """Return the fewest requests of which, with the probability `power`, enough are away from the
    end of their range for a limit by resampling, if a `share` of all is.

    A resample without any of k such requests has the probability e^-k and no spread; if this
    exceeds the error, there is no limit. None for more than `MOST_UNITS`.
    """
    fewest = math.ceil(-math.log(float(confidence.error)))
    if share * MOST_UNITS < fewest:
        return None
    chance = float(share)
    return _least(fewest, lambda n: float(stats.binom.sf(fewest - 1, n, chance)) >= power)


def units_with_unseen(
    share: float, away: float, variance: float, power: float, confidence: Confidence = ONE_LOOK
) -> int | None:
    """Return the fewest requests whose limits for undrawn requests (`bootstrap.clustered_ratio`)
    are within the threshold with the probability `power`.

    In shares of the range: the threshold is `share` from the best value and the mean `away`;
    `variance` is that of one request. The normal approximation. None if no number is enough.
    """
    if not away < share:
        return None
    z = float(stats.norm.ppf(power))

    def enough(n: int) -> bool:
        mean = max(0.0, away + z * math.sqrt(variance / n))
        return mean + (1 - mean) * (1 - math.pow(confidence.error, 1 / n)) <= share

    return _least(FEWEST_CLUSTERS, enough)


def shown_by(n: int, confidence: Confidence = ONE_LOOK) -> float:
    """Return the upper limit of the rate for n units, none of them beyond."""
    return limits(0, n, confidence)[1]


def _by_count(
    rate: Fraction, confidence: Confidence, enough: Callable[[int, int], bool]
) -> int | None:
    """Return the number of units for the smallest k exceedances with `enough(k, units)`."""

    def reached(k: int) -> bool:
        units = units_for_budget(rate, confidence, k=k)
        return units is None or enough(k, units)

    high = 1
    if reached(0):
        return units_for_budget(rate, confidence)
    while not reached(high):
        high *= 2
        if high > 10**6:
            return None
    return units_for_budget(rate, confidence, k=_between(high // 2, high, reached))


def _least(start: int, holds: Callable[[int], bool]) -> int | None:
    """Return the least number from `start` on for which `holds`, which must be monotone; None for
    more than `MOST_UNITS`."""
    if holds(start):
        return start
    step = 1
    while not holds(start + step):
        step *= 2
        if step > MOST_UNITS:
            return None
    return _between(start + step // 2, start + step, holds)


def _between(low: int, high: int, holds: Callable[[int], bool]) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
