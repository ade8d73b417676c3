"""Bounds of many functionals of one entry: its elements, their deviations, directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint, whole
from kcdsl_backends.affine.energy import ellipsoid, norm
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.tape import INPUT, SAFE, Tape

BATCH = 512
"""Functionals bounded by one reverse pass."""
NUMBERS = 2**23
"""Numbers of the functionals of several rows that are bounded by one reverse pass."""
MOST_NUMBERS = 2**28
"""Numbers of the functionals of one reverse pass, where each reads every token: 2 GiB."""

Row = tuple[int, ...]
"""The index of a row of the last dimension."""


def unit_functionals(
    shape: tuple[int, ...], device: torch.device, *, by_row: bool = False, size: int = BATCH
) -> Iterator[tuple[int, int, int, Adjoint]]:
    """Yield (first index, start, stop, functionals) that read single elements of a tensor.

    Elements start to stop of the flattened rest [i, ...] of the tensor; together all of them. At
    most `size` come together, and with `by_row` none of two rows of the last dimension.
    """
    rest, count = shape[1:], math.prod(shape[1:])
    if by_row:
        unit = torch.eye(shape[-1], dtype=torch.float64, device=device)
        for row in rows(shape):
            before = sum(k * math.prod(shape[axis + 2 :]) for axis, k in enumerate(row[1:]))
            for start in range(0, shape[-1], size):
                part = unit[start : start + size]
                stop = start + len(part)
                yield row[0], before + start, before + stop, on_row(part, row, shape)
        return
    for i in range(shape[0]):  # so that windows stay small
        for start in range(0, count, size):
            stop = min(count, start + size)
            values = torch.zeros(stop - start, count, dtype=torch.float64, device=device)
            values[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
            window = ((i, i + 1), *whole(rest))
            yield i, start, stop, Adjoint(values.reshape(stop - start, 1, *rest), window, shape)


def at_once(tape: Tape) -> int:
    """Return how many functionals go through a reverse pass together, so that memory is bounded
    however many tokens there are."""
    matrices = (entry.reference for entry in tape.entries if entry.reference.dim() == 2)
    widest = max((matrix.numel() for matrix in matrices), default=1)
    return max(1, min(BATCH, MOST_NUMBERS // widest))


def elements(tape: Tape, index: int, needed: Tensor, floor: int = INPUT) -> Tensor:
    """Bound |e| of an entry, element by element: by reverse passes in the rows that are needed.

    Args:
        needed: [..., 1] bool; other rows keep the reach of the entry.
        floor: where the passes may stop, see `Tape.bound`.
    """
    entry = tape.entries[index]
    found = entry.reach.clone(memory_format=torch.contiguous_format)
    size = at_once(tape)
    each = unit_functionals(entry.shape, found.device, by_row=entry.by_row, size=size)
    for i, start, stop, functionals in each:
        if bool(needed[i].any()):
            bounds = tape.bound(index, functionals, floor)
            found[i].view(-1)[start:stop] = bounds.magnitude(tape.radius)
    return torch.minimum(found, entry.reach)


def tighten(run: KernelRun, node: Node, index: int, needed: Callable[[Tensor], Tensor]) -> None:
    """Lower the reach of an entry by reverse passes, in rows and until `needed` says enough.

    Args:
        run: the kernel.
        node: the operation that needs it.
        index: the entry.
        needed: from a reach, the rows [..., 1] where it is not good enough yet.
    """
    tape = run.tape
    for floor in tape.floors:
        rows = needed(tape.entries[index].reach)
        if not run.passing(node, index, "reach", rows, floor):
            return
        tape.tighten(index, elements(tape, index, rows, floor))


def deviations(
    tape: Tape,
    index: int,
    weights: Tensor,
    needed: Tensor,
    floor: int = INPUT,
    *,
    apart: bool = False,
) -> Tensor:
    """Bound |e_j - Σ_k weights_k e_k| in every row of an entry [..., n].

    Args:
        weights: [..., n], for every row the weights of a mean.
        needed: [..., 1] bool: rows for which reverse passes are made.
        floor: where the passes may stop, see `Tape.bound`.
        apart: each row in a pass of its own, because functionals of one row are amplified less.
    """
    entry = tape.entries[index]
    n = entry.shape[-1]
    wide = (entry.reach + (weights.abs() * entry.reach).sum(-1, keepdim=True)) * SAFE
    found = wide.clone()
    unit = torch.eye(n, dtype=torch.float64, device=weights.device)
    largest = max(other.reference.numel() for other in tape.entries)
    size = 1 if apart else max(1, NUMBERS // (n * largest))
    for group in _groups(list(_chosen(needed)), size):
        functionals = _on_rows([unit - weights[row] for row in group], group, entry.shape)
        bounds = tape.bound(index, functionals, floor).magnitude(tape.radius)
        for row, bound in zip(group, bounds.reshape(len(group), n), strict=True):
            found[row] = bound
    return torch.minimum(found, wide)


def _groups(chosen: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    """Yield up to `size` rows of one head at a time."""
    for _, head in groupby(chosen, key=lambda row: row[:-1]):
        rest = list(head)
        while rest:
            yield rest[:size]
            rest = rest[size:]


def _on_rows(values: Sequence[Tensor], chosen: Sequence[Row], shape: tuple[int, ...]) -> Adjoint:
    """Return functionals [m, n] of each of some rows of a tensor, all in one batch."""
    places = torch.tensor(chosen).reshape(len(chosen), -1)
    starts, stops = places.amin(0).tolist(), (places.amax(0) + 1).tolist()
    lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
    each = values[0].shape[0]
    total = values[0].new_zeros(len(chosen) * each, *lengths, shape[-1])
    for k, (row, value) in enumerate(zip(chosen, values, strict=True)):
        inner = tuple(i - start for i, start in zip(row, starts, strict=True))
        total[(slice(k * each, (k + 1) * each), *inner)] = value
    window = (*zip(starts, stops, strict=True), (0, shape[-1]))
    return Adjoint(total, window, shape)


def directions(tape: Tape, index: int, along: Tensor, needed: Tensor, floor: int = INPUT) -> Tensor:
    """Bound |Σ_j along_j e_j| in every row of an entry [..., n] -> [..., 1]."""
    entry = tape.entries[index]
    found = (along.abs() * entry.reach).sum(-1, keepdim=True) * SAFE
    for row in _chosen(needed):
        functional = on_row(along[row].reshape(1, -1), row, entry.shape)
        found[row] = tape.bound(index, functional, floor).magnitude(tape.radius)
    return found


def norms(tape: Tape, index: int, functionals: Tensor, needed: Tensor) -> Tensor:
    """Bound the Euclidean norm of functionals of every row of an entry [..., n] -> [..., 1].

    Args:
        functionals: [m, n], the same of every row.
        needed: [..., 1] bool; other rows get infinity.
    """
    return _norms(tape, index, lambda row: functionals, needed)


def weighted_norms(tape: Tape, index: int, weights: Tensor, needed: Tensor) -> Tensor:
    """Bound the Euclidean norm of weights∘e of every row of an entry [..., n] -> [..., 1].

    Args:
        weights: [..., n], of every element.
        needed: [..., 1] bool; other rows get infinity.
    """
    return _norms(tape, index, lambda row: torch.diag(weights[row]), needed)


def _norms(tape: Tape, index: int, functionals: Callable[[Row], Tensor], needed: Tensor) -> Tensor:
    entry = tape.entries[index]
    found = torch.full_like(entry.reach[..., :1], torch.inf)
    for row in _chosen(needed):
        found[row] = norm(tape, index, on_row(functionals(row), row, entry.shape))
    return found


def surround(tape: Tape, index: int, needed: Tensor, floor: int) -> None:
    """Find ellipsoids around the errors of rows of an entry, by reverse passes down to `floor`.

    Args:
        needed: [..., 1] bool, the rows.
        floor: where the passes stop, see `Tape.bound`.
    """
    shape = tape.entries[index].shape
    unit = torch.eye(shape[-1], dtype=torch.float64, device=needed.device)
    found = {
        row: ellipsoid(tape, index, on_row(unit, row, shape), floor) for row in _chosen(needed)
    }
    tape.surround(index, found)


def _chosen(needed: Tensor) -> Iterator[Row]:
    """Yield the index of every row that is needed."""
    for row in rows(tuple(needed.shape)):
        if bool(needed[row]):
            yield row


def rows(shape: tuple[int, ...]) -> Iterator[Row]:
    """Yield the index of every row of the last dimension."""
    for flat in range(math.prod(shape[:-1])):
        yield tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape[:-1]))


def on_row(values: Tensor, row: tuple[int, ...], shape: tuple[int, ...]) -> Adjoint:
    """Return functionals [B, n] of one row of a tensor."""
    window = (*((i, i + 1) for i in row), (0, shape[-1]))
    return Adjoint(values.reshape(-1, *(1 for _ in row), shape[-1]), window, shape)
