"""Elementwise arithmetic: add, sub, mul, scale, divide, shift (section 4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Adjoint, summed
from kcdsl_backends.drift.affine.error_bounds import norms
from kcdsl_backends.drift.affine.independent import Roundings
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.result_rounding import Result, round_result
from kcdsl_backends.drift.affine.row_ellipsoids import squares
from kcdsl_backends.drift.affine.tape import INPUT, PASS, Adjoints, Remainder, RowBounds
from kcdsl_backends.drift.boxes import EPS, SAFE, Box, NoBound, gamma, refuse_wide, up
from kcdsl_backends.drift.boxes.rounding import Rounding, added, times
from kcdsl_backends.drift.boxes.state import State, Step
from kcdsl_backends.drift.linear import LinearOperand, LinearPart, LinearRule, LinearRun
from kcdsl_backends.drift.linear.tape import LINEAR_PASS, Functional, Source
from kcdsl_backends.drift.ops.activations import _OWN, STEEP
from kcdsl_backends.drift.ops.matmul import linear_mul, tighten_product
from kcdsl_backends.drift.ops.operation import Operation


def _relative(kernel: Rounding, exact: Box) -> Tensor:
    return up(kernel.u_function * exact.mag(), 2)


def _faintly(kernel: Rounding, exact: Box) -> Tensor:
    """Return the error of a product: a rounding and an underflow."""
    return up(_relative(kernel, exact) + kernel.eta_function)


def interval_add(step: Step) -> State:
    """Return the boxes of a + b."""
    return _interval_sum(step, step.operand(1))


def interval_sub(step: Step) -> State:
    """Return the boxes of a - b."""
    return _interval_sum(step, -step.operand(1))


def _interval_sum(step: Step, b: State) -> State:
    step.promoted()
    a = step.operand(0)
    exact = a.train + b.train, a.infer + b.infer
    apart = added(a.apart[0], b.apart[0]), added(a.apart[1], b.apart[1])
    return step.finish(exact, a.drift + b.drift, step.each(_relative, exact), apart=apart)


def interval_mul(step: Step) -> State:
    """Bound a * b: Δ(ab) = (a + Δa/2) Δb + Δa (b + Δb/2)."""
    step.promoted()
    a, b = step.operand(0), step.operand(1)
    exact = a.train * b.train, a.infer * b.infer
    drift = a.middle * b.drift + a.drift * b.middle
    apart = (
        added(times(a.apart[0], b.train.mag()), times(b.apart[0], a.train.mag())),
        added(times(a.apart[1], b.infer.mag()), times(b.apart[1], a.infer.mag())),
    )
    return step.finish(exact, drift, step.each(_faintly, exact), apart=apart)


def constant_of(node: Node, name: str) -> float:
    """Return a scalar of an operation: normal in float32, as its reciprocal is, or 0 as a term or
    factor.

    Raises:
        NoBound: for any other number, whose rounding is not a relative error of u.
    """
    constant = float(node.attrs[name])
    if constant == 0 and name != "divisor":
        return constant
    if not 2.0**-126 <= abs(constant) <= 2.0**126:
        raise NoBound(node.name, f"the constant {constant!r} leaves the range of float32")
    return constant


def scalar_of(node: Node, name: str, kernel: Rounding) -> tuple[float, float]:
    """Return the least and the greatest value that a kernel may use for a scalar (Rule 2.12).

    The factor of attention scores belongs to the kernel, which does not round it to their format.

    Raises:
        NoBound: as `constant_of` and `Rounding.scalar` do; or for a divisor that may be 0.
    """
    constant = constant_of(node, name)
    if node.role == "scores" and name != "offset":
        return constant, constant
    low, high = kernel.scalar(constant, kernel.format_for(node.role, node.op), node.name)
    if name == "divisor" and low * high <= 0:
        raise NoBound(node.name, f"the divisor {constant!r} may be rounded to 0")
    return low, high


def _off(
    step: Step, name: str, away: Callable[[Box, float], Box]
) -> tuple[Box, Box] | tuple[None, None]:
    """Return the errors of both kernels by rounding the scalar of an operation.

    `away` returns the error of using another number in its place.
    """
    x, constant, found = step.operand(0), constant_of(step.node, name), []
    for kernel, own in ((step.kernels.train, x.train), (step.kernels.infer, x.infer)):
        ends = scalar_of(step.node, name, kernel)
        found.append([Box.point(torch.zeros_like(own.lo))] * (constant in ends))
        found[-1] += [away(own, end) for end in ends if end != constant]
    if all(len(parts) == 1 for parts in found):
        return None, None
    train, infer = (reduce(Box.hull, parts) for parts in found)
    return train, infer


def _by_constant(step: Step, name: str, apply: Callable[[Box], Box]) -> State:
    """Bound x·c or x/c: c may be rounded, and a quotient may be a product with 1/c: 3 roundings."""
    x, constant = step.operand(0), constant_of(step.node, name)

    def away(box: Box, end: float) -> Box:
        """Return x·(end - c), or x·(1/end - 1/c)."""
        change = Box.point(torch.tensor(end, dtype=torch.float64)) - Box.point(
            torch.tensor(constant, dtype=torch.float64)
        )
        if name == "factor":
            return box * change
        over = torch.tensor(-end * constant, dtype=torch.float64)
        part = change * Box.point(1 / over).reaching((1 / over).abs() * 2.0**-50)
        return box * part

    moved = _off(step, name, away)

    def steepest(kernel: Rounding) -> float:
        ends = (constant, *scalar_of(step.node, name, kernel))
        return max(abs(c) if name == "factor" else 1 / abs(c) for c in ends) * (1 + 2.0**-50)

    def error(kernel: Rounding, size: Box) -> Tensor:
        return up(up(3 * kernel.u_function * size.mag(), 2) + kernel.eta_function)

    exact = sizes = apply(x.train), apply(x.infer)
    if moved[0] is not None:
        sizes = exact[0] + moved[0], exact[1] + moved[1]
    kernels = step.kernels.train, step.kernels.infer
    one, two = (times(own, steepest(k)) for own, k in zip(x.apart, kernels, strict=True))
    errors = step.each(error, sizes)
    return step.finish(exact, apply(x.drift), errors, moved=moved, apart=(one, two))


def interval_scale(step: Step) -> State:
    """Return the boxes of a constant multiple of the operand."""
    factor = constant_of(step.node, "factor")
    return _by_constant(step, "factor", lambda box: box.scaled(factor))


def interval_divide(step: Step) -> State:
    """Return the boxes of the operand divided by a constant."""
    divisor = constant_of(step.node, "divisor")

    def apply(box: Box) -> Box:
        ends = Box(box.lo / divisor, box.hi / divisor)
        ordered = ends if divisor > 0 else Box(ends.hi, ends.lo)
        return ordered.widen(torch.zeros_like(ordered.lo))

    return _by_constant(step, "divisor", apply)


def interval_shift(step: Step) -> State:
    """Return the boxes of the operand plus a constant."""
    x, offset = step.operand(0), constant_of(step.node, "offset")
    constant = Box.point(torch.full_like(x.train.lo, offset))

    def away(box: Box, end: float) -> Box:
        return Box.point(torch.full_like(box.lo, end)) - constant

    moved = _off(step, "offset", away)
    exact = sizes = x.train + constant, x.infer + constant
    if moved[0] is not None:
        sizes = exact[0] + moved[0], exact[1] + moved[1]

    def error(kernel: Rounding, size: Box) -> Tensor:
        u = kernel.u_function  # the sum rounds the error of the offset too
        return up(_relative(kernel, size) + u * (1 + u) * abs(offset), 4)

    return step.finish(exact, x.drift, step.each(error, sizes), moved=moved, apart=x.apart)


def affine_add_or_sub(sign: float) -> Callable[[KernelRun, Node], None]:
    """Return the rule of a + b (sign 1) or a - b (sign -1)."""

    def rule(run: KernelRun, node: Node) -> None:
        refuse_wide(run.nodes, node, run.rounding.numerics)
        a, b = run.operand(node, 0), run.operand(node, 1)
        reference = a.reference + sign * b.reference
        error_bound = (a.error_bound + b.error_bound) * SAFE
        error = run.rounding.u_function * (reference.abs() + error_bound)
        own = _OWN * reference.abs() + gamma(PASS) * error_bound

        def vjp(adjoint: Adjoint) -> Adjoints:
            found = [] if a.index is None else [(a.index, adjoint)]
            return found if b.index is None else [*found, (b.index, adjoint.times(sign))]

        _same_shape(node, a, b)
        parts, internal = Roundings.one(own, error * SAFE), (error + own) * SAFE
        again = added(run.again(node, 0), run.again(node, 1))
        if again is not None:
            internal = internal + run.rounding.u_function * again
        result = Result(reference, vjp, error_bound, internal, roundings=parts, again=again)
        round_result(run, node, result)

    return rule


def _same_shape(node: Node, *operands: Operand) -> None:
    """Refuse broadcast operands that have errors; known numbers may be broadcast."""
    if any(o.index is not None and o.reference.shape != node.shape for o in operands):
        raise NoBound(node.name, f"{node.op} of shapes that broadcast")


def affine_mul(run: KernelRun, node: Node) -> None:
    """Append a * b."""
    refuse_wide(run.nodes, node, run.rounding.numerics)
    _same_shape(node, run.operand(node, 0), run.operand(node, 1))
    tighten_product(run, node, torch.mul, run.tape.floors[:1], by_row=True)
    sums = _sums(run, node)
    if sums is None or bool(run.tape.radius.any()):
        tighten_product(run, node, torch.mul, run.tape.floors[1:], by_row=True)
    a, b = run.operand(node, 0), run.operand(node, 1)
    reference = a.reference * b.reference
    linear = (a.error_bound * b.reference.abs() + a.reference.abs() * b.error_bound) * SAFE
    size = (a.size * b.size).expand(reference.shape) * SAFE
    rounded, faint = run.rounding.u_function * size, run.rounding.eta_function
    second = (a.error_bound * b.error_bound).expand(reference.shape) * SAFE
    own = _OWN * reference.abs() + gamma(PASS) * linear

    def vjp(adjoint: Adjoint) -> Adjoints:
        found = [] if a.index is None else [(a.index, adjoint.times(b.reference))]
        return found if b.index is None else [*found, (b.index, adjoint.times(a.reference))]

    rest = (own + faint if sums is not None else second + own + faint) * SAFE
    parts = Roundings.one(rest, rounded * SAFE)
    first, other = run.again(node, 0), run.again(node, 1)
    again = added(times(first, b.size), times(other, a.size))
    if first is not None and other is not None:
        again = added(again, times(first, other))
    internal = (rounded + rest) * SAFE
    if again is not None:
        internal = internal + run.rounding.u_function * again
    result = Result(reference, vjp, linear, internal, roundings=parts, again=again)
    if sums is not None:
        remainder = Remainder(-second, second, *sums).nonlinear()
        result = replace(result, nonlinear=remainder, extra=second)
    round_result(run, node, result)


def _sums(run: KernelRun, node: Node) -> tuple[Tensor, RowBounds | None] | None:
    """Bound Σ|e_a e_b| <= |e_a|₂ |e_b|₂ in every row [..., 1] of a product, and weighted sums, by
    passes that stop at ellipsoids, in rows where error bounds do not show that it is negligible;
    None if there are no such rows, or no ellipsoids."""
    a, b, floor = run.operand(node, 0), run.operand(node, 1), run.tape.near
    if a.index is None or b.index is None:
        return None
    sums = (a.error_bound * b.error_bound).sum(-1, keepdim=True) * SAFE
    worth = run.small(node, (a.reference * b.reference).abs().sum(-1, keepdim=True))
    needed, lengths = ~(sums <= worth), []
    linear = (a.error_bound * b.reference.abs() + a.reference.abs() * b.error_bound).sum(
        -1, keepdim=True
    )
    steep = needed & bool((sums > STEEP * linear).any())
    one, two = (squares(run, node, index, steep) for index in (a.index, b.index))
    if one is not None and two is not None:
        every = torch.ones_like(a.error_bound)
        sums = torch.minimum(sums, one.whole(every) * two.whole(every) * SAFE)
        return sums, lambda row, weights: one.root(row, weights) * two.root(row, weights) * SAFE
    unit = torch.eye(a.reference.shape[-1], dtype=torch.float64, device=sums.device)
    if floor == INPUT:
        return None
    for index in (a.index, b.index):
        if not run.passing(node, index, "norm", needed, floor):
            return None
        lengths.append(norms(run.tape, index, unit, needed, floor))
    return torch.minimum(sums, lengths[0] * lengths[1] * SAFE), None


def affine_scale(run: KernelRun, node: Node) -> None:
    """Append x·c or x/c: c may be rounded, and a quotient may be a product with 1/c."""
    name = "factor" if node.op == "scale" else "divisor"
    low, high = scalar_of(node, name, run.rounding)
    if node.op == "divide":
        low, high = 1 / high, 1 / low
    factor, off = low / 2 + high / 2, (high - low) / 2
    index, x = run.entry(node, 0)
    reference, linear = x.reference * factor, x.error_bound * abs(factor) * SAFE
    moved = off * x.size * SAFE
    size = (reference.abs() + linear + moved) * SAFE
    error = 3 * run.rounding.u_function * size + run.rounding.eta_function + moved
    own = gamma(PASS + 4) * size

    def vjp(adjoint: Adjoint) -> Adjoints:
        return [(index, adjoint.times(factor))]

    again = times(run.again(node, 0), (abs(factor) + off) * SAFE)
    if again is not None:
        error = error + 3 * run.rounding.u_function * again
    round_result(run, node, Result(reference, vjp, linear, (error + own) * SAFE, again=again))


def affine_shift(run: KernelRun, node: Node) -> None:
    """Append x + offset."""
    index, x = run.entry(node, 0)
    low, high = scalar_of(node, "offset", run.rounding)
    offset, off = low / 2 + high / 2, (high - low) / 2
    most = max(abs(low), abs(high))
    reference = x.reference + offset
    u = run.rounding.u_function
    error = u * (reference.abs() + x.error_bound + off) + u * (1 + u) * most + off
    own = _OWN * (reference.abs() + most) + gamma(PASS) * x.error_bound
    again = run.again(node, 0)
    if again is not None:
        error = error + u * again
    internal = (error + own) * SAFE
    result = Result(reference, lambda a: [(index, a)], x.error_bound, internal, again=again)
    round_result(run, node, result)


def _sizes(operand: LinearOperand) -> tuple[Tensor, Tensor, Tensor]:
    return operand.reference.abs(), operand.deviation.mag(), operand.drift.mag()


def linear_add(sign: float) -> LinearRule:
    """Return the rule of a + b (sign 1) or a - b (sign -1)."""

    def rule(run: LinearRun, node: Node) -> None:
        a, b = run.operand(node, 0), run.operand(node, 1)
        reference = a.reference + sign * b.reference
        own, e, d = (p + q for p, q in zip(_sizes(a), _sizes(b), strict=True))
        zero, repeated = torch.zeros_like(reference), reference.numel()

        def vjp(f: Functional) -> list[Source]:
            return [_gathered(f, a, 1.0), _gathered(f, b, sign)]

        inexact = gamma(LINEAR_PASS + (0 if a.reference.shape == b.reference.shape else repeated))
        run.append(
            node,
            reference,
            vjp,
            LinearPart(zero, (4 * EPS * own + inexact * e) * SAFE),
            LinearPart(zero, (inexact * d + 2.0**-1000).expand(reference.shape) * SAFE),
        )

    return rule


def _gathered(f: Functional, operand: LinearOperand, factor: float) -> Source:
    shape = tuple(operand.reference.shape)
    return operand.index, f.each(lambda part: summed(part.times(factor), shape))


def linear_scale(run: LinearRun, node: Node) -> None:
    """Append x·c or x/c."""
    constant = float(node.attrs["factor" if node.op == "scale" else "divisor"])
    factor = constant if node.op == "scale" else 1 / constant
    x = run.operand(node, 0)
    own, e, d = (abs(factor) * size for size in _sizes(x))
    zero = torch.zeros_like(own)
    run.append(
        node,
        x.reference * factor,
        lambda f: [(x.index, f.each(lambda part: part.times(factor)))],
        LinearPart(zero, gamma(LINEAR_PASS) * (own + e) * SAFE),
        LinearPart(zero, (gamma(LINEAR_PASS) * d + 2.0**-1000) * SAFE),
    )


def linear_shift(run: LinearRun, node: Node) -> None:
    """Append x + offset."""
    x, offset = run.operand(node, 0), float(node.attrs["offset"])
    own, e, d = _sizes(x)
    zero = torch.zeros_like(own)
    run.append(
        node,
        x.reference + offset,
        lambda f: [(x.index, f)],
        LinearPart(zero, gamma(LINEAR_PASS) * (own + abs(offset) + e) * SAFE),
        LinearPart(zero, (gamma(LINEAR_PASS) * d + 2.0**-1000) * SAFE),
    )


OPERATIONS = {
    "add": Operation(interval_add, affine_add_or_sub(1.0), linear_add(1.0)),
    "sub": Operation(interval_sub, affine_add_or_sub(-1.0), linear_add(-1.0)),
    "mul": Operation(interval_mul, affine_mul, linear_mul, (0, 1)),
    "scale": Operation(interval_scale, affine_scale, linear_scale),
    "divide": Operation(interval_divide, affine_scale, linear_scale),
    "shift": Operation(interval_shift, affine_shift, linear_shift),
}
