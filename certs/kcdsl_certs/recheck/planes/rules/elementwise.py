"""Elementwise arithmetic, rotary embedding and ReLU (sections 3 and 4)."""

from __future__ import annotations

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded, summed
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Bools, Floats, magnitude
from kcdsl_certs.recheck.planes.course import Added, Course, Operand, raised
from kcdsl_certs.recheck.planes.functional import Functional, joined
from kcdsl_certs.recheck.planes.relu import Polygon, Relu, plain
from kcdsl_certs.recheck.planes.rules.linear import SPARE
from kcdsl_certs.recheck.planes.tape import FAINT, UNIT, Entry
from kcdsl_certs.recheck.rules.elementwise import constant
from kcdsl_certs.recheck.rules.state import gamma


def add(course: Course, node: Node) -> None:
    """Write a + b."""
    _sum(course, node, 1.0)


def sub(course: Course, node: Node) -> None:
    """Write a - b."""
    _sum(course, node, -1.0)


def _sum(course: Course, node: Node, sign: float) -> None:
    a, b = course.operand(node, 0), course.operand(node, 1)
    reference = a.reference + sign * b.reference
    repeated = reference.size // max(1, min(a.reference.size, b.reference.size))
    lost = gamma(SPARE + repeated, UNIT)

    def pull(f: Functional) -> list[tuple[int, Functional]]:
        return [_gathered(f, a, 1.0), _gathered(f, b, sign)]

    own = 4 * UNIT * (np.abs(a.reference) + np.abs(b.reference))
    none = np.zeros(reference.shape)
    course.write(
        node,
        reference,
        pull,
        Added(none, raised(own + lost * (magnitude(a.e) + magnitude(b.e))) + FAINT),
        Added(none, raised(lost * (magnitude(a.d) + magnitude(b.d))) + FAINT),
    )


def _gathered(f: Functional, x: Operand, factor: float) -> tuple[int, Functional]:
    return x.place, f.map(lambda a: summed(Adjoint(a.values * factor, a.start), x.shape))


def scale(course: Course, node: Node) -> None:
    """Write x·factor."""
    _proportional(course, node, constant(node, "factor"))


def divide(course: Course, node: Node) -> None:
    """Write x / divisor."""
    _proportional(course, node, 1 / constant(node, "divisor"))


def _proportional(course: Course, node: Node, factor: float) -> None:
    x, lost = course.operand(node, 0), gamma(SPARE, UNIT) * abs(factor)
    own = np.abs(x.reference) + magnitude(x.e)
    none = np.zeros(x.shape)
    course.write(
        node,
        x.reference * factor,
        lambda f: ((x.place, f.times(factor)),),
        Added(none, raised(lost * own) + FAINT),
        Added(none, raised(lost * magnitude(x.d)) + FAINT),
    )


def shift(course: Course, node: Node) -> None:
    """Write x + offset."""
    x, offset = course.operand(node, 0), constant(node, "offset")
    own = 4 * UNIT * (np.abs(x.reference) + abs(offset))
    none = np.zeros(x.shape)
    course.write(
        node,
        x.reference + offset,
        lambda f: ((x.place, f),),
        Added(none, raised(own) + FAINT),
        Added(none, none),
    )


def rope(course: Course, node: Node) -> None:
    """Write x∘C + rot(x)∘S with the tables that either kernel knows."""
    x = course.operand(node, 0)
    cos, sin = (course.state(name) for name in node.inputs[1:])
    train = _tables(x.shape, cos.t.lo, sin.t.lo)
    infer = _tables(x.shape, cos.i.lo, sin.i.lo)
    change = infer[0] - train[0], infer[1] - train[1]
    moves = bool(change[0].any() or change[1].any())

    def pull(f: Functional) -> tuple[tuple[int, Functional], ...]:
        e = None if f.e is None else _back(f.e, train)
        if f.d is None:
            return ((x.place, Functional(e, None)),)
        if moves:
            e = joined(e, _back(f.d, change))
        return ((x.place, Functional(e, _back(f.d, infer))),)

    lost = gamma(SPARE, UNIT)
    own = np.abs(x.reference) + magnitude(x.e)
    moved = _sizes(own, change) + _sizes(magnitude(x.d), infer)
    course.write(
        node,
        _rotated(x.reference, train),
        pull,
        Added(np.zeros(x.shape), raised(lost * _sizes(own, train)) + FAINT),
        Added(_rotated(x.reference, change), raised(lost * moved) + FAINT),
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
    """Return α∘C and α∘S turned back."""
    width = tables[0].shape[-1]
    whole = embedded(adjoint, (*adjoint.start[:-1], 0), (*adjoint.extent[:-1], width))
    by_sin = whole.values * tables[1][whole.window]
    h = width // 2
    turned = np.concatenate([by_sin[..., h:], -by_sin[..., :h]], axis=-1)
    return Adjoint(whole.values * tables[0][whole.window] + turned, whole.start)


def relu(course: Course, node: Node, given: tuple[Bools, Floats] | None) -> None:
    """Write max(x, 0) by planes; slopes [6, elements] may be given for some elements."""
    x, before, after = (
        course.operand(node, 0),
        course.state(node.inputs[0]),
        course.state(node.name),
    )
    own = Polygon(box.exact(x.reference), x.e, before.t)
    pair = Polygon(before.t, before.d, before.i)
    reference = np.maximum(x.reference, 0.0)
    slopes = plain(own, pair)
    slopes = slopes if given is None else slopes.replaced(*given)
    none = np.zeros(x.shape)
    course.places[node.name] = course.tape.add(
        Entry(
            reference,
            box.sub(after.t, box.exact(reference)),
            after.d,
            lambda f: (),
            (none, none),
            (none, none),
            relu=Relu(x.place, x.reference, own, pair, slopes),
        )
    )
