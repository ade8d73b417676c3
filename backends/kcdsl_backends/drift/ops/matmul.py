"""Products of two results, in every domain (section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Adjoint, at
from kcdsl_backends.drift.affine.error_bounds import tighten_error
from kcdsl_backends.drift.affine.independent import of_sums
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.result_rounding import Result, round_result
from kcdsl_backends.drift.affine.tape import PASS, Adjoints
from kcdsl_backends.drift.boxes import SAFE, Box, NoBound, gamma, magnitude_product, matmul
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.state import State, Step
from kcdsl_backends.drift.boxes.sums import Sums
from kcdsl_backends.drift.linear import LinearPart, LinearRun
from kcdsl_backends.drift.linear.tape import LINEAR_PASS, Functional, Source, added_adjoints
from kcdsl_backends.drift.ops.bilinear import (
    Heads,
    _outputs,
    bilinear_remainder,
    heads,
    key_maps,
    places_after,
    turned_heads,
    views_behind,
)
from kcdsl_backends.drift.ops.linear import _through_weights
from kcdsl_backends.drift.ops.one_row import row_of_keys
from kcdsl_backends.drift.ops.operation import Operation
from kcdsl_backends.drift.ops.row_images import images_of_keys


def interval_matmul(step: Step) -> State:
    """Bound a @ b where both operands vary: Δ(ab) = (a + Δa/2) Δb + Δa (b + Δb/2)."""
    a, b = step.operand(0), step.operand(1)
    drift = matmul(a.middle, b.drift) + matmul(a.drift, b.middle)
    train, infer = matmul(a.train, b.train), matmul(a.infer, b.infer)
    errors = (
        _matmul_error(step, a.train, b.train, train, step.kernels.train),
        _matmul_error(step, a.infer, b.infer, infer, step.kernels.infer),
    )
    return step.finish((train, infer), drift, errors, accumulates=True)


def _matmul_error(step: Step, a: Box, b: Box, result: Box, kernel: Rounding) -> Tensor:
    total = magnitude_product(a.mag(), b.mag())
    before = kernel.numerics.attention.term_roundings if step.node.role == "scores" else 2
    return Sums(a.mag(), b.mag(), total, result.mag(), kernel, before=before).error()


def affine_matmul(run: KernelRun, node: Node) -> None:
    """Append a @ b of two computed matrices."""
    scores = node.role == "scores"
    before = run.rounding.numerics.attention.term_roundings if scores else 2
    query, key = (
        (heads(run, node, 0), heads(run, node, 1, transposed=True)) if scores else (None, None)
    )
    by_norms = _rotated_remainder(run, node) if scores and (query is None or key is None) else None
    if (query is None or key is None) and not _far_below(run, node, by_norms):
        tighten_product(run, node, torch.matmul)
    a, b = run.operand(node, 0), run.operand(node, 1)
    second = a.error_bound @ b.error_bound * SAFE
    if query is not None and key is not None:
        by_norms = _sharpened(run, node, query, key)
    if by_norms is not None:
        second = torch.minimum(second, by_norms)
    result = affine_product(run, node, a, b, a.reference.shape[-1], before)
    internal, parts = (result.internal + second) * SAFE, result.roundings
    parts = None if parts is None else parts.with_sure(second)
    one_row = row_of_keys(run, a, key_maps(run, node) if scores else None, b.reference)
    formed = Result(
        result.reference,
        result.vjp,
        result.linear,
        internal,
        roundings=parts,
        one_row=one_row,
        gathered=images_of_keys(run, node, a, b.reference) if scores else None,
    )
    round_result(run, node, formed, accumulates=True)


def tighten_product(
    run: KernelRun,
    node: Node,
    times: Callable[[Tensor, Tensor], Tensor],
    floors: Sequence[int] | None = None,
    *,
    by_row: bool = False,
) -> None:
    """Tighten the error bounds of both factors of a product while their product matters, in rows
    where it does if it is elementwise (`by_row`), by passes that stop at `floors`; by default
    everywhere where they may."""
    a, b = run.operand(node, 0), run.operand(node, 1)
    if a.index is None or b.index is None:
        return
    worth = run.small(node, times(a.reference, b.reference).abs().sum(-1, keepdim=True))
    for index, other in ((a.index, b.index), (b.index, a.index)):

        def matters(error_bound: Tensor, index: int = index, other: int = other) -> Tensor:
            rest = run.tape.entries[other].error_bound
            pair = (error_bound, rest) if index == a.index else (rest, error_bound)
            sums = times(*pair).sum(-1, keepdim=True)
            large = sums > worth if by_row else sums.sum() > worth.sum()
            return (error_bound > 0).any(-1, keepdim=True) & large

        tighten_error(run, node, index, matters, floors)


def affine_product(
    run: KernelRun, node: Node, a: Operand, b: Operand, steps: int, before: int
) -> Result:
    """Return a @ b without its remainder of second order."""
    if a.reference.shape[:-2] != b.reference.shape[:-2]:
        raise NoBound(node.name, f"{node.op} of shapes that broadcast")
    p, q, terms = a.reference, b.reference, a.reference.shape[-1]
    reference = p @ q
    linear = (a.error_bound @ q.abs() + p.abs() @ b.error_bound) * SAFE
    total = a.size @ b.size * SAFE
    value = (reference.abs() + a.error_bound @ b.size + p.abs() @ b.error_bound) * SAFE
    sums = Sums(a.size, b.size, total, value, run.rounding, steps - terms, before)
    error = sums.error()
    parts = of_sums(sums, error)
    own = gamma(terms + 4) * total + gamma(max(terms, *p.shape[-2:], q.shape[-1]) + PASS) * linear

    def vjp(adjoint: Adjoint) -> Adjoints:
        adjoint = adjoint.narrowed(-1)  # columns that are masked have no adjoint
        *lead, rows, columns = adjoint.window
        inner = (0, terms)
        found = []
        if a.index is not None:
            back = adjoint.values @ q[at((*lead, inner, columns))].mT
            found.append((a.index, Adjoint(back, (*lead, rows, inner), tuple(p.shape))))
        if b.index is not None:
            inner = _used(p[at((*lead, rows, inner))])
            part = p[at((*lead, rows, inner))].mT
            single = rows[1] - rows[0] == 1  # then every product has one term
            back = part * adjoint.values if single else part @ adjoint.values
            found.append((b.index, Adjoint(back, (*lead, inner, columns), tuple(q.shape))))
        return found

    internal = (error + own) * SAFE
    return Result(reference, vjp, linear, internal, roundings=parts.with_sure(own))


def _used(p: Tensor) -> tuple[int, int]:
    """Return the range of nonzero columns of p [..., columns]; one column if all are zero."""
    used = p.flatten(0, -2).any(0).nonzero()
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 1)


def _sharpened(run: KernelRun, node: Node, query: Heads, key: Heads) -> Tensor:
    """Bound |e_q·e_k|, after tightening the error bounds of both sources as far as they matter."""
    scores = run.operand(node, 0).reference @ run.operand(node, 1).reference
    worth = run.negligible * scores.abs().sum()

    def matters(error_bound: Tensor) -> Tensor:
        bound = _through_weights(query.again(run), key.again(run)).sum()
        return (error_bound > 0).any(-1, keepdim=True) & ~(bound <= worth)

    for source in dict.fromkeys((query.source, key.source)):
        if source is not None:
            tighten_error(run, node, source, matters)
    return _through_weights(query.again(run), key.again(run))


def _rotated_remainder(run: KernelRun, node: Node) -> Tensor | None:
    """Bound |e_q·e_k| of rotated heads of linears by norms, if it matters; else None."""
    a, b = run.operand(node, 0), run.operand(node, 1)
    worth = run.negligible * (a.reference @ b.reference).abs().sum()
    if not bool((a.error_bound @ b.error_bound).sum() > worth):
        return None
    query, key = turned_heads(run, node, 0), turned_heads(run, node, 1, transposed=True)
    if query is None or key is None:
        return None

    def bound() -> Tensor:
        return bilinear_remainder(query.again(run), key.again(run))

    def matters(error_bound: Tensor) -> Tensor:
        return (error_bound > 0).any(-1, keepdim=True) & ~(bound().sum() <= worth)

    for source in dict.fromkeys((query.below.source, key.below.source)):
        if source is not None and run.tape.entries[source].rows is None:
            tighten_error(run, node, source, matters)
    return bound()


_FAR_BELOW = 4.0
"""Error bounds of a product's factors that passes make tight are hardly less than half of those
from operand to operand."""


def _far_below(run: KernelRun, node: Node, second: Tensor | None) -> bool:
    """Return whether a remainder's bound is far below the product of the error bounds."""
    if second is None:
        return False
    a, b = run.operand(node, 0), run.operand(node, 1)
    return bool(_FAR_BELOW * second.sum() <= (a.error_bound @ b.error_bound).sum())


