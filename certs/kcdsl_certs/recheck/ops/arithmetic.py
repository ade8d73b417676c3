"""Sums, products, multiples and shifts in every domain (section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint, summed
from kcdsl_certs.recheck.affine.ellipsoids import Row, Squares
from kcdsl_certs.recheck.affine.form import Form, Operand, Walk, form_of
from kcdsl_certs.recheck.affine.independent import only_sure
from kcdsl_certs.recheck.affine.remainders import Remainder, squares
from kcdsl_certs.recheck.affine.result_rounding import Formed, round_result
from kcdsl_certs.recheck.affine.reverse_passes import bound_asked_norms, tighten_by_floors
from kcdsl_certs.recheck.affine.tape import VJP, NonlinearPart
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, ULP, UNIT, Box, Floats, magnitude, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    State,
    Value,
    by,
    gamma,
    middle,
    numeric,
    plus,
    settle,
    target,
)
from kcdsl_certs.recheck.linear_bounds.context import SPARE, Added, Context, Reading
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch
from kcdsl_certs.recheck.numerics.formats import FLOAT32
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.operation import Operation

_BELOW_NORMAL = 2.0**-126


def add_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return a + b."""
    return _linear_pair(problem, node, inputs, box.add)


def sub_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return a - b."""
    return _linear_pair(problem, node, inputs, box.sub)


def _linear_pair(
    problem: DriftProblem, node: Node, inputs: list[Value], combine: Callable[[Box, Box], Box]
) -> State:
    node.attrs.exactly()
    a, b = numeric(inputs[0]), numeric(inputs[1])
    y_t, y_i = combine(a.t, b.t), combine(a.i, b.i)
    errors = _relative(problem.train, y_t), _relative(problem.infer, y_i)
    own = plus(a.own[0], b.own[0]), plus(a.own[1], b.own[1])
    return settle(problem, node, (y_t, y_i, combine(a.d, b.d)), errors, own=own)


def mul_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return a * b."""
    node.attrs.exactly()
    a, b = numeric(inputs[0]), numeric(inputs[1])
    y_t, y_i = box.mul(a.t, b.t), box.mul(a.i, b.i)
    d = box.add(box.mul(middle(a), b.d), box.mul(a.d, middle(b)))
    errors = _relative(problem.train, y_t, 1, True), _relative(problem.infer, y_i, 1, True)
    own = (
        plus(by(a.own[0], box.mag(b.t)), by(b.own[0], box.mag(a.t))),
        plus(by(a.own[1], box.mag(b.i)), by(b.own[1], box.mag(a.i))),
    )
    return settle(problem, node, (y_t, y_i, d), errors, own=own)


def _relative(kernel: KernelNumerics, y: Box, count: int = 1, faint: bool = False) -> Floats:
    """Return count·u_f·mag(Y), and η_f where a product may underflow."""
    form = kernel.inner
    return box.up(count * form.u * box.mag(y) + (underflow(kernel) if faint else 0.0))


def underflow(kernel: KernelNumerics) -> float:
    """Return η_f: one smallest subnormal of the inner format."""
    return 2 * kernel.inner.eta if kernel.inner == FLOAT32 else kernel.inner.eta


def scale_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return x * factor."""
    factor = constant(node, "factor")

    def ends(kernel: KernelNumerics) -> tuple[float, float]:
        return kernel.scalar(factor, node)

    def move(b: Box) -> Box:
        return box.mul(b, box.exact(np.array(factor)))

    return _scaled(problem, node, inputs, factor, move, ends)


def divide_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return x / divisor."""
    divisor = constant(node, "divisor")
    if divisor == 0:
        raise Rejected("graph/field", "a division by zero")

    def ends(kernel: KernelNumerics) -> tuple[float, float]:
        return inverses(kernel.scalar(divisor, node))

    return _scaled(problem, node, inputs, 1 / divisor, lambda b: _divided(b, divisor), ends)


def inverses(ends: tuple[float, float]) -> tuple[float, float]:
    """Return the inverses of numbers, of which none is 0. Raises Rejected "bound/not-finite"."""
    if ends[0] * ends[1] <= 0:
        raise Rejected("bound/not-finite", "a divisor may be rounded to 0")
    return 1 / ends[1], 1 / ends[0]


def _other(ends: tuple[float, float], value: float) -> Box:
    """Return a box of the differences of numbers between the ends from a value."""
    if ends[0] == ends[1]:
        return box.zeros(())
    lost = 4 * ULP * abs(value)
    low, high = np.array(ends[0] - value - lost), np.array(ends[1] - value + lost)
    return Box(np.minimum(low, 0.0), np.maximum(high, 0.0))


