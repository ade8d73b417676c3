"""Linear maps, with the input that a kernel quantises (section 3)."""

from __future__ import annotations

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Floats, magnitude
from kcdsl_certs.recheck.planes.course import Added, Course, Operand, Origin, raised
from kcdsl_certs.recheck.planes.functional import Functional, joined
from kcdsl_certs.recheck.planes.tape import FAINT, UNIT
from kcdsl_certs.recheck.rules.linear import quantisation
from kcdsl_certs.recheck.rules.state import gamma, pinned
from kcdsl_certs.rejected import Rejected

SPARE = 24  # roundings of adjoints and centres beside those of their sums


def linear(course: Course, node: Node) -> None:
    """Write x @ weight.T + bias: e is W_t e, D is W_i D + (W_i - W_t) e and what is known."""
    scene = pinned(course.scene, node)
    key = scene.keys.get(node.inputs[1])
    if key is None:
        raise Rejected("rule/weight", "the weight of a linear must be a parameter")
    train = scene.parameters.linear(key, scene.train)
    infer = scene.parameters.linear(key, scene.infer)
    x = _quantised(course, node, key)
    change = infer - train
    moves = bool(change.any())
    reference, known = x.reference @ train.T, x.reference @ change.T
    sizes = [np.abs(x.reference) @ np.abs(w).T for w in (train, change)]
    if len(node.inputs) > 2:
        bias = course.state(node.inputs[2])
        apart = bias.i.lo - bias.t.lo
        reference, known = reference + bias.t.lo, known + apart
        sizes = [sizes[0] + np.abs(bias.t.lo), sizes[1] + np.abs(apart)]
    outputs, inputs = train.shape
    formed, carried = gamma(inputs + SPARE, UNIT), gamma(outputs + SPARE, UNIT)
    size_e, size_d = magnitude(x.e), magnitude(x.d)
    on_e = size_e @ np.abs(train).T
    on_d = size_d @ np.abs(infer).T + size_e @ np.abs(change).T

    def through(adjoint: Adjoint, matrix: Floats) -> Adjoint:
        return Adjoint(
            flat_product(adjoint.values, matrix[adjoint.window[-1]]), (*adjoint.start[:-1], 0)
        )

    def pull(f: Functional) -> tuple[tuple[int, Functional], ...]:
        e = None if f.e is None else through(f.e, train)
        if f.d is None:
            return ((x.place, Functional(e, None)),)
        if moves:
            e = joined(e, through(f.d, change))
        return ((x.place, Functional(e, through(f.d, infer))),)

    straight = course.write(
        node,
        reference,
        pull,
        Added(np.zeros(reference.shape), raised(formed * sizes[0] + carried * on_e) + FAINT),
        Added(known, raised(formed * sizes[1] + carried * on_d) + FAINT),
    )
    if straight and reference.ndim == 2 and x.place == course.operand(node, 0).place:
        index = np.arange(reference.size, dtype=np.int64).reshape(reference.shape)
        place = course.places[node.name]
        course.origins[node.name] = Origin(x.place, place, train, infer, index)


def flat_product(values: Floats, matrix: Floats) -> Floats:
    """Return values @ matrix, all rows of the values in one product."""
    found = values.reshape(-1, values.shape[-1]) @ matrix
    return np.asarray(found.reshape(*values.shape[:-1], matrix.shape[-1]))


def _quantised(course: Course, node: Node, key: str) -> Operand:
    """Return the input of a linear; where a kernel quantises it, as an entry of its own."""
    x, state = course.operand(node, 0), course.state(node.inputs[0])
    scene = pinned(course.scene, node)
    key = scene.keys.get(node.inputs[1], "")
    by_train = quantisation(scene.train, state.t, key)
    by_infer = quantisation(scene.infer, state.i, key)
    if not (by_train.any() or by_infer.any()):
        return x
    return course.inexact(x, raised(by_train), raised(by_train + by_infer))