def linear_matmul(run: LinearRun, node: Node) -> None:
    """Append a @ b: Δ(ab) = (a + Δa/2) Δb + Δa (b + Δb/2)."""
    linear_product(run, node, torch.matmul, _back_through_matmul, second_order(run, node))


Multiply = Callable[[Tensor, Tensor], Tensor]
Back = Callable[[Adjoint, Tensor, Tensor], tuple[Adjoint, Adjoint]]


def _back_through_matmul(part: Adjoint, p: Tensor, q: Tensor) -> tuple[Adjoint, Adjoint]:
    """Return functionals of δp @ q and of p @ δq as functionals of δp and δq."""
    *lead, rows, columns = part.window
    inner = (0, p.shape[-1])
    left = part.values @ q[at((*lead, inner, columns))].mT
    right = p[at((*lead, rows, inner))].mT @ part.values
    return (
        Adjoint(left, (*lead, rows, inner), tuple(p.shape)),
        Adjoint(right, (*lead, inner, columns), tuple(q.shape)),
    )


def linear_product(
    run: LinearRun, node: Node, multiply: Multiply, back: Back, second: SecondOrder | None = None
) -> None:
    """Append a product of two operands, of elements or of matrices.

    With u = u_c + û for a = ã + e_a etc.: the deviation of ab from ãb̃ is e_a b̃ + ã e_b + e_a e_b;
    its drift M_a Δb + M_b Δa with M = h + Δ/2, taken around the middles of M and Δ.
    """
    a, b = run.operand(node, 0), run.operand(node, 1)
    if a.reference.shape[:-2] != b.reference.shape[:-2]:
        raise NoBound(node.name, f"{node.op} of shapes that broadcast")
    terms = a.reference.shape[-1]
    wide = gamma(max(terms, *a.reference.shape[-2:], *b.reference.shape[-1:]) + LINEAR_PASS)
    pa, pb = a.reference, b.reference
    (ea, ra), (eb, rb) = a.deviation.midpoint(), b.deviation.midpoint()
    (da, sa), (db, sb) = a.drift.midpoint(), b.drift.midpoint()
    ta, tb = ra + sa / 2, rb + sb / 2  # radii of M = h + Δ/2
    ma, mb = pa + ea + da / 2, pb + eb + db / 2
    reference = multiply(pa, pb)

    def sizes(*pairs: tuple[Tensor, Tensor]) -> Tensor:
        found = torch.zeros_like(reference)
        for left, right in pairs:
            found = found + multiply(left.abs(), right.abs())
        return found * SAFE

    mag_ea, mag_eb = a.deviation.mag(), b.deviation.mag()
    mag_da, mag_db = a.drift.mag(), b.drift.mag()
    # deviation: e_a b̃ + ã e_b + e_a e_b around the middles of e_a, e_b
    fa, fb = pa + ea, pb + eb
    e_second = sizes((ra, rb))
    e_centre = -multiply(ea, eb)
    e_radius = wide * sizes((pa, pb), (mag_ea, fb), (fa, mag_eb), (ea, eb))
    # drift: M_a Δb = m_a Δb + (M_a - m_a) d_b + (M_a - m_a)(Δb - d_b)
    d_second = sizes((ta, sb), (sa, tb))
    d_centre = -multiply(ea + da / 2, db) - multiply(da, eb + db / 2)
    d_radius = wide * sizes(
        (fa, mag_db), (mag_da, fb), (mag_da, mag_db), (mag_ea, mag_db), (mag_da, mag_eb)
    )
    d_radius = (d_radius + 2.0**-1000) * SAFE
    nonlinear = None
    if second is not None:
        e_least, d_least = second.elements
        e_second, d_second = torch.minimum(e_second, e_least), torch.minimum(d_second, d_least)
        nonlinear = second.nonlinear
    if nonlinear is None:
        deviation = LinearPart(e_centre, (e_radius + e_second) * SAFE)
        drift = LinearPart(d_centre, (d_radius + d_second) * SAFE)
    else:
        deviation, drift = (
            LinearPart(e_centre, e_radius, e_second),
            LinearPart(d_centre, d_radius, d_second),
        )

    def vjp(f: Functional) -> list[Source]:
        on: list[list[Adjoint | None]] = [[None, None], [None, None]]

        def give(side: int, unknown: int, part: Adjoint) -> None:
            on[side][unknown] = added_adjoints(on[side][unknown], part)

        if f.deviation is not None:
            left, right = back(f.deviation, fa, fb)
            give(0, 0, left)
            give(1, 0, right)
        if f.drift is not None:
            # M = h + Δ/2 moves with e by one and with Δ by one half
            left, right = back(f.drift, da, db)
            if bool(db.any()):
                give(0, 0, left)
            if bool(da.any()):
                give(1, 0, right)
            left, right = back(f.drift, ma + da / 2, mb + db / 2)
            give(0, 1, left)
            give(1, 1, right)
        found: list[Source] = []
        for operand, (deviation, drift) in zip((a, b), on, strict=True):
            if deviation is not None or drift is not None:
                found.append((operand.index, Functional(deviation, drift)))
        return found

    run.append(node, reference, vjp, deviation, drift, nonlinear)


