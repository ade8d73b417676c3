"""Products of two operands, of elements or of matrices (section 3)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Floats, magnitude
from kcdsl_certs.recheck.planes.course import Added, Course, Operand, halves, raised
from kcdsl_certs.recheck.planes.functional import Functional, joined
from kcdsl_certs.recheck.planes.rules import straight
from kcdsl_certs.recheck.planes.rules.linear import SPARE
from kcdsl_certs.recheck.planes.tape import FAINT, UNIT
from kcdsl_certs.recheck.rules.state import gamma
from kcdsl_certs.rejected import Rejected

Multiply = Callable[[Floats, Floats], Floats]
Back = Callable[[Adjoint, Floats, Floats], tuple[Adjoint, Adjoint]]


def mul(course: Course, node: Node) -> None:
    """Write a * b."""

    def back(adjoint: Adjoint, a: Floats, b: Floats) -> tuple[Adjoint, Adjoint]:
        return adjoint.times(b), adjoint.times(a)

    a, b = course.operand(node, 0), course.operand(node, 1)
    if a.shape != b.shape:
        raise Rejected("bound/not-finite", "planes have no products that broadcast")
    _product(course, node, (a, b), np.multiply, back, 1, None)


def matmul(course: Course, node: Node) -> None:
    """Write a @ b; what comes straight from linears leaves less of second order."""
    a, b = course.operand(node, 0), course.operand(node, 1)
    if a.shape[:-2] != b.shape[:-2]:
        raise Rejected("bound/not-finite", "planes have no products that broadcast")
    terms = max(*a.shape[-2:], b.shape[-1])
    second = straight.context(course, node) if node.role == "context" else None
    if node.role != "context":
        second = straight.scores(course, node)
    _product(course, node, (a, b), np.matmul, _matmul_back, terms, second)


def _matmul_back(adjoint: Adjoint, a: Floats, b: Floats) -> tuple[Adjoint, Adjoint]:
    """Return the functionals of δa @ b and of a @ δb."""
    *lead, rows, columns = adjoint.window
    on_a = adjoint.values @ np.swapaxes(b[(*lead, slice(None), columns)], -1, -2)
    on_b = np.swapaxes(a[(*lead, rows)], -1, -2) @ adjoint.values
    head, (row, column) = adjoint.start[:-2], adjoint.start[-2:]
    return Adjoint(on_a, (*head, row, 0)), Adjoint(on_b, (*head, 0, column))


def _product(
    course: Course,
    node: Node,
    operands: tuple[Operand, Operand],
    multiply: Multiply,
    back: Back,
    terms: int,
    second: straight.Second | None,
) -> None:
    a, b = operands
    (ea, ra), (eb, rb), (da, sa), (db, sb) = map(halves, (a.e, b.e, a.d, b.d))
    fa, fb = a.reference + ea, b.reference + eb  # the middle of the training values
    ma, mb = fa + da / 2, fb + db / 2  # the middle of M = h + D/2
    ta, tb = ra + sa / 2, rb + sb / 2  # and how far it may be from there
    reference = multiply(a.reference, b.reference)

    def sizes(*pairs: tuple[Floats, Floats]) -> Floats:
        found = np.zeros(reference.shape)
        for left, right in pairs:
            found = found + multiply(np.abs(left), np.abs(right))
        return raised(found)

    size_ea, size_eb = magnitude(a.e), magnitude(b.e)
    size_da, size_db = magnitude(a.d), magnitude(b.d)
    lost = gamma(terms + SPARE, UNIT)
    own_e = lost * sizes(
        (a.reference, b.reference), (size_ea, fb), (fa, size_eb), (size_ea, size_eb)
    )
    own_d = lost * sizes(
        *((fa, size_db), (size_da, fb), (size_da, size_db), (size_ea, size_db), (size_da, size_eb))
    )
    second_e, second_d = sizes((ra, rb)), sizes((ta, sb), (sa, tb))
    if second is not None and second.elements is not None:
        second_e = np.minimum(second_e, second.elements[0])
        second_d = np.minimum(second_d, second.elements[1])
    centre_e = -multiply(ea, eb)
    centre_d = -multiply(ea + da / 2, db) - multiply(da, eb + db / 2)
    curved = None if second is None else second.curved
    if curved is None:
        e = Added(centre_e, raised(own_e + second_e) + FAINT)
        d = Added(centre_d, raised(own_d + second_d) + FAINT)
    else:
        e = Added(centre_e, raised(own_e) + FAINT, second_e)
        d = Added(centre_d, raised(own_d) + FAINT, second_d)
    drifting = bool(da.any() or db.any())

    def pull(f: Functional) -> tuple[tuple[int, Functional], ...]:
        on_a: list[Adjoint | None] = [None, None]
        on_b: list[Adjoint | None] = [None, None]
        if f.e is not None:
            on_a[0], on_b[0] = back(f.e, fa, fb)
        if f.d is not None:
            on_a[1], on_b[1] = back(f.d, ma + da / 2, mb + db / 2)
            if drifting:
                one, two = back(f.d, da, db)
                on_a[0], on_b[0] = joined(on_a[0], one), joined(on_b[0], two)
        return ((a.place, Functional(*on_a)), (b.place, Functional(*on_b)))

    course.write(node, reference, pull, e, d, curved)
