"""Bounds of elements, and Gram norms of rows, by reverse passes over the tape (section 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, gathered, merged, reads_one_each, units
from kcdsl_certs.recheck.affine.ellipsoids import (
    EllipsoidImage,
    Part,
    RankOne,
    around_sum,
    image_with_bounds,
    largest_eigenvalue,
    multiplied,
    norm_on_ellipsoid,
    rows_of,
)
from kcdsl_certs.recheck.affine.form import Form, Walk, form_of
from kcdsl_certs.recheck.affine.many_rows import RowErrors
from kcdsl_certs.recheck.affine.tape import NonlinearPart, Tape, TapeEntry
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval.box import UNIT, Bools, Floats, raised

_ROUNDED = 2.0**-36  # bounds the relative error of an adjoint
_FACTORED = 2.0**-24  # bounds √n times the error of a column of a QR factorisation
_LOST = 2.0**-450  # squares of smaller columns underflow
_MORE = 1 + 2.0**-30
_MANY = 2**10  # functionals, of whose norms eigenvalues of parts take too long


def gram_norm(
    tape: Tape,
    place: int,
    functionals: Adjoint,
    formed: TapeEntry | None = None,
    floor: int = 0,
) -> float:
    """Return a bound of the norm of functionals of the error of an entry, the region included.

    `formed` replaces the entry: the same result before its cast. Adjoints at `floor` or before are
    bounded by the ellipsoids and reaches there.
    """
    found = _NormTerms(functionals.batch)
    _descend(tape, {place: functionals}, found, formed, floor)
    return found.total


def gram_ellipsoid(tape: Tape, place: int, functionals: Adjoint, floor: int) -> Floats:
    """Return an ellipsoid [B, B] around functionals of the error of an entry.

    Adjoints at `floor` or before are bounded by the ellipsoids and reaches there.
    """
    return surrounded(tape, place, functionals, floor).shape


@dataclass(frozen=True, slots=True)
class Surrounded:
    """Bounds of functionals [B] from one pass: an ellipsoid [B, B] around them, and the size of
    each. They are sums of members of the ellipsoids `parts` and of a vector no longer than
    `rest`."""

    shape: Floats
    each: Floats
    parts: tuple[Floats | RankOne, ...]
    rest: float

    @property
    def norm(self) -> float:
        """Return a bound of the norm of all functionals; of many, by the ellipsoid alone."""
        if len(self.shape) >= _MANY:
            return (
                math.sqrt(largest_eigenvalue(self.shape, float(np.trace(self.shape)) * _MORE))
                * _MORE
            )
        total = self.rest
        for part in self.parts:
            if isinstance(part, RankOne):
                total += math.sqrt(part.largest)
            else:
                total += math.sqrt(largest_eigenvalue(part, float(np.trace(part)) * _MORE))
        return total * _MORE


def surrounded(tape: Tape, place: int, functionals: Adjoint, floor: int) -> Surrounded:
    """Return the bounds of one pass for functionals of an entry; see `gram_ellipsoid`."""
    return _surrounded(tape, {place: functionals}, functionals.batch, floor)


def _surrounded(tape: Tape, pending: dict[int, Adjoint], count: int, floor: int) -> Surrounded:
    found, parts = _NormTerms(count, single=np.zeros(count)), list[Part]()
    while pending:
        place = max(pending)
        adjoint = pending.pop(place)
        if place == 0:
            if tape.region is not None:
                found.symbols(adjoint, tape.region)
            break
        entry = tape.entries[place]
        if place <= floor:
            found.each = found.each + _ROUNDED * adjoint.sizes(entry.error_bound)
            _add_stopped(entry, adjoint, found, parts)
            continue
        if entry.rows is not None:
            _add_rows(entry.rows, adjoint, found)
            continue
        kept = adjoint if entry.kept is None else adjoint.times(entry.kept)
        _add_other_terms(entry, adjoint, kept, found, parts)
        _add_own_terms(entry, adjoint, found, parts)
        if entry.gather is not None and adjoint.extent[-2] == 1:
            gathered = entry.gather(adjoint, floor)
            if gathered is not None:
                parts += gathered.parts
                found.alone(gathered.each)
                found.each = found.each + gathered.lost
                _add_pending(pending, gathered.passed)
                continue
        one_row = all(size == 1 for size in kept.extent[:-1])
        if entry.share is not None and one_row and not pending and len(entry.operands) == 1:
            below, each = _amplified(tape, entry, kept, floor)
            parts.append(below)
            found.alone(each)
            break
        if entry.share is not None:
            found.each = found.each + kept.sizes(entry.share.otherwise)
        _add_pending(pending, _on_operands(entry, kept))
    if found.gram is not None:
        parts.append(found.gram * found.trace)
    alone = RankOne(found.centre, 0.0, found.uncentred**2)
    whole = multiplied(parts)
    shape = around_sum([*whole, RankOne(found.centre, 1.0, 0.0), alone])
    return Surrounded(shape, found.sizes, tuple(whole), found.rest)


def _amplified(tape: Tape, entry: TapeEntry, kept: Adjoint, floor: int) -> tuple[Part, Floats]:
    """Return an ellipsoid around 1 + ratio times the terms below an entry, and bounds of each, for
    functionals of one row: as the image of an ellipsoid of its elements if these are fewer."""
    assert entry.share is not None
    sides = 1 + float(entry.share.ratio[kept.window[:-1]].max())
    values = kept.values.reshape(kept.batch, -1)
    few = values.shape[1] < kept.batch
    read = (
        kept if not few else Adjoint(np.eye(values.shape[1]).reshape(-1, *kept.extent), kept.start)
    )
    below = _surrounded(tape, dict(_on_operands(entry, read)), read.batch, floor)
    shape, each = below.shape * (sides**2 * _MORE), below.each * sides
    if not few:
        return shape, each
    seen = EllipsoidImage.of(values, shape)
    return seen, np.minimum(seen.extents, np.abs(values) @ each * _MORE)


def _add_stopped(entry: TapeEntry, adjoint: Adjoint, found: _NormTerms, parts: list[Part]) -> None:
    """Add the error of an entry at which a pass stops, row by row."""
    for row, part in rows_of(adjoint):
        if not part.values.any():
            continue
        if row in entry.ellipsoids:
            columns = part.window[-1]
            values = part.values.reshape(part.batch, -1)
            around, extents = image_with_bounds(entry.ellipsoids[row][columns, columns], values)
            parts.append(around)
            found.alone(np.minimum(part.sizes(entry.nearest), extents))
        else:
            found.symbols(part, entry.nearest)


def _add_rows(rows_of: RowErrors, adjoint: Adjoint, found: _NormTerms) -> None:
    """Add the whole error of an entry whose rows have bounds: a symbol for each element, and for
    each line of a row."""
    found.each = found.each + _ROUNDED * adjoint.sizes(rows_of.error_bound)
    found.symbols(adjoint, rows_of.radius)
    for line in rows_of.lines:
        sums = (adjoint.values * line.direction[adjoint.window]).sum(axis=-1)
        found.columns(sums * line.size[adjoint.window[0]])


@dataclass(slots=True)
class _NormTerms:
    """Sums of a reverse pass of several functionals.

    The vector of functionals is `centre` + Σ b_j ξ_j + (a vector up to `each`, element by element)
    + (a vector of norm up to `more`), with |ξ_j| ≤ 1; `gram` = Σ b_j b_jᵀ/|b_j|, `trace` = Σ |b_j|.
    `single`, if wanted, bounds the functionals one by one, without centre and `each`.
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
        """Return a bound of the norm of the vector without the symbols."""
        alone = float(np.linalg.norm(self.centre) + np.linalg.norm(self.each))
        return (alone + self.more) * _MORE + _LOST

    @property
    def uncentred(self) -> float:
        """Return a bound of the norm of the vector without symbols and centre."""
        return (float(np.linalg.norm(self.each)) + self.more) * _MORE + _LOST

    @property
    def total(self) -> float:
        """Return a bound of the norm of the vector."""
        symbols = 0.0
        if self.gram is not None:
            symbols = math.sqrt(self.trace * largest_eigenvalue(self.gram, self.trace))
        return (symbols + self.rest) * _MORE

    @property
    def sizes(self) -> Floats:
        """Return a bound of the size of each functional."""
        assert self.single is not None
        return (self.single + np.abs(self.centre) + self.each) * _MORE + _LOST

    def alone(self, sizes: Floats) -> None:
        """Add bounds of functionals one by one."""
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
        """Add one symbol for each column; parallel columns share one."""
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

    def add(self, below: _NormTerms, ratio: float) -> None:
        """Add the sums below an entry, and up to `ratio` times these once more."""
        self.more += below.more + (ratio * below.total if ratio else 0.0)
        self.trace += below.trace
        self.centre = self.centre + below.centre
        self.each = self.each + below.each
        if below.gram is not None:
            self.gram = below.gram if self.gram is None else self.gram + below.gram


