"""Functionals of single elements and of whole rows of a node, for sharper boxes (section 5)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.adjoint import Adjoint, units
from kcdsl_certs.recheck.box import Bools, Box, Floats
from kcdsl_certs.recheck.planes.course import halves, raised
from kcdsl_certs.recheck.planes.functional import Functional
from kcdsl_certs.recheck.planes.tape import UNIT, Tape
from kcdsl_certs.recheck.rules.state import gamma

_NUMBERS = 2**22  # of an adjoint at the largest node
DEVIATION, DRIFT = "deviation", "drift"


def of(unknown: str, adjoint: Adjoint) -> Functional:
    """Return functionals of one unknown."""
    return Functional(adjoint, None) if unknown == DEVIATION else Functional(None, adjoint)


def elements(tape: Tape, place: int, unknown: str, rows: Bools) -> Box:
    """Return the box of every element of one unknown, where `rows` [..., 1] says so."""
    entry = tape.entries[place]
    known = entry.e if unknown == DEVIATION else entry.d
    lo, hi = known.lo.copy(), known.hi.copy()
    shape, step = lo.shape, _step(tape)
    for row in _named(rows):
        for first in range(0, shape[-1], step):
            count = min(step, shape[-1] - first)
            where: tuple[int | slice, ...] = (*row, slice(first, first + count))
            low, high = tape.between(place, of(unknown, units(shape, row, first, count)))
            lo[where], hi[where] = np.maximum(lo[where], low), np.minimum(hi[where], high)
    return Box(lo, hi)


def less_mean(tape: Tape, place: int, unknown: str, weights: Floats) -> Box:
    """Return the box of u_j - Σ_k weights_k u_k in every row of one unknown u."""
    entry = tape.entries[place]
    inside = entry.e if unknown == DEVIATION else entry.d
    middle, radius = halves(inside)
    n = middle.shape[-1]
    mean = (weights * middle).sum(axis=-1, keepdims=True)
    about = radius + (weights * radius).sum(axis=-1, keepdims=True)
    lost = 2 * gamma(n + 16, UNIT)
    about = about + lost * (np.abs(middle) + (weights * np.abs(middle)).sum(axis=-1, keepdims=True))
    known = box.widen(box.sub(box.exact(middle), box.exact(mean)), raised(about))
    lo, hi = known.lo.copy(), known.hi.copy()
    # The functionals are off by the rounding of 1 - weights.
    off = raised(4 * UNIT * (1 + weights) * box.magnitude(inside))
    step = _step(tape)
    for row in np.ndindex(*middle.shape[:-1]):
        for first in range(0, n, step):
            count = min(step, n - first)
            part = slice(first, first + count)
            values = np.eye(count, n, first) - weights[row]
            low, high = tape.between(place, of(unknown, _in_row(values, row)))
            where = (*row, part)
            lo[where] = np.maximum(lo[where], box.add_down(low, -off[where]))
            hi[where] = np.minimum(hi[where], box.add_up(high, off[where]))
    return Box(lo, hi)


def along(tape: Tape, place: int, unknown: str, weights: Floats) -> Floats:
    """Return a bound of |Σ_j weights_j u_j| of every row of one unknown u, [..., 1]."""
    entry = tape.entries[place]
    size = box.magnitude(entry.e if unknown == DEVIATION else entry.d)
    found = raised((np.abs(weights) * size).sum(axis=-1, keepdims=True))
    for row in np.ndindex(*size.shape[:-1]):
        low, high = tape.between(place, of(unknown, _in_row(weights[row][None], row)))
        found[row] = np.minimum(found[row], np.maximum(-low, high))
    return found


def _in_row(values: Floats, row: tuple[int, ...]) -> Adjoint:
    ones = (1,) * len(row)
    return Adjoint(values.reshape(len(values), *ones, -1), (*row, 0))


def _named(rows: Bools) -> Iterator[tuple[int, ...]]:
    for row in np.ndindex(*rows.shape[:-1]):
        if rows[row].any():
            yield row


def _step(tape: Tape) -> int:
    """Return how many functionals are carried at a time."""
    largest = max(entry.reference.size for entry in tape.entries)
    return max(1, min(256, _NUMBERS // largest))
