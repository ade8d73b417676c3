"""Series of numbers for charts: histograms, buckets, and agreement along positions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_backends.empirical.statistics.rates import quantile_rank
from kcdsl_backends.empirical.table.evidence import Array

BINS = 24
WIDE = 30.0
"""Smallest ratio of the largest to the smallest positive value with logarithmic edges."""
PERCENTILES = (50, 90, 95, 99)


def edges_of(values: Array, bins: int = BINS) -> tuple[str, list[float]]:
    """Return the scale ("log" or "linear") and ascending edges that hold every finite value.

    A log scale leaves zeros out; they are counted apart. Equal values give two equal edges, no
    values give none.
    """
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return "linear", []
    low, high = float(finite.min()), float(finite.max())
    positive = finite[finite > 0]
    if low >= 0 and positive.size and high >= WIDE * float(positive.min()):
        with np.errstate(over="ignore"):  # of the last edge, which is set exactly below
            edges = np.geomspace(float(positive.min()), high, bins + 1)
        edges[0], edges[-1] = float(positive.min()), high
        return "log", [float(end) for end in edges]
    if low == high:
        return "linear", [low, high]
    edges = 4 * np.linspace(low / 4, high / 4, bins + 1)  # high - low may be beyond float64
    edges[0], edges[-1] = low, high
    return "linear", [float(end) for end in np.unique(edges)]


def histogram(values: Array, scale: str, edges: Sequence[float]) -> dict[str, Any]:
    """Count values between edges; the last bin holds its upper edge.

    `zeros` counts zeros on a log scale, `outside` values that are not finite.
    """
    finite = values[np.isfinite(values)]
    shown = finite[finite > 0] if scale == "log" else finite
    if len(edges) == 2 and edges[0] == edges[1]:
        counts = [int(shown.size)]
    elif edges:
        counts = [int(c) for c in np.histogram(shown, np.asarray(edges))[0]]
    else:
        counts = []
    return {
        "counts": counts,
        "zeros": int(finite.size - shown.size),
        "outside": int(values.size - finite.size),
        "n": int(values.size),
    }


def percentiles(values: Array, *, higher_is_better: bool) -> dict[str, float] | None:
    """Return order statistics towards the worse end, never interpolated, and the worst value.

    None where there is no value or one is not finite.
    """
    if values.size == 0 or not bool(np.isfinite(values).all()):
        return None
    ordered = np.sort(values)[::-1] if higher_is_better else np.sort(values)
    found = {
        f"p{p}": float(ordered[quantile_rank(ordered.size, Fraction(p, 100)) - 1])
        for p in PERCENTILES
    }
    return {**found, "worst": float(ordered[-1])}


# --- values by buckets of another -----------------------------------------------------------------

BUCKETS = 12
Chosen = NDArray[np.bool_]


def by_rank(keys: Array, buckets: int = BUCKETS) -> Iterator[tuple[float, float, Chosen]]:
    """Yield (least key, largest key, mask) of ranges with about equal numbers of finite keys.

    Equal keys are in one range, so there may be fewer of them.
    """
    finite = np.isfinite(keys)
    known = np.sort(keys[finite])
    if known.size == 0:
        return
    ranks = np.arange(1, min(buckets, known.size)) * known.size // min(buckets, known.size)
    edges = np.unique(known[ranks]) if ranks.size else known[:0]
    place = np.searchsorted(edges, keys, side="right")
    for at in range(edges.size + 1):
        inside = finite & (place == at)
        if inside.any():
            yield float(keys[inside].min()), float(keys[inside].max()), inside


def by_doubling(keys: Array) -> Iterator[tuple[float, float, Chosen]]:
    """Yield (first, last, mask) of the ranges 0, 1, 2-3, 4-7, ... of whole numbers."""
    start, size = 0, 1
    while start <= float(keys.max()):
        inside = (keys >= start) & (keys < start + size)
        if inside.any():
            yield float(start), float(start + size - 1), inside
        start, size = (1, 1) if start == 0 else (start + size, 2 * size)


def mean(values: Array) -> float:
    """Return the mean of at least one value; finite if all are, even if their sum exceeds
    float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(values.mean())
        if math.isfinite(found) or not bool(np.isfinite(values).all()):
            return found
        parts = float((values / values.size).sum())
    return min(max(parts, float(values.min())), float(values.max()))


def summary(values: Array, *, higher_is_better: bool = False) -> dict[str, float | int] | None:
    """Return n, mean, p50, p95 and the worst of the finite values; None if there are none."""
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


# --- agreement along positions --------------------------------------------------------------------

POINTS = 64


def positions(longest: int, points: int = POINTS) -> list[int]:
    """Return at most `points` positions from the first to the last, evenly spaced."""
    if longest <= 0:
        return []
    return sorted({round(float(at)) for at in np.linspace(0, longest - 1, min(points, longest))})


def disagreement(overlaps: Sequence[Array]) -> list[dict[str, int | float]]:
    """Return, at positions, how many of the `n` texts that reach them have disagreed so far, and
    the estimated share of all texts if none ended earlier.

    `overlaps` holds the top-k overlap of every position of each text; a text has disagreed once one
    was below 1. `count` of `n` may fall if texts end that had disagreed; `share` never does: it
    is the product-limit estimate, 1 less the product of 1 - d/r over positions, where d of r texts
    that still agree disagree (E. L. Kaplan and P. Meier, JASA 53, 1958). For texts of one length
    both are the same.
    """
    texts = [text for text in overlaps if text.size]
    if not texts:
        return []
    lengths = np.array([text.size for text in texts])
    never = int(lengths.max())
    forked = np.array([_first(text < 1, never) for text in texts])
    new = np.bincount(forked, minlength=never + 1)[:never]
    lasting = np.minimum(forked, lengths - 1)  # the last position at which a text still counts
    risk = texts_from(lasting, never)
    share = 1.0 - np.cumprod(1.0 - new / np.maximum(risk, 1))
    found: list[dict[str, int | float]] = []
    for at in positions(never):
        reach = lengths > at
        disagreed = int((reach & (forked <= at)).sum())
        row = {"at": at, "count": disagreed, "n": int(reach.sum())}
        found.append({**row, "share": float(share[at])})
    return found


def texts_from(last: NDArray[np.int64], positions: int) -> NDArray[np.int64]:
    """Return how many texts count at each position; `last` holds the last position of each text."""
    return np.bincount(last, minlength=positions)[::-1].cumsum()[::-1]


def _first(mask: Any, otherwise: int) -> int:
    at = np.flatnonzero(mask)
    return int(at[0]) if at.size else otherwise


def flips_by_margin(margins: Array, overlaps: Array) -> list[dict[str, float | int]]:
    """Return how many of the `n` positions in each range of the margin have another first token.

    Positions without a finite overlap are left out: they neither agree nor differ.
    """
    known = np.isfinite(overlaps)
    margins, overlaps = margins[known], overlaps[known]
    found: list[dict[str, float | int]] = []
    for low, high, inside in by_rank(margins):
        flipped = int((overlaps[inside] < 1).sum())
        found.append({"low": low, "high": high, "count": flipped, "n": int(inside.sum())})
    return found
