"""Views, concatenations, casts, negation and ReLU in every domain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import part, viewed
from kcdsl_certs.recheck.affine.cases import Cases
from kcdsl_certs.recheck.affine.form import Form, Operand, Version, Walk, form_of, known_form
from kcdsl_certs.recheck.affine.result_rounding import Formed, round_result
from kcdsl_certs.recheck.affine.tape import VJP, TapeEntry
from kcdsl_certs.recheck.graphs.graph import Node, View
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Box, Floats, magnitude, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Mask,
    Own,
    State,
    Value,
    gamma,
    numeric,
    recast,
    reduce,
    target,
)
from kcdsl_certs.recheck.linear_bounds.context import Added, Context, nothing
from kcdsl_certs.recheck.linear_bounds.tape import (
    BoundsEntry,
    FunctionalBatch,
    Polygon,
    Relu,
    plain,
)
from kcdsl_certs.recheck.ops.arithmetic import operands_of
from kcdsl_certs.recheck.ops.operation import Operation


def view_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> Value:
    """Return the elements as a view moves them."""
    found, value = View.of(node, inputs[0].shape), inputs[0]
    if isinstance(value, Mask):
        return Mask(found.moved(value.allowed))
    state = numeric(value)
    one, two = (None if own is None else found.moved(own) for own in state.own)
    t, i, d = (part.map(found.moved) for part in (state.t, state.i, state.d))
    return State(t, i, d, (one, two))


def concat_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> Value:
    """Return the inputs concatenated along one dimension."""
    rank = len(inputs[0].shape)
    dim = node.attrs.exactly("dim").integer("dim", -rank)
    if dim >= rank or any(len(value.shape) != rank for value in inputs):
        raise Rejected("graph/shape", "the inputs of a concat do not fit")
    if all(isinstance(value, Mask) for value in inputs):
        masks = [value.allowed for value in inputs if isinstance(value, Mask)]
        return Mask(np.concatenate(masks, axis=dim))
    states = [numeric(value) for value in inputs]

    def joined(boxes: list[Box]) -> Box:
        lo = np.concatenate([b.lo for b in boxes], axis=dim)
        if all(b.point for b in boxes):
            return box.exact(lo)
        return Box(lo, np.concatenate([b.hi for b in boxes], axis=dim))

    def own(side: int) -> Own:
        if all(s.own[side] is None for s in states):
            return None
        each = ((s.own[side], s.shape) for s in states)
        parts = [np.zeros(n) if part is None else np.broadcast_to(part, n) for part, n in each]
        return np.concatenate(parts, axis=dim)

    t, i, d = (joined([getattr(s, part) for s in states]) for part in ("t", "i", "d"))
    return State(t, i, d, (own(0), own(1)))


def view_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Operand:
    """Return the elements as a view moves them; summing adjoints of copies has roundings."""
    found, value = View.of(node, inputs[0].shape), inputs[0]
    if isinstance(value, Mask):
        return Mask(found.moved(value.allowed))
    reference = found.moved(value.reference)
    if value.place is None:
        return known_form(reference)
    error_bound = found.moved(value.error_bound)
    radius = None if found.copies == 1 else raised(error_bound * gamma(found.copies, UNIT)) + TINY
    place = walk.tape.add(
        TapeEntry(error_bound, ((value.place, lambda a: viewed(a, found)),), radius)
    )
    own, origin = walk.own(node, 0), value.origin
    add_versions(walk, node, None if own is None else found.moved(own))
    if origin is not None:
        origin = replace(origin, index=found.moved(origin.index))
    turned = value.turned
    if turned is not None:
        turned = replace(turned, index=found.moved(turned.index))
    cases, moved = _cases(found, value.cases), (node.inputs[0], found)
    return Form(reference, error_bound, place, origin, cases=cases, turned=turned, moved=moved)


def _cases(view: View, cases: Cases | None) -> Cases | None:
    """Return the cases of moved elements; None unless the elements of each block stay together."""
    found = cases.shaped(view.split) if cases is not None and view.takes_all else None
    found = None if found is None else found.turned(list(view.order))
    return None if found is None else found.shaped(view.shape)


def concat_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Operand:
    """Return the inputs concatenated along one dimension."""
    rank = len(inputs[0].shape)
    dim = node.attrs.exactly("dim").integer("dim", -rank)
    if dim >= rank or any(len(value.shape) != rank for value in inputs):
        raise Rejected("graph/shape", "the inputs of a concat do not fit")
    axis = dim % rank
    masks = [value.allowed for value in inputs if isinstance(value, Mask)]
    if len(masks) == len(inputs):
        return Mask(np.concatenate(masks, axis=axis))
    forms = [form_of(value) for value in inputs]
    reference = np.concatenate([form.reference for form in forms], axis=axis)
    error_bound = np.concatenate([form.error_bound for form in forms], axis=axis)
    operands, offset = [], 0
    for form in forms:
        if form.place is not None:
            operands.append((form.place, _taken(axis, offset, form.shape[axis])))
        offset += form.shape[axis]
    if not operands:
        return known_form(reference)
    parts = [walk.own(node, place) for place in range(len(forms))]
    if any(own is not None for own in parts):
        each = zip(parts, forms, strict=True)
        whole = [np.zeros(form.shape) if own is None else own for own, form in each]
        add_versions(walk, node, np.concatenate(whole, axis=axis))
    return Form(reference, error_bound, walk.tape.add(TapeEntry(error_bound, tuple(operands))))


def add_versions(walk: Walk, node: Node, own: Floats | None) -> None:
    """Record the distance of readings of moved elements."""
    if own is not None:
        walk.versions[node.name] = Version(own)


def _taken(axis: int, offset: int, size: int) -> VJP:
    return lambda a: part(a, axis, offset, size)


def view_bounds(context: Context, node: Node) -> None:
    """Write the elements as a view moves them; functionals of copies are summed."""
    x = context.operand(node, 0)
    view = View.of(node, x.shape)
    reference = view.moved(x.reference)
    none = np.zeros(reference.shape)
    e, d = none, none
    if view.copies > 1:
        lost = gamma(view.copies + 4, UNIT)
        e, d = (raised(view.moved(magnitude(part)) * lost) + TINY for part in (x.e, x.d))

    def vjp(f: FunctionalBatch) -> list[tuple[int, FunctionalBatch]]:
        return [(x.place, f.map(lambda a: viewed(a, view)))]

    context.write(node, reference, vjp, Added(none, e), Added(none, d))
    origin = context.origins.get(node.inputs[0])
    if origin is not None:
        context.origins[node.name] = replace(origin, index=view.moved(origin.index))


def concat_bounds(context: Context, node: Node) -> None:
    """Write the operands concatenated."""
    axis = node.attrs.integer("dim", -len(node.shape)) % len(node.shape)
    operands = [context.operand(node, k) for k in range(len(node.inputs))]
    reference = np.concatenate([x.reference for x in operands], axis=axis)

    def vjp(f: FunctionalBatch) -> list[tuple[int, FunctionalBatch]]:
        found, offset = [], 0
        for x in operands:
            size = x.shape[axis]
            e, d = (None if p is None else part(p, axis, offset, size) for p in (f.e, f.d))
            if e is not None or d is not None:
                found.append((x.place, FunctionalBatch(e, d)))
            offset += size
        return found

    none = nothing(reference.shape)
    context.write(node, reference, vjp, none, none)


def cast_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return x in the format of the node."""
    node.attrs.exactly()
    return recast(problem, node, numeric(inputs[0]))


