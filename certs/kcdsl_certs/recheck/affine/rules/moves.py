"""Leaves and moves: the block input, known numbers, and what only moves elements."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.adjoint import part, viewed
from kcdsl_certs.recheck.affine.cases import Cases
from kcdsl_certs.recheck.affine.drifting import symbol
from kcdsl_certs.recheck.affine.form import (
    UNIT,
    Form,
    Operand,
    Version,
    Walk,
    known,
    numeric,
    raised,
)
from kcdsl_certs.recheck.affine.storing import Formed, settle
from kcdsl_certs.recheck.affine.tape import FAINT, Entry, Pull, Shared
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Box, Floats
from kcdsl_certs.recheck.nearby import alike
from kcdsl_certs.recheck.rules import structural
from kcdsl_certs.recheck.rules.state import Mask, State, gamma, target
from kcdsl_certs.recheck.spec import FLOAT32
from kcdsl_certs.recheck.view import View
from kcdsl_certs.rejected import Rejected


def source(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return the block input, entry 0, stored where compute is coarser than float32."""
    node.attrs.exactly()
    centre, region = walk.scene.centre, walk.tape.region
    if centre is None or region is None or node.role:
        raise Rejected("rule/input", "a block on token ids has no block input")
    if centre.shape != walk.scene.block.input_shape:
        raise Rejected("graph/shape", "the region does not have the input's shape")
    if walk.scene.drift is not None:
        _versions(walk, node, walk.scene.entering[1 if walk.moved else 0])
        return _apart(walk, centre, region, walk.scene.drift)
    form = target(walk.kernel, node)
    if form.precision >= FLOAT32.precision:
        return Form(centre, region, 0)
    formed = Formed(centre, region, ((0, lambda a: a),), np.zeros(centre.shape))
    return settle(walk, node, formed, form, FLOAT32)


def _apart(walk: Walk, centre: Floats, region: Floats, drift: Box) -> Form:
    """Return an input that another block stored: x, or x + e in the kernel that reads with drift.

    e is known within its box alone, so its radius is an error of this entry; or in ellipsoids, and
    then an entry of its own, where reverse passes may stop.
    """
    if drift.shape != centre.shape:
        raise Rejected("graph/shape", "the drift does not have the input's shape")
    if not walk.moved:
        return Form(centre, region, 0)
    middle, half = box.midpoint(drift)
    shifted = box.add(box.exact(centre), box.exact(middle))
    reference, slip = box.midpoint(shifted)
    radius = np.zeros(centre.shape)
    for more in (half, slip):
        radius = radius if more is None else radius + more
    radius = raised(radius)
    reach = raised(region + radius)
    if walk.scene.held is not None:
        apart = walk.tape.cut = symbol(walk, walk.scene.held, middle, radius, reference)
        place = walk.tape.add(Entry(reach, ((0, lambda a: a), (apart, lambda a: a))))
        return Form(reference, reach, place)
    place = walk.tape.add(Entry(reach, ((0, lambda a: a),), radius))
    return Form(reference, reach, place)


def leaf(walk: Walk, node: Node, inputs: list[Operand]) -> Operand:
    """Return a parameter, a constant or the rows of a table, as this kernel stores it."""
    rule = {
        "param": structural.parameter,
        "constant": structural.constant,
        "embedding": structural.embedding,
    }[node.op]
    value = rule(replace(walk.scene, rho=Fraction(0)), node, [])
    if isinstance(value, Mask):
        return value
    if not isinstance(value, State):
        raise Rejected("internal", "a leaf without a value")
    first = walk.kernel is walk.scene.train
    found = (value.t if first else value.i).lo
    if not walk.scene.rho or node.op == "constant":
        return known(found)
    wide = rule(walk.scene, node, [])
    if not isinstance(wide, State):
        raise Rejected("internal", "a leaf without a value")
    radius = around(found, wide.t if first else wide.i)
    shared = None
    if alike((walk.scene.train, walk.scene.infer), linear=False):
        shared = Shared(node.name, radius, np.zeros(radius.shape))
    return Form(found, radius, walk.tape.add(Entry(radius, (), radius, shared=shared)))


def around(centre: Floats, wide: Box) -> Floats:
    """Return how far the numbers in a box may be from those known."""
    far = np.maximum(box.add_up(wide.hi, -centre), box.add_up(centre, -wide.lo))
    return np.asarray(raised(np.maximum(far, 0.0)))


