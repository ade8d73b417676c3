"""Where greedy decoding forks: disagreement along positions, by margin, by length of text.

`flips` holds, for each position of one text, 1 where the kernels put another token first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kcdsl_backends.empirical.metrics.evidence import (
    Array,
    Unmeasured,
    columns,
    indicators,
)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A share of `n` units at one position or in one bucket."""

    at: float
    count: int
    n: int

    @property
    def share(self) -> float:
        """Return count / n."""
        return self.count / self.n


def greedy_divergence_step(flips: ArrayLike) -> int:
    """Return how many tokens agree before the first flip; all of them where none flips."""
    values = indicators(flips, "flips")
    found = np.flatnonzero(values)
    return int(found[0]) if found.size else values.size


def cumulative_disagreement(overlaps: Sequence[ArrayLike]) -> tuple[CurvePoint, ...]:
    """Return the share of texts that disagreed up to each position: the curve of the top k.

    `overlaps` holds, for each text, the top-k overlap of its positions; a text has disagreed once
    an overlap was below 1. At position t only the texts that reach it are counted. Raises
    Unmeasured without texts, for empty ones and for values outside [0, 1].
    """
    texts = [np.asarray(row, dtype=np.float64) for row in overlaps]
    if not texts or any(t.ndim != 1 or t.size == 0 for t in texts):
        raise Unmeasured("a curve needs texts, none of them empty")
    if any(not bool(((t >= 0) & (t <= 1)).all()) for t in texts):
        raise Unmeasured("overlaps lie in [0, 1]")
    forked = [np.maximum.accumulate(t < 1) for t in texts]
    points = []
    for at in range(max(t.size for t in texts)):
        reached = [bool(f[at]) for f in forked if f.size > at]
        points.append(CurvePoint(at, sum(reached), len(reached)))
    return tuple(points)


def agreement_survival(steps: Sequence[int], lengths: Sequence[int]) -> tuple[CurvePoint, ...]:
    """Return the Kaplan-Meier table of `greedy_divergence_step`: at each step the texts that forked
    there among those that still agreed; a text that ends without a fork is censored."""
    if not steps or len(steps) != len(lengths):
        raise Unmeasured(f"{len(steps)} steps for {len(lengths)} texts")
    if any(not 0 <= s <= n for s, n in zip(steps, lengths, strict=True)):
        raise Unmeasured("a text cannot fork after its end")
    pairs = list(zip(steps, lengths, strict=True))
    points = []
    for at in sorted({s for s, n in pairs if s < n}):
        risk = sum(s >= at and n > at for s, n in pairs)
        points.append(CurvePoint(at, sum(s == at and s < n for s, n in pairs), risk))
    return tuple(points)


def flip_hazard(flips: ArrayLike) -> float:
    """Return flips per 1000 tokens."""
    values = indicators(flips, "flips")
    return 1000 * float(values.sum()) / values.size


@dataclass(frozen=True, slots=True)
class FlipThreshold:
    """The margin that separates flips best, and how many positions it puts on the wrong side."""

    margin: float
    mistaken: int
    n: int


def flip_by_margin(
    margins: ArrayLike, flips: ArrayLike, edges: Sequence[float]
) -> tuple[CurvePoint, ...]:
    """Return the share of flips in each bucket of the margin; buckets without positions are left
    out. `edges` are the lower ends of the buckets, ascending; what lies below the first is refused.
    """
    values, flipped = columns(margin=margins, flips=flips)
    indicators(flipped, "flips")
    ends = np.asarray(edges, dtype=np.float64)
    if ends.size == 0 or not (np.diff(ends) > 0).all():
        raise ValueError("the edges of buckets must ascend")
    if values.min() < ends[0]:
        raise Unmeasured(f"a margin of {values.min()} lies below the first bucket")
    bucket = np.searchsorted(ends, values, side="right") - 1
    return tuple(
        CurvePoint(float(ends[b]), int(flipped[bucket == b].sum()), int((bucket == b).sum()))
        for b in np.unique(bucket)
    )


def flip_threshold(margins: ArrayLike, flips: ArrayLike) -> FlipThreshold:
    """Fit the margin m for which "flips where the margin is below m" is wrong least often."""
    values, flipped = columns(margin=margins, flips=flips)
    indicators(flipped, "flips")
    order = np.argsort(values, kind="stable")
    values, flipped = values[order], flipped[order]
    below: Array = np.concatenate([[0.0], np.cumsum(flipped)])
    stable_below = np.arange(values.size + 1) - below
    wrong = stable_below + (below[-1] - below)
    apart = np.concatenate([[True], values[1:] > values[:-1], [True]])
    wrong = np.where(apart, wrong, np.inf)
    best = int(np.argmin(wrong))
    at = float(values[best]) if best < values.size else float("inf")
    return FlipThreshold(at, int(wrong[best]), values.size)
