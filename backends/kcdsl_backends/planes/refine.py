"""Sharper boxes of a node from functionals of its elements and rows (section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl_backends.affine.reaches import on_row, rows, unit_functionals
from kcdsl_backends.interval.box import EPS, Box, down, gamma, up
from kcdsl_backends.planes.functional import only
from kcdsl_backends.planes.run import Unknown
from kcdsl_backends.planes.tape import SAFE, Tape

WORTH = 1 - 2.0**-8
"""A row is met with its functionals where they make some box of it narrower by this factor."""


def refine(tape: Tape, index: int, unknown: Unknown) -> tuple[Box, Tensor]:
    """Bound every element of an unknown of an entry; return its box, and the rows [..., 1] met.

    Rows in which next to nothing is gained keep the box that they have.
    """
    entry = tape.entries[index]
    before = entry.deviation if unknown == "deviation" else entry.drift
    low = torch.empty_like(entry.reference, memory_format=torch.contiguous_format)
    high = torch.empty_like(low)
    for i, start, stop, adjoint in unit_functionals(entry.shape, low.device):
        least, most = tape.bound(index, only(unknown, adjoint))
        low[i].view(-1)[start:stop] = down(_known(least, -torch.inf))
        high[i].view(-1)[start:stop] = up(_known(most, torch.inf))
    found = before.meet(Box(low, high))
    narrower = found.hi - found.lo < (before.hi - before.lo) * WORTH
    met = narrower.any(-1, keepdim=True)
    return Box(torch.where(met, found.lo, before.lo), torch.where(met, found.hi, before.hi)), met


def deviations(tape: Tape, index: int, weights: Tensor, unknown: Unknown) -> Box:
    """Bound u_j - Σ_k weights_k u_k in every row of one unknown u of an entry [..., n]."""
    entry = tape.entries[index]
    n, box = entry.shape[-1], entry.deviation if unknown == "deviation" else entry.drift
    middle, radius = box.midpoint()
    about = up((radius + (weights.abs() * radius).sum(-1, keepdim=True)) * SAFE, 2)
    mean = (weights * middle).sum(-1, keepdim=True)
    inexact = 2 * gamma(n + 8) * (middle.abs() + (weights * middle).abs().sum(-1, keepdim=True))
    wide = Box.point(middle - mean).widen(up(about + inexact, 2))
    unit = torch.eye(n, dtype=torch.float64, device=weights.device)
    low = torch.empty_like(wide.lo, memory_format=torch.contiguous_format)
    high = torch.empty_like(low)
    for row in rows(entry.shape):
        adjoint = on_row(unit - weights[row], row, entry.shape)
        least, most = tape.bound(index, only(unknown, adjoint))
        low[row], high[row] = down(least), up(most)
    # the functionals themselves are off by the float64 error of 1 - weights
    lost = 4 * EPS * (1 + weights.abs()) * box.mag()
    return Box(low, high).widen(up(lost, 2)).meet(wide)


def directions(tape: Tape, index: int, along: Tensor, unknown: Unknown) -> Tensor:
    """Bound |Σ_j along_j u_j| in every row of one unknown u of an entry [..., n] -> [..., 1]."""
    entry = tape.entries[index]
    box = entry.deviation if unknown == "deviation" else entry.drift
    found: Tensor = (along.abs() * box.mag()).sum(-1, keepdim=True) * SAFE
    for row in rows(entry.shape):
        adjoint = on_row(along[row].reshape(1, -1), row, entry.shape)
        least, most = tape.bound(index, only(unknown, adjoint))
        found[row] = torch.minimum(found[row], torch.maximum(-least, most))
    return found


def _known(bound: Tensor, otherwise: float) -> Tensor:
    """Return a bound with what is not a number replaced by no bound at all."""
    return bound.masked_fill(torch.isnan(bound), otherwise)
