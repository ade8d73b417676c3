"""Bound functionals of the output: norms of its drift, the order of columns, ellipsoids of rows.

No document contains ellipsoids; the checker derives those of a chain, link by link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import units
from kcdsl_certs.recheck.affine.ellipsoids import around_sum
from kcdsl_certs.recheck.affine.form import Form, Walk
from kcdsl_certs.recheck.affine.remainders import ball
from kcdsl_certs.recheck.affine.reverse_passes import gram_ellipsoid, gram_norm
from kcdsl_certs.recheck.affine.tape import Bound
from kcdsl_certs.recheck.affine_walk import Pair, Row, bound_functionals, in_row
from kcdsl_certs.recheck.documents.document import Functional
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Box, Floats, raised
from kcdsl_certs.recheck.interval.state import Held, State


def bound(functional: Functional, output: State) -> float:
    """Return an upper bound of the functional; for no_flip 0 if the top k stay, else infinity."""
    if functional.kind == "no_flip":
        return 0.0 if _boxes_keep_order(functional.k, output) else math.inf
    return of_drift(functional.kind, output.d)


def of_drift(kind: str, d: Box) -> float:
    """Return an upper bound of "inf", "2" or "span" of a box of drifts."""
    match kind:
        case "inf":
            found = box.magnitude(d).max()
        case "2":
            size = box.mag(d)
            found = box.up(np.sqrt((size**2).sum(axis=-1)), d.shape[-1] + 8).max()
        case _:
            found = box.add_up(d.hi.max(axis=-1), -d.lo.min(axis=-1)).max()
    return float(found)


def _boxes_keep_order(k: int, output: State) -> bool:
    """Return whether in every row the same k columns are above all others in both kernels."""
    columns = output.shape[-1]
    if k >= columns:
        raise Rejected("document/field", f"no_flip {k} needs more than {k} columns")
    chosen = np.argsort(output.t.lo, axis=-1, kind="stable")[..., columns - k :]
    inside = np.zeros(output.shape, dtype=np.bool_)
    np.put_along_axis(inside, chosen, True, axis=-1)
    return all(
        bool(
            (
                np.where(inside, part.lo, np.inf).min(axis=-1)
                > np.where(inside, -np.inf, part.hi).max(axis=-1)
            ).all()
        )
        for part in (output.t, output.i)
    )


_LONGEST = 4096  # most columns of a row whose errors are bounded in norm
_ENDS = 160  # columns with the largest upper ends, and with the least lower ends, that are paired
_PAIRS = 2048  # most pairs of a row whose differences are bounded one by one


def of_rows(pair: Pair, drift: Box, kind: str, claim: float) -> float:
    """Return an upper bound of "2" or "span" of the drift; stop once it is at most `claim`."""
    rows = np.ndindex(*pair.shape[:-1])
    of_row = _row_norm if kind == "2" else _span
    return max(of_row(pair, row, Box(drift.lo[row], drift.hi[row]), claim) for row in rows)


def _row_norm(pair: Pair, row: Row, drift: Box, claim: float) -> float:
    cheap = float(box.up(np.sqrt((box.mag(drift) ** 2).sum()), drift.shape[0] + 8))
    if cheap <= claim or pair.shape[-1] > _LONGEST:
        return cheap
    apart = pair.apart
    known = box.mag(Box(apart.lo[row], apart.hi[row]))
    centre = float(box.up(np.sqrt((known**2).sum()), known.size + 8))
    t = _errors(pair.train, pair.t, row)
    i = t if pair.infer is pair.train else _errors(pair.infer, pair.i, row)
    return min(cheap, float(raised(np.asarray(centre + t + i))))


def _errors(walk: Walk, form: Form, row: Row) -> float:
    """Return a bound of the norm of a row of errors."""
    if form.place is None:
        return 0.0
    (units,) = in_row(row, np.eye(form.shape[-1]), form.shape[-1])
    return gram_norm(walk.tape, form.place, units)


def _span(pair: Pair, row: Row, drift: Box, claim: float) -> float:
    cheap = _box_span(drift)
    if cheap <= claim:
        return cheap
    apart = pair.apart
    known = Box(apart.lo[row], apart.hi[row])
    n = pair.shape[-1]
    share = float(np.float32(1 / n))  # its 24 bits leave 1 - share exact in a double
    centred = box.add(known, pair.errors(row, np.eye(n) - share))
    best = min((drift, centred), key=_box_span)
    bound = _box_span(best)
    if bound <= claim or not math.isfinite(bound):
        return min(cheap, bound)
    top = np.argsort(-best.hi, kind="stable")[:_ENDS]
    low = np.argsort(best.lo, kind="stable")[:_ENDS]
    first, second = (index.reshape(-1) for index in np.meshgrid(top, low, indexing="ij"))
    first, second = first[first != second], second[first != second]
    least = np.minimum(_differences(drift, first, second), _differences(centred, first, second))
    order = np.argsort(-least, kind="stable")[:_PAIRS]
    for start in range(0, order.size, pair.step):  # the same batches whatever is claimed
        some = order[start : start + pair.step]
        if not least[some].max() > claim:
            break
        asked = _contrasts(pair, row, known, first[some], second[some])
        least[some] = np.minimum(least[some], asked)
    found = float(np.max(np.append(least, [0.0, _other_differences(best, top, low)])))
    return min(cheap, bound, found)  # in this order a NaN of the others is ignored


def _box_span(drift: Box) -> float:
    return float(box.add_up(drift.hi.max(), -drift.lo.min()))


def _differences(drift: Box, first: np.ndarray, second: np.ndarray) -> Floats:
    return box.add_up(drift.hi[first], -drift.lo[second])


def _contrasts(pair: Pair, row: Row, known: Box, first: np.ndarray, second: np.ndarray) -> Floats:
    """Return upper bounds of D_first - D_second of pairs of columns."""
    values = np.zeros((first.size, pair.shape[-1]))
    values[np.arange(first.size), first] = 1.0
    values[np.arange(first.size), second] = -1.0
    return box.add_up(_differences(known, first, second), pair.errors(row, values).hi)


def _other_differences(drift: Box, top: np.ndarray, low: np.ndarray) -> float:
    """Return the largest difference with a column that is in no pair."""
    hi, lo = drift.hi.copy(), drift.lo.copy()
    hi[top], lo[low] = -np.inf, np.inf
    one = box.add_up(hi.max(), -drift.lo.min())
    two = box.add_up(drift.hi.max(), -lo.min())
    return float(max(one, two))


Columns = NDArray[np.intp]

_MOST = 2**15  # most pairs of columns of a row that are compared one by one


def stays(pair: Pair, k: int, known: State | None) -> bool:
    """Return whether in each row the same k columns are above all others in every run.

    These are the columns with the k largest references of the training kernel. `known` are the
    output's interval boxes, if there are any. Raises Rejected "document/field" if k is not below
    the number of columns.
    """
    columns = pair.shape[-1]
    if k >= columns:
        raise Rejected("document/field", f"no_flip {k} needs more than {columns} columns")
    sides = [_Side(pair.train, pair.t, _values(pair.t, None if known is None else known.t))]
    if pair.infer is not pair.train:
        sides.append(_Side(pair.infer, pair.i, _values(pair.i, None if known is None else known.i)))
    seen = 0
    for row in np.ndindex(*pair.shape[:-1]):
        order = np.argsort(pair.t.reference[row], kind="stable")
        inside, outside = order[columns - k :], order[: columns - k]
        if not all(side.keeps(row, inside, outside, pair.step) for side in sides):
            return False
        seen += 1
    return seen > 0


@dataclass(frozen=True, slots=True)
class _Side:
    """One kernel: its walk, the form of the output, and boxes of the output's elements."""

    walk: Walk
    form: Form
    values: Box

    def keeps(self, row: Row, inside: Columns, outside: Columns, step: int) -> bool:
        """Return whether every column inside is above every one outside."""
        lo, hi = self.values.lo[row], self.values.hi[row]
        inside, outside = _not_separated(lo, hi, inside, outside)
        if not inside.size:
            return True
        if inside.size * outside.size > inside.size + outside.size:
            some = np.concatenate([inside, outside])
            found = box.add(
                box.exact(self.form.reference[row][some]),
                self._errors(row, np.eye(lo.size)[some], step),
            )
            lo, hi = lo.copy(), hi.copy()
            lo[some] = np.maximum(lo[some], found.lo)
            hi[some] = np.minimum(hi[some], found.hi)
            inside, outside = _not_separated(lo, hi, inside, outside)
        if inside.size * outside.size > _MOST:
            return False
        first, second = (part.reshape(-1) for part in np.meshgrid(inside, outside))
        still = ~(lo[first] > hi[second])
        first, second = first[still], second[still]
        if not first.size:
            return True
        values = np.zeros((first.size, lo.size))
        values[np.arange(first.size), first] = 1.0
        values[np.arange(first.size), second] = -1.0
        reference = self.form.reference[row]
        apart = box.add_down(reference[first], -reference[second])
        least = box.add_down(apart, self._errors(row, values, step).lo)
        return bool((least > 0).all())

    def _errors(self, row: Row, functionals: Floats, step: int) -> Box:
        """Return the box of functionals [B, n] of a row of this kernel's errors."""
        region = self.walk.tape.region
        found = [
            _ends(bound_functionals(self.walk, self.form, adjoint), region)
            for adjoint in in_row(row, functionals, step)
        ]
        return Box(np.concatenate([b.lo for b in found]), np.concatenate([b.hi for b in found]))


