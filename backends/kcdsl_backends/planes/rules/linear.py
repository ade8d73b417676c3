"""Linear maps and products of matrices (section 3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint, at
from kcdsl_backends.interval.box import gamma
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.rules.linear import activation_error
from kcdsl_backends.planes.functional import Functional, total
from kcdsl_backends.planes.heads import Second, second_of
from kcdsl_backends.planes.run import Operand, Part, Run, Straight
from kcdsl_backends.planes.tape import SAFE, Source

PASS = 16
"""Roundings of an adjoint beside those of the products: sums of adjoints, and the noise."""


def linear(run: Run, node: Node) -> None:
    """Append x @ weight.T + bias: Δy = W' Δx + (W' - W) x + (b' - b)."""
    x = _quantised(run, node)
    weight = run.kernels.linear(run.source(node, 1))
    bias = run.kernels.plain(run.source(node, 2)) if len(node.inputs) > 2 else None
    train, infer, same = weight.train, weight.infer, weight.alike
    change = torch.zeros_like(train) if same else infer - train
    reference = x.reference @ train.T
    known = x.reference @ change.T
    size, moved = x.reference.abs(), x.reference.abs() @ change.abs().T
    total_size = size @ train.abs().T
    if bias is not None:
        reference, known = reference + bias.train, known + (bias.infer - bias.train)
        total_size = total_size + bias.train.abs()
        moved = moved + (bias.infer - bias.train).abs()
    inputs, outputs = train.shape[1], train.shape[0]
    own, back = gamma(inputs + PASS), gamma(outputs + PASS)
    e, d = x.deviation.mag(), x.drift.mag()
    along = e @ train.abs().T
    across = d @ infer.abs().T + e @ change.abs().T
    deviation = Part(torch.zeros_like(reference), (own * total_size + back * along) * SAFE)
    drift = Part(known, (own * moved + back * across + 2.0**-1000) * SAFE)

    def through(part: Adjoint, matrix: Tensor) -> Adjoint:
        start, stop = part.window[-1]
        values = part.values @ matrix[start:stop]
        return Adjoint(values, (*part.window[:-1], (0, inputs)), (*part.shape[:-1], inputs))

    def pull(a: Functional) -> list[Source]:
        on_e = None if a.deviation is None else through(a.deviation, train)
        on_d = None if a.drift is None else through(a.drift, infer)
        if a.drift is not None and not same:
            on_e = total(on_e, through(a.drift, change))
        return [(x.index, Functional(on_e, on_d))]

    whole = run.append(node, reference, pull, deviation, drift)
    if whole and x.index == run.operand(node, 0).index and reference.dim() == 2:
        run.straight[node.name] = Straight(x.index, run.index[node.name], train, infer)


def _quantised(run: Run, node: Node) -> Operand:
    """Return the input of a linear, with an entry of its own where a kernel quantises it."""
    x, state = run.operand(node, 0), run.state(run.source(node, 0))
    weight = str(run.source(node, 1).attrs["key"])
    kernels = run.kernels.at(node, run.nodes)
    by_train = activation_error(state.train, kernels.train, node.name, weight)
    by_infer = activation_error(state.infer, kernels.infer, node.name, weight)
    if by_train is None and by_infer is None:
        return x
    zero = torch.zeros_like(x.reference)
    first = zero if by_train is None else by_train
    second = first if by_infer is None else first + by_infer
    index = run.inexact(f"{node.name}/input", x.index, first * SAFE, second * SAFE)
    entry = run.tape.entries[index]
    return Operand(index, entry.reference, entry.deviation, entry.drift)


def matmul(run: Run, node: Node) -> None:
    """Append a @ b: Δ(ab) = (a + Δa/2) Δb + Δa (b + Δb/2)."""
    bilinear(run, node, torch.matmul, _back_through_matmul, second_of(run, node))


Multiply = Callable[[Tensor, Tensor], Tensor]
Back = Callable[[Adjoint, Tensor, Tensor], tuple[Adjoint, Adjoint]]


def _back_through_matmul(part: Adjoint, p: Tensor, q: Tensor) -> tuple[Adjoint, Adjoint]:
    """Pull functionals of δp @ q and of p @ δq back to δp and δq."""
    *lead, rows, columns = part.window
    inner = (0, p.shape[-1])
    left = part.values @ q[at((*lead, inner, columns))].mT
    right = p[at((*lead, rows, inner))].mT @ part.values
    return (
        Adjoint(left, (*lead, rows, inner), tuple(p.shape)),
        Adjoint(right, (*lead, inner, columns), tuple(q.shape)),
    )


def bilinear(
    run: Run, node: Node, multiply: Multiply, back: Back, second: Second | None = None
) -> None:
    """Append a product of two operands, of elements or of matrices.

    With u = u_c + û for a = ã + e_a etc.: the deviation of ab from ãb̃ is e_a b̃ + ã e_b + e_a e_b;
    its drift M_a Δb + M_b Δa with M = h + Δ/2, taken around the middles of M and Δ.
    """
    a, b = run.operand(node, 0), run.operand(node, 1)
    if a.reference.shape[:-2] != b.reference.shape[:-2]:
        raise NoBound(node.name, f"{node.op} of shapes that broadcast")
    terms = a.reference.shape[-1]
    wide = gamma(max(terms, *a.reference.shape[-2:], *b.reference.shape[-1:]) + PASS)
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
    curved = None
    if second is not None:
        e_least, d_least = second.elements
        e_second, d_second = torch.minimum(e_second, e_least), torch.minimum(d_second, d_least)
        curved = second.curved
    if curved is None:
        deviation = Part(e_centre, (e_radius + e_second) * SAFE)
        drift = Part(d_centre, (d_radius + d_second) * SAFE)
    else:
        deviation, drift = Part(e_centre, e_radius, e_second), Part(d_centre, d_radius, d_second)

    def pull(f: Functional) -> list[Source]:
        on: list[list[Adjoint | None]] = [[None, None], [None, None]]

        def give(side: int, unknown: int, part: Adjoint) -> None:
            on[side][unknown] = total(on[side][unknown], part)

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

    run.append(node, reference, pull, deviation, drift, curved)


def product_of_elements(run: Run, node: Node) -> None:
    """Append a * b."""

    def back(part: Adjoint, p: Tensor, q: Tensor) -> tuple[Adjoint, Adjoint]:
        return part.times(q), part.times(p)

    a, b = run.operand(node, 0), run.operand(node, 1)
    if a.reference.shape != b.reference.shape:
        raise NoBound(node.name, "mul of shapes that broadcast")
    bilinear(run, node, torch.mul, back)
