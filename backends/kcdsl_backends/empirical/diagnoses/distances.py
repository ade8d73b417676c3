"""How far two outputs lie apart, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl_backends.empirical.diagnoses.model import Probe


def total_variation(a: Tensor, b: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the total variation [T] of the policies of logits [T, V]; logits may be -inf."""
    p, q = torch.softmax(a / temperature, -1), torch.softmax(b / temperature, -1)
    return (p - q).abs().sum(-1) / 2


def deviation(probes: Sequence[Probe], temperature: float) -> float:
    """Return the mean total variation of both kernels over all positions; 0 without any."""
    return mean([total_variation(p.train, p.infer, temperature) for p in probes])


def mean(parts: Sequence[Tensor]) -> float:
    """Return the mean over all elements of all parts; 0 without any."""
    joined = torch.cat([p.reshape(-1) for p in parts]) if parts else torch.empty(0)
    return float(joined.mean()) if joined.numel() else 0.0


def row_size(a: Tensor, b: Tensor, *, states: bool = False) -> Tensor:
    """Return the root mean square [T] of b - a; logits are compared up to a number per row.

    Equal logits of tokens without mass (-inf) are no difference.
    """
    difference = torch.where(a == b, 0.0, b - a)
    if not states:
        difference = difference - difference.mean(-1, keepdim=True)
    return difference.square().mean(-1).sqrt()


def size(a: Tensor, b: Tensor, *, states: bool = False) -> float:
    """Return the mean over rows of `row_size`."""
    return float(row_size(a, b, states=states).mean()) if a.numel() else 0.0
