"""Operands of products in attention that are heads of linears, and bilinear remainders of their
errors (sections 3 and 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node, View
from kcdsl_backends.drift.affine.adjoint import largest_eigenvalues
from kcdsl_backends.drift.affine.ellipsoids import Ellipsoids, norm_on_ellipsoid
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.row_sums import BoundedRows, KeyVectors, power
from kcdsl_backends.drift.affine.tape import PASS, TapeEntry, reads_many
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
                found[h, t] = min(float(found[h, t]), norm_on_ellipsoid(matrix, self.part(h)))
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
    return heads_of_linear(run, moves, source, transposed=transposed)


def views_behind(run: KernelRun | LinearRun, source: Node) -> tuple[list[Node], Node]:
    """Return the operations that only moved elements between a node and where it was computed, the
    last one first, and the node that computed it."""
    moves = []
    while source.op == "view":
        moves.append(source)
        source = run.source(source, 0)
    return moves, source


def heads_of_linear(
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


def _groups(groups: tuple[int, ...], first: int, last: int) -> Iterator[list[int]]:
    """Yield groups of heads of a window that read the same values."""
    for group in dict.fromkeys(groups[first:last]):
        yield [h for h in range(first, last) if groups[h] == group]


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
    below = heads_of_linear(run, *views_behind(run, run.source(source, 0)))
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
