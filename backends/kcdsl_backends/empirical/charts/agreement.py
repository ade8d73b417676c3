"""Where the likeliest tokens part: along positions, and by the margin of the training kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kcdsl_backends.empirical.charts.buckets import by_rank
from kcdsl_backends.empirical.measured import Array

POINTS = 64


def positions(longest: int, points: int = POINTS) -> list[int]:
    """Return at most `points` positions from the first to the last, as even as they can be."""
    if longest <= 0:
        return []
    return sorted({round(float(at)) for at in np.linspace(0, longest - 1, min(points, longest))})


def disagreement(overlaps: Sequence[Array]) -> list[dict[str, int]]:
    """Return, at positions, how many of the `n` texts that reach them have disagreed by then.

    `overlaps` holds the top-k overlap of every position of each text; a text has disagreed once one
    was below 1.
    """
    texts = [text for text in overlaps if text.size]
    if not texts:
        return []
    lengths = np.array([text.size for text in texts])
    never = int(lengths.max())
    forked = np.array([_first(text < 1, never) for text in texts])
    found = []
    for at in positions(never):
        reach = lengths > at
        found.append(
            {"at": at, "count": int((reach & (forked <= at)).sum()), "n": int(reach.sum())}
        )
    return found


def _first(mask: Any, otherwise: int) -> int:
    at = np.flatnonzero(mask)
    return int(at[0]) if at.size else otherwise


def flips_by_margin(margins: Array, overlaps: Array) -> list[dict[str, float | int]]:
    """Return how many of the `n` positions of each range of the margin put another token first."""
    found: list[dict[str, float | int]] = []
    for low, high, inside in by_rank(margins):
        flipped = int((overlaps[inside] < 1).sum())
        found.append({"low": low, "high": high, "count": flipped, "n": int(inside.sum())})
    return found
