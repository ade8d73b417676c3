"""Bilinear remainders of attention: operands of products that come straight from linears."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node, View
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.eigenvalues import Ellipsoids, largest_eigenvalue, longest
from kcdsl_backends.drift.affine.error_bounds import rows
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.tape import PASS, Entry
from kcdsl_backends.drift.boxes.box import SAFE, gamma
from kcdsl_backends.drift.linear.run import LinearRun
from kcdsl_backends.drift.linear.tape import Functional, LinearEntry


@dataclass(frozen=True, slots=True)
class Heads:
    """An operand [heads, T, d] that comes straight from a linear: e[h, t] = W_h e_x[t] + o[h, t].

    `weight` [heads, d, D], `own` [heads, T, d] bounds |o|, `error_bound` [T, D] bounds |e_x|; e_x
    is the entry `source` (None: a known number). `groups` names for every head the first that is
    the same, of several that read one; `plain`: nothing else is known of o, and no others share any
    of it.
    """

    weight: Tensor
    own: Tensor
    error_bound: Tensor
    source: int | None
    ellipsoids: Ellipsoids = field(default_factory=dict)
    plain: bool = False
    groups: tuple[int, ...] = ()

    @property
    def carried(self) -> Tensor:
        """Return |W_h| `error_bound` [heads, T, d]."""
        return self.error_bound @ self.weight.abs().mT * SAFE

    @property
    def lengths(self) -> Tensor:
        """Return bounds of |W_h e_x|₂ [heads, T]: √n times the largest singular value of W_h ρ."""
        found = self.own.new_empty(self.own.shape[:-1])
        for h, t in rows((*found.shape, 1)):
            scaled = self.weight[h] * self.error_bound[t]
            trace = float(scaled.square().sum()) * SAFE
            found[h, t] = math.sqrt(largest_eigenvalue(scaled @ scaled.T, trace))
        found = found * math.sqrt(self.error_bound.shape[-1]) * SAFE
        for (t,), matrix in self.ellipsoids.items():
            for h in range(found.shape[0]):
                found[h, t] = min(float(found[h, t]), longest(matrix, self.weight[h]))
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
    weight = run.parameters.linear(run.source(source, 1))
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


def places_after(entry: Entry | LinearEntry, moves: Sequence[Node], *, transposed: bool) -> Tensor:
    """Return which element of an entry stands where, after `moves`, the last of them first."""
    count = entry.reference.numel()
    place = torch.arange(count, device=entry.reference.device).reshape(entry.shape)
    for move in reversed(moves):
        place = View.of(move).moved(place)
    return place.mT if transposed else place


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotation R_j of every row: tables [T, d], and a bound [groups, T, d] of what it adds."""

    cos: Tensor
    sin: Tensor
    own: Tensor

    def back(self, vectors: Tensor, rows: slice) -> Tensor:
        """Return R_jᵀ v of vectors [heads, 1, d] -> [heads, rows, d]."""
        first, second = (vectors * self.sin[rows]).chunk(2, -1)
        return vectors * self.cos[rows] + torch.cat([second, -first], -1)

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
    turn: Rotation | None
    size: Tensor

    @staticmethod
    def of(below: Heads, groups: tuple[int, ...], turn: Rotation | None) -> KeyMaps:
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
        return self._back(queries[:, None], rows) @ self.below.weight[read]

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


