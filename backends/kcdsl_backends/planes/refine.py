"""Sharper boxes of a node from functionals of its elements, and the slopes that are best (6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kcdsl_backends.affine.reaches import on_row, rows, unit_functionals
from kcdsl_backends.interval.box import EPS, Box, down, gamma, up
from kcdsl_backends.planes.functional import Functional
from kcdsl_backends.planes.tape import SAFE, Slopes, Tape

CONTIGUOUS = torch.contiguous_format
Unknown = Literal["deviation", "drift"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is spent on slopes.

    Steps of the search for functionals of the output, and for those of inner nodes; how far the
    first one goes; and up to how many numbers the slopes may have.
    """

    steps: int = 40
    inner: int = 0
    rate: float = 0.1
    largest: int = 2**24


def refine(tape: Tape, index: int, effort: Effort) -> tuple[Box, Box] | None:
    """Bound every element of both unknowns of an entry: (deviation, drift)."""
    entry = tape.entries[index]
    boxes = []
    for unknown in ("deviation", "drift"):
        low, high = (
            torch.empty_like(entry.reference, memory_format=CONTIGUOUS),
            torch.empty_like(entry.reference, memory_format=CONTIGUOUS),
        )
        for i, start, stop, adjoint in unit_functionals(entry.shape, low.device):
            functional = (
                Functional(adjoint, None) if unknown == "deviation" else Functional(None, adjoint)
            )
            least, most = bounds(tape, index, functional, effort)
            low[i].view(-1)[start:stop] = down(_known(least, -torch.inf))
            high[i].view(-1)[start:stop] = up(_known(most, torch.inf))
        boxes.append(Box(low, high))
    return boxes[0], boxes[1]


def bounds(tape: Tape, index: int, functional: Functional, effort: Effort) -> tuple[Tensor, Tensor]:
    """Bound functionals of an entry from below and above [B], with slopes chosen for each."""
    if not tape.split(index):
        return tape.bound(index, functional)
    low = -best_above(tape, index, functional.negative(), effort)
    return low, best_above(tape, index, functional, effort)


def best_above(tape: Tape, index: int, functional: Functional, effort: Effort) -> Tensor:
    """Return the least upper bounds [B] of functionals that steps along the gradient find.

    Any slopes give sound planes, so nothing depends on how they are found.
    """

    def value(slopes: Slopes) -> Tensor:
        middle, spread = tape.walk(index, functional, slopes)
        return up(middle + spread)

    with torch.no_grad():
        best = value({})
    planes = tape.split(index)
    count = functional.count
    numbers = sum(math.prod(tape.entries[i].shape) for i in planes) * count
    if effort.steps == 0 or numbers > effort.largest:
        return best
    moves: dict[int, list[Tensor]] = {}
    starts: dict[int, tuple[tuple[Tensor, Tensor], ...]] = {}
    for i in planes:
        entry, these = tape.entries[i], tape.entries[i].planes
        assert these is not None
        starts[i] = tuple(zip(these.slopes(), these.scales(), strict=True))
        shape = (count, *entry.shape)
        moves[i] = [torch.zeros(shape, dtype=best.dtype, device=best.device) for _ in starts[i]]
        for move in moves[i]:
            move.requires_grad_(True)

    def slopes() -> Slopes:
        return {
            i: tuple(
                start + scale * move
                for (start, scale), move in zip(starts[i], moves[i], strict=True)
            )
            for i in planes
        }

    flat = [move for group in moves.values() for move in group]
    search = torch.optim.Adam(flat, lr=effort.rate)
    for step in range(effort.steps):
        for group in search.param_groups:
            group["lr"] = effort.rate * (1 - step / effort.steps)
        middle, spread = tape.walk(index, functional, slopes())
        found = middle + spread
        best = torch.fmin(best, up(found.detach()))
        search.zero_grad()
        found.sum().backward()  # type: ignore[no-untyped-call]
        search.step()
    with torch.no_grad():
        return torch.fmin(best, value(slopes()))


def deviations(tape: Tape, index: int, weights: Tensor, unknown: Unknown) -> Box:
    """Bound u_j - Σ_k weights_k u_k in every row of one unknown u of an entry [..., n]."""
    entry = tape.entries[index]
    n, box = entry.shape[-1], getattr(entry, unknown)
    middle, radius = box.midpoint()
    about = up((radius + (weights.abs() * radius).sum(-1, keepdim=True)) * SAFE, 2)
    mean = (weights * middle).sum(-1, keepdim=True)
    inexact = 2 * gamma(n + 8) * (middle.abs() + (weights * middle).abs().sum(-1, keepdim=True))
    wide = Box.point(middle - mean).widen(up(about + inexact, 2))
    unit = torch.eye(n, dtype=torch.float64, device=weights.device)
    low, high = (
        torch.empty_like(wide.lo, memory_format=CONTIGUOUS),
        torch.empty_like(wide.lo, memory_format=CONTIGUOUS),
    )
    for row in rows(entry.shape):
        adjoint = on_row(unit - weights[row], row, entry.shape)
        functional = (
            Functional(adjoint, None) if unknown == "deviation" else Functional(None, adjoint)
        )
        least, most = tape.bound(index, functional)
        low[row], high[row] = down(least), up(most)
    # the functionals themselves are off by the float64 error of 1 - weights
    lost = 4 * EPS * (1 + weights.abs()) * box.mag()
    return Box(low, high).widen(up(lost, 2)).meet(wide)


def directions(tape: Tape, index: int, along: Tensor, unknown: Unknown) -> Tensor:
    """Bound |Σ_j along_j u_j| in every row of one unknown u of an entry [..., n] -> [..., 1]."""
    entry = tape.entries[index]
    found: Tensor = (along.abs() * getattr(entry, unknown).mag()).sum(-1, keepdim=True) * SAFE
    for row in rows(entry.shape):
        adjoint = on_row(along[row].reshape(1, -1), row, entry.shape)
        functional = (
            Functional(adjoint, None) if unknown == "deviation" else Functional(None, adjoint)
        )
        least, most = tape.bound(index, functional)
        found[row] = torch.minimum(found[row], torch.maximum(-least, most))
    return found


def _known(bound: Tensor, otherwise: float) -> Tensor:
    """Return a bound with what is not a number replaced by no bound at all."""
    return bound.masked_fill(torch.isnan(bound), otherwise)
