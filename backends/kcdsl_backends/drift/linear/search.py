"""Slopes of ReLU searched by descent, and the hints about them that stand in a proof."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kcdsl_backends.drift.affine.error_bounds import on_row
from kcdsl_backends.drift.boxes.box import Box, up
from kcdsl_backends.drift.linear.relu import in_single
from kcdsl_backends.drift.linear.run import LinearRun
from kcdsl_backends.drift.linear.tape import Functional, LinearTape, Slopes

Side = Literal["below", "above"]
_GAIN = 1 - 2.0**-10
"""Slopes of its own are kept for an element whose bound they lower by this factor."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is spent on slopes of elements of the output.

    Steps of the search (0: none), how far the first one goes, how many elements are searched on
    both sides together, how many numbers the slopes that are kept may have in all, and how many are
    moved at a time. With `limit`, only elements whose drift may exceed it in size are searched,
    and none if they are too many.
    """

    steps: int = 40
    rate: float = 0.1
    most: int = 64
    kept: int = 2**20
    at_once: int = 2**16
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Searched:
    """Slopes for one element of the output, on one side: [6, bent elements of all ReLUs]."""

    element: int
    side: Side
    values: Tensor


def search(tape: LinearTape, index: int, effort: Effort) -> tuple[Box, tuple[Searched, ...]]:
    """Lower bounds of elements of the drift of an entry; return its box and the slopes that do."""
    drift = tape.entries[index].drift
    low, high = (end.clone(memory_format=torch.contiguous_format) for end in (drift.lo, drift.hi))
    planes = tape.split(index)
    numbers = sum(math.prod(tape.entries[i].shape) for i in planes)
    bent = sum(_bent(tape, i) for i in planes)
    if effort.steps == 0 or bent == 0:
        return drift, ()
    found: list[Searched] = []
    room = max(1, effort.at_once // numbers)
    for side, elements in _worth(drift, effort, room):
        if (len(found) + len(elements)) * 6 * bent > effort.kept:
            break
        bounds, slopes = _descend(tape, index, _unit_functionals(drift, elements, side), effort)
        for k, element in enumerate(elements):
            end = high if side == "above" else -low
            if not float(bounds[k]) < float(end.view(-1)[element]) - _least(drift, element):
                continue
            found.append(Searched(element, side, _packed(tape, planes, slopes, k)))
            if side == "above":
                high.view(-1)[element] = bounds[k]
            else:
                low.view(-1)[element] = -bounds[k]
    return Box(low, high), tuple(found)


def _least(drift: Box, element: int) -> float:
    return float((drift.hi - drift.lo).view(-1)[element]) * (1 - _GAIN)


def _bent(tape: LinearTape, index: int) -> int:
    planes = tape.entries[index].planes
    return 0 if planes is None else int(planes.bent.sum())


def _worth(drift: Box, effort: Effort, room: int) -> Iterator[tuple[Side, list[int]]]:
    """Yield elements of one row by side, at most `room`, those with the largest bounds first."""
    ends = torch.stack([drift.hi.flatten(), -drift.lo.flatten()])
    count, n = ends.shape[1], drift.lo.shape[-1]
    order = torch.argsort(ends.flatten(), descending=True, stable=True)
    if effort.limit is not None:
        order = order[ends.flatten()[order] > effort.limit]
        order = order[: 0 if len(order) > effort.most else None]
    found: dict[tuple[Side, int], list[int]] = {}
    for place in order[: effort.most].tolist():
        side: Side = "above" if place < count else "below"
        found.setdefault((side, place % count // n), []).append(place % count)
    for (side, _), elements in found.items():
        for first in range(0, len(elements), room):
            yield side, elements[first : first + room]


def _unit_functionals(drift: Box, elements: Sequence[int], side: Side) -> Functional:
    """Return the functionals of elements of one row, and of -drift below."""
    shape = tuple(drift.lo.shape)
    values = drift.lo.new_zeros(len(elements), shape[-1])
    columns = torch.tensor([element % shape[-1] for element in elements])
    values[torch.arange(len(elements)), columns] = 1.0 if side == "above" else -1.0
    row = torch.unravel_index(torch.tensor(elements[0] // shape[-1]), shape[:-1])
    return Functional(None, on_row(values, tuple(int(k) for k in row), shape))


def _descend(
    tape: LinearTape, index: int, functional: Functional, effort: Effort
) -> tuple[Tensor, Slopes]:
    """Return the least upper bounds [B] that were found, and their slopes in float32."""
    count, planes = functional.count, tape.split(index)
    starts: dict[int, tuple[tuple[Tensor, Tensor], ...]] = {}
    moves: dict[int, list[Tensor]] = {}
    for i in planes:
        entry, these = tape.entries[i], tape.entries[i].planes
        assert these is not None
        starts[i] = tuple(zip(these.slopes(), these.scales(), strict=True))
        like = entry.reference
        moves[i] = [like.new_zeros((count, *entry.shape)).requires_grad_() for _ in starts[i]]

    def slopes() -> Slopes:
        return {
            i: tuple(s + scale * move for (s, scale), move in zip(starts[i], moves[i], strict=True))
            for i in planes
        }

    flat = [move for group in moves.values() for move in group]
    steps = torch.optim.Adam(flat, lr=effort.rate)
    best: Tensor | None = None
    chosen: Slopes = {}
    for step in range(effort.steps + 1):
        for group in steps.param_groups:
            group["lr"] = effort.rate * (1 - step / (effort.steps + 1))
        current = slopes()
        middle, spread = tape.walk(index, functional, current)
        total = middle + spread
        reached = total.detach()
        now = {i: tuple(in_single(slope.detach()) for slope in current[i]) for i in planes}
        better = torch.ones_like(reached, dtype=torch.bool) if best is None else reached < best
        best = reached if best is None else torch.where(better, reached, best)
        chosen = {i: _either(better, now[i], chosen.get(i, now[i])) for i in planes}
        if not total.requires_grad:  # nothing that is bent matters here
            break
        if step < effort.steps and total.requires_grad:
            gradients = torch.autograd.grad(total.sum(), flat, allow_unused=True)
            for move, gradient in zip(flat, gradients, strict=True):
                move.grad = torch.zeros_like(move) if gradient is None else gradient
            steps.step()
    with torch.no_grad():
        middle, spread = tape.walk(index, functional, chosen)
        return up(middle + spread), chosen


def _either(
    better: Tensor, now: tuple[Tensor, ...], before: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the slopes of now where they are better."""
    wide = better.reshape(-1, *(1 for _ in now[0].shape[1:]))
    return tuple(torch.where(wide, a, b) for a, b in zip(now, before, strict=True))


