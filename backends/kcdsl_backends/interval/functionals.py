"""From boxes of the output to the number a clause speaks of (section 7)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kcdsl_backends.interval.box import Box, down, gamma, up
from kcdsl_backends.interval.state import State


def drift_bound(drift: Box, kind: str) -> float:
    """Return a bound of the functional of the drift, the largest over all rows.

    Args:
        drift: box of the drift of the block output, rows along the last dimension.
        kind: "inf" (largest element), "2" (largest row l2 norm), "span" (largest minus smallest).
    """
    found = row_bounds(drift, kind)
    number = float(found.amax()) if found.numel() else math.inf
    return number if math.isfinite(number) else math.inf


def row_bounds(drift: Box, kind: str) -> Tensor:
    """Return a bound of the functional of every row of the drift [..., n] -> [...]."""
    match kind:
        case "inf":
            return drift.mag().amax(-1)
        case "2":
            mag = drift.mag()
            length = torch.sqrt((mag * mag).sum(-1) * (1 + 2 * gamma(mag.shape[-1] + 4)))
            return up(length, 2)
        case "span":
            return up(drift.hi.amax(-1) - drift.lo.amin(-1))
        case _:
            raise ValueError(f"unknown functional {kind!r}")


def top_margin(output: State, k: int, factor: float = 1.0) -> float:
    """Return how far k columns stay above all others, in the worst row and in both kernels.

    A positive margin shows that no run of either kernel changes the set of the k largest columns
    of any row. The boxes are first made wider by `factor` >= 1; the result is rounded down.
    """
    middle = (output.train.lo + output.train.hi) / 2
    if not 0 < k < middle.shape[-1]:
        return -math.inf
    chosen = torch.zeros_like(middle, dtype=torch.bool)
    chosen.scatter_(-1, middle.topk(k, -1).indices, True)
    margins = [
        down(
            torch.where(chosen, box.lo, torch.inf).amin(-1)
            - torch.where(chosen, -torch.inf, box.hi).amax(-1)
        ).amin()
        for box in (_wider(output.train, factor), _wider(output.infer, factor))
    ]
    worst = float(torch.stack(margins).amin())
    return worst if math.isfinite(worst) else -math.inf


def _wider(box: Box, factor: float) -> Box:
    return box.widen(up((factor - 1.0) * (box.hi - box.lo), 2))