def linear_mul(run: LinearRun, node: Node) -> None:
    """Append a * b."""

    def back(part: Adjoint, p: Tensor, q: Tensor) -> tuple[Adjoint, Adjoint]:
        return part.times(q), part.times(p)

    a, b = run.operand(node, 0), run.operand(node, 1)
    if a.reference.shape != b.reference.shape:
        raise NoBound(node.name, "mul of shapes that broadcast")
    linear_product(run, node, torch.mul, back)


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
    """Return the forms of an operand, None if it is no linear image.

    Args:
        transposed: the operand is [heads, d, T].
    """
    moves, source = views_behind(run, run.source(node, position))
    origin = run.origins.get(source.name)
    if origin is None:
        return None
    entry, x = run.tape.entries[origin.entry], run.tape.entries[origin.source]
    noise = entry.noise
    assert noise is not None
    place = places_after(entry, moves, transposed=transposed)
    chosen = _outputs(place, *entry.shape)
    if chosen is None:
        return None
    operand = run.operand(node, position)
    train, infer = origin.train[chosen], origin.infer[chosen]
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
    """Return bounds of the second-order terms that are smaller than products of radii."""
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


OPERATIONS = {"matmul": Operation(interval_matmul, affine_matmul, linear_matmul, (0, 1))}