def _packed(tape: LinearTape, planes: tuple[int, ...], slopes: Slopes, k: int) -> Tensor:
    """Return the slopes of one functional at the elements that are bent, [6, elements]."""
    parts = []
    for i in planes:
        these = tape.entries[i].planes
        assert these is not None
        parts.append(torch.stack([slope[k][these.bent] for slope in slopes[i]]))
    return torch.cat(parts, 1)


def hints_of(run: LinearRun, searched: Sequence[Searched]) -> dict[str, Any]:
    """Return the hints of a walk as plain data; arrays are numpy's.

    Rows of the nodes that were met with their functionals, the slopes of every ReLU at the elements
    whose sign is open, and those of single elements of the output.
    """
    met = [
        {"of": name, "unknown": unknown, "rows": rows}
        for (name, unknown), chosen in sorted(run.met.items())
        if (rows := _runs(chosen))
    ]
    slopes = []
    for entry in run.tape.entries:
        if entry.planes is None:
            continue
        at = entry.planes.bent
        values = torch.stack([slope[0][at] for slope in entry.planes.slopes()])
        slopes.append({"of": entry.name, "at": at.cpu().numpy(), "values": _single(values)})
    own = [
        {"element": one.element, "side": one.side, "values": _single(one.values)}
        for one in searched
    ]
    return {"met": met, "slopes": slopes, "searched": own}


def _runs(chosen: Tensor) -> list[int]:
    """Return rows from first to end in turn."""
    flat = np.concatenate(([False], chosen.flatten().cpu().numpy(), [False]))
    return [int(k) for k in np.flatnonzero(flat[1:] != flat[:-1])]


def _single(values: Tensor) -> np.ndarray[Any, Any]:
    return values.cpu().numpy().astype(np.float32)
