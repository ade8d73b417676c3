"""Ellipsoids that a link of a chain hands to the next one (docs/chains.md).

They stand in no document: who checks a chain derives them, link by link.
"""

from __future__ import annotations

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.adjoint import units
from kcdsl_certs.recheck.affine.drifting import ball
from kcdsl_certs.recheck.affine.ellipsoids import sum_of
from kcdsl_certs.recheck.affine.form import Form, Walk, raised
from kcdsl_certs.recheck.affine.lengths import ellipsoid
from kcdsl_certs.recheck.affine.pair import Pair
from kcdsl_certs.recheck.box import Floats
from kcdsl_certs.recheck.rules.state import Held

_LARGEST = 2**29  # numbers in the ellipsoids of a state
_FAINT = 2.0**-16  # of the larger error, up to which a box says enough of the other


def handed(pair: Pair) -> Held | None:
    """Return where the rows of the output's drift lie; None where that would be too large.

    Row t is middle[t] + e_i - e_t, each error in an ellipsoid of its own.
    """
    if len(pair.shape) != 2 or pair.shape[0] * pair.shape[1] ** 2 > _LARGEST:
        return None
    middle, slip = box.midpoint(pair.apart)
    shapes = []
    for row in range(pair.shape[0]):
        sides = [(pair.train, pair.t), (pair.infer, pair.i)]
        sizes = [float(np.linalg.norm(form.reach[row])) for _, form in sides]
        parts = []
        for (walk, form), size in zip(sides, sizes, strict=True):
            known = size <= _FAINT * max(sizes) or form.place is None
            parts.append(_around_box(form.reach[row]) if known else _error(walk, form, row))
        if slip is not None:
            parts.append(ball(slip[row]))
        shapes.append(sum_of(parts))
    return middle, np.stack(shapes)


def _error(walk: Walk, form: Form, row: int) -> Floats:
    """Return an ellipsoid around the error of a row of the output in one kernel."""
    place = form.place
    assert place is not None
    known = walk.tape.entries[place].ellipsoids
    if (row,) in known:
        return known[(row,)]
    floor = walk.tape.cut if walk.tape.cut < place else 0
    return ellipsoid(walk.tape, place, units(form.shape, (row,), 0, form.shape[-1]), floor)


def _around_box(reach: Floats) -> Floats:
    """Return an ellipsoid around |e| ≤ reach: (Σ w) Σ P_k/w_k with w_k = reach_k."""
    return raised(np.diag(reach) * float(reach.sum()))
