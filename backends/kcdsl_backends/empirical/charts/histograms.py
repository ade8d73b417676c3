"""How values of requests are spread: counts between stated edges, the same for every slice."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from kcdsl_backends.empirical.statistics import quantile_rank
from kcdsl_backends.empirical.table.units import Array

BINS = 24
WIDE = 30.0
"""From this ratio of the largest to the smallest positive value on, edges are logarithmic."""
PERCENTILES = (50, 90, 95, 99)


def edges_of(values: Array, bins: int = BINS) -> tuple[str, list[float]]:
    """Return the scale ("log" or "linear") and ascending edges that hold every finite value.

    On a log scale zero has no place: it is counted apart. Values that are all equal have two equal
    edges; no value has none.
    """
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return "linear", []
    low, high = float(finite.min()), float(finite.max())
    positive = finite[finite > 0]
    if low >= 0 and positive.size and high >= WIDE * float(positive.min()):
        with np.errstate(over="ignore"):  # of the last one, which is stated exactly below
            ends = np.geomspace(float(positive.min()), high, bins + 1)
        ends[0], ends[-1] = float(positive.min()), high
        return "log", [float(end) for end in ends]
    if low == high:
        return "linear", [low, high]
    ends = 4 * np.linspace(low / 4, high / 4, bins + 1)  # high - low may be beyond float64
    ends[0], ends[-1] = low, high
    return "linear", [float(end) for end in np.unique(ends)]


def histogram(values: Array, scale: str, edges: Sequence[float]) -> dict[str, Any]:
    """Count values between edges; the last bin holds its upper edge.

    `zeros` are those that a log scale cannot show, `outside` those that are not finite.
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
    """Return order statistics, never interpolated, towards the worse end, and the worst value.

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
