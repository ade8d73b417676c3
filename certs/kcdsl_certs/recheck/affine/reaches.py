"""Reaches from reverse passes, element by element: what a rule calls tight."""

from __future__ import annotations

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, units
from kcdsl_certs.recheck.affine.form import UNIT, Form, Walk, raised
from kcdsl_certs.recheck.box import Floats

_WIDEST = 64  # unit functionals at a time: their windows are cut to the columns they touch
_LARGEST = 2**24  # doubles in one batch of adjoints of the largest node


def room(walk: Walk) -> int:
    """Return how many functionals may be carried at a time."""
    largest = max((entry.reach.size for entry in walk.tape.entries), default=1)
    return max(1, _LARGEST // largest)


def tight(walk: Walk, name: str, form: Form) -> Form:
    """Return a form whose reach is also bounded by unit functionals; the node keeps it."""
    if form.place is None or not form.reach.any():
        return form
    reach = form.reach.copy()
    step = min(_WIDEST, room(walk))
    for row in np.ndindex(*form.shape[:-1]):
        for first in range(0, form.shape[-1], step):
            count = min(step, form.shape[-1] - first)
            found = walk.tape.bound(form.place, units(form.shape, row, first, count))
            columns = (*row, slice(first, first + count))
            reach[columns] = np.minimum(reach[columns], found.magnitude(walk.tape.region))
    sharper = Form(form.reference, reach, form.place, form.origin, form.allowed)
    walk.keep(name, sharper)
    return sharper


def along(walk: Walk, form: Form, row: tuple[int, ...], functionals: Floats) -> Floats:
    """Return bounds of functionals [B, n] of one row of a node."""
    if form.place is None:
        return np.zeros(functionals.shape[0])
    ones = (1,) * len(row)
    found, step = [], room(walk)
    for first in range(0, functionals.shape[0], step):
        part = functionals[first : first + step]
        adjoint = Adjoint(part.reshape(part.shape[0], *ones, -1), (*row, 0))
        found.append(walk.tape.bound(form.place, adjoint).magnitude(walk.tape.region))
    return np.concatenate(found)


def centred(walk: Walk, form: Form) -> Floats:
    """Return bounds of e - mean(e) over the last dimension, by reverse passes."""
    n = form.shape[-1]
    mean = raised(form.reach.mean(axis=-1, keepdims=True))
    rounding = 4 * UNIT * (form.reach + mean)
    plain = raised(form.reach * (1 - 1 / n) + mean - form.reach / n + 2 * rounding)
    found = np.empty(form.shape)
    for row in np.ndindex(*form.shape[:-1]):
        found[row] = along(walk, form, row, np.eye(n) - 1 / n)
    return np.minimum(plain, raised(found + rounding))
