"""The drift of a link's input, known by ellipsoids around its rows (docs/chains.md)."""

from __future__ import annotations

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.ellipsoids import Row, longest, reached, rows_of, sum_of
from kcdsl_certs.recheck.affine.form import Walk, raised
from kcdsl_certs.recheck.affine.tape import Curve, Entry
from kcdsl_certs.recheck.box import Floats
from kcdsl_certs.recheck.rules.state import Held


def symbol(walk: Walk, held: Held, middle: Floats, half: Floats, reference: Floats) -> int:
    """Append the drift of an input, as it is around the middle of its box; return its place.

    `half` holds the half width, with what `reference`, the centre and the middle, was rounded by.
    """
    centres, shapes = held
    rounded = 2.0**-51 * np.abs(reference)  # what centres - middle lost is a share of sum_of
    found: dict[Row, Floats] = {}
    for row, (shift, slip) in enumerate(zip(centres - middle, rounded, strict=True)):
        found[(row,)] = sum_of([shapes[row], np.outer(shift, shift), ball(slip)])

    def between(adjoint: Adjoint) -> tuple[Floats, Floats]:
        size = reached(found, half, adjoint)
        return -size, size

    def together(adjoint: Adjoint) -> float:
        total = 0.0
        for row, part in rows_of(adjoint):
            columns = part.window[-1]
            values = part.values.reshape(part.batch, -1)
            alone = float(np.linalg.norm(part.sizes(half)))
            total += min(longest(found[row][columns, columns], values), alone)
        return total * (1 + 2.0**-40)

    return walk.tape.add(Entry(half, curved=(Curve(between, together),), ellipsoids=found))


def ball(radius: Floats) -> Floats:
    """Return an ellipsoid around all that is no longer than a box."""
    return raised(np.eye(len(radius)) * float((radius**2).sum()))
