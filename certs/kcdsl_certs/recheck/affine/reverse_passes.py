"""Bounds of elements, and Gram norms of rows, by reverse passes over the tape (section 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, gathered, merged, reads_one_each, units
from kcdsl_certs.recheck.affine.ellipsoids import (
    Part,
    RankOne,
    Seen,
    largest,
    longest,
    moved_with_extents,
    multiplied,
    rows_of,
    sum_of,
)
from kcdsl_certs.recheck.affine.form import Form, Walk, form_of
from kcdsl_certs.recheck.affine.many_rows import RowReach
from kcdsl_certs.recheck.affine.tape import NonlinearPart, Tape, TapeEntry
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval.box import UNIT, Bools, Floats, raised

_ROUNDED = 2.0**-36  # more than an adjoint is off by, relatively
_FACTORED = 2.0**-24  # more than √n times what a column of a QR factorisation is off by
_LOST = 2.0**-450  # columns below it lose their squares to underflow
_MORE = 1 + 2.0**-30


def length(
    tape: Tape,
    place: int,
    functionals: Adjoint,
    formed: TapeEntry | None = None,
    floor: int = 0,
) -> float:
    """Return a bound of the norm of functionals of the error of an entry, the region included.

    `formed` is read in the place of the entry: the same before its cast. What arrives at `floor` or
    before is bounded by the ellipsoids and reaches there.
    """
    found = _Length(functionals.batch)
    _descend(tape, {place: functionals}, found, formed, floor)
    return found.total


def ellipsoid(tape: Tape, place: int, functionals: Adjoint, floor: int) -> Floats:
    """Return an ellipsoid [B, B] around functionals of the error of an entry.

    What arrives at `floor` or before is bounded by the ellipsoids and reaches there.
    """
    return surrounded(tape, place, functionals, floor).shape


@dataclass(frozen=True, slots=True)
class Surrounded:
    """What one pass says of functionals [B]: an ellipsoid [B, B] around them, and the size of each;
    they are sums of members of the ellipsoids `parts` and of a vector no longer than `rest`."""

    shape: Floats
    each: Floats
    parts: tuple[Floats | RankOne, ...]
    rest: float

    @property
    def norm(self) -> float:
        """Return a bound of the norm of all functionals."""
        total = self.rest
        for part in self.parts:
            if isinstance(part, RankOne):
                total += math.sqrt(part.largest)
            else:
                total += math.sqrt(largest(part, float(np.trace(part)) * _MORE))
        return total * _MORE


def surrounded(tape: Tape, place: int, functionals: Adjoint, floor: int) -> Surrounded:
    """Return what one pass says of functionals of the error of an entry; see `ellipsoid`."""
    return _surrounded(tape, {place: functionals}, functionals.batch, floor)


def _surrounded(tape: Tape, pending: dict[int, Adjoint], count: int, floor: int) -> Surrounded:
    found, parts = _Length(count, single=np.zeros(count)), list[Part]()
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
        if entry.rows is not None:
            _of_rows(entry.rows, adjoint, found)
            continue
        kept = adjoint if entry.kept is None else adjoint.times(entry.kept)
        _beside(entry, adjoint, kept, found, parts)
        _each(entry, adjoint, found, parts)
        if entry.gather is not None and adjoint.extent[-2] == 1:
            gathered = entry.gather(adjoint, floor)
            if gathered is not None:
                parts += gathered.parts
                found.alone(gathered.each)
                found.each = found.each + gathered.lost
                _wait(pending, gathered.pulled)
                continue
        one_row = all(size == 1 for size in kept.extent[:-1])
        if entry.share is not None and one_row and not pending and len(entry.operands) == 1:
            below, each = _shared(tape, entry, kept, floor)
            parts.append(below)
            found.alone(each)
            break
        if entry.share is not None:
            found.each = found.each + kept.sizes(entry.share.otherwise)
        _wait(pending, _pulled(entry, kept))
    if found.gram is not None:
        parts.append(found.gram * found.trace)
    alone = RankOne(found.centre, 0.0, found.uncentred**2)
    whole = multiplied(parts)
    shape = sum_of([*whole, RankOne(found.centre, 1.0, 0.0), alone])
    return Surrounded(shape, found.sizes, tuple(whole), found.rest)


def _shared(tape: Tape, entry: TapeEntry, kept: Adjoint, floor: int) -> tuple[Part, Floats]:
    """Return an ellipsoid around 1 + ratio times what is below an entry, and bounds one by one, of
    functionals of one row: of its elements, as the functionals see them, where these are fewer."""
    assert entry.share is not None
    sides = 1 + float(entry.share.ratio[kept.window[:-1]].max())
    values = kept.values.reshape(kept.batch, -1)
    few = values.shape[1] < kept.batch
    read = (
        kept if not few else Adjoint(np.eye(values.shape[1]).reshape(-1, *kept.extent), kept.start)
    )
    below = _surrounded(tape, dict(_pulled(entry, read)), read.batch, floor)
    shape, each = below.shape * (sides**2 * _MORE), below.each * sides
    if not few:
        return shape, each
    seen = Seen.by(values, shape)
    return seen, np.minimum(seen.extents, np.abs(values) @ each * _MORE)


def _stopped(entry: TapeEntry, adjoint: Adjoint, found: _Length, parts: list[Part]) -> None:
    """Take in the error of an entry at which a pass stops, row by row."""
    for row, part in rows_of(adjoint):
        if not part.values.any():
            continue
        if row in entry.ellipsoids:
            columns = part.window[-1]
            values = part.values.reshape(part.batch, -1)
            around, extents = moved_with_extents(entry.ellipsoids[row][columns, columns], values)
            parts.append(around)
            found.alone(np.minimum(part.sizes(entry.nearest), extents))
        else:
            found.symbols(part, entry.nearest)


def _of_rows(rows_of: RowReach, adjoint: Adjoint, found: _Length) -> None:
    """Take in all of an entry whose rows have bounds: a symbol for each element, and for each line
    of a row."""
    found.each = found.each + _ROUNDED * adjoint.sizes(rows_of.reach)
    found.symbols(adjoint, rows_of.radius)
    for line in rows_of.lines:
        sums = (adjoint.values * line.direction[adjoint.window]).sum(axis=-1)
        found.columns(sums * line.size[adjoint.window[0]])


@dataclass(slots=True)
class _Length:
    """What a reverse pass of several functionals has met.

    The vector of functionals is `centre` + Σ b_j ξ_j + (up to `each`, one by one) + (up to `more`,
    as a norm), with |ξ_j| ≤ 1; `gram` = Σ b_j b_jᵀ/|b_j|, `trace` = Σ |b_j|. `single`, where it is
    wanted, bounds all but centre and `each` functional by functional.
    """

    count: int
    more: float = 0.0
    trace: float = 0.0
    gram: Floats | None = None
    single: Floats | None = None
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
    def uncentred(self) -> float:
        """Return the same without the centre."""
        return (float(np.linalg.norm(self.each)) + self.more) * _MORE + _LOST

    @property
    def total(self) -> float:
        """Return a bound of the norm of the vector."""
        symbols = 0.0
        if self.gram is not None:
            symbols = math.sqrt(self.trace * largest(self.gram, self.trace))
        return (symbols + self.rest) * _MORE

    @property
    def sizes(self) -> Floats:
        """Return a bound of the size of each functional."""
        assert self.single is not None
        return (self.single + np.abs(self.centre) + self.each) * _MORE + _LOST

    def alone(self, sizes: Floats) -> None:
        """Add what functionals are at most, one by one."""
        if self.single is not None:
            self.single = self.single + sizes

    def symbols(self, adjoint: Adjoint, radius: Floats) -> None:
        """Add one symbol for each element of an entry."""
        columns = (adjoint.values * radius[adjoint.window]).reshape(self.count, -1)
        if reads_one_each(columns):
            sizes = np.abs(np.diagonal(columns))
            self.alone(sizes)
            self._squares(np.diag(sizes), float(sizes.sum()))
        else:
            self.columns(columns)

    def columns(self, columns: Floats) -> None:
        """Add one symbol for each column; of parallel ones, one for all."""
        sizes = np.linalg.norm(columns, axis=0)
        some = sizes > _LOST
        self.more += _LOST * sizes.size
        self.alone(np.full(self.count, _LOST * sizes.size))
        if not some.any():
            return
        columns, lost = gathered(columns if some.all() else columns[:, some])
        self.each = self.each + lost
        self.alone(np.abs(columns).sum(axis=1))
        sizes = np.linalg.norm(columns, axis=0)
        scaled = columns / np.sqrt(sizes)
        self._squares(scaled @ scaled.T, float(sizes.sum()))

    def _squares(self, product: Floats, trace: float) -> None:
        """Add Σ b bᵀ/|b| and Σ |b|."""
        self.gram = product if self.gram is None else self.gram + product
        self.trace += trace

    def add(self, below: _Length, ratio: float) -> None:
        """Add what lies below an entry, and up to `ratio` times that once more."""
        self.more += below.more + (ratio * below.total if ratio else 0.0)
        self.trace += below.trace
        self.centre = self.centre + below.centre
        self.each = self.each + below.each
        if below.gram is not None:
            self.gram = below.gram if self.gram is None else self.gram + below.gram


def _descend(
    tape: Tape,
    pending: dict[int, Adjoint],
    found: _Length,
    formed: TapeEntry | None = None,
    floor: int = 0,
) -> None:
    while pending:
        place = max(pending)
        adjoint = pending.pop(place)
        if place == 0:
            if tape.region is not None:
                found.symbols(adjoint, tape.region)
            return
        entry, formed = formed or tape.entries[place], None
        if place <= floor:
            found.each = found.each + _ROUNDED * adjoint.sizes(entry.reach)
            _at_floor(entry, adjoint, found)
            continue
        if entry.rows is not None:
            _of_rows(entry.rows, adjoint, found)
            continue
        kept = adjoint if entry.kept is None else adjoint.times(entry.kept)
        _beside(entry, adjoint, kept, found)
        pulled = list(_pulled(entry, kept))
        alone = not pending and len(pulled) == 1
        if alone and pulled[0][1].values[0].size < found.count:
            if entry.radius is not None:
                found.each = found.each + adjoint.sizes(entry.radius)
            if entry.share is not None:
                found.each = found.each + kept.sizes(entry.share.otherwise)
            found.more += _factored(tape, *pulled[0], floor)
            return
        _each(entry, adjoint, found)
        if entry.share is not None:
            if alone and all(size == 1 for size in kept.extent[:-1]):
                below = _Length(found.count)
                _descend(tape, dict(pulled), below, None, floor)
                found.add(below, float(entry.share.ratio[kept.window[:-1]].max()))
                return
            found.each = found.each + kept.sizes(entry.share.otherwise)
        _wait(pending, pulled)


def _wait(pending: dict[int, Adjoint], pulled: Iterable[tuple[int, Adjoint]]) -> None:
    """Add functionals to those that wait at entries."""
    for operand, part in pulled:
        pending[operand] = merged(pending[operand], part) if operand in pending else part


def _at_floor(entry: TapeEntry, adjoint: Adjoint, found: _Length) -> None:
    """Take in the error of an entry at which a pass stops, by the norms of its rows."""
    for row, part in rows_of(adjoint):
        if not part.values.any():
            continue
        if row in entry.ellipsoids:
            columns = part.window[-1]
            values = part.values.reshape(part.batch, -1)
            found.more += longest(entry.ellipsoids[row][columns, columns], values)
        else:
            found.symbols(part, entry.nearest)


def _pulled(entry: TapeEntry, adjoint: Adjoint) -> Iterator[tuple[int, Adjoint]]:
    for operand, pull in entry.operands:
        part = pull(adjoint)
        if part is not None:
            yield operand, part


def _each(
    entry: TapeEntry, adjoint: Adjoint, found: _Length, parts: list[Part] | None = None
) -> None:
    """Add the symbols of an entry, and what is known of it by the sums of its rows; ellipsoids to
    `parts`, where these are wanted."""
    radius = entry.radius if entry.apart is None else entry.apart.radius
    few = len(adjoint.values) > adjoint.values[0].size
    if radius is not None and parts is not None and few:
        parts.append(_few_symbols(adjoint, radius, found))
    elif radius is not None:
        found.symbols(adjoint, radius)
    if entry.apart is not None:
        _curve(entry.apart.rest, adjoint, found, parts)


def _few_symbols(adjoint: Adjoint, radius: Floats, found: _Length) -> Part:
    """Return the ellipsoid of symbols b_j ξ_j that are fewer than the functionals, as these see it:
    b_j = A_j ρ_j, weighted by ρ_j|A_j|."""
    values, sizes = adjoint.values.reshape(adjoint.batch, -1), radius[adjoint.window].reshape(-1)
    columns = np.maximum(np.linalg.norm(values, axis=0), _LOST)
    found.alone(np.abs(values) @ sizes * _MORE)
    return Seen.by(values, sizes / columns * float(sizes @ columns) * _MORE)


def _curve(
    curve: NonlinearPart, adjoint: Adjoint, found: _Length, parts: list[Part] | None
) -> None:
    """Add what is known functional by functional."""
    if parts is None or curve.around is None:
        found.more += curve.together(adjoint)
    else:
        parts += curve.around(adjoint)
    if parts is not None:
        found.alone(curve.one_by_one(adjoint))


def _beside(
    entry: TapeEntry,
    adjoint: Adjoint,
    kept: Adjoint,
    found: _Length,
    parts: list[Part] | None = None,
) -> None:
    """Add what an entry contributes that is not one symbol for each element; ellipsoids to `parts`,
    where these are wanted."""
    found.each = found.each + _ROUNDED * adjoint.sizes(entry.reach)
    if entry.centre is not None:
        found.centre = found.centre + kept.sums(entry.centre)
        found.each = found.each + 2.0**-30 * kept.sizes(np.abs(entry.centre))
    for curve in entry.curved:
        _curve(curve, kept, found, parts)


def _factored(tape: Tape, place: int, adjoint: Adjoint, floor: int) -> float:
    """Return the norm of more functionals than elements: of the triangular factor R of A = QR,
    which is kept for the next row."""
    matrix = adjoint.values.reshape(adjoint.batch, -1)
    if tape.factored is None or not np.array_equal(tape.factored[0], matrix):
        tape.factored = matrix, np.asarray(np.linalg.qr(matrix, mode="r"))
    triangle = tape.factored[1]
    fewer = Adjoint(triangle.reshape(-1, *adjoint.extent), adjoint.start)
    inexact = _FACTORED * float(np.linalg.norm(adjoint.sizes(tape.entries[place].reach)))
    return (length(tape, place, fewer, floor=floor) + inexact) * _MORE


Row = tuple[int, ...]

_WIDEST = 64  # unit functionals at a time: their windows are cut to the columns they touch
AT_ONCE = 256  # of an output row, and of a result before its cast, which both read the same
OF_ROWS = 1024  # of one row, where sums over rows are bounded one by one
_LARGEST = 2**24  # doubles in one batch of adjoints of the largest node


def room(walk: Walk) -> int:
    """Return how many functionals may be carried at a time."""
    largest = max((entry.reach.size for entry in walk.tape.entries), default=1)
    return max(1, _LARGEST // largest)


def room_of_rows(walk: Walk) -> int:
    """Return how many functionals of one row may be carried at a time. Of a block with one softmax
    they read many rows only where these are bounded one by one, if any are."""
    if len(walk.softmaxes) == 1 and any(entry.rows is not None for entry in walk.tape.entries):
        return OF_ROWS
    return min(AT_ONCE, room(walk))


def tight(walk: Walk, node: Node, name: str, floor: int) -> Form:
    """Bound the reach of a node by unit functionals too, in the rows that count; it is kept."""
    form = form_of(walk.forms[name])
    needed = walk.chosen(node, name, "reach", floor)
    if form.place is None or not needed.any():
        return form
    return kept(walk, name, _reaches(walk, form, needed, floor))


def _reaches(walk: Walk, form: Form, needed: Bools, floor: int) -> Floats:
    """Return the reach of a node, by unit functionals in the rows needed; of a view, by those of
    the elements that were moved there."""
    assert form.place is not None
    reach = form.reach.copy()
    if form.moved is not None and form.cases is None:
        source, view = form_of(walk.forms[form.moved[0]]), form.moved[1]
        if source.place is not None and source.place > floor:
            read = np.zeros(source.reach.size, dtype=np.bool_)
            index = view.moved(np.arange(source.reach.size).reshape(source.shape))
            read[index[np.broadcast_to(needed, form.shape)]] = True
            some = np.asarray(read.reshape(source.shape).any(axis=-1, keepdims=True))
            moved = view.moved(_reaches(walk, source, some, floor))
            radius = walk.tape.entries[form.place].radius
            moved = moved if radius is None else raised(moved + radius)
            return np.where(needed, np.minimum(reach, moved), reach)
    step = min(_WIDEST, room(walk))
    for row in rows(needed):
        for first in range(0, form.shape[-1], step):
            count = min(step, form.shape[-1] - first)
            found = walk.tape.bound(form.place, units(form.shape, row, first, count), floor)
            columns: tuple[int | slice, ...] = (*row, slice(first, first + count))
            reach[columns] = np.minimum(reach[columns], found.magnitude(walk.tape.region))
    return reach


def kept(walk: Walk, name: str, reach: Floats) -> Form:
    """Keep a smaller reach of a node, and return the node with it."""
    form = form_of(walk.forms[name])
    assert form.place is not None
    sharper = replace(form, reach=reach)
    walk.keep(name, sharper)
    walk.tape.sharpen(form.place, reach)
    return sharper


def until(walk: Walk, node: Node, name: str) -> Form:
    """Make a node's reach tight for an operation, by longer and longer passes."""
    for floor in walk.tape.floors:
        tight(walk, node, name, floor)
    return form_of(walk.forms[name])


