"""Reaches from reverse passes, element by element: what a rule calls tight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, units
from kcdsl_certs.recheck.affine.form import UNIT, Form, Walk, numeric, raised
from kcdsl_certs.recheck.affine.lengths import ellipsoid, length
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Bools, Floats

Row = tuple[int, ...]

_WIDEST = 64  # unit functionals at a time: their windows are cut to the columns they touch
_LARGEST = 2**24  # doubles in one batch of adjoints of the largest node


def room(walk: Walk) -> int:
    """Return how many functionals may be carried at a time."""
    largest = max((entry.reach.size for entry in walk.tape.entries), default=1)
    return max(1, _LARGEST // largest)


def tight(walk: Walk, node: Node, name: str, floor: int) -> Form:
    """Bound the reach of a node by unit functionals too, in the rows that count; it is kept."""
    form = numeric(walk.forms[name])
    needed = walk.chosen(node, name, "reach", floor)
    if form.place is None or not needed.any():
        return form
    reach = form.reach.copy()
    step = min(_WIDEST, room(walk))
    for row in rows(needed):
        for first in range(0, form.shape[-1], step):
            count = min(step, form.shape[-1] - first)
            found = walk.tape.bound(form.place, units(form.shape, row, first, count), floor)
            columns: tuple[int | slice, ...] = (*row, slice(first, first + count))
            reach[columns] = np.minimum(reach[columns], found.magnitude(walk.tape.region))
    return kept(walk, name, reach)


def kept(walk: Walk, name: str, reach: Floats) -> Form:
    """Keep a smaller reach of a node, and return the node with it."""
    form = numeric(walk.forms[name])
    assert form.place is not None
    sharper = replace(form, reach=reach)
    walk.keep(name, sharper)
    walk.tape.sharpen(form.place, reach)
    return sharper


def until(walk: Walk, node: Node, name: str) -> Form:
    """Make a node's reach tight for an operation, by longer and longer passes."""
    for floor in walk.tape.floors:
        tight(walk, node, name, floor)
    return numeric(walk.forms[name])


def rows(needed: Bools) -> Iterator[Row]:
    """Yield the rows that count."""
    return (row for row in np.ndindex(*needed.shape[:-1]) if needed[row].any())


def surround(walk: Walk, place: int, shape: tuple[int, ...], needed: Bools, floor: int) -> None:
    """Find ellipsoids around the errors of rows of an entry."""
    found = {}
    for row in rows(needed):
        whole = units(shape, row, 0, shape[-1])
        found[tuple(map(int, row))] = ellipsoid(walk.tape, place, whole, floor)
    walk.tape.surround(place, found)


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


def centred(walk: Walk, form: Form, needed: Bools) -> Floats:
    """Return bounds of e - mean(e) over the last dimension, by reverse passes where needed."""
    n = form.shape[-1]
    mean = raised(form.reach.mean(axis=-1, keepdims=True) * (1 + 4 * n * UNIT))
    rounding = 4 * UNIT * (form.reach + mean)
    found = raised(form.reach + mean)
    for row in rows(needed):
        tightened = raised(along(walk, form, row, np.eye(n) - 1 / n) + rounding[row])
        found[row] = np.minimum(found[row], tightened)
    return found


def together(walk: Walk, form: Form, needed: Bools, functionals: Callable[[Row], Floats]) -> Floats:
    """Return bounds [..., 1] of the norm of functionals [m, n] of rows, infinite where unasked."""
    found = np.full(needed.shape, np.inf)
    if form.place is None:
        return np.zeros(needed.shape)
    ones = (1,) * (len(form.shape) - 1)
    for row in rows(needed):
        values = functionals(row)
        adjoint = Adjoint(values.reshape(len(values), *ones, -1), (*row, 0))
        found[row] = length(walk.tape, form.place, adjoint)
    return found
