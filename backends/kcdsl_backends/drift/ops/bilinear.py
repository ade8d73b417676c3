"""Bilinear remainders of attention: operands of products that come straight from linears, and
functionals of one row: averages of values, and keys in one pass (section 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from kcdsl.model.graph import Node, View
from kcdsl_backends.drift.affine.adjoint import Adjoint, largest_eigenvalue
from kcdsl_backends.drift.affine.ellipsoids import Ellipsoids, longest
from kcdsl_backends.drift.affine.error_bounds import rows
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.row_sums import (
    KeyRows,
    LastVectors,
    RowSums,
    ValueRows,
    Vectors,
)
from kcdsl_backends.drift.affine.tape import PASS, Nonlinear, SingleRow, TapeEntry
from kcdsl_backends.drift.boxes import SAFE, gamma
from kcdsl_backends.drift.linear import LinearRun
from kcdsl_backends.drift.linear.tape import LinearEntry


class Through(Protocol):
    """See `through_values`."""

    def __call__(self, a: Adjoint, h: int, *, known: bool = False) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Heads:
    """An operand [heads, T, d] that comes straight from a linear: e[h, t] = W_h e_x[t] + o[h, t].

    W is `kept` [heads, d, D] in the format of the weight, `own` [heads, T, d] bounds |o|,
    `error_bound` [T, D] bounds |e_x|; e_x is the entry `source` (None: a known number). `groups`
    names for every head the first that is the same, of several that read one; `plain`: nothing else
    is known of o, and no others share any of it.
    """

    kept: Tensor
    own: Tensor
    error_bound: Tensor
    source: int | None
    ellipsoids: Ellipsoids = field(default_factory=dict)
    plain: bool = False
    groups: tuple[int, ...] = ()

    @property
    def weight(self) -> Tensor:
        """Return W as float64."""
        return self.kept.to(torch.float64)

    def part(self, heads: int | slice | list[int], columns: slice = slice(None)) -> Tensor:
        """Return some rows of W of some heads, as float64."""
        return self.kept[heads, columns].to(torch.float64)

    @property
    def carried(self) -> Tensor:
        """Return |W_h| `error_bound` [heads, T, d]."""
        return self.error_bound @ self.weight.abs().mT * SAFE

    @property
    def lengths(self) -> Tensor:
        """Return bounds of |W_h e_x|₂ [heads, T]: √n times the largest singular value of W_h ρ."""
        found = self.own.new_empty(self.own.shape[:-1])
        for h, t in rows((*found.shape, 1)):
            scaled = self.part(h) * self.error_bound[t]
            trace = float(scaled.square().sum()) * SAFE
            found[h, t] = math.sqrt(largest_eigenvalue(scaled @ scaled.T, trace))
        found = found * math.sqrt(self.error_bound.shape[-1]) * SAFE
        for (t,), matrix in self.ellipsoids.items():
            for h in range(found.shape[0]):
                found[h, t] = min(float(found[h, t]), longest(matrix, self.part(h)))
        return found

    def again(self, run: KernelRun) -> Heads:
        """Return the same with the error bound as it is by now."""
        return (
            self
            if self.source is None
            else replace(
                self,
                error_bound=run.tape.entries[self.source].error_bound,
                ellipsoids=run.tape.entries[self.source].ellipsoids,
            )
        )


def heads(run: KernelRun, node: Node, position: int, *, transposed: bool = False) -> Heads | None:
    """Return the heads behind an operand, None where it does not come straight from a linear.

    Args:
        transposed: the operand is [heads, d, T].
    """
    moves, source = views_behind(run, run.source(node, position))
    return straight_heads(run, moves, source, transposed=transposed)


def views_behind(run: KernelRun | LinearRun, source: Node) -> tuple[list[Node], Node]:
    """Return the operations that only moved what a node holds, the last one first, and where it
    was computed."""
    moves = []
    while source.op == "view":
        moves.append(source)
        source = run.source(source, 0)
    return moves, source


def straight_heads(
    run: KernelRun, moves: Sequence[Node], source: Node, *, transposed: bool = False
) -> Heads | None:
    """Return the heads that `moves` make of a linear; None of other nodes, or where rows mix."""
    if source.op != "linear" or run.quantises(source):
        return None
    entry = run.tape.entries[run.computed[source.name]]
    if not entry.kept or entry.radius is None or len(entry.shape) != 2:
        return None
    place = places_after(entry, moves, transposed=transposed)
    outputs = _outputs(place, *entry.shape)
    if outputs is None:
        return None
    weight = run.parameters.kept(run.source(source, 1))
    own = run.own(source.name)
    assert own is not None
    own = own.flatten()[place.flatten()].reshape(place.shape)
    below, read = run.operand(source, 0), [tuple(each) for each in outputs.tolist()]
    groups = tuple(read.index(each) for each in read)
    each_once = [output for h in sorted(set(groups)) for output in read[h]]
    apart = len(set(each_once)) == len(each_once)
    plain = apart and entry.centre is None and entry.apart is None
    return Heads(weight[outputs], own, below.error_bound, below.index, plain=plain, groups=groups)


def _outputs(place: Tensor, tokens: int, features: int) -> Tensor | None:
    """Return which outputs [heads, d] of a linear every head reads, given the places [heads, T, d]
    of its elements [T, features]; None where rows mix, or heads read others at another row."""
    if place.dim() != 3 or place.shape[1] != tokens:
        return None
    outputs = place[:, :1] % features
    row = torch.arange(tokens, device=place.device)[:, None]
    return outputs[:, 0] if bool((place == row * features + outputs).all()) else None


def places_after(
    entry: TapeEntry | LinearEntry, moves: Sequence[Node], *, transposed: bool
) -> Tensor:
    """Return which element of an entry stands where, after `moves`, the last of them first."""
    count = entry.reference.numel()
    place = torch.arange(count, device=entry.reference.device).reshape(entry.shape)
    for move in reversed(moves):
        place = View.of(move).moved(place)
    return place.mT if transposed else place


@dataclass(frozen=True, slots=True)
class RowRotation:
    """A rotation R_j of every row: tables [T, d], and a bound [groups, T, d] of what it adds."""

    cos: Tensor
    sin: Tensor
    own: Tensor

    def back(self, vectors: Tensor, rows: slice) -> Tensor:
        """Return R_jᵀ v of vectors [heads, 1, d] -> [heads, rows, d]."""
        first, second = (vectors * self.sin[rows]).chunk(2, -1)
        return vectors * self.cos[rows] + torch.cat([second, -first], -1)

    @property
    def stretch(self) -> Tensor:
        """Bound |R_j|₂ of every row [T]: R_j R_jᵀ has a 2 by 2 block for every pair of elements."""
        (c, d), (s, t) = self.cos.chunk(2, -1), self.sin.chunk(2, -1)
        first, second, beside = c.square() + s.square(), d.square() + t.square(), c * t - s * d
        half = torch.sqrt(((first - second) / 2).square() + beside.square())
        return (((first + second) / 2 + half).amax(-1) + 2.0**-48).sqrt() * SAFE

    def sizes(self, values: Tensor) -> Tensor:
        """Return |R_t| v of v [groups, T, d] >= 0."""
        first, second = values.chunk(2, -1)
        swapped = torch.cat([second, first], -1)
        return (values * self.cos.abs() + swapped * self.sin.abs()) * SAFE

    def size(self, vectors: Tensor, rows: slice) -> Tensor:
        """Return |R_jᵀ| |v| of vectors [heads, 1, d] -> [heads, rows, d]."""
        sizes = vectors.abs()
        first, second = (sizes * self.sin[rows].abs()).chunk(2, -1)
        return sizes * self.cos[rows].abs() + torch.cat([second, first], -1)


@dataclass(frozen=True, slots=True)
class KeyMaps:
    """Where keys come from: `below`, whose heads are turned, and read by the heads of `groups`.

    `size` [heads of `below`, T, d] bounds |W_g e_x[j] + o[g, j]|.
    """

    below: Heads
    groups: tuple[int, ...]
    turn: RowRotation | None
    size: Tensor

    @staticmethod
    def of(below: Heads, groups: tuple[int, ...], turn: RowRotation | None) -> KeyMaps:
        """Return the keys of heads."""
        return KeyMaps(below, groups, turn, below.carried + below.own)

    def own(self, each: Tensor, queries: Tensor, first: int, rows: slice) -> Tensor:
        """Bound what rotation and linear add to functionals of one row of scores.

        Args:
            each: a [B, heads, rows], of heads from the one numbered `first`.
            queries: q [heads, d].
            rows: the keys that are read.

        Returns:
            [B]. What float64 loses on the way to e_x is part of it.
        """
        read, vectors = self.groups[first : first + len(queries)], queries[:, None]
        size, gathered = self.size[:, rows], list(read)
        total = _size(each, self._back(vectors, rows), self.below.own[:, rows], read)
        if self.turn is None:
            sizes = vectors.abs() * size[gathered]
        else:
            added = self.turn.own[:, rows]
            total = total + _size(each, vectors, added, read)
            sizes = vectors.abs() * added[gathered]
            sizes = sizes + self.turn.size(vectors, rows) * size[gathered]
        inexact = gamma(len(read) + vectors.shape[-1] + 2 * PASS) * sizes.sum(-1)
        return (total + each.abs().flatten(1) @ inexact.flatten()) * SAFE

    def directions(self, queries: Tensor, first: int, rows: slice) -> Tensor:
        """Return W_gᵀ R_jᵀ q_h of queries [heads, d] -> [heads, rows, D]; [heads, 1, D] where it is
        the same in every row."""
        read = list(self.groups[first : first + len(queries)])
        return self._back(queries[:, None], rows) @ self.below.part(read)

    def _back(self, vectors: Tensor, rows: slice) -> Tensor:
        return vectors if self.turn is None else self.turn.back(vectors, rows)


def _size(each: Tensor, vectors: Tensor, own: Tensor, read: tuple[int, ...]) -> Tensor:
    """Bound Σ_j Σ_h a_hj v_hj·o[g, j] of |o| <= own, the heads of a group taken together.

    Args:
        each: a [B, heads, rows].
        vectors: v [heads, rows or 1, d].
        own: [groups, rows, d].
        read: the group of every head.
    """
    total = each.new_zeros(len(each))
    for group in dict.fromkeys(read):
        members = [h for h, other in enumerate(read) if other == group]
        if len(members) == 1:
            size = (vectors[members[0]].abs() * own[group]).sum(-1)
            total = total + each[:, members[0]].abs() @ size
            continue
        turned = vectors[members].expand(-1, each.shape[-1], -1)
        joint = torch.einsum("bhj,hjd->bjd", each[:, members], turned)
        total = total + joint.abs().flatten(1) @ own[group].flatten()
    return total * (1 + 2 * gamma(own[0].numel() + PASS))


@dataclass(frozen=True, slots=True)
class TurnedHeads:
    """An operand [heads, T, d] that a rotation made of heads of a linear: e[h, t] =
    R_t (W_g e_x[t] + o'[g, t]) + o[g, t], g = `groups[h]`."""

    below: Heads
    groups: tuple[int, ...]
    turn: RowRotation

    @property
    def own(self) -> Tensor:
        """Bound |R_t o' + o| [heads, T, d]."""
        return (self.turn.sizes(self.below.own) + self.turn.own)[list(self.groups)] * SAFE

    @property
    def carried(self) -> Tensor:
        """Bound |R_t W_g e_x| [heads, T, d]."""
        return self.turn.sizes(self.below.carried)[list(self.groups)]

    @property
    def lengths(self) -> Tensor:
        """Bound |R_t W_g e_x|₂ [heads, T]."""
        return (self.below.lengths * self.turn.stretch)[list(self.groups)] * SAFE

    def again(self, run: KernelRun) -> TurnedHeads:
        """Return the same with the error bound of x as it is by now."""
        return replace(self, below=self.below.again(run))


def turned_heads(
    run: KernelRun, node: Node, position: int, *, transposed: bool = False
) -> TurnedHeads | None:
    """Return what a rotation made of heads of a linear, whole heads of it in every row of heads of
    an operand; None where it comes from elsewhere.

    Args:
        transposed: the operand is [heads, d, T].
    """
    moves, source = views_behind(run, run.source(node, position))
    if source.op != "rope":
        return None
    entry = run.tape.entries[run.computed[source.name]]
    below = straight_heads(run, *views_behind(run, run.source(source, 0)))
    simple = entry.kept and entry.centre is None and entry.apart is None
    if below is None or not simple or entry.radius is None:
        return None
    _, tokens, width = entry.shape
    place = places_after(entry, moves, transposed=transposed)
    if place.shape[1:] != (tokens, width):
        return None
    inner = torch.arange(tokens * width, device=place.device).reshape(tokens, width)
    if not bool((place == place[:, :1, :1] + inner).all()):
        return None
    groups = tuple((place[:, 0, 0] // (tokens * width)).tolist())
    cos, sin = (run.parameters.plain(run.source(source, i)) for i in (1, 2))
    own = run.own(source.name)
    assert own is not None
    return TurnedHeads(
        below, groups, RowRotation(cos.expand(tokens, width), sin.expand(tokens, width), own)
    )


def key_maps(run: KernelRun, node: Node) -> KeyMaps | None:
    """Return the keys [heads, d, T] of a product of scores; None where they come from elsewhere."""
    if views_behind(run, run.source(node, 1))[1].op != "rope":
        found = heads(run, node, 1, transposed=True)
        return None if found is None or not found.plain else KeyMaps.of(found, found.groups, None)
    turned = turned_heads(run, node, 1, transposed=True)
    if turned is None or not turned.below.plain:
        return None
    return KeyMaps.of(turned.below, turned.groups, turned.turn)


def bilinear_remainder(
    query: Heads | TurnedHeads, key: Heads | TurnedHeads, by_weights: Tensor | None = None
) -> Tensor:
    """Bound |e_q·e_k| [heads, T, T'] by norms, or element by element where that is less.

    `by_weights` is another bound of what comes from e_x in both.
    """
    by_query, by_key = query.lengths, key.lengths
    found = by_query[:, :, None] * by_key[:, None, :]
    found = found if by_weights is None else torch.minimum(found, by_weights)
    own_query, own_key = query.own.norm(dim=-1), key.own.norm(dim=-1)
    mixed = torch.minimum(query.own @ key.carried.mT, own_query[:, :, None] * by_key[:, None, :])
    other = torch.minimum(query.carried @ key.own.mT, by_query[:, :, None] * own_key[:, None, :])
    return (found + mixed + other + query.own @ key.own.mT) * SAFE


def row_of_values(
    run: KernelRun, p: Operand, values: Heads, known: Tensor, second_order: bool
) -> SingleRow | None:
    """Take rows of probabilities times values, as section 4 says of averages.

    With m_j = |a|·|o[h, j]| and any numbers p_j + e_j, |e_j| <= ρ_j, in front of the o[h, j],

        |Σ_j (p_j + e_j) a·o| <=
            Σ_j p_j m_j + Σ_j ρ_j |m_j - m| + m |Σ_j e_j| + 2 Σ_j (ρ_j - p_j)₊ m_j

    for every m >= 0; Σ_j ρ_j m_j may stand for the last three. Of heads h that read the same o, all
    together are also at most Σ_j |Σ_h p_hj a_h|·|o| + Σ_j Σ_h ρ_hj m_hj.

    Args:
        run: the kernel.
        p: the probabilities [heads, T, keys].
        values: where the values come from.
        known: their reference [heads, keys, d].
        second_order: whether Σ_j e_j a·e_v[h, j] is bounded here; else it is known element by
            element.
    """
    place, source = p.index, values.source
    if place is None or source is None or not values.plain:
        return None
    entry, bound = run.tape.entries[place], run.tape.entries[source].rows
    weights, moved, balance = entry.reference, entry.error_bound, entry.balance
    below, last = 2 * (moved - weights).clamp_min(0), LastVectors()
    beyond = through_values(values, moved)
    sizes = values.carried + values.own
    ends = [_last(row) + 1 for row in (weights != 0).any(0)]
    reads = [_last(row) + 1 for row in ((weights != 0) | (moved != 0)).any(0)]
    carries = bool(values.error_bound.any())

    def vectors(a: Adjoint) -> Vectors | None:
        """Return the functionals of one row as those of every row that the values come from."""
        if bound is None or not carries:
            return None
        (first, stop), _, columns = a.window
        each = a.values[:, :, 0].transpose(0, 1)  # [heads, B, d]
        return last.get(each, values.kept[first:stop, slice(*columns)], bound)

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, stop), (row, _), columns = a.window
        total, many = a.values.new_zeros(a.values.shape[0]), vectors(a) if second_order else None
        read = slice(0, reads[row])
        if many is not None:
            far = moved[first:stop, row] @ values.error_bound * SAFE
            total = total + many.weighed(far).sum(0)
        for members in _groups(values.groups, first, stop):
            alone, around = torch.zeros_like(total), torch.zeros_like(total)
            for h in members:
                own = a.values[:, h - first, 0].abs() @ values.own[h, read, slice(*columns)].T
                own = own * SAFE  # [B, keys]
                alone = alone + own @ weights[h, row, read].abs()
                if not second_order:
                    continue
                rest = plain = own @ moved[h, row, read]
                if balance is not None:
                    price = balance[h, row]
                    middle = _middle(own, moved[h, row, read], price)
                    apart = (own - middle).abs() @ moved[h, row, read] + own @ below[h, row, read]
                    rest = torch.minimum(rest, apart + middle[:, 0] * price)
                alone, around = alone + rest, around + plain
                total = total + beyond(a, h, known=many is not None)
            if len(members) > 1:
                alone = torch.minimum(
                    alone, _together(a, members, weights[:, row], values, sizes) + around
                )
            total = total + alone
        total = total * SAFE
        return -total, total

    def vjp(a: Adjoint) -> list[tuple[int, Adjoint | RowSums]]:
        (first, stop), (row, end), columns = a.window
        heads = slice(first, stop)
        each = a.values[:, :, 0].transpose(0, 1)  # [heads, B, d]
        back = (each @ known[heads, :, slice(*columns)].mT).transpose(0, 1)[:, :, None]
        window = ((first, stop), (row, end), (0, weights.shape[-1]))
        found: list[tuple[int, Adjoint | RowSums]]
        found = [(place, Adjoint(back, window, tuple(weights.shape)))]
        many = vectors(a) if ends[row] else None
        if many is not None and bound is not None:
            shares = ValueRows(many, weights[heads, row, : ends[row]])
            count = a.values.shape[0]
            found.append((source, RowSums(bound, row, 0, ends[row], count, values=shares)))
        elif carries and ends[row]:
            inputs = each @ values.part(heads, slice(*columns))  # [heads, B, D]
            rows = torch.einsum("hj,hbn->bjn", weights[heads, row, : ends[row]], inputs)
            shape = tuple(values.error_bound.shape)
            found.append((source, Adjoint(rows, ((0, ends[row]), (0, shape[1])), shape)))
        return found

    return SingleRow(Nonlinear(between), vjp, nearer=second_order and balance is not None)


def _last(chosen: Tensor) -> int:
    """Return the index of the last element that is true, -1 where there is none."""
    found = chosen.nonzero()
    return int(found[-1]) if len(found) else -1


def _groups(groups: tuple[int, ...], first: int, last: int) -> Iterator[list[int]]:
    """Yield the heads of a window that are the same."""
    for group in dict.fromkeys(groups[first:last]):
        yield [h for h in range(first, last) if groups[h] == group]


def _together(
    a: Adjoint, members: list[int], weights: Tensor, values: Heads, sizes: Tensor
) -> Tensor:
    """Bound Σ_j Σ_h p_hj a_h·o[j] of heads that read the same values [B].

    Args:
        weights: p [heads, keys] of the row.
        sizes: of the values' errors [heads, keys, d].
    """
    (first, _), _, columns = a.window
    each, part = a.values[:, [h - first for h in members], 0], weights[members]
    own = values.own[members[0], :, slice(*columns)]
    joint = torch.einsum("hj,bhd->bjd", part, each).abs().flatten(1) @ own.flatten()
    lost = gamma(a.values.shape[1] + values.kept.shape[-2] + 2 * PASS)
    size = (sizes[members][:, :, slice(*columns)] * part.abs()[..., None]).sum(1)
    inexact = lost * (each.abs().flatten(1) @ size.flatten())
    return (joint * (1 + 2 * gamma(own.numel() + PASS)) + inexact) * SAFE


def row_of_keys(
    run: KernelRun, query: Operand, keys: KeyMaps | None, known: Tensor
) -> SingleRow | None:
    """Take rows of queries times keys.

    Args:
        run: the kernel.
        query: the queries [heads, T, d].
        keys: where the keys come from.
        known: the reference of the keys [heads, d, keys].
    """
    if keys is None or keys.below.source is None or query.index is None:
        return None
    place, source, found_at = query.index, keys.below.source, query.reference
    shape, bound = tuple(keys.below.error_bound.shape), run.tape.entries[source].rows

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, last), (row, _), columns = a.window
        total = keys.own(a.values[:, :, 0], found_at[first:last, row], first, slice(*columns))
        return -total, total

    carries = bool(keys.below.error_bound.any())

    def vjp(a: Adjoint) -> list[tuple[int, Adjoint | RowSums]]:
        (first, last), (row, _), (start, stop) = a.window
        each = a.values[:, :, 0].transpose(0, 1)  # [heads, B, keys]
        back = (each @ known[first:last, :, start:stop].mT).transpose(0, 1)[:, :, None]
        window = ((first, last), a.window[1], (0, known.shape[1]))
        found: list[tuple[int, Adjoint | RowSums]]
        found = [(place, Adjoint(back, window, tuple(found_at.shape)))]
        if not carries or start == stop:
            return found
        along = keys.directions(found_at[first:last, row], first, slice(start, stop))
        if bound is not None:
            several, count = KeyRows(each, along, start), a.values.shape[0]
            found.append((source, RowSums(bound, row, start, stop, count, keys=several)))
        else:
            rows = torch.einsum("hbj,hjn->bjn", each, along.expand(-1, stop - start, -1))
            found.append((source, Adjoint(rows, ((start, stop), (0, shape[1])), shape)))
        return found

    return SingleRow(Nonlinear(between), vjp)


def through_values(values: Heads, moved: Tensor) -> Through:
    """Return a function that bounds Σ_j moved[h, t, j] |a·W_h e_x[j]| of a head, [B]; with `known`,
    but for what that is beside Σ_j moved[h, t, j] (|a·W_h| ρ_x[j])."""
    inexact = gamma(values.kept.shape[1] + PASS) * values.carried
    exact = not bool(values.error_bound.any())  # then all that the values are off by is their own

    def beyond(a: Adjoint, h: int, *, known: bool = False) -> Tensor:
        (first, _), (row, end), columns = a.window
        part, weights = a.values[:, h - first], moved[h, row:end]
        size = part.abs() * (weights @ inexact[h, :, slice(*columns)])
        total = size.flatten(1).sum(-1) * SAFE
        if exact or known:
            return total
        far = weights @ values.error_bound * SAFE
        sized = (part @ values.part(h, slice(*columns))).abs() * far
        return total + sized.flatten(1).sum(-1) * SAFE

    return beyond


CANDIDATES = 32
"""About so many elements of a row are looked at to find the middle one."""


def _middle(sizes: Tensor, weights: Tensor, price: Tensor) -> Tensor:
    """Return an m [B, 1] where Σ_j weights_j |sizes_j - m| + price·m of sizes [B, n] is nearly
    least: the best of some of the sizes."""
    step = max(1, sizes.shape[-1] // CANDIDATES)
    sizes, weights = sizes[:, ::step], weights[::step] * step
    if not sizes.shape[-1]:
        return sizes.new_zeros(len(sizes), 1)
    ordered, order = sizes.sort(dim=-1)
    below = weights[order].cumsum(-1)
    wanted = ((weights.sum() - price) / 2).clamp_min(0)
    place = (below < wanted).sum(-1, keepdim=True).clamp_max(sizes.shape[-1] - 1)
    return torch.where(wanted > 0, ordered.gather(-1, place), 0.0)
