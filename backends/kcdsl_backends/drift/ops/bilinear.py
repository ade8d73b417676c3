"""Bilinear remainders of attention: operands of products that are heads of linears, and functionals
of one row: averages of values, and keys in one pass (section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from kcdsl.model.graph import Node, View
from kcdsl_backends.drift.affine.adjoint import Adjoint, largest_eigenvalues
from kcdsl_backends.drift.affine.ellipsoids import Ellipsoids, longest
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.row_sums import (
    BoundedRows,
    KeyRows,
    KeyVectors,
    RowSums,
    ValueRows,
    Vectors,
    power,
)
from kcdsl_backends.drift.affine.tape import (
    PASS,
    Nonlinear,
    SingleRow,
    TapeEntry,
    reads_many,
)
from kcdsl_backends.drift.boxes import SAFE, gamma
from kcdsl_backends.drift.linear import LinearRun
from kcdsl_backends.drift.linear.tape import LinearEntry

_TOKENS = 16
"""Tokens whose Gram matrices are formed at a time."""


@dataclass(frozen=True, slots=True)
class Heads:
    """An operand [heads, T, d] made of heads of a linear: e[h, t] = W_h e_x[t] + o[h, t].

    W is `kept` [heads, d, D] in the format of the weight, `own` [heads, T, d] bounds |o|,
    `error_bound` [T, D] bounds |e_x|; e_x is the entry `source` (None: a known number). `groups`
    names for every head the first head equal to it. `plain`: o has only an elementwise bound, and
    heads share none of its elements unless they are equal.
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
        """Return bounds of |W_h e_x|₂ [heads, T]: of every row the largest singular value of W_h ρ
        times √n; for many products that of W_h √ω times the norm of ρ/√ω, ω the mean of ρ²."""
        if not bool(self.error_bound.any()):
            return self.own.new_zeros(self.own.shape[:-1])
        scales, columns = self.error_bound, self.error_bound.shape[-1]
        across = self.own.new_tensor([math.sqrt(columns)])
        if reads_many(self.own.shape, columns):
            top = power(scales)
            squares = (scales / top).square()
            metric = squares.mean(0).clamp_min(2.0**-100)
            sums = (squares / metric).sum(-1) * (1 + gamma(columns + 16))
            scales, across = metric.sqrt()[None], (sums + 2.0**-800).sqrt() * top
        found = self.own.new_empty(len(self.own), len(scales))
        for h in range(len(found)):
            weight = self.part(h)
            for first in range(0, len(scales), _TOKENS):
                some = slice(first, first + _TOKENS)
                scaled = weight * scales[some, None]
                products = torch.bmm(scaled, scaled.mT)
                traces = products.diagonal(dim1=1, dim2=2).sum(-1) * (1 + 2.0**-30)
                found[h, some] = largest_eigenvalues(products, traces).sqrt()
        found = found * across * SAFE
        for (t,), matrix in self.ellipsoids.items():
            for h in range(found.shape[0]):
                found[h, t] = min(float(found[h, t]), longest(matrix, self.part(h)))
        return found

    def again(self, run: KernelRun) -> Heads:
        """Return the same operand with the present error bound of x."""
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
    """Return the heads that an operand is made of; None if it is not made of heads of a linear.

    Args:
        transposed: the operand is [heads, d, T].
    """
    moves, source = views_behind(run, run.source(node, position))
    return straight_heads(run, moves, source, transposed=transposed)


def views_behind(run: KernelRun | LinearRun, source: Node) -> tuple[list[Node], Node]:
    """Return the operations that only moved elements between a node and where it was computed, the
    last one first, and the node that computed it."""
    moves = []
    while source.op == "view":
        moves.append(source)
        source = run.source(source, 0)
    return moves, source


