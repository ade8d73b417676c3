"""Casts, negation and ReLU in every domain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kcdsl_certs.recheck.affine.form import Form, Operand, Version, Walk, form_of, known_form
from kcdsl_certs.recheck.affine.storing import Formed, settle_form
from kcdsl_certs.recheck.affine.tape import Entry
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, Box, raised
from kcdsl_certs.recheck.interval.state import Scene, State, Value, numeric, recast, reduce, target
from kcdsl_certs.recheck.linear_bounds.context import Context, nothing
from kcdsl_certs.recheck.linear_bounds.tape import BoundsEntry, Polygon, Relu, plain
from kcdsl_certs.recheck.ops.elementwise.arithmetic import operands_of
from kcdsl_certs.recheck.ops.moves.view import add_versions
from kcdsl_certs.recheck.ops.operation import Operation


def cast_interval(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return x in the format of the node."""
    node.attrs.exactly()
    return recast(scene, node, numeric(inputs[0]))


def relu_interval(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return max(x, 0): no rounding, and where the sign is known no new drift."""
    node.attrs.exactly()
    x = numeric(inputs[0])
    t = x.t.map(lambda v: np.maximum(v, 0.0))
    i = x.i.map(lambda v: np.maximum(v, 0.0))
    on = (x.t.lo >= 0) & (x.i.lo >= 0)
    off = (x.t.hi <= 0) & (x.i.hi <= 0)
    lo = np.where(on, x.d.lo, np.where(off, 0.0, np.minimum(x.d.lo, 0.0)))
    hi = np.where(on, x.d.hi, np.where(off, 0.0, np.maximum(x.d.hi, 0.0)))
    return reduce(t, i, Box(lo, hi), x.own)


def neg_interval(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return -x."""
    node.attrs.exactly()
    x = numeric(inputs[0])
    return State(box.neg(x.t), box.neg(x.i), box.neg(x.d), x.own)


def cast_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x in the format of the node, as it is where that holds all that it may be."""
    node.attrs.exactly()
    x, form = form_of(inputs[0]), target(walk.kernel, node)
    nodes = walk.scene.block.named
    read = walk.kernel.reads(nodes, nodes[node.name].inputs[0], walk.scene.handed)
    if all(form.holds(other) for other in read):
        if x.place is None:
            return known_form(x.reference)
        place = walk.tape.add(Entry(x.reach, ((x.place, lambda a: a),)))
        own = walk.own(node, 0)
        if own is not None:
            walk.versions[node.name] = Version(own)
        return Form(x.reference, x.reach, place, x.origin, cases=x.cases)
    widest = max(read, key=lambda other: other.precision)
    pulls = operands_of((x, lambda a: a))
    formed = Formed(x.reference, x.reach, pulls, np.zeros(x.shape), cases=x.cases)
    return settle_form(walk, node, replace(formed, own=walk.own(node, 0)), form, widest)


def neg_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return -x."""
    node.attrs.exactly()
    x = form_of(inputs[0])
    if x.place is None:
        return known_form(-x.reference)
    minus = np.full(x.shape, -1.0)
    entry = Entry(x.reach, ((x.place, lambda a: a.times(minus)),))
    add_versions(walk, node, walk.own(node, 0))
    return Form(-x.reference, x.reach, walk.tape.add(entry))


def relu_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return max(x, 0): linear where the sign is known, else known to lie near its reference."""
    node.attrs.exactly()
    x = form_of(inputs[0])
    if x.place is None:
        return known_form(np.maximum(x.reference, 0.0))
    sure = np.abs(x.reference) > x.reach
    on = (sure & (x.reference > 0)).astype(np.float64)
    lo = np.maximum(box.add_down(x.reference, -x.reach), 0.0)
    hi = np.maximum(box.add_up(x.reference, x.reach), 0.0)
    reference = np.where(sure, np.maximum(x.reference, 0.0), lo / 2 + hi / 2)
    half = np.maximum(box.add_up(hi, -reference), box.add_up(reference, -lo))
    radius = np.where(sure, 0.0, raised(half) + TINY)
    reach = np.where(sure, on * x.reach, radius)
    entry = Entry(reach, ((x.place, lambda a: a.times(on)),), radius)
    add_versions(walk, node, walk.own(node, 0))
    return Form(reference, reach, walk.tape.add(entry))


def relu_bounds(context: Context, node: Node) -> None:
    """Write max(x, 0) by linear bounds, with the slopes that are given for some elements."""
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
    """Write x; what a cast rounds is counted with what is stored."""
    x = context.operand(node, 0)
    none = nothing(x.shape)
    context.write(node, x.reference, lambda f: ((x.place, f),), none, none)


OPERATIONS = {
    "cast": Operation(1, 1, cast_interval, cast_affine, cast_bounds, forms=False),
    "neg": Operation(1, 1, neg_interval, neg_affine, neg_bounds, pointwise=True, forms=False),
    "relu": Operation(
        1, 1, relu_interval, relu_affine, relu_bounds, (0,), pointwise=True, forms=False
    ),
}