def _divided(b: Box, divisor: float) -> Box:
    if divisor < 0:
        b, divisor = box.neg(b), -divisor
    lo, hi = b.lo / divisor, b.hi / divisor
    return Box(np.where(b.lo == 0, 0.0, box.down(lo)), np.where(b.hi == 0, 0.0, box.above(hi)))


def _scaled(
    problem: DriftProblem,
    node: Node,
    inputs: list[Value],
    factor: float,
    move: Callable[[Box], Box],
    ends: Callable[[KernelNumerics], tuple[float, float]],
) -> State:
    """Return a multiple of x; `ends` are the least and greatest factor that a kernel may use."""
    x = numeric(inputs[0])
    y_t, y_i = move(x.t), move(x.i)
    between = ends(problem.train), ends(problem.infer)
    other = box.mul(x.t, _other(between[0], factor)), box.mul(x.i, _other(between[1], factor))
    errors = (
        _relative(problem.train, box.add(y_t, other[0]), 3, True),
        _relative(problem.infer, box.add(y_i, other[1]), 3, True),
    )
    steepest = [max(abs(low), abs(high)) for low, high in between]
    own = by(x.own[0], steepest[0]), by(x.own[1], steepest[1])
    return settle(problem, node, (y_t, y_i, move(x.d)), errors, beside=other, own=own)


def shift_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return x + offset."""
    offset = constant(node, "offset")
    x = numeric(inputs[0])
    moved = box.exact(np.array(offset))
    y_t, y_i = box.add(x.t, moved), box.add(x.i, moved)
    other = (
        _other(problem.train.scalar(offset, node), offset),
        _other(problem.infer.scalar(offset, node), offset),
    )

    def error(kernel: KernelNumerics, y: Box, more: Box) -> Floats:
        return box.up(
            kernel.inner.u * (box.mag(box.add(y, more)) + abs(offset) * (1 + kernel.inner.u))
        )

    errors = error(problem.train, y_t, other[0]), error(problem.infer, y_i, other[1])
    return settle(problem, node, (y_t, y_i, x.d), errors, beside=other, own=x.own)


def constant(node: Node, name: str) -> float:
    """Return a float attribute: 0, or a number that is normal in float32, as is its reciprocal.

    Raises Rejected "graph/field".
    """
    raw = node.attrs.exactly(name).raw(name)
    whole = isinstance(raw, int) and not isinstance(raw, bool)
    value = float(raw) if whole else node.attrs.real(name)
    if value != 0 and not _BELOW_NORMAL <= abs(value) <= 2.0**126:
        raise Rejected("graph/field", f"{name} = {value} leaves the range of float32")
    return value


def add_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return a + b."""
    return _sum_affine(walk, node, inputs, 1.0)


def sub_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return a - b."""
    return _sum_affine(walk, node, inputs, -1.0)


def _sum_affine(walk: Walk, node: Node, inputs: list[Operand], sign: float) -> Form:
    node.attrs.exactly()
    a, b = form_of(inputs[0]), form_of(inputs[1])
    reference = a.reference + sign * b.reference
    carried = raised(a.error_bound + b.error_bound)
    error = walk.kernel.inner.u * raised(np.abs(reference) * (1 + 2 * UNIT) + carried)
    own = 2 * UNIT * np.abs(reference) + _copies(reference, a, b) * carried
    operands = operands_of((a, _spread(a.shape)), (b, _scaled_functionals(b.shape, sign)))
    split, apart = only_sure(own).with_one(error), plus(walk.own(node, 0), walk.own(node, 1))
    radius = error + own
    if apart is not None:
        radius = raised(radius + walk.kernel.inner.u * apart)
    formed = Formed(reference, carried, operands, radius, split=split, own=apart)
    kernel = walk.kernel
    return round_result(walk, node, formed, target(kernel, node), kernel.inner, sums=True)


def mul_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return a * b."""
    node.attrs.exactly()
    a, b = form_of(inputs[0]), form_of(inputs[1])
    reference, sums, weighted = a.reference * b.reference, None, None
    if a.shape == b.shape:
        found = [squares(walk, node, name) for name in node.inputs]
        for name in node.inputs:
            tighten_by_floors(walk, node, name)
        a, b = (form_of(walk.forms[name]) for name in node.inputs)
        sums, weighted = _sums(walk, node, a, found[0], found[1])
    carried = raised(a.error_bound * np.abs(b.reference) + np.abs(a.reference) * b.error_bound)
    rest = raised(a.error_bound * b.error_bound)
    own = 2 * UNIT * np.abs(reference) + TINY
    size = raised(np.abs(reference) + own + carried + rest)
    error, faint = raised(walk.kernel.inner.u * size), underflow(walk.kernel)
    others = own + faint + _copies(reference, a, b) * carried
    bent: Floats | None = None
    nonlinear: tuple[NonlinearPart, ...] = ()
    if sums is None:
        others = others + rest
    else:
        boxed = raised(rest.sum(axis=-1, keepdims=True) * (1 + 2 * rest.shape[-1] * UNIT))
        bent, nonlinear = (
            rest,
            (Remainder(-rest, rest, np.minimum(sums, boxed), weighted).nonlinear,),
        )
    radius, split = raised(others + error), only_sure(others).with_one(error)
    left, right = _broadcast(b, reference), _broadcast(a, reference)
    operands = operands_of((a, times(left, a.shape)), (b, times(right, b.shape)))
    one, two = walk.own(node, 0), walk.own(node, 1)
    apart = plus(by(one, b.size), by(two, a.size), None if two is None else by(one, two))
    if apart is not None:
        radius = raised(radius + walk.kernel.inner.u * apart)
    formed = Formed(
        *(reference, carried, operands, radius),
        bent=bent,
        nonlinear=nonlinear,
        split=split,
        own=apart,
    )
    return settled(walk, node, formed)