def _ends(found: Bound, region: Floats | None) -> Box:
    """Return the box of functionals for every input of the region."""
    wide = found.wide()
    if found.input is not None and region is not None:
        wide = wide + found.input.sizes(region) * (1 + (region.size + 8) * 2.0**-51)
    return box.widen(box.exact(found.centre), box.up(wide, 16))


def _values(form: Form, known: Box | None) -> Box:
    return form.box if known is None else box.meet(form.box, known)


def _not_separated(
    lo: Floats, hi: Floats, inside: Columns, outside: Columns
) -> tuple[Columns, Columns]:
    """Return the columns of each side that the boxes do not separate from all of the other side."""
    above = lo[inside] > hi[outside].max()
    below = hi[outside] < lo[inside].min()
    return inside[~above], outside[~below]


_LARGEST = 2**29  # most numbers in the ellipsoids of a state
_FAINT = 2.0**-16  # share of the larger error up to which the other is bounded by its box alone


def interface_ellipsoids(pair: Pair) -> Held | None:
    """Return ellipsoids around the rows of the output's drift; None if they were too large.

    Row t is middle[t] + e_i - e_t, each error in an ellipsoid of its own.
    """
    if len(pair.shape) != 2 or pair.shape[0] * pair.shape[1] ** 2 > _LARGEST:
        return None
    middle, slip = box.midpoint(pair.apart)
    shapes = []
    for row in range(pair.shape[0]):
        sides = [(pair.train, pair.t), (pair.infer, pair.i)]
        sizes = [float(np.linalg.norm(form.error_bound[row])) for _, form in sides]
        parts = []
        for (walk, form), size in zip(sides, sizes, strict=True):
            known = size <= _FAINT * max(sizes) or form.place is None
            parts.append(_around_box(form.error_bound[row]) if known else _error(walk, form, row))
        if slip is not None:
            parts.append(ball(slip[row]))
        shapes.append(around_sum(parts))
    return middle, np.stack(shapes)


def _error(walk: Walk, form: Form, row: int) -> Floats:
    """Return an ellipsoid around the error of a row of the output in one kernel."""
    place = form.place
    assert place is not None
    known = walk.tape.entries[place].ellipsoids
    if (row,) in known:
        return known[(row,)]
    floor = walk.tape.cut if walk.tape.cut < place else 0
    return gram_ellipsoid(walk.tape, place, units(form.shape, (row,), 0, form.shape[-1]), floor)


def _around_box(error_bound: Floats) -> Floats:
    """Return an ellipsoid around |e| ≤ error_bound: (Σ w) Σ P_k/w_k with w_k = error_bound_k."""
    return raised(np.diag(error_bound) * float(error_bound.sum()))