def key_maps(run: KernelRun, node: Node) -> KeyMaps | None:
    """Return the keys [heads, d, T] of a product of scores; None where they come from elsewhere."""
    moves, source = views_behind(run, run.source(node, 1))
    if source.op != "rope":
        found = heads(run, node, 1, transposed=True)
        return None if found is None or not found.plain else KeyMaps.of(found, found.groups, None)
    entry = run.tape.entries[run.computed[source.name]]
    below = straight_heads(run, *views_behind(run, run.source(source, 0)))
    simple = entry.kept and entry.centre is None and entry.apart is None
    if below is None or not below.plain or not simple or entry.radius is None:
        return None
    _, tokens, width = entry.shape
    place = places_after(entry, moves, transposed=True)
    if place.shape[1:] != (tokens, width):
        return None
    inner = torch.arange(tokens * width, device=place.device).reshape(tokens, width)
    if not bool((place == place[:, :1, :1] + inner).all()):
        return None
    groups = tuple((place[:, 0, 0] // (tokens * width)).tolist())
    cos, sin = (run.parameters.plain(run.source(source, i)) for i in (1, 2))
    own = run.own(source.name)
    assert own is not None
    turn = Rotation(cos.expand(tokens, width), sin.expand(tokens, width), own)
    return KeyMaps.of(below, groups, turn)


@dataclass(frozen=True, slots=True)
class HeadForm:
    """A part of an operand [heads, T, d]: u[h, t] = Σ_k M_k,h w_k[t] + o[h, t].

    `maps` are pairs of M [heads, d, D] and bounds of |w| [T, D]; `own` bounds |o|.
    """

    maps: tuple[tuple[Tensor, Tensor], ...]
    own: Tensor

    @property
    def carried(self) -> Tensor:
        """Return Σ |M| |w| [heads, T, d]."""
        found = torch.zeros_like(self.own)
        for matrix, error_bound in self.maps:
            found = found + error_bound @ matrix.abs().mT
        return found * SAFE

    def against(self, functionals: Tensor, head: int) -> Tensor:
        """Return bounds of |functional·u[h, t]| for functionals [..., d] -> [..., T]."""
        inexact = gamma(2 * self.own.shape[-1] + 16) * self.carried[head]
        found = functionals.abs() @ (self.own[head] + inexact).T
        for matrix, error_bound in self.maps:
            found = found + (functionals @ matrix[head]).abs() @ error_bound.T
        return found * SAFE


@dataclass(frozen=True, slots=True)
class LinearHeads:
    """The forms of an operand: of e, of Δ and of h + Δ/2, all from the middles of their boxes."""

    deviation: HeadForm
    drift: HeadForm
    middle: HeadForm


def linear_heads(
    run: LinearRun, node: Node, position: int, *, transposed: bool = False
) -> LinearHeads | None:
    """Return the forms of an operand, None where it does not come straight from a linear.

    Args:
        transposed: the operand is [heads, d, T].
    """
    moves, source = views_behind(run, run.source(node, position))
    straight = run.straight.get(source.name)
    if straight is None:
        return None
    entry, x = run.tape.entries[straight.entry], run.tape.entries[straight.source]
    noise = entry.noise
    assert noise is not None
    place = places_after(entry, moves, transposed=transposed)
    chosen = _outputs(place, *entry.shape)
    if chosen is None:
        return None
    operand = run.operand(node, position)
    train, infer = straight.train[chosen], straight.infer[chosen]
    change = infer - train

    def gathered(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return torch.zeros(place.shape, dtype=torch.float64, device=place.device)
        return tensor.expand(entry.shape).flatten()[place.flatten()].reshape(place.shape)

    def middle_of(box: Tensor) -> Tensor:
        return box.mT if transposed else box

    (e_mid, e_rad), (d_mid, d_rad) = x.deviation.midpoint(), x.drift.midpoint()
    ea, da = (middle_of(box.midpoint()[0]) for box in (operand.deviation, operand.drift))
    off_e = e_mid @ train.mT + gathered(noise.deviation_centre) - ea
    off_d = d_mid @ infer.mT + e_mid @ change.mT + gathered(noise.drift_centre) - da
    own_e, own_d = gathered(noise.deviation), gathered(noise.drift)
    width = train.shape[-1]
    lost = gamma(width + 16) * (
        e_mid.abs() @ (train.abs() + change.abs()).mT + d_mid.abs() @ infer.abs().mT
    ) + 2.0**-50 * (ea.abs() + da.abs() + gathered(noise.drift_centre).abs())
    moving = bool(d_rad.any())
    changed = bool(change.any())
    drift = (*(((infer, d_rad),) if moving else ()), *(((change, e_rad),) if changed else ()))
    middle = (
        ((train + infer) / 2 if changed else train, e_rad),
        *(((infer / 2, d_rad),) if moving else ()),
    )
    return LinearHeads(
        HeadForm(((train, e_rad),), (own_e + off_e.abs() + lost) * SAFE),
        HeadForm(drift, (own_d + off_d.abs() + lost) * SAFE),
        HeadForm(middle, (own_e + own_d / 2 + (off_e + off_d / 2).abs() + 2 * lost) * SAFE),
    )


@dataclass(frozen=True, slots=True)
class SecondOrder:
    """Bounds of the terms of second order of a product of matrices.

    `elements` of its deviation and of its drift, element by element; `nonlinear` functional by
    functional.
    """

    elements: tuple[Tensor, Tensor]
    nonlinear: Callable[[Functional], Tensor] | None = None


def second_order(run: LinearRun, node: Node) -> SecondOrder | None:
    """Return what is known of the second order beyond products of radii."""
    if node.role == "context":
        values = linear_heads(run, node, 1)
        return None if values is None else _of_context(run, node, values)
    first, second = linear_heads(run, node, 0), linear_heads(run, node, 1, transposed=True)
    if first is None or second is None:
        return None
    return SecondOrder(
        (
            _product(first.deviation, second.deviation),
            (_product(first.middle, second.drift) + _product(first.drift, second.middle)) * SAFE,
        )
    )


def _product(a: HeadForm, b: HeadForm) -> Tensor:
    """Bound |u[h, t]·w[h, s]| [heads, T, T]."""
    carried_a, carried_b = a.carried, b.carried
    found = a.own @ carried_b.mT + carried_a @ b.own.mT + a.own @ b.own.mT
    for p, reach_p in a.maps:
        for q, reach_q in b.maps:
            inner = (p.mT @ q).abs()
            inner = inner + gamma(p.shape[1] + 4) * (p.abs().mT @ q.abs())
            found = found + reach_p @ inner @ reach_q.T
    return found * SAFE


def _of_context(run: LinearRun, node: Node, values: LinearHeads) -> SecondOrder:
    """Bound Σ_j e_p,j α·e_v,j and the terms of the drift for every functional α."""
    p = run.operand(node, 0)
    r, s = p.deviation.midpoint()[1], p.drift.midpoint()[1]
    t = (r + s / 2) * SAFE

    def along(part: Adjoint, pairs: tuple[tuple[Tensor, HeadForm], ...]) -> Tensor:
        (first, last), (start, stop), _ = part.window
        d = part.shape[-1]
        functional = part.on((*part.window[:-1], (0, d)))
        total = functional.new_zeros(functional.shape[0])
        for h in range(first, last):
            for size, form in pairs:
                bound = form.against(functional[:, h - first], h)  # [B, rows, keys]
                total = total + (bound * size[h, start:stop]).flatten(1).sum(-1)
        return total * SAFE

    def nonlinear(f: Functional) -> Tensor:
        found = f.parts[0].values.new_zeros(f.count)
        if f.deviation is not None:
            found = found + along(f.deviation, ((r, values.deviation),))
        if f.drift is not None:
            found = found + along(f.drift, ((t, values.drift), (s, values.middle)))
        return found * SAFE

    nothing = torch.tensor(torch.inf, dtype=torch.float64, device=r.device)
    return SecondOrder((nothing, nothing), nonlinear)