_Sums = tuple[Floats | None, Callable[[Row, Floats], Floats] | None]


def _sums(walk: Walk, node: Node, like: Form, one: Squares | None, two: Squares | None) -> _Sums:
    """Return bounds of Σ|e_a e_b| in every row [..., 1], and of the weighted sum: by the squares of
    both errors, or by norms from reverse passes, infinite in rows without passes; None if there are
    no passes."""
    if one is not None and two is not None:
        every = np.ones(like.shape)

        def weighted(row: Row, weights: Floats) -> Floats:
            return raised(one.root(row, weights) * two.root(row, weights)) + TINY

        return raised(one.each(every) * two.each(every)) + TINY, weighted
    return _by_norms(walk, node, like), None


def _by_norms(walk: Walk, node: Node, like: Form) -> Floats | None:
    """Return a bound of Σ|e_a e_b| by norms of both errors from reverse passes."""
    if walk.passes.rows is None or walk.tape.budget is not None:
        return None
    identity = np.eye(like.shape[-1])
    one, two = (bound_asked_norms(walk, node, name, lambda _: identity) for name in node.inputs)
    known = np.isfinite(one) & np.isfinite(two)
    both = np.where(known, one, 0.0) * np.where(known, two, 0.0)
    return raised(np.where(known, both, np.inf)) if known.any() else None


def scale_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x * factor."""
    return _proportional_affine(walk, node, inputs, constant(node, "factor"), False)


def divide_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x / divisor."""
    divisor = constant(node, "divisor")
    if divisor == 0:
        raise Rejected("graph/field", "a division by zero")
    return _proportional_affine(walk, node, inputs, divisor, True)


def _proportional_affine(
    walk: Walk, node: Node, inputs: list[Operand], number: float, inverse: bool
) -> Form:
    x = form_of(inputs[0])
    ends = walk.kernel.scalar(number, node)
    ends = inverses(ends) if inverse else ends
    factor, away = ends[0] / 2 + ends[1] / 2, (ends[1] - ends[0]) / 2
    reference = x.reference * factor
    carried = raised(x.error_bound * abs(factor))
    own = 6 * UNIT * np.abs(reference) + TINY
    other = raised(away * x.size)
    whole = raised(np.abs(reference) + own + carried + other)
    error = 3 * walk.kernel.inner.u * whole + underflow(walk.kernel)
    radius = raised(own + error + other + gamma(6, UNIT) * carried)
    operands = operands_of((x, _scaled_functionals(x.shape, factor)))
    apart = by(walk.own(node, 0), raised(np.asarray(abs(factor) + away)))
    if apart is not None:
        radius = raised(radius + 3 * walk.kernel.inner.u * apart)
    return settled(walk, node, Formed(reference, carried, operands, radius, own=apart))