def straight_heads(
    run: KernelRun, moves: Sequence[Node], source: Node, *, transposed: bool = False
) -> Heads | None:
    """Return the heads that `moves` make of a linear; None of other nodes, or if rows are mixed."""
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
    of its elements [T, features]; None if rows are mixed, or if heads read other outputs at another
    row."""
    if place.dim() != 3 or place.shape[1] != tokens:
        return None
    outputs = place[:, :1] % features
    row = torch.arange(tokens, device=place.device)[:, None]
    return outputs[:, 0] if bool((place == row * features + outputs).all()) else None


def places_after(
    entry: TapeEntry | LinearEntry, moves: Sequence[Node], *, transposed: bool
) -> Tensor:
    """Return the entry's element at each position after `moves`, the last of them first."""
    count = entry.reference.numel()
    place = torch.arange(count, device=entry.reference.device).reshape(entry.shape)
    for move in reversed(moves):
        place = View.of(move).moved(place)
    return place.mT if transposed else place


@dataclass(frozen=True, slots=True)
class RowRotation:
    """A rotation R_j of every row: tables [T, d], and a bound [groups, T, d] of its own error."""

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
    """The source of keys: heads `below`, rotated by `turn`, and for each head of the keys its
    source in `groups`.

    `size` [heads of `below`, T, d] bounds |W_g e_x[j] + o[g, j]|.
    """

    below: Heads
    groups: tuple[int, ...]
    turn: RowRotation | None
    size: Tensor

    @staticmethod
    def of(below: Heads, groups: tuple[int, ...], turn: RowRotation | None) -> KeyMaps:
        """Return the maps of keys made of these heads."""
        return KeyMaps(below, groups, turn, below.carried + below.own)

    def row(self, queries: Tensor, rows: slice) -> KeyRow:
        """Return the functionals of some rows of the keys by queries [heads, d] of one row."""
        read, vectors = list(self.groups), queries[:, None]
        back, size = self._back(vectors, rows), self.size[:, rows]
        below, turned = self.below.own[:, rows], None
        alone = (back.abs() * below[read]).sum(-1)
        if self.turn is None:
            sizes = vectors.abs() * size[read]
        else:
            turned = self.turn.own[:, rows]
            added = vectors.abs() * turned[read]
            alone = alone + added.sum(-1)
            sizes = added + self.turn.size(vectors, rows) * size[read]
        inexact = gamma(len(read) + vectors.shape[-1] + 2 * PASS) * sizes.sum(-1)
        parts = [(back, below)] if turned is None else [(back, below), (vectors, turned)]
        return KeyRow(self, rows, back, alone.expand_as(inexact), inexact, tuple(parts))

    def directions(self, queries: Tensor, first: int, rows: slice) -> Tensor:
        """Return W_gᵀ R_jᵀ q_h of queries [heads, d] -> [heads, rows, D]; [heads, 1, D] if it is
        the same in every row."""
        read = list(self.groups[first : first + len(queries)])
        return self._back(queries[:, None], rows) @ self.below.part(read)

    def _back(self, vectors: Tensor, rows: slice) -> Tensor:
        return vectors if self.turn is None else self.turn.back(vectors, rows)


@dataclass(frozen=True, slots=True)
class KeyRow:
    """The functionals of some `rows` of the keys that the queries of one row make, all heads.

    R_jᵀ q_h are `back` [heads, rows or 1, d]. The own errors of rotation and linear change score j
    of a head by at most `alone` [heads, rows], the sum of |v|·|o| over `parts` v [heads, rows or 1,
    d] and bounds of o [groups, rows, d]; `inexact` bounds the float64 error on the way to e_x.
    """

    maps: KeyMaps
    rows: slice
    back: Tensor
    alone: Tensor
    inexact: Tensor
    parts: tuple[tuple[Tensor, Tensor], ...]

    def own(self, each: Tensor, first: int) -> Tensor:
        """Bound the own errors of rotation and linear in functionals a [B, heads, rows] of the row
        of scores, of heads from `first` on, plus the float64 error, [B]."""
        heads = slice(first, first + each.shape[1])
        sizes, joint = self.inexact[heads].clone(), each.new_zeros(len(each))
        for members in _groups(self.maps.groups, heads.start, heads.stop):
            if len(members) == 1:
                sizes[members[0] - first] += self.alone[members[0]]
                continue
            group, some = self.maps.groups[members[0]], [h - first for h in members]
            for vectors, own in self.parts:
                turned = vectors[members].expand(-1, each.shape[-1], -1)
                sums = torch.einsum("bhj,hjd->bjd", each[:, some], turned)
                joint = joint + sums.abs().flatten(1) @ own[group].flatten()
        terms = self.inexact[heads].numel() + self.back.shape[-1] + 2 * PASS
        total = joint + each.abs().flatten(1) @ sizes.flatten()
        return total * (1 + 2 * gamma(terms * self.back.shape[-1])) * SAFE

    def key_vectors(self, bound: BoundedRows) -> KeyVectors:
        """Return W_gᵀ R_jᵀ q_h with its products with a bound of the rows of x."""
        weight = self.maps.below.part(list(self.maps.groups))
        scale = power(self.back.abs().sum(-1).amax() * weight.abs().amax())
        places = (self.back / scale) @ weight
        return KeyVectors(places, scale, bound, self.rows.start, self.rows.stop - self.rows.start)


