"""Tails of the importance ratio: how often it is extreme, and whether its moments exist.

delta = ln w at sampled tokens, raw: never after truncation, which hides exactly this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kcdsl_backends.empirical.metrics.evidence import Array, Unmeasured, column

GRID = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0)
"""The thresholds at which a tail is shown."""
UNRELIABLE = 0.7
"""A tail index above this leaves importance-weighted means without use (Vehtari et al. 2024)."""
_FEWEST_TAIL = 25


@dataclass(frozen=True, slots=True)
class TailPoint:
    """Pr[w > threshold] and Pr[w < 1/threshold], as counts of n tokens."""

    threshold: float
    above: int
    below: int
    n: int


def ratio_tail(delta: ArrayLike, grid: Sequence[float] = GRID) -> tuple[TailPoint, ...]:
    """Count the ratios beyond each threshold, on both sides.

    `delta` holds ln w of n tokens. Raises Unmeasured for no tokens and for what is not finite;
    ValueError for a threshold that is not above 1.
    """
    values = column(delta, "ln w")
    if not all(math.isfinite(t) and t > 1 for t in grid):
        raise ValueError(f"the thresholds of a tail must be above 1, not {tuple(grid)}")
    return tuple(
        TailPoint(
            t,
            int(np.count_nonzero(values > math.log(t))),
            int(np.count_nonzero(values < -math.log(t))),
            values.size,
        )
        for t in grid
    )


def extreme_fraction(delta: ArrayLike) -> float:
    """Return the share of tokens with |ln w| > ln 2."""
    values = column(delta, "ln w")
    return float(np.count_nonzero(np.abs(values) > math.log(2)) / values.size)


def hill_index(values: ArrayLike, tail: int | None = None) -> float:
    """Return Hill's estimate of the tail index k of positive values, 0 for a light tail.

    k = mean of ln(x_(i) / x_(tail + 1)) over the `tail` largest; moments of order 1/k and above do
    not exist. By default `tail` is ceil(min(n/5, 3 sqrt n)). Raises Unmeasured below 26 values and
    where the largest ones are zero.
    """
    found = np.sort(column(values, "values", fewest=_FEWEST_TAIL + 1))[::-1]
    count = _tail_size(found.size, tail)
    if not found[count] > 0:
        raise Unmeasured("values: the tail holds zeros or negative numbers")
    return float(np.mean(np.log(found[:count] / found[count])))


def pareto_k(delta: ArrayLike, tail: int | None = None) -> float:
    """Return the shape of the generalised Pareto law that fits the largest ratios w.

    The estimator of Zhang and Stephens (2009) with the prior of Vehtari et al. (2024): the
    diagnostic of Pareto-smoothed importance sampling. Above 0.7 means of w are not reliable. Equal
    ratios have no tail and give -inf. Raises Unmeasured below 26 tokens.
    """
    values = np.sort(column(delta, "ln w", fewest=_FEWEST_TAIL + 1))
    count = _tail_size(values.size, tail)
    weights = np.exp(values - values[-1])
    excess = weights[-count:] - weights[-count - 1]
    if not excess[-1] > 0:
        return -math.inf
    shape = _fit_pareto(excess[excess > 0])
    return float(shape * count / (count + 10) + 0.5 * 10 / (count + 10))


def _tail_size(n: int, tail: int | None) -> int:
    size = math.ceil(min(n / 5, 3 * math.sqrt(n))) if tail is None else tail
    if not 5 <= size < n:
        raise Unmeasured(f"a tail of {size} of {n} values cannot be fitted")
    return size


def _fit_pareto(excess: Array) -> float:
    """Return the shape by the profile likelihood averaged over a grid (Zhang and Stephens)."""
    n = excess.size
    if n < 5:
        raise Unmeasured(f"{n} different ratios in the tail, needs at least 5")
    points = 30 + math.isqrt(n)
    quartile = excess[int(n / 4 + 0.5) - 1]
    grid = 1 / excess[-1] + (1 - np.sqrt(points / (np.arange(points) + 0.5))) / (3 * quartile)
    with np.errstate(all="ignore"):
        shapes = np.log1p(-grid[:, None] * excess).mean(axis=1)
        likelihood = n * (np.log(-grid / shapes) - shapes - 1)
    usable = np.isfinite(likelihood)
    weights = np.exp(likelihood[usable] - likelihood[usable].max())
    best = float(np.sum(grid[usable] * weights) / np.sum(weights))
    return float(np.mean(np.log1p(-best * excess)))