def shift_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x + offset."""
    x, offset = form_of(inputs[0]), constant(node, "offset")
    low, high = walk.kernel.scalar(offset, node)
    middle, away = low / 2 + high / 2, (high - low) / 2
    reference = x.reference + middle
    own = 2 * UNIT * (np.abs(reference) + abs(middle)) + TINY
    u = walk.kernel.inner.u
    size = raised(np.abs(reference) + own + x.error_bound + away)
    error = u * raised(size + max(abs(low), abs(high)) * (1 + u)) + away
    operands = operands_of((x, _spread(x.shape)))
    apart, radius = walk.own(node, 0), raised(own + error)
    if apart is not None:
        radius = raised(radius + u * apart)
    return settled(walk, node, Formed(reference, x.error_bound, operands, radius, own=apart))


def settled(walk: Walk, node: Node, formed: Formed) -> Form:
    """Return a form with the roundings of its node in the format of the kernel."""
    return round_result(walk, node, formed, target(walk.kernel, node), walk.kernel.inner)


def operands_of(*parts: tuple[Form, VJP]) -> tuple[tuple[int, VJP], ...]:
    """Return the entries of operands that are not constant, with their adjoint maps."""
    return tuple((form.place, vjp) for form, vjp in parts if form.place is not None)


def _copies(reference: Floats, *operands: Form) -> float:
    """Return γ of the sums of adjoints over broadcast dimensions."""
    least = min(math.prod(form.shape) for form in operands)
    return gamma(4 + reference.size // max(1, least), UNIT)


def _broadcast(form: Form, reference: Floats) -> Floats:
    return np.broadcast_to(form.reference, reference.shape)


def _spread(shape: tuple[int, ...]) -> VJP:
    return lambda a: summed(a, shape)


def _scaled_functionals(shape: tuple[int, ...], factor: float) -> VJP:
    return lambda a: summed(Adjoint(a.values * factor, a.start), shape)


def times(factor: Floats, shape: tuple[int, ...]) -> VJP:
    """Return the adjoint map of an elementwise product by `factor`, summed to `shape`."""
    return lambda a: summed(a.times(factor), shape)


def add_bounds(context: Context, node: Node) -> None:
    """Write a + b."""
    _sum_bounds(context, node, 1.0)


def sub_bounds(context: Context, node: Node) -> None:
    """Write a - b."""
    _sum_bounds(context, node, -1.0)


def _sum_bounds(context: Context, node: Node, sign: float) -> None:
    a, b = context.operand(node, 0), context.operand(node, 1)
    reference = a.reference + sign * b.reference
    repeated = reference.size // max(1, min(a.reference.size, b.reference.size))
    lost = gamma(SPARE + repeated, UNIT)

    def vjp(f: FunctionalBatch) -> list[tuple[int, FunctionalBatch]]:
        return [_gathered(f, a, 1.0), _gathered(f, b, sign)]

    own = 4 * UNIT * (np.abs(a.reference) + np.abs(b.reference))
    none = np.zeros(reference.shape)
    context.write(
        node,
        reference,
        vjp,
        Added(none, raised(own + lost * (magnitude(a.e) + magnitude(b.e))) + TINY),
        Added(none, raised(lost * (magnitude(a.d) + magnitude(b.d))) + TINY),
    )


def _gathered(f: FunctionalBatch, x: Reading, factor: float) -> tuple[int, FunctionalBatch]:
    return x.place, f.map(lambda a: summed(Adjoint(a.values * factor, a.start), x.shape))


def scale_bounds(context: Context, node: Node) -> None:
    """Write x·factor."""
    _proportional_bounds(context, node, constant(node, "factor"))


def divide_bounds(context: Context, node: Node) -> None:
    """Write x / divisor."""
    _proportional_bounds(context, node, 1 / constant(node, "divisor"))


def _proportional_bounds(context: Context, node: Node, factor: float) -> None:
    x, lost = context.operand(node, 0), gamma(SPARE, UNIT) * abs(factor)
    own = np.abs(x.reference) + magnitude(x.e)
    none = np.zeros(x.shape)
    context.write(
        node,
        x.reference * factor,
        lambda f: ((x.place, f.times(factor)),),
        Added(none, raised(lost * own) + TINY),
        Added(none, raised(lost * magnitude(x.d)) + TINY),
    )


def shift_bounds(context: Context, node: Node) -> None:
    """Write x + offset."""
    x, offset = context.operand(node, 0), constant(node, "offset")
    own = 4 * UNIT * (np.abs(x.reference) + abs(offset))
    none = np.zeros(x.shape)
    context.write(
        node,
        x.reference + offset,
        lambda f: ((x.place, f),),
        Added(none, raised(own) + TINY),
        Added(none, none),
    )


OPERATIONS = {
    "add": Operation(2, 2, add_interval, add_affine, add_bounds),
    "sub": Operation(2, 2, sub_interval, sub_affine, sub_bounds),
    "scale": Operation(1, 1, scale_interval, scale_affine, scale_bounds),
    "divide": Operation(1, 1, divide_interval, divide_affine, divide_bounds),
    "shift": Operation(1, 1, shift_interval, shift_affine, shift_bounds),
}
