"""Statistics of measured values, each with the limits that a sample of requests supports.

One request is one sampling unit: tokens of a request are dependent, and counting them as
independent certifies several times too often. Every limit holds by itself with the stated
confidence (one-sided), so [low, high] is an interval of 2 * confidence - 1.

Values are exact where that is possible: means are correctly rounded sums (`math.fsum`), so their
last digit does not depend on order; percentiles are order statistics without interpolation.
Sources: Clopper and Pearson 1934; the binomial law of ranks; the studentised bootstrap of Efron.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 1999
FEWEST_CLUSTERS = 8
"""With fewer requests a bootstrap says nothing, and no limit is given."""
_BLOCK = 2**22

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic over n units; `low` and `high` are None where the sample supports no limit.

    `exact` is the value before rounding to float64, where it is a quotient: a mean, a share.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    method: str
    exact: Fraction | None = None
    weight: Fraction = Fraction(1)
    """What a mean was divided by: the number of its token values."""

    @property
    def rational(self) -> Fraction:
        """Return the value as it is compared with a threshold."""
        return Fraction(self.value) if self.exact is None else self.exact


@dataclass(frozen=True, slots=True)
class Exceedance:
    """k of n units beyond the threshold, with one-sided limits of the rate."""

    k: int
    n: int
    low: float
    high: float

    @property
    def rate(self) -> Fraction:
        """Return k / n exactly."""
        return Fraction(self.k, self.n)


class NotMeasurable(ValueError):
    """The values support no statement at all: none, or one of them is not finite."""


def check_values(values: Sequence[float] | Array, what: str) -> Array:
    """Return the values as float64; raise `NotMeasurable` for none, and for one not finite."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise NotMeasurable(f"{what}: there are no values")
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        raise NotMeasurable(f"{what}: {bad} of {array.size} values are not finite")
    return array


def quantile_rank(n: int, q: Fraction) -> int:
    """Return the rank ceil(q n), at least 1, of the order statistic that is the q-quantile."""
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile lies in [0, 1], not {q}")
    return max(1, math.ceil(q * n))


def quantile(values: Array, q: Fraction, confidence: float | None = CONFIDENCE) -> Estimate:
    """Return the order statistic x_(ceil(q n)) with the limits of the binomial law of ranks.

    Here and below, `confidence` None asks for the value alone.
    """
    array = np.sort(check_values(values, "quantile"))
    n = int(array.size)
    value = float(array[quantile_rank(n, q) - 1])
    if q in (0, 1) or confidence is None:
        return Estimate(value, None, None, n, "order-statistic")
    upper = int(stats.binom.ppf(confidence, n, float(q))) + 1
    lower = int(stats.binom.ppf(1 - confidence, n, float(q)))
    return Estimate(
        value,
        float(array[lower - 1]) if lower >= 1 else None,
        float(array[upper - 1]) if upper <= n else None,
        n,
        "order-statistic",
    )


def largest(values: Array) -> Estimate:
    """Return the maximum. No sample bounds the maximum of what it was drawn from from above."""
    array = check_values(values, "max")
    return Estimate(float(array.max()), float(array.max()), None, int(array.size), "maximum")


def smallest(values: Array) -> Estimate:
    """Return the minimum. No sample bounds the minimum of what it was drawn from from below."""
    array = check_values(values, "min")
    return Estimate(float(array.min()), None, float(array.min()), int(array.size), "minimum")


def proportion(k: int, n: int, confidence: float | None = CONFIDENCE) -> Estimate:
    """Return k / n with Clopper-Pearson limits, each one-sided at `confidence`."""
    if n <= 0:
        raise NotMeasurable("rate: there are no values")
    if not 0 <= k <= n:
        raise ValueError(f"{k} of {n}")
    exact = Fraction(k, n)
    if confidence is None:
        return Estimate(k / n, None, None, n, "clopper-pearson", exact, Fraction(n))
    error = 1 - confidence
    low = float(stats.beta.ppf(error, k, n - k + 1)) if k > 0 else 0.0
    high = float(stats.beta.ppf(confidence, k + 1, n - k)) if k < n else 1.0
    return Estimate(k / n, low, high, n, "clopper-pearson", exact, Fraction(n))


def exceedance(beyond: Sequence[bool], confidence: float = CONFIDENCE) -> Exceedance:
    """Count the units beyond a threshold."""
    k, n = sum(beyond), len(beyond)
    limits = proportion(k, n, confidence)
    assert limits.low is not None
    assert limits.high is not None
    return Exceedance(k, n, limits.low, limits.high)


