"""Drift in ranges of something else: of the position, the length, the entropy, the margin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_backends.empirical.statistics import quantile_rank
from kcdsl_backends.empirical.table.units import Array

BUCKETS = 12
Chosen = NDArray[np.bool_]


def by_rank(keys: Array, buckets: int = BUCKETS) -> Iterator[tuple[float, float, Chosen]]:
    """Yield (least key, largest key, which) of ranges that hold about as many finite keys each.

    Equal keys are in one range, so there may be fewer of them.
    """
    finite = np.isfinite(keys)
    known = np.sort(keys[finite])
    if known.size == 0:
        return
    ranks = np.arange(1, min(buckets, known.size)) * known.size // min(buckets, known.size)
    ends = np.unique(known[ranks]) if ranks.size else known[:0]
    place = np.searchsorted(ends, keys, side="right")
    for at in range(ends.size + 1):
        inside = finite & (place == at)
        if inside.any():
            yield float(keys[inside].min()), float(keys[inside].max()), inside


def by_doubling(keys: Array) -> Iterator[tuple[float, float, Chosen]]:
    """Yield (first, last, which) of 0, 1, 2-3, 4-7, ... of whole numbers."""
    start, size = 0, 1
    while start <= float(keys.max()):
        inside = (keys >= start) & (keys < start + size)
        if inside.any():
            yield float(start), float(start + size - 1), inside
        start, size = (1, 1) if start == 0 else (start + size, 2 * size)


def mean(values: Array) -> float:
    """Return the mean of values, of which there is one; finite where all are, though their sum may
    be beyond the largest float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(values.mean())
        if math.isfinite(found) or not bool(np.isfinite(values).all()):
            return found
        parts = float((values / values.size).sum())
    return min(max(parts, float(values.min())), float(values.max()))


def summary(values: Array, *, higher_is_better: bool = False) -> dict[str, float | int] | None:
    """Return n, mean, p50, p95 and the worst of values; None where none is finite."""
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return None
    ordered = np.sort(finite)[::-1] if higher_is_better else np.sort(finite)
    found: dict[str, float | int] = {"n": int(finite.size), "mean": mean(finite)}
    for percent in (50, 95):
        rank = quantile_rank(ordered.size, Fraction(percent, 100))
        found[f"p{percent}"] = float(ordered[rank - 1])
    return {**found, "worst": float(ordered[-1])}


def drift_by(
    ranges: Iterator[tuple[float, float, Chosen]], values: Array, *, higher_is_better: bool = False
) -> list[dict[str, Any]]:
    """Return a summary of the values in each range; ranges without values are left out."""
    found = []
    for low, high, inside in ranges:
        row = summary(values[inside], higher_is_better=higher_is_better)
        if row is not None:
            found.append({"low": low, "high": high, **row})
    return found
