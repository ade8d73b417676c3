"""Leaves and moves: what is known, what enters, and what only moves elements (section 3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import part, viewed
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import magnitude
from kcdsl_certs.recheck.planes.course import Added, Course, halves, nothing, raised
from kcdsl_certs.recheck.planes.functional import Functional
from kcdsl_certs.recheck.planes.tape import FAINT, UNIT
from kcdsl_certs.recheck.rules.state import gamma
from kcdsl_certs.recheck.view import View
from kcdsl_certs.rejected import Rejected


def source(course: Course, node: Node) -> None:
    """Write the block input: a box around the centre, without drift but for storing."""
    centre, radius = course.scene.centre, course.scene.radius
    if centre is None or radius is None:
        raise Rejected("rule/input", "a block on token ids has no block input")
    wide = np.ascontiguousarray(np.broadcast_to(radius, centre.shape))
    own = Added(np.zeros(centre.shape), wide)
    course.write(node, centre, lambda f: (), own, nothing(centre.shape))


def embedding(course: Course, node: Node) -> None:
    """Write the rows of a table, which either kernel knows."""
    state = course.state(node.name)
    if not (state.t.point and state.i.point):
        raise Rejected("rule/weight", "the table of an embedding must be known")
    middle, radius = halves(state.d)
    added = Added(middle, radius)
    course.write(node, state.t.lo, lambda f: (), nothing(state.shape), added)


def view(course: Course, node: Node) -> None:
    """Write the elements where a view puts them; functionals of copies are summed."""
    x = course.operand(node, 0)
    view = View.of(node, x.shape)
    reference = view.moved(x.reference)
    none = np.zeros(reference.shape)
    e, d = none, none
    if view.copies > 1:
        lost = gamma(view.copies + 4, UNIT)
        e, d = (raised(view.moved(magnitude(part)) * lost) + FAINT for part in (x.e, x.d))

    def pull(f: Functional) -> list[tuple[int, Functional]]:
        return [(x.place, f.map(lambda a: viewed(a, view)))]

    course.write(node, reference, pull, Added(none, e), Added(none, d))
    origin = course.origins.get(node.inputs[0])
    if origin is not None:
        course.origins[node.name] = replace(origin, index=view.moved(origin.index))


def neg(course: Course, node: Node) -> None:
    """Write -x."""
    x = course.operand(node, 0)
    none = nothing(x.shape)
    course.write(node, -x.reference, lambda f: ((x.place, f.times(-1.0)),), none, none)


def cast(course: Course, node: Node) -> None:
    """Write x; what a cast rounds is counted with what is stored."""
    x = course.operand(node, 0)
    none = nothing(x.shape)
    course.write(node, x.reference, lambda f: ((x.place, f),), none, none)


def concat(course: Course, node: Node) -> None:
    """Write the operands one after another."""
    axis = node.attrs.integer("dim", -len(node.shape)) % len(node.shape)
    operands = [course.operand(node, k) for k in range(len(node.inputs))]
    reference = np.concatenate([x.reference for x in operands], axis=axis)

    def pull(f: Functional) -> list[tuple[int, Functional]]:
        found, offset = [], 0
        for x in operands:
            size = x.shape[axis]
            e, d = (None if p is None else part(p, axis, offset, size) for p in (f.e, f.d))
            if e is not None or d is not None:
                found.append((x.place, Functional(e, d)))
            offset += size
        return found

    none = nothing(reference.shape)
    course.write(node, reference, pull, none, none)
