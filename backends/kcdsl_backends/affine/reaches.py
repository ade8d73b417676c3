"""Bounds of many functionals of one entry: its elements, their deviations, directions."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kcdsl_backends.affine.adjoint import Adjoint, whole
from kcdsl_backends.affine.energy import norm
from kcdsl_backends.affine.tape import SAFE, Range, Tape

BATCH = 512
"""Functionals bounded by one reverse pass."""
TOGETHER = 2**18
"""All rows of a head are bounded by one reverse pass where its functionals have so many numbers."""


def unit_functionals(
    shape: tuple[int, ...], device: torch.device
) -> Iterator[tuple[int, int, int, Adjoint]]:
    """Yield (first index, start, stop, functionals) that read single elements of a tensor.

    Elements start to stop of the flattened rest [i, ...] of the tensor; together all of them.
    """
    rest, count = shape[1:], math.prod(shape[1:])
    for i in range(shape[0]):  # one row at a time, so that windows stay small
        for start in range(0, count, BATCH):
            stop = min(count, start + BATCH)
            values = torch.zeros(stop - start, count, dtype=torch.float64, device=device)
            values[torch.arange(stop - start), torch.arange(start, stop)] = 1.0
            window = ((i, i + 1), *whole(rest))
            yield i, start, stop, Adjoint(values.reshape(stop - start, 1, *rest), window, shape)


def elements(tape: Tape, index: int, needed: Tensor) -> Tensor:
    """Bound |e| of an entry, element by element: by reverse passes in the rows that are needed.

    Args:
        needed: [..., 1] bool; other rows keep the reach of the entry.
    """
    entry = tape.entries[index]
    found = entry.reach.clone()
    for i, start, stop, functionals in unit_functionals(entry.shape, found.device):
        if bool(needed[i].any()):
            found[i].view(-1)[start:stop] = tape.bound(index, functionals).magnitude(tape.radius)
    return torch.minimum(found, entry.reach)


def deviations(tape: Tape, index: int, weights: Tensor, needed: Tensor) -> Tensor:
    """Bound |e_j - Σ_k weights_k e_k| in every row of an entry [..., n].

    Args:
        weights: [..., n], for every row the weights of a mean.
        needed: [..., 1] bool: rows for which reverse passes are made.
    """
    entry = tape.entries[index]
    *lead, count, n = entry.shape
    wide = (entry.reach + (weights.abs() * entry.reach).sum(-1, keepdim=True)) * SAFE
    found = wide.clone()
    if not bool(needed.any()):
        return found
    unit = torch.eye(n, dtype=torch.float64, device=weights.device)
    if (count * n) ** 2 <= TOGETHER and not tape.amplifies:
        for head in rows((*lead, 1)):
            values = torch.zeros(count, n, count, n, dtype=torch.float64, device=weights.device)
            for t in range(count):
                values[t, :, t] = unit - weights[(*head, t)]
            window = (*((i, i + 1) for i in head), (0, count), (0, n))
            shape = (count * n, *(1 for _ in head), count, n)
            bounds = tape.bound(index, Adjoint(values.reshape(shape), window, entry.shape))
            found[head] = bounds.magnitude(tape.radius).reshape(count, n)
    else:
        for row in _chosen(needed):
            functionals = on_row(unit - weights[row], row, entry.shape)
            found[row] = tape.bound(index, functionals).magnitude(tape.radius)
    return torch.minimum(found, wide)


def directions(tape: Tape, index: int, along: Tensor, needed: Tensor) -> Tensor:
    """Bound |Σ_j along_j e_j| in every row of an entry [..., n] -> [..., 1]."""
    entry = tape.entries[index]
    found = (along.abs() * entry.reach).sum(-1, keepdim=True) * SAFE
    for row in _chosen(needed):
        functional = on_row(along[row].reshape(1, -1), row, entry.shape)
        found[row] = tape.bound(index, functional).magnitude(tape.radius)
    return found


def norms(tape: Tape, index: int, functionals: Tensor, needed: Tensor) -> Tensor:
    """Bound the Euclidean norm of functionals of every row of an entry [..., n] -> [..., 1].

    Args:
        functionals: [m, n] of every row, or [..., n]: the row's elements with these weights.
        needed: [..., 1] bool; other rows get infinity.
    """
    entry = tape.entries[index]
    found = torch.full_like(entry.reach[..., :1], torch.inf)
    weighted = functionals.shape == entry.reach.shape
    for row in _chosen(needed):
        values = torch.diag(functionals[row]) if weighted else functionals
        found[row] = norm(tape, index, on_row(values, row, entry.shape))
    return found


def _chosen(needed: Tensor) -> Iterator[tuple[int, ...]]:
    """Yield the index of every row that is needed."""
    for row in rows(tuple(needed.shape)):
        if bool(needed[row]):
            yield row


def rows(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the index of every row of the last dimension."""
    for flat in range(math.prod(shape[:-1])):
        yield tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape[:-1]))


def on_row(values: Tensor, row: tuple[int, ...], shape: tuple[int, ...]) -> Adjoint:
    """Return functionals [B, n] of one row of a tensor."""
    window = (*((i, i + 1) for i in row), (0, shape[-1]))
    return Adjoint(values.reshape(-1, *(1 for _ in row), shape[-1]), window, shape)


def ranges(tape: Tape, index: int) -> Iterator[tuple[int, int, int, Range]]:
    """Yield the bounds of the elements of an entry, in the batches of `unit_functionals`."""
    entry = tape.entries[index]
    for i, start, stop, functionals in unit_functionals(entry.shape, entry.reach.device):
        yield i, start, stop, tape.bound(index, functionals)