def _descend(
    tape: Tape,
    pending: dict[int, Adjoint],
    found: _NormTerms,
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
            found.each = found.each + _ROUNDED * adjoint.sizes(entry.error_bound)
            _at_floor(entry, adjoint, found)
            continue
        if entry.rows is not None:
            _add_rows(entry.rows, adjoint, found)
            continue
        kept = adjoint if entry.kept is None else adjoint.times(entry.kept)
        _add_other_terms(entry, adjoint, kept, found)
        passed = list(_on_operands(entry, kept))
        alone = not pending and len(passed) == 1
        if alone and passed[0][1].values[0].size < found.count:
            if entry.radius is not None:
                found.each = found.each + adjoint.sizes(entry.radius)
            if entry.share is not None:
                found.each = found.each + kept.sizes(entry.share.otherwise)
            found.more += _factored(tape, *passed[0], floor)
            return
        _add_own_terms(entry, adjoint, found)
        if entry.share is not None:
            if alone and all(size == 1 for size in kept.extent[:-1]):
                below = _NormTerms(found.count)
                _descend(tape, dict(passed), below, None, floor)
                found.add(below, float(entry.share.ratio[kept.window[:-1]].max()))
                return
            found.each = found.each + kept.sizes(entry.share.otherwise)
        _add_pending(pending, passed)


def _add_pending(pending: dict[int, Adjoint], passed: Iterable[tuple[int, Adjoint]]) -> None:
    """Add functionals to the pending ones of their entries."""
    for operand, part in passed:
        pending[operand] = merged(pending[operand], part) if operand in pending else part


def _at_floor(entry: TapeEntry, adjoint: Adjoint, found: _NormTerms) -> None:
    """Add the error of an entry at which a pass stops, by the norms of its rows."""
    for row, part in rows_of(adjoint):
        if not part.values.any():
            continue
        if row in entry.ellipsoids:
            columns = part.window[-1]
            values = part.values.reshape(part.batch, -1)
            found.more += norm_on_ellipsoid(entry.ellipsoids[row][columns, columns], values)
        else:
            found.symbols(part, entry.nearest)


def _on_operands(entry: TapeEntry, adjoint: Adjoint) -> Iterator[tuple[int, Adjoint]]:
    for operand, vjp in entry.operands:
        part = vjp(adjoint)
        if part is not None:
            yield operand, part


def _add_own_terms(
    entry: TapeEntry, adjoint: Adjoint, found: _NormTerms, parts: list[Part] | None = None
) -> None:
    """Add the symbols of an entry, and the part bounded by its row sums; ellipsoids to `parts`, if
    given."""
    radius = entry.radius if entry.apart is None else entry.apart.radius
    few = len(adjoint.values) > adjoint.values[0].size
    if radius is not None and parts is not None and few:
        parts.append(_few_symbols(adjoint, radius, found))
    elif radius is not None:
        found.symbols(adjoint, radius)
    if entry.apart is not None:
        _add_nonlinear(entry.apart.rest, adjoint, found, parts)


def _few_symbols(adjoint: Adjoint, radius: Floats, found: _NormTerms) -> Part:
    """Return the ellipsoid of symbols b_j ξ_j that are fewer than the functionals, as an image: b_j
    = A_j ρ_j, weighted by ρ_j|A_j|."""
    values, sizes = adjoint.values.reshape(adjoint.batch, -1), radius[adjoint.window].reshape(-1)
    columns = np.maximum(np.linalg.norm(values, axis=0), _LOST)
    found.alone(np.abs(values) @ sizes * _MORE)
    return EllipsoidImage.of(values, sizes / columns * float(sizes @ columns) * _MORE)


def _add_nonlinear(
    part: NonlinearPart, adjoint: Adjoint, found: _NormTerms, parts: list[Part] | None
) -> None:
    """Add a part that is bounded functional by functional."""
    if parts is None or part.around is None:
        found.more += part.together(adjoint)
    else:
        parts += part.around(adjoint)
    if parts is not None:
        found.alone(part.one_by_one(adjoint))


def _add_other_terms(
    entry: TapeEntry,
    adjoint: Adjoint,
    kept: Adjoint,
    found: _NormTerms,
    parts: list[Part] | None = None,
) -> None:
    """Add the contribution of an entry without its symbols; ellipsoids to `parts`, if given."""
    found.each = found.each + _ROUNDED * adjoint.sizes(entry.error_bound)
    if entry.centre is not None:
        found.centre = found.centre + kept.sums(entry.centre)
        found.each = found.each + 2.0**-30 * kept.sizes(np.abs(entry.centre))
    for part in entry.nonlinear:
        _add_nonlinear(part, kept, found, parts)


def _factored(tape: Tape, place: int, adjoint: Adjoint, floor: int) -> float:
    """Return the norm of more functionals than elements: of the triangular factor R of A = QR,
    which is cached for the next row."""
    matrix = adjoint.values.reshape(adjoint.batch, -1)
    if tape.factored is None or not np.array_equal(tape.factored[0], matrix):
        tape.factored = matrix, np.asarray(np.linalg.qr(matrix, mode="r"))
    triangle = tape.factored[1]
    fewer = Adjoint(triangle.reshape(-1, *adjoint.extent), adjoint.start)
    inexact = _FACTORED * float(np.linalg.norm(adjoint.sizes(tape.entries[place].error_bound)))
    return (gram_norm(tape, place, fewer, floor=floor) + inexact) * _MORE


Row = tuple[int, ...]

_WIDEST = 64  # unit functionals at a time: their windows are cut to the columns they touch
AT_ONCE = 256  # functionals of an output row, and of a result before its cast, which share reads
FEW = 128  # of these in one pass, so that the cache of a core holds them
OF_ROWS = 2048  # functionals of one row, if sums over rows are bounded row by row
_LARGEST = 2**24  # doubles in one batch of adjoints of the largest node


def batch_limit(walk: Walk) -> int:
    """Return the largest number of functionals in one batch."""
    largest = max((entry.error_bound.size for entry in walk.tape.entries), default=1)
    return max(1, _LARGEST // largest)


def row_batch_limit(walk: Walk) -> int:
    """Return the largest number of functionals of one row in one batch. In a block with one softmax
    they read many rows only where these are bounded row by row, if any are."""
    if len(walk.softmaxes) == 1 and any(entry.rows is not None for entry in walk.tape.entries):
        return OF_ROWS
    return min(AT_ONCE, batch_limit(walk))


def tighten_error(walk: Walk, node: Node, name: str, floor: int) -> Form:
    """Tighten a node's error bound by unit functionals in the rows asked for, and store it."""
    form = form_of(walk.forms[name])
    needed = walk.chosen(node, name, "elements", floor)
    if form.place is None or not needed.any():
        return form
    return store_error_bound(walk, name, _error_bounds(walk, form, needed, floor))


def _error_bounds(walk: Walk, form: Form, needed: Bools, floor: int) -> Floats:
    """Return the error bound of a node, by unit functionals in the rows needed; of a view, by those
    of its source."""
    assert form.place is not None
    error_bound = form.error_bound.copy()
    if form.moved is not None and form.cases is None:
        source, view = form_of(walk.forms[form.moved[0]]), form.moved[1]
        if source.place is not None and source.place > floor:
            read = np.zeros(source.error_bound.size, dtype=np.bool_)
            index = view.moved(np.arange(source.error_bound.size).reshape(source.shape))
            read[index[np.broadcast_to(needed, form.shape)]] = True
            some = np.asarray(read.reshape(source.shape).any(axis=-1, keepdims=True))
            moved = view.moved(_error_bounds(walk, source, some, floor))
            radius = walk.tape.entries[form.place].radius
            moved = moved if radius is None else raised(moved + radius)
            return np.where(needed, np.minimum(error_bound, moved), error_bound)
    step = min(_WIDEST, batch_limit(walk))
    for row in rows(needed):
        for first in range(0, form.shape[-1], step):
            count = min(step, form.shape[-1] - first)
            found = walk.tape.bound(form.place, units(form.shape, row, first, count), floor)
            columns: tuple[int | slice, ...] = (*row, slice(first, first + count))
            error_bound[columns] = np.minimum(
                error_bound[columns], found.magnitude(walk.tape.region)
            )
    return error_bound


def store_error_bound(walk: Walk, name: str, error_bound: Floats) -> Form:
    """Store a smaller error bound of a node, and return the node with it."""
    form = form_of(walk.forms[name])
    assert form.place is not None
    sharper = replace(form, error_bound=error_bound)
    walk.keep(name, sharper)
    walk.tape.sharpen(form.place, error_bound)
    return sharper


def tighten_by_floors(walk: Walk, node: Node, name: str) -> Form:
    """Tighten a node's error bound for an operation, by longer and longer passes."""
    for floor in walk.tape.floors:
        tighten_error(walk, node, name, floor)
    return form_of(walk.forms[name])


def rows(needed: Bools) -> Iterator[Row]:
    """Yield the index of every row that is needed."""
    return (row for row in np.ndindex(*needed.shape[:-1]) if needed[row].any())


def surround_rows(
    walk: Walk, place: int, shape: tuple[int, ...], needed: Bools, floor: int
) -> Floats:
    """Find ellipsoids around the errors of rows of an entry; return bounds of the norms of these
    rows [..., 1], infinite in other rows."""
    found, norms = {}, np.full(needed.shape, np.inf)
    for row in rows(needed):
        whole = surrounded(walk.tape, place, units(shape, row, 0, shape[-1]), floor)
        found[tuple(map(int, row))], norms[row] = whole.shape, whole.norm
    walk.tape.surround(place, found)
    return norms


def bound_row_functionals(
    walk: Walk, form: Form, row: Row, functionals: Floats, floor: int = 0
) -> Floats:
    """Return bounds of functionals [B, n] of one row of a node."""
    if form.place is None:
        return np.zeros(functionals.shape[0])
    ones = (1,) * len(row)
    found, step = [], row_batch_limit(walk)
    for first in range(0, functionals.shape[0], step):
        part = functionals[first : first + step]
        adjoint = Adjoint(part.reshape(part.shape[0], *ones, -1), (*row, 0))
        found.append(walk.tape.bound(form.place, adjoint, floor).magnitude(walk.tape.region))
    return np.concatenate(found)


def centred(walk: Walk, form: Form, needed: Bools) -> Floats:
    """Return bounds of e - mean(e) over the last dimension, by reverse passes where needed."""
    n = form.shape[-1]
    mean = raised(form.error_bound.mean(axis=-1, keepdims=True) * (1 + 4 * n * UNIT))
    rounding = 4 * UNIT * (form.error_bound + mean)
    found = raised(form.error_bound + mean)
    for row in rows(needed):
        tightened = raised(
            bound_row_functionals(walk, form, row, np.eye(n) - 1 / n) + rounding[row]
        )
        found[row] = np.minimum(found[row], tightened)
    return found


def bound_asked_norms(
    walk: Walk, node: Node, name: str, functionals: Callable[[Row], Floats]
) -> Floats:
    """Return bounds [..., 1] of the norm of functionals [m, n] of the rows of a node for which an
    operation asks for passes, infinite elsewhere."""
    found = bound_norms(
        walk, form_of(walk.forms[name]), walk.chosen(node, name, "norm"), functionals
    )
    if not walk.tape.cut or walk.passes.rows is None:
        return found
    near, cut = walk.chosen(node, name, "norm", walk.tape.cut), walk.tape.cut
    sooner = bound_norms(walk, form_of(walk.forms[name]), near, functionals, cut)
    return np.minimum(found, sooner)


def bound_norms(
    walk: Walk,
    form: Form,
    needed: Bools,
    functionals: Callable[[Row], Floats],
    floor: int = 0,
) -> Floats:
    """Return bounds [..., 1] of the norm of functionals [m, n] of rows needed, else infinite."""
    found = np.full(needed.shape, np.inf)
    if form.place is None:
        return np.zeros(needed.shape)
    ones = (1,) * (len(form.shape) - 1)
    for row in rows(needed):
        values = functionals(row)
        adjoint = Adjoint(values.reshape(len(values), *ones, -1), (*row, 0))
        found[row] = gram_norm(walk.tape, form.place, adjoint, floor=floor)
    return found
