"""Products of two computed matrices, and elementwise ones, in every domain (section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine import cases
from kcdsl_certs.recheck.affine.adjoint import Adjoint, shortened, summed
from kcdsl_certs.recheck.affine.cases import Cases
from kcdsl_certs.recheck.affine.form import Form, Operand, Walk, form_of, product_raised
from kcdsl_certs.recheck.affine.independent import of_sum
from kcdsl_certs.recheck.affine.result_rounding import Formed, round_result
from kcdsl_certs.recheck.affine.reverse_passes import tighten_by_floors
from kcdsl_certs.recheck.affine.tape import VJP, Averaged, NonlinearPart
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Floats, magnitude, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Mask,
    State,
    Value,
    gamma,
    middle,
    numeric,
    settle,
    target,
)
from kcdsl_certs.recheck.interval.sums import rounding_of_sums
from kcdsl_certs.recheck.linear_bounds.context import SPARE, Added, Context, Reading, halves
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch, joined
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.arithmetic import mul_affine, mul_interval
from kcdsl_certs.recheck.ops.linear import bilinear, one_row, row_images
from kcdsl_certs.recheck.ops.operation import Operation


def matmul_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return a @ b of two computed matrices."""
    node.attrs.exactly()
    if any(isinstance(value, Mask) for value in inputs):
        raise Rejected("rule/mask", "a product with a mask")
    a, b = numeric(inputs[0]), numeric(inputs[1])
    n = check_product(a.shape, b.shape)
    y_t, y_i = box.matmul(a.t, b.t), box.matmul(a.i, b.i)
    d = box.add(box.matmul(middle(a), b.d), box.matmul(a.d, middle(b)))
    errors = []
    for kernel, left, right, y in ((problem.train, a.t, b.t, y_t), (problem.infer, a.i, b.i, y_i)):
        size = box.product_up(box.mag(left), box.mag(right))
        k, j = product_roundings(kernel, node, n)
        factors = box.mag(left), box.mag(right)
        errors.append(rounding_of_sums(kernel, factors, (size, box.mag(y)), extra=k - n, before=j))
    inner = problem.train.accumulate, problem.infer.accumulate
    return settle(problem, node, (y_t, y_i, d), (errors[0], errors[1]), inner)


