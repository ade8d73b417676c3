"""Rotary embedding in every domain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded, merged
from kcdsl_certs.recheck.affine.form import Form, Operand, Turned, Walk, form_of
from kcdsl_certs.recheck.affine.independent import only_sure
from kcdsl_certs.recheck.affine.result_rounding import Formed
from kcdsl_certs.recheck.affine.tape import VJP
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Box, Floats, magnitude, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Own,
    State,
    Value,
    by,
    gamma,
    numeric,
    plus,
    settle,
)
from kcdsl_certs.recheck.linear_bounds.context import SPARE, Added, Context
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch, joined
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.arithmetic import operands_of, settled, underflow
from kcdsl_certs.recheck.ops.operation import Operation


def rope_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return x * cos + concat(-x[…, h:], x[…, :h]) * sin."""
    node.attrs.exactly()
    x, cos, sin = (numeric(value) for value in inputs)
    if x.shape[-1] % 2 or not (cos.t.point and cos.i.point and sin.t.point and sin.i.point):
        raise Rejected("rule/rope", "rope needs an even last dimension and known tables")
    exact, errors = rotated(problem, x, cos, sin)
    own = rotated_own(x.own[0], cos.t.lo, sin.t.lo), rotated_own(x.own[1], cos.i.lo, sin.i.lo)
    return settle(problem, node, exact, errors, own=own)


def rotated_own(own: Own, cos: Floats, sin: Floats) -> Own:
    """Return the distance of readings after the rotation."""
    if own is None:
        return None
    h = own.shape[-1] // 2
    other = np.concatenate([own[..., h:], own[..., :h]], axis=-1)
    return plus(by(own, np.abs(cos)), by(other, np.abs(sin)))


def rotated(
    problem: DriftProblem, x: State, cos: State, sin: State
) -> tuple[tuple[Box, Box, Box], tuple[Floats, Floats]]:
    """Return the rotated boxes before storing, and E of both kernels; the tables are points."""
    turned = State(_rotate(x.t), _rotate(x.i), _rotate(x.d))
    y_t = box.add(box.mul(x.t, cos.t), box.mul(turned.t, sin.t))
    y_i = box.add(box.mul(x.i, cos.i), box.mul(turned.i, sin.i))
    by_cos = box.add(box.mul(x.d, cos.i), box.mul(x.t, box.sub(cos.i, cos.t)))
    by_sin = box.add(box.mul(turned.d, sin.i), box.mul(turned.t, box.sub(sin.i, sin.t)))
    errors = (
        rope_error(problem.train, x.t, turned.t, cos.t.lo, sin.t.lo),
        rope_error(problem.infer, x.i, turned.i, cos.i.lo, sin.i.lo),
    )
    return (y_t, y_i, box.add(by_cos, by_sin)), errors


def _rotate(x: Box) -> Box:
    h = x.shape[-1] // 2
    lo = np.concatenate([-x.hi[..., h:], x.lo[..., :h]], axis=-1)
    hi = lo if x.point else np.concatenate([-x.lo[..., h:], x.hi[..., :h]], axis=-1)
    return Box(lo, hi)


def rope_error(kernel: KernelNumerics, x: Box, turned: Box, cos: Floats, sin: Floats) -> Floats:
    """Return E of rope; `turned` are the boxes of the factors of the sines.

    Raises Rejected "bound/overflow".
    """
    parts = (
        box.up(box.mag(x) * box.lifted(np.abs(cos))),
        box.up(box.mag(turned) * box.lifted(np.abs(sin))),
    )
    size = box.up(parts[0] + parts[1])
    error = box.up(gamma(4, kernel.inner.u) * size + 2 * underflow(kernel))
    if kernel.coarse:
        if not bool((np.maximum(*parts) * (1 + 2.0**-10) <= kernel.compute.largest).all()):
            raise Rejected("bound/overflow", f"a product may overflow {kernel.compute.name}")
        u, eta = kernel.off(kernel.compute)
        cast = (1 + 2.0**-10) * (u * size + 2 * eta)
        error = box.up(error + cast)
    return error