@dataclass(frozen=True, slots=True)
class TurnedHeads:
    """An operand [heads, T, d] of rotated heads of a linear: e[h, t] = R_t (W_g e_x[t] + o'[g, t])
    + o[g, t], g = `groups[h]`."""

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
        """Return the same operand with the present error bound of x."""
        return replace(self, below=self.below.again(run))


def turned_heads(
    run: KernelRun, node: Node, position: int, *, transposed: bool = False
) -> TurnedHeads | None:
    """Return the rotated heads of a linear that an operand is made of, each head of it a whole head
    in every row; None if it is made otherwise.

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
    """Return the maps of the keys [heads, d, T] of scores; None if not heads of a linear."""
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
    """Bound |e_q·e_k| [heads, T, T'] by norms, or element by element if that is less.

    `by_weights` is another bound of the product of both parts from e_x.
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
    """Return the rule of section 4 (averages) for single rows of probabilities times values.

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
    below = 2 * (moved - weights).clamp_min(0)
    beyond, inexact = through_values(values, moved), moved @ _lost(values) * SAFE
    sizes = values.carried + values.own
    ends = [_last(row) + 1 for row in (weights != 0).any(0)]
    reads = [_last(row) + 1 for row in ((weights != 0) | (moved != 0)).any(0)]
    carries = bool(values.error_bound.any())
    lines = torch.stack([weights.abs(), moved, below], -1)
    last = _LastRow(values, known, moved, bound if carries else None)

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, stop), (row, _), columns = a.window
        heads, read, of_row = slice(first, stop), slice(0, reads[row]), last.get(a)
        own = of_row.own[:, :, read]  # [heads, B, keys]
        sums = torch.bmm(own, lines[heads, row, read])
        alone, around = sums[..., 0], torch.zeros_like(sums[..., 0])
        total = a.values.new_zeros(a.values.shape[0])
        if second_order:
            rest = around = sums[..., 1]
            if balance is not None:
                price, to = balance[heads, row], moved[heads, row, read]
                middle = _middle(own, to, price)
                apart = torch.bmm((own - middle).abs_(), to[..., None])[..., 0] + sums[..., 2]
                rest = torch.minimum(rest, apart + middle[..., 0] * price)
            alone = alone + rest
            if of_row.many is not None:
                size = inexact[heads, row, slice(*columns)].flatten()
                lost = a.values.abs().flatten(1) @ size * (1 + 2 * gamma(size.numel()))
                total = total + of_row.far[:, row] + lost
            else:
                for h in range(first, stop):
                    total = total + beyond(a, h)
        for members in _groups(values.groups, first, stop):
            some = [h - first for h in members]
            together = alone[some].sum(0)
            if len(members) > 1:
                joint = _together(a, members, weights[:, row], values, sizes)
                together = torch.minimum(together, joint + around[some].sum(0))
            total = total + together
        total = total * SAFE
        return -total, total

    def vjp(a: Adjoint) -> list[tuple[int, Adjoint | RowSums]]:
        (first, stop), (row, end), columns = a.window
        heads, read, of_row = slice(first, stop), slice(0, max(reads[row], 1)), last.get(a)
        window = ((first, stop), (row, end), (read.start, read.stop))
        found: list[tuple[int, Adjoint | RowSums]]
        back = of_row.back[:, :, None, read]
        found = [(place, Adjoint(back, window, tuple(weights.shape)))]
        if of_row.many is not None and bound is not None and ends[row]:
            own = weights[heads].diagonal(dim1=1, dim2=2)
            shares = ValueRows(of_row.many, weights[heads, row, : ends[row]], own)
            count = a.values.shape[0]
            found.append((source, RowSums(bound, row, 0, ends[row], count, values=shares)))
        elif carries and ends[row]:
            each = a.values[:, :, 0].transpose(0, 1)  # [heads, B, d]
            inputs = each @ values.part(heads, slice(*columns))  # [heads, B, D]
            rows = torch.einsum("hj,hbn->bjn", weights[heads, row, : ends[row]], inputs)
            shape = tuple(values.error_bound.shape)
            found.append((source, Adjoint(rows, ((0, ends[row]), (0, shape[1])), shape)))
        return found

    return SingleRow(Nonlinear(between), vjp, nearer=second_order and balance is not None)


@dataclass(frozen=True)
class _OfRow:
    """Functionals of one row of a context product, with their products with the values, which are
    the same in every row."""

    functionals: Adjoint
    values: Heads
    known: Tensor
    moved: Tensor
    bound: BoundedRows | None

    def same(self, a: Adjoint) -> bool:
        """Return whether other functionals have the same values and heads; rows may differ."""
        mine, one, two = self.functionals, self.functionals.values, a.values
        if (mine.window[0], mine.window[2]) != (a.window[0], a.window[2]):
            return False
        return one.shape == two.shape and torch.equal(one, two)

    @cached_property
    def heads(self) -> slice:
        return slice(*self.functionals.window[0])

    @cached_property
    def columns(self) -> slice:
        return slice(*self.functionals.window[2])

    @cached_property
    def back(self) -> Tensor:
        """Return a·v_j of the reference of every key [B, heads, keys]."""
        each, known = self.functionals.values[:, :, 0], self.known[self.heads, :, self.columns]
        return times_by_heads(each, known.mT)

    @cached_property
    def own(self) -> Tensor:
        """Bound |a|·|o_j| of the own errors of the values at every key [heads, B, keys]."""
        own = self.values.own[self.heads, :, self.columns]
        return self.functionals.values[:, :, 0].abs().transpose(0, 1) @ own.mT * SAFE

    @cached_property
    def many(self) -> Vectors | None:
        """Return them as functionals of every row of the source of the values."""
        if self.bound is None:
            return None
        each = self.functionals.values[:, :, 0].transpose(0, 1)  # [heads, B, d]
        weight = self.values.kept[self.heads, self.columns].to(torch.float64)
        return Vectors.of(each, weight, self.bound)

    @cached_property
    def far(self) -> Tensor:
        """Bound Σ_h Σ_j moved_htj |a·W_h| ρ_j of every row t [B, T]."""
        many = self.many
        assert many is not None
        return many.weighed(self.moved[self.heads], self.values.error_bound)


@dataclass(slots=True)
class _LastRow:
    """Cache of the last functionals of one row: those of the next row are often the same."""

    values: Heads
    known: Tensor
    moved: Tensor
    bound: BoundedRows | None
    last: _OfRow | None = None

    def get(self, a: Adjoint) -> _OfRow:
        """Return the functionals with their cached products."""
        if self.last is None or not self.last.same(a):
            self.last = None
            self.last = _OfRow(a, self.values, self.known, self.moved, self.bound)
        return self.last


def times_by_heads(values: Tensor, matrices: Tensor) -> Tensor:
    """Return values [B, heads, n] times the matrix [heads, n, m] of each head [B, heads, m]."""
    found = values.new_empty(*values.shape[:2], matrices.shape[-1])
    for head, matrix in enumerate(matrices):
        torch.mm(values[:, head], matrix, out=found[:, head])
    return found


def _last(chosen: Tensor) -> int:
    """Return the index of the last element that is true, -1 if there is none."""
    found = chosen.nonzero()
    return int(found[-1]) if len(found) else -1


def _groups(groups: tuple[int, ...], first: int, last: int) -> Iterator[list[int]]:
    """Yield groups of heads of a window that read the same values."""
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
    """Return the rule for single rows of queries times keys.

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
    carries, last = bool(keys.below.error_bound.any()), _LastKeys(keys, found_at, bound)

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        total = last.get(a).own(a.values[:, :, 0], a.window[0][0])
        return -total, total

    def vjp(a: Adjoint) -> list[tuple[int, Adjoint | RowSums]]:
        (first, end), (row, _), (start, stop) = a.window
        heads, each = slice(first, end), a.values[:, :, 0]
        back = times_by_heads(each, known[heads, :, start:stop].mT)[:, :, None]
        window = (a.window[0], a.window[1], (0, known.shape[1]))
        found: list[tuple[int, Adjoint | RowSums]]
        found = [(place, Adjoint(back, window, tuple(found_at.shape)))]
        if not carries or start == stop:
            return found
        if bound is not None:
            several, count = KeyRows(each, last.key_vectors(a), heads), a.values.shape[0]
            found.append((source, RowSums(bound, row, start, stop, count, keys=several)))
        else:
            along = keys.directions(found_at[heads, row], first, slice(start, stop))
            rows = torch.einsum("bhj,hjn->bjn", each, along.expand(-1, stop - start, -1))
            found.append((source, Adjoint(rows, ((start, stop), (0, shape[1])), shape)))
        return found

    return SingleRow(Nonlinear(between), vjp)


@dataclass(slots=True)
class _LastKeys:
    """Cache of the last row of queries: functionals of its heads follow one another."""

    keys: KeyMaps
    queries: Tensor
    bound: BoundedRows | None
    place: tuple[int, tuple[int, int]] | None = None
    row: KeyRow | None = None
    known: KeyVectors | None = None

    def get(self, a: Adjoint) -> KeyRow:
        """Return the functionals of the keys at the columns that they read."""
        place = a.window[1][0], a.window[2]
        if self.row is None or self.place != place:
            self.known = None
            self.row = self.keys.row(self.queries[:, place[0]], slice(*place[1]))
            self.place = place
        return self.row

    def key_vectors(self, a: Adjoint) -> KeyVectors:
        """Return the vectors by which the scores read the input of the keys."""
        row = self.get(a)
        if self.known is None:
            assert self.bound is not None
            self.known = row.key_vectors(self.bound)
        return self.known


def through_values(values: Heads, moved: Tensor) -> Callable[[Adjoint, int], Tensor]:
    """Return a function that bounds Σ_j moved[h, t, j] |a·W_h e_x[j]| of a head, [B]."""
    inexact = _lost(values)
    exact = not bool(values.error_bound.any())  # then the values have own errors only

    def beyond(a: Adjoint, h: int) -> Tensor:
        (first, _), (row, end), columns = a.window
        part, weights = a.values[:, h - first], moved[h, row:end]
        size = part.abs() * (weights @ inexact[h, :, slice(*columns)])
        total = size.flatten(1).sum(-1) * SAFE
        if exact:
            return total
        far = weights @ values.error_bound * SAFE
        sized = (part @ values.part(h, slice(*columns))).abs() * far
        return total + sized.flatten(1).sum(-1) * SAFE

    return beyond


def _lost(values: Heads) -> Tensor:
    """Bound the float64 error of taking adjoints of values through their linear."""
    return gamma(values.kept.shape[1] + PASS) * values.carried


CANDIDATES = 32
"""About so many elements of a row are looked at to find the middle one."""


def _middle(sizes: Tensor, weights: Tensor, price: Tensor) -> Tensor:
    """Return an m [heads, B, 1] that nearly minimises Σ_j weights_j |sizes_j - m| + price·m for
    sizes [heads, B, n]: the best of some of the sizes.

    Args:
        weights: [heads, n].
        price: [heads, 1].
    """
    step = max(1, sizes.shape[-1] // CANDIDATES)
    sizes, weights = sizes[..., ::step], weights[:, None, ::step] * step
    if not sizes.shape[-1]:
        return sizes.new_zeros(*sizes.shape[:-1], 1)
    ordered, order = sizes.sort(dim=-1)
    below = weights.expand_as(sizes).gather(-1, order).cumsum(-1)
    wanted = ((weights.sum(-1, keepdim=True) - price[..., None]) / 2).clamp_min(0)
    place = (below < wanted).sum(-1, keepdim=True).clamp_max(sizes.shape[-1] - 1)
    return torch.where(wanted > 0, ordered.gather(-1, place), 0.0)
