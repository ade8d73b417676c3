"""Whether the same columns of every row are the largest, in every run of both kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.form import Form, Walk
from kcdsl_certs.recheck.affine.pair import Pair, Row, bound, in_row
from kcdsl_certs.recheck.affine.tape import Bound
from kcdsl_certs.recheck.box import Box, Floats
from kcdsl_certs.recheck.rules.state import State
from kcdsl_certs.rejected import Rejected

Columns = NDArray[np.intp]

_MOST = 2**15  # pairs of columns of a row that are asked one by one


def stays(pair: Pair, k: int, known: State | None) -> bool:
    """Return whether in each row some k columns are above all others in every run.

    They are those with the k largest references of the training kernel. `known` are the output's
    boxes in the interval domain, where that has any.

    Raises:
        Rejected: "document/field" for a k that leaves no other column.
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
        inside, outside = _open(lo, hi, inside, outside)
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
            inside, outside = _open(lo, hi, inside, outside)
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
            _ends(bound(self.walk, self.form, adjoint), region)
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


def _open(lo: Floats, hi: Floats, inside: Columns, outside: Columns) -> tuple[Columns, Columns]:
    """Return the columns inside that are not above all outside, and the outside that are why."""
    above = lo[inside] > hi[outside].max()
    below = hi[outside] < lo[inside].min()
    return inside[~above], outside[~below]
