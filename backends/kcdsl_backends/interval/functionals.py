"""From boxes of the output to the number a clause speaks of (section 7)."""

from __future__ import annotations

import math

import torch

from kcdsl_backends.interval.box import Box, down, gamma, up
from kcdsl_backends.interval.state import State


def drift_bound(drift: Box, kind: str) -> float:
    """Return a bound of the functional of the drift, the largest over all rows.

    Args:
        drift: box of the drift of the block output, rows along the last dimension.
        kind: "inf" (largest element), "2" (largest row l2 norm), "span" (largest minus smallest).
    """
    match kind:
        case "inf":
            value = drift.mag().amax()
        case "2":
            mag = drift.mag()
            length = torch.sqrt((mag * mag).sum(-1) * (1 + 2 * gamma(mag.shape[-1] + 4)))
            value = up(length, 2).amax()
        case "span":
            value = up(drift.hi.amax(-1) - drift.lo.amin(-1)).amax()
        case _:
            raise ValueError(f"unknown functional {kind!r}")
    number = float(value)
    return number if math.isfinite(number) else math.inf


def top_margin(output: State, k: int) -> float:
    """Return how far k columns stay above all others, in the worst row and in both kernels.

    A positive margin shows that no run of either kernel changes the set of the k largest columns
    of any row. The result is rounded down.
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
        for box in (output.train, output.infer)
    ]
    worst = float(torch.stack(margins).amin())
    return worst if math.isfinite(worst) else -math.inf