def units_for_budget(rate: Fraction, confidence: float = CONFIDENCE) -> int:
    """Return how many units without any exceedance show that at most `rate` exceed."""
    if not 0 < rate < 1:
        raise ValueError(f"a budget lies between 0 and 1, not {rate}")
    return math.ceil(math.log(1 - confidence) / math.log1p(-float(rate)))


def clustered_ratio(
    numerators: Sequence[float] | Array,
    denominators: Sequence[float] | Array,
    *,
    seed: int,
    confidence: float | None = CONFIDENCE,
    bounds: tuple[float | None, float | None] = (None, None),
    what: str = "mean",
) -> Estimate:
    """Return sum(numerators) / sum(denominators) with limits by the studentised bootstrap.

    One entry of each is one request: the sum of its token values and their number, or its tokens
    and its seconds. Requests are resampled whole, with a fixed seed. `bounds` is the range of a
    single value: where every value sits on an end of it, resampling shows no spread, and the
    limit is that of n equal draws instead. Fewer than 8 requests give no limits.
    """
    above = check_values(numerators, what)
    below = check_values(denominators, what)
    if above.shape != below.shape:
        raise ValueError("one numerator and one denominator per request")
    if bool((below <= 0).any()):
        raise NotMeasurable(f"{what}: a request has nothing to divide by")
    n = int(above.size)
    weight = Fraction(math.fsum(below))
    exact = Fraction(math.fsum(above)) / weight
    value = float(exact)
    if n < FEWEST_CLUSTERS or confidence is None:
        return Estimate(value, None, None, n, "cluster-bootstrap-t", exact, weight)
    error = _linear_error(above, below, value)
    if error == 0:
        low, high = _degenerate_limits(above / below, n, confidence, bounds)
        return Estimate(value, low, high, n, "equal-draws", exact, weight)
    t = _bootstrap_t(above, below, value, seed)
    low = value - float(np.quantile(t, confidence, method="higher")) * error
    high = value - float(np.quantile(t, 1 - confidence, method="lower")) * error
    return Estimate(
        value,
        _clip(low, bounds) if math.isfinite(low) else None,
        _clip(high, bounds) if math.isfinite(high) else None,
        n,
        "cluster-bootstrap-t",
        exact,
        weight,
    )


def resamples(n: int, seed: int, count: int = RESAMPLES) -> Iterator[NDArray[np.int64]]:
    """Yield the drawn requests of `count` resamples in blocks [at most count, n]."""
    generator = np.random.default_rng(seed)
    block = max(1, min(count, _BLOCK // n))
    for start in range(0, count, block):
        yield generator.integers(0, n, size=(min(block, count - start), n))


def _bootstrap_t(above: Array, below: Array, value: float, seed: int) -> Array:
    parts = [_studentise(above[d], below[d], value) for d in resamples(above.size, seed)]
    return np.concatenate(parts)


def _studentise(top: Array, bottom: Array, value: float) -> Array:
    n = top.shape[1]
    total = bottom.sum(axis=1)
    ratio = top.sum(axis=1) / total
    residual = top - ratio[:, None] * bottom
    spread = np.sqrt((residual**2).sum(axis=1) * n / (n - 1)) / total
    distance = ratio - value
    with np.errstate(divide="ignore", invalid="ignore"):
        t = distance / spread
    # A resample without spread lies infinitely many of its own standard errors away.
    return np.where(spread > 0, t, np.where(distance == 0, 0.0, np.copysign(np.inf, distance)))


def _linear_error(above: Array, below: Array, value: float) -> float:
    """Return the standard error of a ratio of sums by linearisation (0: all ratios are equal)."""
    if bool(np.all(above / below == above[0] / below[0])):
        return 0.0
    n = above.size
    residual = above - value * below
    return math.sqrt(math.fsum(residual**2) * n / (n - 1)) / math.fsum(below)


def _degenerate_limits(
    means: Array, n: int, confidence: float, bounds: tuple[float | None, float | None]
) -> tuple[float | None, float | None]:
    """Return limits where every request has the same mean.

    For values in [a, b] that all equal b: the chance of that is at most ((mu - a)/(b - a))^n, so mu
    is at least a + (b - a) (1 - confidence)^(1/n); mirrored at a. Inside the range, or on a range
    open at the other end, equal values support no limit on that side.
    """
    bottom, top = bounds
    value = float(means[0])
    room = (1 - confidence) ** (1 / n)
    if bottom is not None and top is not None and value == top:
        return bottom + (top - bottom) * room, top
    if bottom is not None and top is not None and value == bottom:
        return bottom, top - (top - bottom) * room
    if bottom is not None and value == bottom:
        return value, None
    return None, None


def _clip(limit: float, bounds: tuple[float | None, float | None]) -> float:
    low, high = bounds
    limit = limit if low is None else max(limit, low)
    return limit if high is None else min(limit, high)