def rope_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x * cos + concat(-x[…, h:], x[…, :h]) * sin."""
    node.attrs.exactly()
    x, cos, sin = (form_of(value) for value in inputs)
    if x.shape[-1] % 2 or cos.place is not None or sin.place is not None:
        raise Rejected("rule/rope", "rope needs an even last dimension and known tables")
    h = x.shape[-1] // 2
    turned = np.concatenate([-x.reference[..., h:], x.reference[..., :h]], axis=-1)
    far = np.concatenate([x.error_bound[..., h:], x.error_bound[..., :h]], axis=-1)
    c, s = np.broadcast_to(cos.reference, x.shape), np.broadcast_to(sin.reference, x.shape)
    reference = x.reference * c + turned * s
    carried = raised(x.error_bound * np.abs(c) + far * np.abs(s))
    own = 4 * UNIT * (np.abs(x.reference * c) + np.abs(turned * s)) + TINY
    apart = walk.own(node, 0)
    wide = x if apart is None else replace(x, error_bound=raised(x.error_bound + apart))
    far_wide = np.concatenate([wide.error_bound[..., h:], wide.error_bound[..., :h]], axis=-1)
    around = box.widen(box.exact(turned), far_wide)
    error = rope_error(walk.kernel, wide.box, around, c, s)
    own = own + gamma(8, UNIT) * carried
    split, kernel = only_sure(own + error), walk.kernel
    if kernel.coarse:  # both products are stored: their roundings are not in `sure`
        terms = raised(x.size * np.abs(c) + raised(np.abs(turned) + far) * np.abs(s))
        inside = raised(gamma(4, kernel.inner.u) * terms) + 2 * underflow(kernel)
        u, eta = kernel.off(kernel.compute)
        cast = raised(u * (1 + 2.0**-10) * terms)
        split = only_sure(own + inside).with_cast(kernel, cast, 2 * (1 + 2.0**-10) * eta)
    operands = operands_of((x, _turned(c, s)))
    form = settled(
        walk,
        node,
        Formed(
            reference,
            carried,
            operands,
            raised(own + error),
            split=split,
            own=rotated_own(apart, c, s),
        ),
    )
    entry = None if form.place is None else walk.tape.entries[form.place]
    bare = entry is not None and entry.kept is None and entry.centre is None
    if entry is None or not bare or entry.apart is not None or entry.radius is None:
        return form
    if x.origin is None or len(form.shape) != 3 or not entry.operands:
        return form
    version = walk.versions.get(node.name)
    rest = entry.radius if version is None else raised(entry.radius + version.own)
    by_cos, by_sin = (np.broadcast_to(part.reference, form.shape[1:]) for part in (cos, sin))
    index = np.arange(reference.size).reshape(form.shape)
    return replace(form, turned=Turned(x.origin, by_cos, by_sin, rest, index))


def _turned(cos: Floats, sin: Floats) -> VJP:
    """Return the adjoint map of rope: α·cos, plus α·sin rotated back."""
    h = cos.shape[-1] // 2

    def vjp(adjoint: Adjoint) -> Adjoint:
        wide = embedded(adjoint, (*adjoint.start[:-1], 0), (*adjoint.extent[:-1], cos.shape[-1]))
        by_sin = wide.times(sin).values
        back = np.concatenate([by_sin[..., h:], -by_sin[..., :h]], axis=-1)
        return merged(wide.times(cos), Adjoint(back, wide.start))

    return vjp


def rope_bounds(context: Context, node: Node) -> None:
    """Write x∘C + rot(x)∘S with the tables of either kernel."""
    x = context.operand(node, 0)
    cos, sin = (context.state(name) for name in node.inputs[1:])
    train = _tables(x.shape, cos.t.lo, sin.t.lo)
    infer = _tables(x.shape, cos.i.lo, sin.i.lo)
    change = infer[0] - train[0], infer[1] - train[1]
    moves = bool(change[0].any() or change[1].any())

    def vjp(f: FunctionalBatch) -> tuple[tuple[int, FunctionalBatch], ...]:
        e = None if f.e is None else _back(f.e, train)
        if f.d is None:
            return ((x.place, FunctionalBatch(e, None)),)
        if moves:
            e = joined(e, _back(f.d, change))
        return ((x.place, FunctionalBatch(e, _back(f.d, infer))),)

    lost = gamma(SPARE, UNIT)
    own = np.abs(x.reference) + magnitude(x.e)
    moved = _sizes(own, change) + _sizes(magnitude(x.d), infer)
    context.write(
        node,
        _rotated(x.reference, train),
        vjp,
        Added(np.zeros(x.shape), raised(lost * _sizes(own, train)) + TINY),
        Added(_rotated(x.reference, change), raised(lost * moved) + TINY),
    )


def _tables(shape: tuple[int, ...], cos: Floats, sin: Floats) -> tuple[Floats, Floats]:
    return np.broadcast_to(cos, shape), np.broadcast_to(sin, shape)


def _rotated(x: Floats, tables: tuple[Floats, Floats]) -> Floats:
    h = x.shape[-1] // 2
    turned = np.concatenate([-x[..., h:], x[..., :h]], axis=-1)
    return np.asarray(x * tables[0] + turned * tables[1])


def _sizes(x: Floats, tables: tuple[Floats, Floats]) -> Floats:
    h = x.shape[-1] // 2
    turned = np.concatenate([x[..., h:], x[..., :h]], axis=-1)
    return np.asarray(x * np.abs(tables[0]) + turned * np.abs(tables[1]))


def _back(adjoint: Adjoint, tables: tuple[Floats, Floats]) -> Adjoint:
    """Return α∘C plus α∘S rotated back."""
    width = tables[0].shape[-1]
    whole = embedded(adjoint, (*adjoint.start[:-1], 0), (*adjoint.extent[:-1], width))
    by_sin = whole.values * tables[1][whole.window]
    h = width // 2
    turned = np.concatenate([by_sin[..., h:], -by_sin[..., :h]], axis=-1)
    return Adjoint(whole.values * tables[0][whole.window] + turned, whole.start)


OPERATIONS = {"rope": Operation(3, 3, rope_interval, rope_affine, rope_bounds)}
