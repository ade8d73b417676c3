"""Means and other functions of all requests: limits by resampling whole requests.

Tokens of a request are dependent, so whole requests are drawn. The limits of a ratio of sums (a
mean over tokens, tokens per second) are those of the studentised bootstrap (Efron 1981); they hold
for large n and approximately for small n: docs/explanation/statistics.md has the measured coverage.
No limit here holds at every look.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_backends.empirical.statistics.estimates import (
    ONE_LOOK,
    Array,
    Confidence,
    Estimate,
    NotMeasurable,
    check_values,
    rounded_sum,
)

RESAMPLES = 1999
FEWEST_CLUSTERS = 20
"""Smallest number of requests for a limit by bootstrap."""
COCHRAN = 25
"""n requests support a limit without correction if n > 25 G^2, G their skewness (Cochran 1977)."""
_TAIL = 10
"""Smallest number of resamples beyond a limit."""
_MOST_RESAMPLES = 199_999
_MOST_DRAWS = 2**32
"""Largest number of draws for a limit at a small error; a limit that needs more is not given."""
_BLOCK = 2**22
_REDRAWN = 299
"""Smallest number of resamples of a number without a linearisation."""

Range = tuple[float | None, float | None]


def clustered_ratio(
    numerators: Sequence[float] | Array,
    denominators: Sequence[float] | Array,
    *,
    seed: int,
    confidence: Confidence | None = ONE_LOOK,
    bounds: Range = (None, None),
    what: str = "mean",
) -> Estimate:
    """Return sum(numerators) / sum(denominators) with limits by the studentised bootstrap.

    One entry of each is one request: the sum of its token values and their number, or its tokens
    and its seconds. Requests are resampled whole, with a fixed seed; their order changes nothing.
    `bounds` is the range of a single value: if every value is at one end of it, resampling has no
    spread, and the limit is that of n equal draws instead. If the requests are too skewed for their
    number, the limit on the side of the long tail is that of the same requests with the worst one
    counted twice, since a sample hardly has all rare, large values. In a bounded range no limit is
    nearer to the value than that of equal draws. Fewer than 20 requests give no limits, and neither
    does a confidence for every look.
    """
    above = check_values(numerators, what)
    below = check_values(denominators, what)
    if above.shape != below.shape:
        raise ValueError("one numerator and one denominator per request")
    if bool((below <= 0).any()):
        raise NotMeasurable(f"{what}: a request has nothing to divide by")
    order = np.lexsort((below, above))  # limits do not depend on the order of requests
    above, below = above[order], below[order]
    n = int(above.size)
    weight = Fraction(math.fsum(below))
    total = rounded_sum(above)
    if not math.isfinite(total):
        raise NotMeasurable(f"{what}: the sum is beyond the largest float64")
    exact = Fraction(total) / weight
    value = float(exact)
    _check_range(value, bounds, what)
    bare = Estimate(value, None, None, n, "cluster-bootstrap-t", exact, weight)
    if confidence is None or confidence.anytime:
        return bare
    if linear_error(above, below, value) == 0:
        low, high = _degenerate_limits(above / below, n, confidence, bounds)
        return Estimate(value, low, high, n, "equal-draws", exact, weight)
    if n < FEWEST_CLUSTERS:
        return bare
    count = resamples_needed(confidence, RESAMPLES)
    if count is None or (count > RESAMPLES and count * n > _MOST_DRAWS):
        return bare
    low, high = _studentised_limits(above, below, confidence, seed, count)
    residual = above - value * below
    skew = skewness(residual)
    if n <= COCHRAN * skew**2:
        worst = int(residual.argmax() if skew > 0 else residual.argmin())
        again = np.append(above, above[worst]), np.append(below, below[worst])
        wider = _studentised_limits(*again, confidence, seed, count)
        low, high = (low, max(high, wider[1])) if skew > 0 else (min(low, wider[0]), high)
    low, high = _with_unseen(low, high, value, n, confidence, bounds)
    return Estimate(
        value,
        _clip(low, bounds) if math.isfinite(low) else None,
        _clip(high, bounds) if math.isfinite(high) else None,
        n,
        "cluster-bootstrap-t",
        exact,
        weight,
    )


@dataclass(frozen=True, slots=True)
class SmoothFunction:
    """A smooth function of sums of requests: `rows` [n, S] are their sums, `value` maps totals
    [..., S], real or complex, to the number on a variance-stabilised scale, and `back` maps that to
    the number.

    `beyond` gives the row of one more request from the worst row; None if it is unbounded.
    """

    rows: Array
    value: Callable[[NDArray[Any]], NDArray[Any]]
    back: Callable[[float], float]
    beyond: Callable[[Array], Array | None] = lambda worst: worst


def clustered_function(
    value: float,
    smooth: SmoothFunction,
    *,
    seed: int,
    confidence: Confidence | None,
    bounds: Range = (None, None),
) -> Estimate:
    """Return a smooth function of sums of requests with limits by the studentised bootstrap.

    `value` is the function of all requests. The standard error, of the requests and of each
    resample, is that of the delta method (linearisation). Equal requests have no limits, and
    neither have fewer than 20 requests; requests too skewed for their number are treated as in
    `clustered_ratio`, with the row of `beyond` added.
    """
    smooth = replace(smooth, rows=smooth.rows[np.lexsort(smooth.rows.T)])
    n = len(smooth.rows)
    bare = Estimate(value, None, None, n, "cluster-bootstrap-t")
    if n < FEWEST_CLUSTERS or confidence is None or confidence.anytime:
        return bare
    count = resamples_needed(confidence, RESAMPLES)
    if count is None or (count > RESAMPLES and count * n > _MOST_DRAWS):
        return bare
    limits = _smooth_limits(smooth, smooth.rows, confidence, seed, count)
    if limits is None:
        return bare
    low, high = limits
    slope = _gradient(smooth.value, smooth.rows.sum(axis=0)[None])[0]
    influence = (smooth.rows - smooth.rows.mean(axis=0)) @ slope
    skew = skewness(influence)
    if n <= COCHRAN * skew**2:
        worst = smooth.beyond(smooth.rows[influence.argmax() if skew > 0 else influence.argmin()])
        wider = None
        if worst is not None:
            again = np.vstack([smooth.rows, worst])
            wider = _smooth_limits(smooth, again, confidence, seed, count)
        far = (-math.inf, math.inf) if wider is None else wider
        low, high = (low, max(high, far[1])) if skew > 0 else (min(low, far[0]), high)
    return replace(
        bare,
        low=_clip(smooth.back(low), bounds) if math.isfinite(low) else None,
        high=_clip(smooth.back(high), bounds) if math.isfinite(high) else None,
    )


def skewness(residuals: Array) -> float:
    """Return the skewness of residuals around 0, of which one is not 0."""
    scaled = residuals / np.abs(residuals).max()
    return float((scaled**3).mean() / (scaled**2).mean() ** 1.5)


def _smooth_limits(
    smooth: SmoothFunction, rows: Array, confidence: Confidence, seed: int, count: int
) -> tuple[float, float] | None:
    """Return limits on the scale of a smooth function; None if too many resamples have no value."""
    n = len(rows)
    apart = rows - rows.mean(axis=0)
    products = (apart[:, :, None] * apart[:, None, :]).reshape(n, -1)

    def at(counts: Array) -> tuple[Array, Array]:
        totals, gaps = counts @ rows, counts @ apart
        spread = (counts @ products).reshape(len(counts), rows.shape[1], rows.shape[1])
        spread = (spread - gaps[:, :, None] * gaps[:, None, :] / n) * n / (n - 1)
        slope = _gradient(smooth.value, totals)
        squares = np.einsum("bi,bij,bj->b", slope, spread, slope)
        return smooth.value(totals), np.sqrt(np.maximum(squares, 0.0))

    with np.errstate(all="ignore"):
        (center,), (error,) = at(np.ones((1, n)))
        if not (math.isfinite(center) and math.isfinite(error) and error > 0):
            return None
        parts = []
        for counts in multiplicities(n, seed, count):
            values, errors = at(counts)
            t = (values - center) / errors
            parts.append(np.where(errors > 0, t, np.copysign(np.inf, values - center)))
        t = np.concatenate(parts)
    if np.count_nonzero(np.isnan(t)) > 0.01 * count:
        return None
    t = t[~np.isnan(t)]
    return (
        float(center - np.quantile(t, confidence.share, method="higher") * error),
        float(center - np.quantile(t, float(confidence.error), method="lower") * error),
    )


def _gradient(value: Callable[[NDArray[Any]], NDArray[Any]], totals: Array) -> Array:
    """Return the derivatives [B, S] of a function of totals [B, S], by complex steps."""
    width = totals.shape[1]
    steps = 1e-30 * np.maximum(np.abs(totals), 1e-30)
    moved = totals[:, None, :] + 1j * steps[:, :, None] * np.eye(width)
    found: Array = value(moved).imag / steps
    return found


def clustered_redrawn(
    value: float,
    of: Callable[[Array], Array],
    n: int,
    *,
    seed: int,
    confidence: Confidence | None,
    bounds: Range = (None, None),
) -> Estimate:
    """Return a function of the multiplicities of n requests with the limits of
    `clustered_statistic`: `of` maps the multiplicities of requests in resamples [B, n] to values
    [B], NaN if there is none."""
    bare = Estimate(value, None, None, n, "cluster-bootstrap")
    if n < FEWEST_CLUSTERS or confidence is None or confidence.anytime:
        return bare
    wanted = resamples_needed(confidence.divided(2), _REDRAWN)
    if wanted is None or wanted > 20 * _REDRAWN:
        return bare
    draws = np.concatenate([of(counts) for counts in multiplicities(n, seed, wanted)])
    draws = draws[~np.isnan(draws)]
    if draws.size < 0.99 * wanted:
        return bare
    return _with_resampled(bare, draws, confidence, bounds)


def _with_resampled(
    bare: Estimate, draws: Array, confidence: Confidence, bounds: Range
) -> Estimate:
    """Return an estimate with the limits of its resamples, widened for values that n requests do
    not show. If all resamples are equal, an unbounded range gives no limits."""
    value = bare.value
    low, high = resampled_limits(value, draws, confidence)
    if low == high and None in bounds:
        return bare
    low, high = _with_unseen(low, high, value, bare.n, confidence, bounds)
    return replace(
        bare,
        low=low if math.isfinite(low) else None,
        high=high if math.isfinite(high) else None,
    )


def multiplicities(n: int, seed: int, count: int) -> Iterator[Array]:
    """Yield the multiplicities of n requests in `count` resamples, in blocks [at most count, n]."""
    for drawn in resamples(n, seed, count):
        rows = np.arange(len(drawn))[:, None] * n
        found = np.bincount((drawn + rows).ravel(), minlength=drawn.size)
        yield found.reshape(drawn.shape).astype(np.float64)


def clustered_statistic(
    statistic: Callable[[Sequence[int]], float | None],
    n: int,
    *,
    seed: int,
    confidence: Confidence | None,
    count: int,
    bounds: Range = (None, None),
) -> Estimate:
    """Return a function of n requests, given by their numbers, with limits by resampling.

    For statistics without a standard error, which may be biased: each limit is the wider of the
    percentile of the resamples and the one mirrored at the value, which removes their bias, at half
    the error each. `statistic` may return None for a resample without a value. More than 1 % of
    those, a NaN, or an error that needs over 20 times `count` resamples give no limits.
    `bounds` is the range of the value: see `_with_unseen`.
    """
    value = statistic(range(n))
    if value is None:
        raise NotMeasurable("the requests have no such value")
    bare = Estimate(value, None, None, n, "cluster-bootstrap")
    if n < FEWEST_CLUSTERS or confidence is None or confidence.anytime:
        return bare
    wanted = resamples_needed(confidence.divided(2), count)
    if wanted is None or wanted > 20 * count:
        return bare
    found = (statistic(row.tolist()) for block in resamples(n, seed, wanted) for row in block)
    draws = [drawn for drawn in found if drawn is not None]
    if len(draws) < 0.99 * wanted or any(math.isnan(drawn) for drawn in draws):
        return bare
    return _with_resampled(bare, np.asarray(draws), confidence, bounds)


def resampled_limits(value: float, draws: Array, confidence: Confidence) -> tuple[float, float]:
    """Return the limits by resamples of a value: on each side the wider of their percentile and of
    the one mirrored at the value, each at half the error."""
    half = confidence.divided(2)
    first = float(np.quantile(draws, float(half.error), method="lower"))
    last = float(np.quantile(draws, half.share, method="higher"))
    return min(first, 2 * value - last, value), max(last, 2 * value - first, value)


def resamples_needed(confidence: Confidence, usual: int) -> int | None:
    """Return the number of resamples with enough beyond a limit; None for more than possible."""
    needed = math.ceil(_TAIL / confidence.error) - 1
    if needed > _MOST_RESAMPLES:
        return None
    return max(usual, needed)


def resamples(n: int, seed: int, count: int = RESAMPLES) -> Iterator[NDArray[np.int64]]:
    """Yield the drawn requests of `count` resamples in blocks [at most count, n]."""
    generator = np.random.default_rng(seed)
    block = max(1, min(count, _BLOCK // n))
    for start in range(0, count, block):
        yield generator.integers(0, n, size=(min(block, count - start), n))


def linear_error(above: Array, below: Array, value: float) -> float:
    """Return the standard error of a ratio of sums by linearisation (0: all ratios are equal)."""
    if bool(np.all(above / below == above[0] / below[0])):
        return 0.0
    n = above.size
    residual = above - value * below
    with np.errstate(over="ignore"):
        squares = residual**2
    return math.sqrt(rounded_sum(squares) * n / (n - 1)) / math.fsum(below)


def _studentised_limits(
    above: Array, below: Array, confidence: Confidence, seed: int, count: int
) -> tuple[float, float]:
    value = rounded_sum(above) / math.fsum(below)
    error = linear_error(above, below, value)
    parts = [_studentise(above[d], below[d], value) for d in resamples(above.size, seed, count)]
    t = np.concatenate(parts)
    return (
        value - float(np.quantile(t, confidence.share, method="higher")) * error,
        value - float(np.quantile(t, float(confidence.error), method="lower")) * error,
    )


def _studentise(top: Array, bottom: Array, value: float) -> Array:
    n = top.shape[1]
    total = bottom.sum(axis=1)
    ratio = top.sum(axis=1) / total
    residual = top - ratio[:, None] * bottom
    spread = np.sqrt((residual**2).sum(axis=1) * n / (n - 1)) / total
    distance = ratio - value
    with np.errstate(divide="ignore", invalid="ignore"):
        t = distance / spread
    # The distance of a resample without spread is infinite in its standard errors.
    return np.where(spread > 0, t, np.where(distance == 0, 0.0, np.copysign(np.inf, distance)))


def _degenerate_limits(
    means: Array, n: int, confidence: Confidence, bounds: Range
) -> tuple[float | None, float | None]:
    """Return the limits if every request has the same mean.

    The probability that n values in [a, b] all equal b is at most ((mu - a)/(b - a))^n, so mu is at
    least a + (b - a) error^(1/n); mirrored for a. Equal values inside the range, or in a range
    unbounded at the other end, support no limit on that side.
    """
    bottom, top = bounds
    value = float(means[0])
    room = float(confidence.error) ** (1 / n)
    if bottom is not None and top is not None and value == top:
        return bottom + (top - bottom) * room, top
    if bottom is not None and top is not None and value == bottom:
        return bottom, top - (top - bottom) * room
    if bottom is not None and value == bottom:
        return value, None
    return None, None


def _with_unseen(
    low: float, high: float, value: float, n: int, confidence: Confidence, bounds: Range
) -> tuple[float, float]:
    """Return limits widened for requests of which n draws have none.

    A share of 1 - error^(1/n) of all requests may be at an end of the range without being drawn,
    whatever the drawn ones are.
    """
    bottom, top = bounds
    if bottom is None or top is None:
        return low, high
    share = 1 - math.pow(confidence.error, 1 / n)
    return min(low, value - (value - bottom) * share), max(high, value + (top - value) * share)


def _check_range(value: float, bounds: Range, what: str) -> None:
    """Raise `NotMeasurable` for a value outside its range, to which limits are clipped."""
    low, high = bounds
    slack = 1e-9 * max(1.0, abs(value))
    if (low is not None and value < low - slack) or (high is not None and value > high + slack):
        raise NotMeasurable(f"{what}: the value {value:g} lies outside of its range")


def _clip(limit: float, bounds: Range) -> float:
    low, high = bounds
    limit = limit if low is None else max(limit, low)
    return limit if high is None else min(limit, high)