def view(walk: Walk, node: Node, inputs: list[Operand]) -> Operand:
    """Return the elements where a view puts them; sums of adjoints of copies round."""
    found, value = View.of(node, inputs[0].shape), inputs[0]
    if isinstance(value, Mask):
        return Mask(found.moved(value.allowed))
    reference = found.moved(value.reference)
    if value.place is None:
        return known(reference)
    reach = found.moved(value.reach)
    radius = None if found.copies == 1 else raised(reach * gamma(found.copies, UNIT)) + FAINT
    place = walk.tape.add(Entry(reach, ((value.place, lambda a: viewed(a, found)),), radius))
    own, origin = walk.own(node, 0), value.origin
    _versions(walk, node, None if own is None else found.moved(own))
    if origin is not None:
        origin = replace(origin, index=found.moved(origin.index))
    return Form(reference, reach, place, origin, cases=_cases(found, value.cases))


def _cases(view: View, cases: Cases | None) -> Cases | None:
    """Return the cases of moved elements, where all of each block stay together."""
    found = cases.shaped(view.split) if cases is not None and view.takes_all else None
    found = None if found is None else found.turned(list(view.order))
    return None if found is None else found.shaped(view.shape)


def concat(walk: Walk, node: Node, inputs: list[Operand]) -> Operand:
    """Return the inputs one after another along one dimension."""
    rank = len(inputs[0].shape)
    dim = node.attrs.exactly("dim").integer("dim", -rank)
    if dim >= rank or any(len(value.shape) != rank for value in inputs):
        raise Rejected("graph/shape", "the inputs of a concat do not fit")
    axis = dim % rank
    masks = [value.allowed for value in inputs if isinstance(value, Mask)]
    if len(masks) == len(inputs):
        return Mask(np.concatenate(masks, axis=axis))
    forms = [numeric(value) for value in inputs]
    reference = np.concatenate([form.reference for form in forms], axis=axis)
    reach = np.concatenate([form.reach for form in forms], axis=axis)
    operands, offset = [], 0
    for form in forms:
        if form.place is not None:
            operands.append((form.place, _taken(axis, offset, form.shape[axis])))
        offset += form.shape[axis]
    if not operands:
        return known(reference)
    parts = [walk.own(node, place) for place in range(len(forms))]
    if any(own is not None for own in parts):
        each = zip(parts, forms, strict=True)
        whole = [np.zeros(form.shape) if own is None else own for own, form in each]
        _versions(walk, node, np.concatenate(whole, axis=axis))
    return Form(reference, reach, walk.tape.add(Entry(reach, tuple(operands))))


def _versions(walk: Walk, node: Node, own: Floats | None) -> None:
    """Note how far readings of moved elements are apart."""
    if own is not None:
        walk.versions[node.name] = Version(own)


def _taken(axis: int, offset: int, size: int) -> Pull:
    return lambda a: part(a, axis, offset, size)


def neg(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return -x."""
    node.attrs.exactly()
    x = numeric(inputs[0])
    if x.place is None:
        return known(-x.reference)
    minus = np.full(x.shape, -1.0)
    entry = Entry(x.reach, ((x.place, lambda a: a.times(minus)),))
    _versions(walk, node, walk.own(node, 0))
    return Form(-x.reference, x.reach, walk.tape.add(entry))


def relu(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return max(x, 0): linear where the sign is known, else known to lie near its reference."""
    node.attrs.exactly()
    x = numeric(inputs[0])
    if x.place is None:
        return known(np.maximum(x.reference, 0.0))
    sure = np.abs(x.reference) > x.reach
    on = (sure & (x.reference > 0)).astype(np.float64)
    lo = np.maximum(box.add_down(x.reference, -x.reach), 0.0)
    hi = np.maximum(box.add_up(x.reference, x.reach), 0.0)
    reference = np.where(sure, np.maximum(x.reference, 0.0), lo / 2 + hi / 2)
    half = np.maximum(box.add_up(hi, -reference), box.add_up(reference, -lo))
    radius = np.where(sure, 0.0, raised(half) + FAINT)
    reach = np.where(sure, on * x.reach, radius)
    entry = Entry(reach, ((x.place, lambda a: a.times(on)),), radius)
    _versions(walk, node, walk.own(node, 0))
    return Form(reference, reach, walk.tape.add(entry))