def relu_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return max(x, 0): no rounding, and no new drift where the sign is known."""
    node.attrs.exactly()
    x = numeric(inputs[0])
    t = x.t.map(lambda v: np.maximum(v, 0.0))
    i = x.i.map(lambda v: np.maximum(v, 0.0))
    on = (x.t.lo >= 0) & (x.i.lo >= 0)
    off = (x.t.hi <= 0) & (x.i.hi <= 0)
    lo = np.where(on, x.d.lo, np.where(off, 0.0, np.minimum(x.d.lo, 0.0)))
    hi = np.where(on, x.d.hi, np.where(off, 0.0, np.maximum(x.d.hi, 0.0)))
    return reduce(t, i, Box(lo, hi), x.own)


def neg_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return -x."""
    node.attrs.exactly()
    x = numeric(inputs[0])
    return State(box.neg(x.t), box.neg(x.i), box.neg(x.d), x.own)


def cast_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x cast to the format of the node, unchanged if the format holds all its values."""
    node.attrs.exactly()
    x, form = form_of(inputs[0]), target(walk.kernel, node)
    nodes = walk.problem.block.named
    read = walk.kernel.reads(nodes, nodes[node.name].inputs[0], walk.problem.handed)
    if all(form.holds(other) for other in read):
        if x.place is None:
            return known_form(x.reference)
        place = walk.tape.add(TapeEntry(x.error_bound, ((x.place, lambda a: a),)))
        own = walk.own(node, 0)
        if own is not None:
            walk.versions[node.name] = Version(own)
        return Form(x.reference, x.error_bound, place, x.origin, cases=x.cases)
    widest = max(read, key=lambda other: other.precision)
    vjps = operands_of((x, lambda a: a))
    formed = Formed(x.reference, x.error_bound, vjps, np.zeros(x.shape), cases=x.cases)
    return round_result(walk, node, replace(formed, own=walk.own(node, 0)), form, widest)


def neg_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return -x."""
    node.attrs.exactly()
    x = form_of(inputs[0])
    if x.place is None:
        return known_form(-x.reference)
    minus = np.full(x.shape, -1.0)
    entry = TapeEntry(x.error_bound, ((x.place, lambda a: a.times(minus)),))
    add_versions(walk, node, walk.own(node, 0))
    return Form(-x.reference, x.error_bound, walk.tape.add(entry))