def rows(needed: Bools) -> Iterator[Row]:
    """Yield the rows that count."""
    return (row for row in np.ndindex(*needed.shape[:-1]) if needed[row].any())


def surround(walk: Walk, place: int, shape: tuple[int, ...], needed: Bools, floor: int) -> Floats:
    """Find ellipsoids around the errors of rows of an entry; return bounds of the norms of these
    rows [..., 1], infinite in others."""
    found, norms = {}, np.full(needed.shape, np.inf)
    for row in rows(needed):
        whole = surrounded(walk.tape, place, units(shape, row, 0, shape[-1]), floor)
        found[tuple(map(int, row))], norms[row] = whole.shape, whole.norm
    walk.tape.surround(place, found)
    return norms


def along(walk: Walk, form: Form, row: Row, functionals: Floats, floor: int = 0) -> Floats:
    """Return bounds of functionals [B, n] of one row of a node."""
    if form.place is None:
        return np.zeros(functionals.shape[0])
    ones = (1,) * len(row)
    found, step = [], room_of_rows(walk)
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


def asked_together(
    walk: Walk, node: Node, name: str, functionals: Callable[[Row], Floats]
) -> Floats:
    """Return bounds [..., 1] of the norm of functionals [m, n] of the rows of a node in which an
    operation asks for them, infinite elsewhere."""
    found = together(walk, form_of(walk.forms[name]), walk.chosen(node, name, "norm"), functionals)
    if not walk.tape.cut or walk.passes.rows is None:
        return found
    near, cut = walk.chosen(node, name, "norm", walk.tape.cut), walk.tape.cut
    sooner = together(walk, form_of(walk.forms[name]), near, functionals, cut)
    return np.minimum(found, sooner)


def together(
    walk: Walk,
    form: Form,
    needed: Bools,
    functionals: Callable[[Row], Floats],
    floor: int = 0,
) -> Floats:
    """Return bounds [..., 1] of the norm of functionals [m, n] of rows, infinite where unasked."""
    found = np.full(needed.shape, np.inf)
    if form.place is None:
        return np.zeros(needed.shape)
    ones = (1,) * (len(form.shape) - 1)
    for row in rows(needed):
        values = functionals(row)
        adjoint = Adjoint(values.reshape(len(values), *ones, -1), (*row, 0))
        found[row] = length(walk.tape, form.place, adjoint, floor=floor)
    return found
