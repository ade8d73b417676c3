"""Ellipsoids of functionals of one row of attention at the source rows of values and keys, without
a functional of each element of these (section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.ellipsoids import ImageEllipsoid, Part
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.tape import Gather, RowImages
from kcdsl_backends.drift.boxes import SAFE
from kcdsl_backends.drift.ops.bilinear import (
    Heads,
    KeyMaps,
    heads,
    places_after,
    turned_heads,
    views_behind,
)
from kcdsl_backends.drift.ops.one_row import times_by_heads

LOST = 2.0**-33
"""More than the relative error of the products of adjoints in all entries that are passed."""

HELD = 2**24
"""Most numbers of products of functionals and the weights of each head at a time."""


@dataclass(frozen=True, slots=True)
class _OwnError:
    """The own error of a linear in each of its heads: at most `radius` [heads, T, d], plus a rest
    with Σ o²/`caps` at most `total` [T] in each row; no caps: no rest."""

    radius: Tensor
    caps: Tensor | None
    total: Tensor
    index: int

    @staticmethod
    def of(run: KernelRun, node: Node, place: Tensor) -> _OwnError | None:
        """Return the own error of a linear with its elements at `place` [heads, T, d]; None if
        other rules bound it, or heads share elements."""
        entry = run.tape.entries[run.computed[node.name]]
        if int(place.flatten().bincount().amax()) > 1:  # heads that read the same
            return None
        if node.name in run.private or entry.centre is not None or entry.nonlinear is not None:
            return None
        split, like = entry.apart, entry.error_bound
        radius = entry.radius if split is None else split.radius
        if radius is None or not entry.kept:
            return None
        caps = None if split is None else split.caps.flatten()[place]
        total = like.new_zeros(len(like)) if split is None else split.total[:, 0]
        return _OwnError(radius.flatten()[place], caps, total, run.computed[node.name])


def images_of_values(
    run: KernelRun, node: Node, p: Operand, known: Tensor, values: Heads | None
) -> Gather | None:
    """Return how functionals of one row of probabilities times values are bounded together.

    Row j of the values is read by the functionals times p_j, so the own errors of all rows in one
    element of a head are one symbol, and the squares of the rests have one sum.
    """
    moves, linear = views_behind(run, run.source(node, 1))
    if values is None or values.source is None or p.index is None:
        return None
    entry = run.tape.entries[run.computed[linear.name]]
    own = _OwnError.of(run, linear, places_after(entry, moves, transposed=False))
    if own is None:
        return None
    place, source, shares = p.index, values.source, p.reference
    sizes = (values.carried + own.radius) * SAFE
    sizes = sizes if own.caps is None else (sizes + own.caps) * SAFE
    shape = tuple(values.error_bound.shape)

    def gathered(a: Adjoint, floor: int) -> RowImages | None:
        (first, stop), (row, end), columns = a.window
        used = (shares[first:stop, row] != 0).any(0).nonzero()
        if floor >= own.index or not len(used):
            return None
        count = int(used[-1]) + 1
        inner, share = slice(*columns), shares[first:stop, row, :count]
        flat = a.values.flatten(1)

        def summed(of: Tensor, weights: Tensor) -> Tensor:
            part = of[first:stop, :count, inner]
            return torch.einsum("hj,hjd->hd", weights, part).flatten() * SAFE

        parts, single = _symbols(flat, summed(own.radius, share.abs()))
        if own.caps is not None:
            total = float(own.total[:count].sum()) * SAFE
            _rest(flat, summed(own.caps, share.square()) * total * SAFE, parts, single)
        lost = flat.abs() @ summed(sizes, share.abs()) * LOST
        each = a.values[:, :, 0].transpose(0, 1)
        back = (each @ known[first:stop, :, inner].mT).transpose(0, 1)[:, :, None]
        window = ((first, stop), (row, end), (0, shares.shape[-1]))
        weight = values.part(slice(first, stop), inner)
        rows = flat.new_empty(len(flat), count, shape[1])
        step = max(1, HELD // weight[:, 0].numel())
        for begin in range(0, len(flat), step):
            part = slice(begin, begin + step)
            rows[part] = share.T @ times_by_heads(a.values[part, :, 0], weight)
        adjoints = [
            (place, Adjoint(back, window, tuple(shares.shape))),
            (source, Adjoint(rows, ((0, count), (0, shape[1])), shape)),
        ]
        return RowImages(parts, single, lost, adjoints)

    return gathered


def images_of_keys(run: KernelRun, node: Node, query: Operand, known: Tensor) -> Gather | None:
    """Return how functionals of one row of queries times keys are bounded together: those of score
    j of a head read one vector of its key, so the own error of that key is one symbol."""
    moves, source_node = views_behind(run, run.source(node, 1))
    if source_node.op == "rope":
        turned = turned_heads(run, node, 1, transposed=True)
        maps = None if turned is None else KeyMaps.of(turned.below, turned.groups, turned.turn)
        moves, source_node = views_behind(run, run.source(source_node, 0))
    else:
        plain = heads(run, node, 1, transposed=True)
        maps = None if plain is None else KeyMaps.of(plain, plain.groups, None)
    if maps is None or query.index is None or maps.below.source is None:
        return None
    if len(set(maps.groups)) < len(maps.groups):  # several heads read one key
        return None
    entry, turn = run.tape.entries[run.computed[source_node.name]], maps.turn
    place = places_after(entry, moves, transposed=turn is None)
    own = _OwnError.of(run, source_node, place)
    if own is None:
        return None
    index, below, shape = query.index, maps.below.source, tuple(maps.below.error_bound.shape)

    def gathered(a: Adjoint, floor: int) -> RowImages | None:
        if floor >= own.index:
            return None
        a = a.narrowed(-1)  # columns that are masked have no adjoint
        (first, stop), (row, end), (start, last) = a.window
        read, columns = list(maps.groups[first:stop]), slice(start, last)
        vectors = query.reference[first:stop, row][:, None]
        turned_back = vectors if turn is None else turn.back(vectors, columns)
        sides = turned_back.abs()
        wide = sides if turn is None else turn.size(vectors, columns)
        flat = a.values[:, :, 0].flatten(1)
        added = (sides * own.radius[read, columns]).sum(-1)
        size = (wide * maps.size[read, columns]).sum(-1)
        if turn is not None:
            outer = (vectors.abs() * turn.own[read, columns]).sum(-1)
            added, size = added + outer, size + outer
        parts, single = _symbols(flat, added.flatten() * SAFE)
        if own.caps is not None:
            squares = (turned_back.square() * own.caps[read, columns]).sum(-1) * SAFE
            total = float(own.total[columns].sum()) * SAFE
            _rest(flat, squares.flatten() * total * SAFE, parts, single)
        lost = flat.abs() @ size.flatten() * LOST
        each = a.values[:, :, 0].transpose(0, 1)  # [heads, B, keys]
        back = (each @ known[first:stop, :, columns].mT).transpose(0, 1)[:, :, None]
        along = maps.directions(query.reference[first:stop, row], first, columns)
        rows = torch.einsum("hbj,hjn->bjn", each, along.expand(-1, last - start, -1))
        adjoints = [
            (index, Adjoint(back, ((first, stop), (row, end), (0, known.shape[1])), _of(query))),
            (below, Adjoint(rows, ((start, last), (0, shape[1])), shape)),
        ]
        return RowImages(parts, single, lost, adjoints)

    return gathered


def _of(operand: Operand) -> tuple[int, ...]:
    return tuple(operand.reference.shape)


def _symbols(flat: Tensor, sizes: Tensor) -> tuple[list[Part], Tensor]:
    """Return the ellipsoid of symbols of these sizes [n] for functionals [B, n] of each, and bounds
    of the functionals."""
    columns = flat.norm(dim=0).clamp_min(2.0**-450)
    weights = (sizes * columns).sum() * (sizes / columns) * SAFE
    return [ImageEllipsoid.of(flat, weights)], flat.abs() @ sizes * SAFE


def _rest(flat: Tensor, axes: Tensor, parts: list[Part], single: Tensor) -> None:
    """Add the ellipsoid with these squares of half axes [n], and its bound of each functional."""
    image = ImageEllipsoid.of(flat, axes)
    parts.append(image)
    single += image.sizes