def relu_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return max(x, 0): linear where the sign is known, else an error around the reference."""
    node.attrs.exactly()
    x = form_of(inputs[0])
    if x.place is None:
        return known_form(np.maximum(x.reference, 0.0))
    sure = np.abs(x.reference) > x.error_bound
    on = (sure & (x.reference > 0)).astype(np.float64)
    lo = np.maximum(box.add_down(x.reference, -x.error_bound), 0.0)
    hi = np.maximum(box.add_up(x.reference, x.error_bound), 0.0)
    reference = np.where(sure, np.maximum(x.reference, 0.0), lo / 2 + hi / 2)
    half = np.maximum(box.add_up(hi, -reference), box.add_up(reference, -lo))
    radius = np.where(sure, 0.0, raised(half) + TINY)
    error_bound = np.where(sure, on * x.error_bound, radius)
    entry = TapeEntry(error_bound, ((x.place, lambda a: a.times(on)),), radius)
    add_versions(walk, node, walk.own(node, 0))
    return Form(reference, error_bound, walk.tape.add(entry))


def relu_bounds(context: Context, node: Node) -> None:
    """Write max(x, 0) by linear bounds, with the slopes of the hints where there are some."""
    x, before, after = (
        context.operand(node, 0),
        context.state(node.inputs[0]),
        context.state(node.name),
    )
    own = Polygon(box.exact(x.reference), x.e, before.t)
    pair = Polygon(before.t, before.d, before.i)
    reference = np.maximum(x.reference, 0.0)
    slopes = plain(own, pair)
    if node.name in context.slopes:
        slopes = slopes.replaced(*context.slopes[node.name])
    none = np.zeros(x.shape)
    context.places[node.name] = context.tape.add(
        BoundsEntry(
            reference,
            box.sub(after.t, box.exact(reference)),
            after.d,
            lambda f: (),
            (none, none),
            (none, none),
            relu=Relu(x.place, x.reference, own, pair, slopes),
        )
    )


def neg_bounds(context: Context, node: Node) -> None:
    """Write -x."""
    x = context.operand(node, 0)
    none = nothing(x.shape)
    context.write(node, -x.reference, lambda f: ((x.place, f.times(-1.0)),), none, none)


def cast_bounds(context: Context, node: Node) -> None:
    """Write x; the rounding of the cast is part of the error of storing."""
    x = context.operand(node, 0)
    none = nothing(x.shape)
    context.write(node, x.reference, lambda f: ((x.place, f),), none, none)


OPERATIONS = {
    "view": Operation(1, 1, view_interval, view_affine, view_bounds, forms=False),
    "concat": Operation(1, 10_000, concat_interval, concat_affine, concat_bounds, forms=False),
    "cast": Operation(1, 1, cast_interval, cast_affine, cast_bounds, forms=False),
    "neg": Operation(1, 1, neg_interval, neg_affine, neg_bounds, pointwise=True, forms=False),
    "relu": Operation(
        1, 1, relu_interval, relu_affine, relu_bounds, (0,), pointwise=True, forms=False
    ),
}
