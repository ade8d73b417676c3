"""Reaches from reverse passes, element by element: what a rule calls tight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, units
from kcdsl_certs.recheck.affine.form import UNIT, Form, Walk, numeric, raised
from kcdsl_certs.recheck.affine.lengths import length
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Bools, Floats

Row = tuple[int, ...]

_WIDEST = 64  # unit functionals at a time: their windows are cut to the columns they touch
_LARGEST = 2**24  # doubles in one batch of adjoints of the largest node


def room(walk: Walk) -> int:
    """Return how many functionals may be carried at a time."""
    largest = max((entry.reach.size for entry in walk.tape.entries), default=1)
    return max(1, _LARGEST // largest)


def tight(walk: Walk, name: str, form: Form, needed: Bools, floor: int = 0) -> Form:
    """Return a form whose reach is also bounded by unit functionals; the node keeps it.

    `needed` [..., 1] says in which rows it counts; if in one, all rows are bounded. A reader whose
    reaches are a little smaller would else forgo a row that the writer bounded.
    """
    if form.place is None or not needed.any():
        return form
    reach = form.reach.copy()
    step = min(_WIDEST, room(walk))
    for row in np.ndindex(*form.shape[:-1]):
        for first in range(0, form.shape[-1], step):
            count = min(step, form.shape[-1] - first)
            found = walk.tape.bound(form.place, units(form.shape, row, first, count), floor)
            columns = (*row, slice(first, first + count))
            reach[columns] = np.minimum(reach[columns], found.magnitude(walk.tape.region))
    sharper = Form(form.reference, reach, form.place, form.origin, form.allowed)
    walk.keep(name, sharper)
    walk.tape.sharpen(form.place, reach)
    return sharper


def until(walk: Walk, name: str, needed: Callable[[Form], Bools]) -> Form:
    """Make a node's reach tight, by longer and longer passes, until it is needed no more."""
    form = numeric(walk.forms[name])
    for floor in walk.tape.floors:
        form = tight(walk, name, form, needed(form), floor)
    return form


def sharpened(
    walk: Walk, node: Node, times: Callable[[Floats, Floats], Floats], worth: float
) -> None:
    """Make the reaches of both factors tight while the product of the reaches exceeds `worth`."""

    def counts(form: Form) -> Bools:
        a, b = (numeric(walk.forms[name]).reach for name in node.inputs)
        return np.full((*form.shape[:-1], 1), not float(times(a, b).sum()) <= worth)

    if all(numeric(walk.forms[name]).place is not None for name in node.inputs):
        for name in node.inputs:
            until(walk, name, counts)


def along(walk: Walk, form: Form, row: Row, functionals: Floats, floor: int = 0) -> Floats:
    """Return bounds of functionals [B, n] of one row of a node."""
    if form.place is None:
        return np.zeros(functionals.shape[0])
    ones = (1,) * len(row)
    found, step = [], room(walk)
    for first in range(0, functionals.shape[0], step):
        part = functionals[first : first + step]
        adjoint = Adjoint(part.reshape(part.shape[0], *ones, -1), (*row, 0))
        found.append(walk.tape.bound(form.place, adjoint, floor).magnitude(walk.tape.region))
    return np.concatenate(found)


def centred(walk: Walk, form: Form, needed: Bools, floor: int = 0) -> Floats:
    """Return bounds of e - mean(e) over the last dimension, by reverse passes where needed."""
    n = form.shape[-1]
    mean = raised(form.reach.mean(axis=-1, keepdims=True) * (1 + 4 * n * UNIT))
    rounding = 4 * UNIT * (form.reach + mean)
    found = raised(form.reach + mean)
    for row in np.ndindex(*form.shape[:-1]) if needed.any() else ():
        tightened = raised(along(walk, form, row, np.eye(n) - 1 / n, floor) + rounding[row])
        found[row] = np.minimum(found[row], tightened)
    return found


def together(walk: Walk, form: Form, needed: Bools, functionals: Callable[[Row], Floats]) -> Floats:
    """Return bounds [..., 1] of the norm of functionals [m, n] of a row; infinite if none count."""
    found = np.full(needed.shape, np.inf)
    if form.place is None:
        return np.zeros(needed.shape)
    ones = (1,) * (len(form.shape) - 1)
    for row in np.ndindex(*form.shape[:-1]) if needed.any() else ():
        values = functionals(row)
        adjoint = Adjoint(values.reshape(len(values), *ones, -1), (*row, 0))
        found[row] = length(walk.tape, form.place, adjoint)
    return found
