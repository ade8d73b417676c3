"""The Euclidean norm of many functionals of one entry, by one reverse pass (section 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, merged
from kcdsl_certs.recheck.affine.ellipsoids import moved, rows_of, sum_of
from kcdsl_certs.recheck.affine.spectrum import largest
from kcdsl_certs.recheck.affine.tape import Entry, Tape
from kcdsl_certs.recheck.box import Floats

_ROUNDED = 2.0**-36  # more than an adjoint is off by, relatively
_FACTORED = 2.0**-24  # more than √n times what a column of a QR factorisation is off by
_LOST = 2.0**-450  # columns below it lose their squares to underflow
_MORE = 1 + 2.0**-30


def length(tape: Tape, place: int, functionals: Adjoint, formed: Entry | None = None) -> float:
    """Return a bound of the norm of functionals of the error of an entry, the region included.

    `formed` is read in the place of the entry: the same before its cast.
    """
    found = _Length(functionals.batch)
    _descend(tape, {place: functionals}, found, formed)
    return found.total


def ellipsoid(tape: Tape, place: int, functionals: Adjoint, floor: int) -> Floats:
    """Return an ellipsoid [B, B] around functionals of the error of an entry.

    What arrives at `floor` or before is bounded by the ellipsoids and reaches there.
    """
    return _surrounded(tape, {place: functionals}, functionals.batch, floor)


def _surrounded(tape: Tape, pending: dict[int, Adjoint], count: int, floor: int) -> Floats:
    found, parts = _Length(count), [np.zeros((count, count))]
    while pending:
        place = max(pending)
        adjoint = pending.pop(place)
        if place == 0:
            if tape.region is not None:
                found.symbols(adjoint, tape.region)
            break
        entry = tape.entries[place]
        if place <= floor:
            found.each = found.each + _ROUNDED * adjoint.sizes(entry.reach)
            _stopped(entry, adjoint, found, parts)
            continue
        kept = adjoint if entry.kept is None else adjoint.times(entry.kept)
        _beside(entry, adjoint, kept, found)
        _each(entry, adjoint, found)
        pulled = list(_pulled(entry, kept))
        if entry.share is not None:
            row = all(size == 1 for size in kept.extent[:-1])
            if row and not pending and len(pulled) == 1:
                ratio = float(entry.share.ratio[kept.window[:-1]].max())
                below = _surrounded(tape, dict(pulled), count, floor)
                parts.append(below * ((1 + ratio) ** 2 * _MORE))
                break
            found.each = found.each + kept.sizes(entry.share.otherwise)
        for operand, part in pulled:
            pending[operand] = merged(pending[operand], part) if operand in pending else part
    if found.gram is not None:
        parts.append(found.gram * found.trace)
    parts.append(np.eye(count) * found.rest**2)
    return sum_of(parts)


def _stopped(entry: Entry, adjoint: Adjoint, found: _Length, parts: list[Floats]) -> None:
    """Take in the error of an entry at which a pass stops, row by row."""
    for row, part in rows_of(adjoint):
        if row in entry.ellipsoids:
            columns = part.window[-1]
            values = part.values.reshape(part.batch, -1)
            parts.append(moved(entry.ellipsoids[row][columns, columns], values))
        else:
            found.symbols(part, entry.nearest)


@dataclass(slots=True)
class _Length:
    """What a reverse pass of several functionals has met.

    The vector of functionals is `centre` + Σ b_j ξ_j + (up to `each`, one by one) + (up to `more`,
    as a norm), with |ξ_j| ≤ 1; `gram` = Σ b_j b_jᵀ/|b_j|, `trace` = Σ |b_j|.
    """

    count: int
    more: float = 0.0
    trace: float = 0.0
    gram: Floats | None = None
    centre: Floats = field(init=False)
    each: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.centre = np.zeros(self.count)
        self.each = np.zeros(self.count)

    @property
    def rest(self) -> float:
        """Return a bound of the norm of what is no symbol."""
        alone = float(np.linalg.norm(self.centre) + np.linalg.norm(self.each))
        return (alone + self.more) * _MORE + _LOST

    @property
    def total(self) -> float:
        """Return a bound of the norm of the vector."""
        symbols = 0.0
        if self.gram is not None:
            symbols = math.sqrt(self.trace * largest(self.gram, self.trace))
        return (symbols + self.rest) * _MORE

    def symbols(self, adjoint: Adjoint, radius: Floats) -> None:
        """Add one symbol for each element of an entry."""
        columns = (adjoint.values * radius[adjoint.window]).reshape(self.count, -1)
        sizes = np.linalg.norm(columns, axis=0)
        some = sizes > _LOST
        self.more += _LOST * sizes.size
        if not some.any():
            return
        columns, sizes = columns[:, some], sizes[some]
        product = (columns / sizes) @ columns.T
        self.gram = product if self.gram is None else self.gram + product
        self.trace += float(sizes.sum())

    def add(self, below: _Length, ratio: float) -> None:
        """Add what lies below an entry, and up to `ratio` times that once more."""
        self.more += below.more + (ratio * below.total if ratio else 0.0)
        self.trace += below.trace
        self.centre = self.centre + below.centre
        self.each = self.each + below.each
        if below.gram is not None:
            self.gram = below.gram if self.gram is None else self.gram + below.gram


def _descend(
    tape: Tape, pending: dict[int, Adjoint], found: _Length, formed: Entry | None = None
) -> None:
    while pending:
        place = max(pending)
        adjoint = pending.pop(place)
        if place == 0:
            if tape.region is not None:
                found.symbols(adjoint, tape.region)
            return
        entry, formed = formed or tape.entries[place], None
        kept = adjoint if entry.kept is None else adjoint.times(entry.kept)
        _beside(entry, adjoint, kept, found)
        pulled = list(_pulled(entry, kept))
        alone = not pending and len(pulled) == 1
        if alone and pulled[0][1].values[0].size < found.count:
            if entry.radius is not None:
                found.each = found.each + adjoint.sizes(entry.radius)
            if entry.share is not None:
                found.each = found.each + kept.sizes(entry.share.otherwise)
            found.more += _factored(tape, *pulled[0])
            return
        _each(entry, adjoint, found)
        if entry.share is not None:
            if alone and all(size == 1 for size in kept.extent[:-1]):
                below = _Length(found.count)
                _descend(tape, dict(pulled), below)
                found.add(below, float(entry.share.ratio[kept.window[:-1]].max()))
                return
            found.each = found.each + kept.sizes(entry.share.otherwise)
        for operand, part in pulled:
            pending[operand] = merged(pending[operand], part) if operand in pending else part


def _pulled(entry: Entry, adjoint: Adjoint) -> Iterator[tuple[int, Adjoint]]:
    for operand, pull in entry.operands:
        part = pull(adjoint)
        if part is not None:
            yield operand, part


def _each(entry: Entry, adjoint: Adjoint, found: _Length) -> None:
    """Add the symbols of an entry, and what is known of it by the sums of its rows."""
    if entry.apart is not None:
        found.symbols(adjoint, entry.apart.radius)
        found.more += entry.apart.rest.together(adjoint)
    elif entry.radius is not None:
        found.symbols(adjoint, entry.radius)


def _beside(entry: Entry, adjoint: Adjoint, kept: Adjoint, found: _Length) -> None:
    """Add what an entry contributes that is not one symbol for each element."""
    found.each = found.each + _ROUNDED * adjoint.sizes(entry.reach)
    if entry.centre is not None:
        found.centre = found.centre + kept.sums(entry.centre)
        found.each = found.each + 2.0**-30 * kept.sizes(np.abs(entry.centre))
    for curve in entry.curved:
        found.more += curve.together(kept)


def _factored(tape: Tape, place: int, adjoint: Adjoint) -> float:
    """Return the norm of more functionals than elements: of the triangular factor R of A = QR."""
    triangle = np.asarray(np.linalg.qr(adjoint.values.reshape(adjoint.batch, -1), mode="r"))
    fewer = Adjoint(triangle.reshape(-1, *adjoint.extent), adjoint.start)
    inexact = _FACTORED * float(np.linalg.norm(adjoint.sizes(tape.entries[place].reach)))
    return (length(tape, place, fewer) + inexact) * _MORE
