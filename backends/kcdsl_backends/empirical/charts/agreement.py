"""Where the likeliest tokens part: along positions, and by the margin of the training kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_backends.empirical.charts.buckets import by_rank
from kcdsl_backends.empirical.table.units import Array

POINTS = 64


def positions(longest: int, points: int = POINTS) -> list[int]:
    """Return at most `points` positions from the first to the last, as even as they can be."""
    if longest <= 0:
        return []
    return sorted({round(float(at)) for at in np.linspace(0, longest - 1, min(points, longest))})


def disagreement(overlaps: Sequence[Array]) -> list[dict[str, int | float]]:
    """Return, at positions, how many of the `n` texts that reach them have disagreed by then, and
    the share of all texts that would have, were none to end before.

    `overlaps` holds the top-k overlap of every position of each text; a text has disagreed once one
    was below 1. `count` of `n` may fall, where texts end that had disagreed; `share` never does: it
    is the product-limit estimate, 1 less the product of 1 - d/r over positions, where d of r texts
    that still agree disagree (E. L. Kaplan and P. Meier, JASA 53, 1958). Without texts of different
    lengths both are the same.
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
    """Return how many texts count at each position, of which `last` is the last one each."""
    return np.bincount(last, minlength=positions)[::-1].cumsum()[::-1]


def _first(mask: Any, otherwise: int) -> int:
    at = np.flatnonzero(mask)
    return int(at[0]) if at.size else otherwise


def flips_by_margin(margins: Array, overlaps: Array) -> list[dict[str, float | int]]:
    """Return how many of the `n` positions of each range of the margin put another token first.

    Positions without a finite overlap are left out: they neither agree nor differ.
    """
    known = np.isfinite(overlaps)
    margins, overlaps = margins[known], overlaps[known]
    found: list[dict[str, float | int]] = []
    for low, high, inside in by_rank(margins):
        flipped = int((overlaps[inside] < 1).sum())
        found.append({"low": low, "high": high, "count": flipped, "n": int(inside.sum())})
    return found