def product_roundings(kernel: KernelNumerics, node: Node, n: int) -> tuple[int, int]:
    """Return how often partial sums, and terms before, of a product of n terms may be rounded.

    A fused score product may scale both operands before. A fused context product that does not read
    a softmax directly is still allowed the rescaling of an online softmax.
    """
    if kernel.fused and node.role == "context":
        return n + 2 * -(-n // kernel.tile) + 4, 2
    return n, 6 if kernel.fused and node.role == "scores" else 2


def check_product(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the number of terms of a @ b. Raises Rejected "graph/shape"."""
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2]:
        raise Rejected("graph/shape", f"no matrix product of {list(a)} and {list(b)}")
    return a[-1]


def matmul_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return a @ b of two matrices; in the role "context", the probabilities times the values."""
    node.attrs.exactly()
    kernel = walk.kernel
    if any(not isinstance(value, Form) for value in inputs):
        raise Rejected("rule/mask", "a product with a mask")
    a, b = form_of(inputs[0]), form_of(inputs[1])
    n = check_product(a.shape, b.shape)
    context = (
        node.role == "context" and walk.named.get(node.inputs[0], node.inputs[0]) in walk.softmaxes
    )
    reference = a.reference @ b.reference
    left, right = np.abs(a.reference), np.abs(b.reference)
    own = product_raised(left, right) * gamma(n + 4, UNIT) + TINY
    rest, nonlinear, averaged = _remainder(walk, node, context)
    a, b = form_of(walk.forms[node.inputs[0]]), form_of(walk.forms[node.inputs[1]])
    by_a = (
        product_raised(a.error_bound, right) if a.place is not None else np.zeros(reference.shape)
    )
    by_b = product_raised(left, b.error_bound) if b.place is not None else np.zeros(reference.shape)
    carried = raised(by_a + by_b)
    result = raised(np.abs(reference) + own + carried + rest)
    size = product_raised(a.size, b.size)
    k, j = product_roundings(kernel, node, n)
    if context:
        tiles = -(-n // kernel.tile) if kernel.fused else 1
        k, j = n + 2 * tiles + 4, 2
    sizes = box.lifted(size), box.lifted(result)
    factors = (a.size, b.size)
    error = rounding_of_sums(kernel, factors, sizes, extra=k - n, before=j)
    split = of_sum(kernel, factors, sizes, error, extra=k - n, before=j)
    lead = math.prod(reference.shape[:-2])
    copies = lead // min(math.prod(a.shape[:-2]), math.prod(b.shape[:-2]))
    count = max(reference.shape[-2:]) * copies
    mapped = own + gamma(count + 8, UNIT) * carried
    radius = mapped + error
    operands: list[tuple[int, VJP]] = []
    if a.place is not None:
        operands.append((a.place, _left(b.reference, a.shape)))
    if b.place is not None:
        operands.append((b.place, _right(a.reference, b.shape)))
    formed = Formed(
        reference,
        carried,
        tuple(operands),
        raised(radius if nonlinear else radius + rest),
        bent=rest if nonlinear else None,
        nonlinear=nonlinear,
        averaged=averaged,
        cases=_in_cases(a, b, raised(own + error)) if context else None,
        split=split.with_sure(mapped if nonlinear else mapped + rest),
    )
    region = walk.tape.region
    if context:
        formed = replace(formed, gather=row_images.of_values(walk, a, b))
    elif node.role == "scores":
        formed = replace(formed, gather=row_images.of_keys(walk, a, b))
    tight = context and region is not None and bool(region.any())
    return round_result(walk, node, formed, target(kernel, node), kernel.accumulate, tight=tight)


def _in_cases(p: Form, v: Form, error: Floats) -> Cases | None:
    """Return p @ v ± error in each case of the probabilities, for probabilities known by steps."""
    choices = None if p.steps is None else p.steps.choices
    if choices is None:
        return None
    left = cases.choices_allowed(error.shape) - int(math.log2(len(choices.lo)))
    worth = np.abs(v.reference).sum(axis=-1)[..., None, :]
    return cases.product(cases.chosen(choices, worth, left), v.box, error)


def _remainder(
    walk: Walk, node: Node, context: bool
) -> tuple[Floats, tuple[NonlinearPart, ...], Averaged | None]:
    """Return an elementwise bound of e_a e_b, and bounds of its functionals where there are any:
    of all, and of those of one row with the own errors of the values."""
    a, b = form_of(walk.forms[node.inputs[0]]), form_of(walk.forms[node.inputs[1]])
    shape = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    if a.place is None or b.place is None:
        return np.zeros(shape), (), None
    if context:
        rest = product_raised(a.error_bound, b.error_bound)
        values = bilinear.values(walk, b, shape)
        if values is None:
            return rest, (), None
        second = bool(walk.chosen(node, node.inputs[1], "product").any())
        curves = (bilinear.context_remainder(a.error_bound, values, rest),) if second else ()
        return rest, curves, one_row.averages(walk, a, b, values, second=second)
    finer = bilinear.scores(walk, node, shape) if node.role == "scores" else None
    if finer is None or form_of(walk.forms[node.inputs[0]]).turned is not None:
        for name in node.inputs:
            tighten_by_floors(walk, node, name)
    a, b = form_of(walk.forms[node.inputs[0]]), form_of(walk.forms[node.inputs[1]])
    rest = product_raised(a.error_bound, b.error_bound)
    other = one_row.keys(walk, a, b) if node.role == "scores" else None
    return (rest if finer is None else np.minimum(rest, finer)), (), other


def _left(b: Floats, shape: tuple[int, ...]) -> VJP:
    """Return the pullback a ← α bᵀ, one matrix product per leading index."""

    def vjp(adjoint: Adjoint) -> Adjoint:
        *lead, _, columns = adjoint.window
        lead_b = _leading(b, lead)
        matrices = b[(*lead_b, slice(None), columns)].swapaxes(-1, -2)
        alpha = np.moveaxis(adjoint.values, 0, -3)  # [*lead, B, rows, columns]
        head = alpha.shape[:-3]
        flat = alpha.reshape(*head, -1, alpha.shape[-1]) @ matrices
        values = np.moveaxis(flat.reshape(*head, *alpha.shape[-3:-1], -1), -3, 0)
        found = Adjoint(np.ascontiguousarray(values), (*adjoint.start[:-1], 0))
        return summed(found, shape)

    return vjp


def _right(a: Floats, shape: tuple[int, ...]) -> VJP:
    """Return the pullback b ← aᵀ α, without unread rows of b at either end (masked columns of a),
    and without such columns of α."""

    def vjp(adjoint: Adjoint) -> Adjoint:
        adjoint = shortened(adjoint, len(adjoint.start) - 1)
        *lead, rows, _ = adjoint.window
        lead_a = _leading(a, lead)
        matrices = a[(*lead_a, rows, slice(None))].swapaxes(-1, -2)
        used = np.flatnonzero(matrices.any(axis=(*range(matrices.ndim - 2), -1)))
        first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 1)
        matrices = matrices[..., first:last, :]
        alpha = np.moveaxis(adjoint.values, 0, -2)  # [*lead, rows, B, columns]
        head, (batch, width) = alpha.shape[:-3], alpha.shape[-2:]
        flat = matrices @ alpha.reshape(*head, alpha.shape[-3], -1)
        values = np.moveaxis(flat.reshape(*head, -1, batch, width), -2, 0)
        start = (*adjoint.start[:-2], first, adjoint.start[-1])
        return summed(Adjoint(np.ascontiguousarray(values), start), shape)

    return vjp


def _leading(array: Floats, lead: list[slice]) -> tuple[slice, ...]:
    """Return the leading slices of a factor that may be broadcast."""
    own = array.shape[:-2]
    chosen = lead[len(lead) - len(own) :]
    return tuple(slice(None) if n == 1 else s for n, s in zip(own, chosen, strict=True))


Multiply = Callable[[Floats, Floats], Floats]
Back = Callable[[Adjoint, Floats, Floats], tuple[Adjoint, Adjoint]]


def mul_bounds(context: Context, node: Node) -> None:
    """Write a * b."""

    def back(adjoint: Adjoint, a: Floats, b: Floats) -> tuple[Adjoint, Adjoint]:
        return adjoint.times(b), adjoint.times(a)

    a, b = context.operand(node, 0), context.operand(node, 1)
    if a.shape != b.shape:
        raise Rejected("bound/not-finite", "planes have no products that broadcast")
    _product(context, node, (a, b), np.multiply, back, 1, None)


def matmul_bounds(context: Context, node: Node) -> None:
    """Write a @ b; operands made of heads of linears have smaller second-order bounds."""
    a, b = context.operand(node, 0), context.operand(node, 1)
    if a.shape[:-2] != b.shape[:-2]:
        raise Rejected("bound/not-finite", "planes have no products that broadcast")
    terms = max(*a.shape[-2:], b.shape[-1])
    second = bilinear.second_order_context(context, node) if node.role == "context" else None
    if node.role != "context":
        second = bilinear.second_order_scores(context, node)
    _product(context, node, (a, b), np.matmul, _matmul_back, terms, second)


def _matmul_back(adjoint: Adjoint, a: Floats, b: Floats) -> tuple[Adjoint, Adjoint]:
    """Return the functionals of δa @ b and of a @ δb."""
    *lead, rows, columns = adjoint.window
    on_a = adjoint.values @ np.swapaxes(b[(*lead, slice(None), columns)], -1, -2)
    on_b = np.swapaxes(a[(*lead, rows)], -1, -2) @ adjoint.values
    head, (row, column) = adjoint.start[:-2], adjoint.start[-2:]
    return Adjoint(on_a, (*head, row, 0)), Adjoint(on_b, (*head, 0, column))


def _product(
    context: Context,
    node: Node,
    operands: tuple[Reading, Reading],
    multiply: Multiply,
    back: Back,
    terms: int,
    second: bilinear.Second | None,
) -> None:
    a, b = operands
    (ea, ra), (eb, rb), (da, sa), (db, sb) = map(halves, (a.e, b.e, a.d, b.d))
    fa, fb = a.reference + ea, b.reference + eb  # the middle of the training values
    ma, mb = fa + da / 2, fb + db / 2  # the middle of M = h + D/2
    ta, tb = ra + sa / 2, rb + sb / 2  # and its radius
    reference = multiply(a.reference, b.reference)

    def sizes(*pairs: tuple[Floats, Floats]) -> Floats:
        found = np.zeros(reference.shape)
        for left, right in pairs:
            found = found + multiply(np.abs(left), np.abs(right))
        return raised(found)

    size_ea, size_eb = magnitude(a.e), magnitude(b.e)
    size_da, size_db = magnitude(a.d), magnitude(b.d)
    lost = gamma(terms + SPARE, UNIT)
    own_e = lost * sizes(
        (a.reference, b.reference), (size_ea, fb), (fa, size_eb), (size_ea, size_eb)
    )
    own_d = lost * sizes(
        *((fa, size_db), (size_da, fb), (size_da, size_db), (size_ea, size_db), (size_da, size_eb))
    )
    second_e, second_d = sizes((ra, rb)), sizes((ta, sb), (sa, tb))
    if second is not None and second.elements is not None:
        second_e = np.minimum(second_e, second.elements[0])
        second_d = np.minimum(second_d, second.elements[1])
    centre_e = -multiply(ea, eb)
    centre_d = -multiply(ea + da / 2, db) - multiply(da, eb + db / 2)
    nonlinear = None if second is None else second.nonlinear
    if nonlinear is None:
        e = Added(centre_e, raised(own_e + second_e) + TINY)
        d = Added(centre_d, raised(own_d + second_d) + TINY)
    else:
        e = Added(centre_e, raised(own_e) + TINY, second_e)
        d = Added(centre_d, raised(own_d) + TINY, second_d)
    drifting = bool(da.any() or db.any())

    def vjp(f: FunctionalBatch) -> tuple[tuple[int, FunctionalBatch], ...]:
        on_a: list[Adjoint | None] = [None, None]
        on_b: list[Adjoint | None] = [None, None]
        if f.e is not None:
            on_a[0], on_b[0] = back(f.e, fa, fb)
        if f.d is not None:
            on_a[1], on_b[1] = back(f.d, ma + da / 2, mb + db / 2)
            if drifting:
                one, two = back(f.d, da, db)
                on_a[0], on_b[0] = joined(on_a[0], one), joined(on_b[0], two)
        return ((a.place, FunctionalBatch(*on_a)), (b.place, FunctionalBatch(*on_b)))

    context.write(node, reference, vjp, e, d, nonlinear)


OPERATIONS = {
    "mul": Operation(2, 2, mul_interval, mul_affine, mul_bounds, (0, 1)),
    "matmul": Operation(2, 2, matmul_interval, matmul_affine, matmul_bounds, (0, 1)),
}
