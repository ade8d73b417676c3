"""Numbers of units that a statement needs, before they are measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from scipy import stats

from kcdsl_backends.empirical.statistics.bootstrap import FEWEST_CLUSTERS
from kcdsl_backends.empirical.statistics.estimates import ONE_LOOK, Confidence, check_rate
from kcdsl_backends.empirical.statistics.rates import limits, shows_below

MOST_UNITS = 10**12
"""More units than this are as good as none."""


def units_for_budget(rate: Fraction, confidence: Confidence = ONE_LOOK, *, k: int = 0) -> int:
    """Return the fewest units of which k beyond still show that at most `rate` are.

    Raises ValueError for a rate of 0, which no number of units shows.
    """
    check_rate(rate)
    return _least(k + 1, lambda n: shows_below(k, n, rate, confidence))


def units_at_rate(rate: Fraction, true: Fraction, confidence: Confidence = ONE_LOOK) -> int | None:
    """Return the fewest units that show at most `rate` where a share `true` of them is beyond.

    A fraction of a unit counts as one. None where `true` is not below the rate, or nearly there.
    """
    check_rate(rate)
    if not 0 <= true < rate:
        return None
    return _by_count(rate, confidence, lambda k, n: n * true <= k)


def units_with_power(
    rate: Fraction, true: Fraction, power: float, confidence: Confidence = ONE_LOOK
) -> int | None:
    """Return the fewest units that show at most `rate` with the probability `power`, where each is
    beyond with the probability `true`.

    At every look the chance is higher still; None as in `units_at_rate`.
    """
    check_rate(rate)
    if not 0 <= true < rate:
        return None
    chance = float(true)
    return _by_count(rate, confidence, lambda k, n: float(stats.binom.cdf(k, n, chance)) >= power)


def units_for_mean(
    variance: float, distance: float, power: float, confidence: Confidence = ONE_LOOK
) -> int | None:
    """Return how many requests show a mean that lies `distance` within its threshold.

    `variance` is that of one request. The normal approximation: ((z_α + z_β) σ / distance)^2, at
    least as many as a bootstrap needs. None where the distance is not positive, or at every look.
    """
    if not distance > 0 or not math.isfinite(variance) or confidence.anytime:
        return None
    z = float(stats.norm.isf(float(confidence.error)) + stats.norm.ppf(power))
    needed = variance * (z / distance) ** 2
    return None if needed > MOST_UNITS else max(FEWEST_CLUSTERS, math.ceil(needed))


def units_with_some(share: Fraction, power: float, confidence: Confidence = ONE_LOOK) -> int | None:
    """Return the fewest requests of which, with the probability `power`, enough lie away from the
    end of their range for resampling to show a limit, where a share of them does.

    A resample that lacks all of k such requests comes with the chance e^-k, and shows no spread: no
    limit is left where that is more often than the error. None for more than `MOST_UNITS`.
    """
    fewest = math.ceil(-math.log(float(confidence.error)))
    if share * MOST_UNITS < fewest:
        return None
    chance = float(share)
    return _least(fewest, lambda n: float(stats.binom.sf(fewest - 1, n, chance)) >= power)


def units_with_unseen(
    share: float, away: float, variance: float, power: float, confidence: Confidence = ONE_LOOK
) -> int | None:
    """Return the fewest requests whose mean, with the probability `power`, leaves room below the
    threshold for requests that none of them shows (`bootstrap.clustered_ratio`).

    In shares of the range: the threshold lies `share` from the good end and the mean `away`;
    `variance` is that of one request. The normal approximation. None where no number is enough.
    """
    if not away < share:
        return None
    z = float(stats.norm.ppf(power))

    def enough(n: int) -> bool:
        mean = max(0.0, away + z * math.sqrt(variance / n))
        return mean + (1 - mean) * (1 - math.pow(confidence.error, 1 / n)) <= share

    try:
        return _least(FEWEST_CLUSTERS, enough)
    except ValueError:
        return None


def shown_by(n: int, confidence: Confidence = ONE_LOOK, *, k: int = 0) -> float:
    """Return the rate that n units, k of them beyond, show not to be exceeded."""
    return limits(k, n, confidence)[1]


def _by_count(
    rate: Fraction, confidence: Confidence, enough: Callable[[int, int], bool]
) -> int | None:
    """Return the units that k exceedances need, for the least k of which they are enough."""

    def reached(k: int) -> bool:
        return enough(k, units_for_budget(rate, confidence, k=k))

    high = 1
    if reached(0):
        return units_for_budget(rate, confidence)
    while not reached(high):
        high *= 2
        if high > 10**6:
            return None
    return units_for_budget(rate, confidence, k=_between(high // 2, high, reached))


def _least(start: int, holds: Callable[[int], bool]) -> int:
    """Return the least number from `start` on that holds, where all beyond it hold too."""
    if holds(start):
        return start
    step = 1
    while not holds(start + step):
        step *= 2
        if step > MOST_UNITS:
            raise ValueError("no number of units is enough")
    return _between(start + step // 2, start + step, holds)


def _between(low: int, high: int, holds: Callable[[int], bool]) -> int:
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
