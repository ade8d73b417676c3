"""Leaves and moves: what is known, what enters, and what only moves elements (section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck.affine.adjoint import (
    Adjoint,
    part,
    permuted,
    reshaped,
    spread,
    summed,
)
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Floats, magnitude
from kcdsl_certs.recheck.planes.course import Added, Course, halves, nothing, raised
from kcdsl_certs.recheck.planes.functional import Functional
from kcdsl_certs.recheck.planes.tape import FAINT, UNIT
from kcdsl_certs.recheck.rules.state import gamma
from kcdsl_certs.rejected import Rejected

Move = Callable[[NDArray[Any]], NDArray[Any]]


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


def reshape(course: Course, node: Node) -> None:
    """Write the same elements in another shape."""
    shape, before = node.shape, course.operand(node, 0).shape
    _moved(course, node, lambda v: v.reshape(shape), lambda a: reshaped(a, shape, before))


def permute(course: Course, node: Node) -> None:
    """Write the dimensions in another order."""
    rank = len(node.shape)
    dims = [d % rank for d in node.attrs.integers("dims", -rank)]
    _moved(course, node, lambda v: np.transpose(v, dims), lambda a: permuted(a, dims))


def slice_(course: Course, node: Node) -> None:
    """Write start:stop:step along one dimension."""
    axis = node.attrs.integer("dim", -len(node.shape)) % len(node.shape)
    start, step = node.attrs.integer("start", 0), node.attrs.integer("step", 1)
    index = (slice(None),) * axis + (slice(start, node.attrs.integer("stop", 0), step),)
    _moved(course, node, lambda v: v[index], lambda a: spread(a, axis, start, step))


def expand(course: Course, node: Node) -> None:
    """Write copies of the operand; functionals of them are summed."""
    x = course.operand(node, 0)
    shape, before = node.shape, x.shape

    def move(values: NDArray[Any]) -> NDArray[Any]:
        return np.broadcast_to(values, shape)

    copies = max(1, int(np.prod(shape)) // max(1, int(np.prod(before))))
    if copies == 1:
        _moved(course, node, move, lambda a: summed(a, before))
        return
    lost = gamma(copies + 4, UNIT)
    _moved(
        course,
        node,
        move,
        lambda a: summed(a, before),
        (raised(move(magnitude(x.e)) * lost) + FAINT, raised(move(magnitude(x.d)) * lost) + FAINT),
    )


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


def _moved(
    course: Course,
    node: Node,
    move: Move,
    back: Callable[[Adjoint], Adjoint],
    lost: tuple[Floats, Floats] | None = None,
) -> None:
    x = course.operand(node, 0)
    reference = np.ascontiguousarray(move(x.reference))
    none = np.zeros(reference.shape)
    e, d = (none, none) if lost is None else lost
    course.write(
        node,
        reference,
        lambda f: ((x.place, f.map(back)),),
        Added(none, e),
        Added(none, d),
    )
    origin = course.origins.get(node.inputs[0])
    if origin is not None:
        index = np.ascontiguousarray(move(origin.index))
        course.origins[node.name] = replace(origin, index=index)
