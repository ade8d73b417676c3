"""Cases of a row (section 7): one for each choice of grid points of scores and probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, Bools, Box, Floats
from kcdsl_certs.recheck.interval.state import gamma
from kcdsl_certs.recheck.numerics.formats import Format, cut, nearest

SCORES = 4  # most chosen scores of a row
_CHOICES = 8  # most chosen scores and probabilities of a row
_NUMBERS = 2**22  # most numbers of all cases of a tensor
_PRODUCTS = 2**22  # most numbers of a batch of functionals in all cases
_MORE = 1 + 2.0**-40


@dataclass(frozen=True, slots=True)
class Ends:
    """The least and greatest grid points of stored numbers; the first dimension may be cases.

    `inward`: numbers are rounded toward zero, else to nearest.
    """

    lo: Floats
    hi: Floats
    form: Format
    inward: bool = False

    def within(self, formed: Box) -> Ends:
        """Return the ends of stored numbers whose values before the cast lie in this box; a case
        may be impossible."""
        step = cut if self.inward else nearest
        lo, hi = (np.clip(step(end, self.form), self.lo, self.hi) for end in (formed.lo, formed.hi))
        return Ends(lo, hi, self.form, self.inward)

    @property
    def two(self) -> Bools:
        """Return where both ends are neighbouring grid points."""
        middle = nearest(self.lo / 2 + self.hi / 2, self.form)
        return np.asarray((self.lo < self.hi) & ((middle == self.lo) | (middle == self.hi)))

    def in_one_case(self) -> Ends:
        """Return the same with a first dimension of one case."""
        return Ends(self.lo[None], self.hi[None], self.form, self.inward)


@dataclass(frozen=True, slots=True)
class Cases:
    """Boxes [cases, *shape]: every block of `width` elements of a row lies in one of them."""

    lo: Floats
    hi: Floats
    width: int

    def turned(self, dims: list[int]) -> Cases | None:
        """Return the cases of a permutation that keeps the last dimension, else None."""
        if dims[-1] != len(dims) - 1:
            return None
        axes = [0, *(1 + axis for axis in dims)]
        return Cases(self.lo.transpose(axes), self.hi.transpose(axes), self.width)

    def shaped(self, shape: tuple[int, ...]) -> Cases | None:
        """Return the cases of the same elements in another shape; None if that splits blocks."""
        if shape[-1] % self.width:
            return None
        count = len(self.lo)
        return Cases(self.lo.reshape(count, *shape), self.hi.reshape(count, *shape), self.width)

    def between(self, adjoint: Adjoint) -> tuple[Floats, Floats]:
        """Return the least and the largest value of functionals, [B] each."""
        first, count = adjoint.start[-1], adjoint.extent[-1]
        begin = first - first % self.width
        end = -(-(first + count) // self.width) * self.width
        start, extent = (*adjoint.start[:-1], begin), (*adjoint.extent[:-1], end - begin)
        whole = embedded(adjoint, start, extent)
        window = (slice(None), *whole.window)
        lo, hi = (self._blocks(side[window]) for side in (self.lo, self.hi))
        alpha = self._blocks(whole.values)  # [blocks, batch, width]
        least, most = np.zeros(adjoint.batch), np.zeros(adjoint.batch)
        step = max(1, _PRODUCTS // (lo.shape[0] * lo.shape[1]))
        for at in range(0, adjoint.batch, step):
            part = slice(at, at + step)
            up, down = np.maximum(alpha[:, part], 0.0), np.minimum(alpha[:, part], 0.0)
            largest = up @ hi.swapaxes(1, 2) + down @ lo.swapaxes(1, 2)
            smallest = up @ lo.swapaxes(1, 2) + down @ hi.swapaxes(1, 2)
            most[part] = largest.max(axis=-1).sum(axis=0)
            least[part] = smallest.min(axis=-1).sum(axis=0)
        size = np.maximum(np.abs(lo), np.abs(hi)).max(axis=1)
        rounding = 2.0**-42 * (np.abs(alpha) * size[:, None]).sum(axis=(0, 2)) + TINY
        return least - rounding, most + rounding

    def _blocks(self, values: Floats) -> Floats:
        """Return [n, *rows, elements] as [blocks, n, width]."""
        return np.asarray(values.reshape(len(values), -1, self.width).swapaxes(0, 1))


@dataclass(frozen=True, slots=True)
class Together:
    """A part of an entry's error by cases; the rest of the error is at most `rest`."""

    cases: Cases
    rest: Floats


def chosen(ends: Ends, worth: Floats, most: int) -> Ends:
    """Split into cases by both values of up to `most` elements of each row, those with the largest
    width times `worth`, which is broadcast to the ends [cases, ..., n].
    """
    effect = np.where(ends.two, ends.hi - ends.lo, 0.0) * worth
    count = min(most, int((effect > 0).sum(axis=-1).max()))
    if count < 1:
        return ends
    order = np.argsort(-effect, axis=-1, kind="stable")[..., :count]
    some = np.take_along_axis(effect, order, axis=-1) > 0
    one, two = (np.take_along_axis(side, order, axis=-1) for side in (ends.lo, ends.hi))
    lows, highs = [], []
    for case in range(2**count):
        upper = np.array([case >> k & 1 == 1 for k in range(count)])
        lo, hi = ends.lo.copy(), ends.hi.copy()
        np.put_along_axis(lo, order, np.where(some & upper, two, one), axis=-1)
        np.put_along_axis(hi, order, np.where(some & ~upper, one, two), axis=-1)
        lows.append(lo)
        highs.append(hi)
    return Ends(np.concatenate(lows), np.concatenate(highs), ends.form, ends.inward)


def choices_allowed(shape: tuple[int, ...]) -> int:
    """Return how many elements of a row of a tensor of this shape may be chosen."""
    return min(_CHOICES, int(math.log2(max(1, _NUMBERS // math.prod(shape)))))


def product(ends: Ends, v: Box, error: Floats) -> Cases:
    """Return p @ v ± error in every case of p [cases, ..., m, n]."""
    centre = v.lo / 2 + v.hi / 2
    own = np.maximum(box.add_up(v.hi, -centre), box.add_up(centre, -v.lo))
    middle = ends.lo / 2 + ends.hi / 2
    half = np.maximum(box.add_up(ends.hi, -middle), box.add_up(middle, -ends.lo))
    half = np.where(ends.hi > ends.lo, half, 0.0)
    size = np.abs(middle) + half
    inexact = gamma(v.shape[-2] + 8, 2.0**-53)
    wide = half @ np.abs(centre) + size @ own + inexact * (size @ (np.abs(centre) + own))
    wide = (wide + error) * _MORE + TINY
    found = middle @ centre
    return Cases(box.add_down(found, -wide), box.add_up(found, wide), error.shape[-1])


def stored(formed: Cases, ends: Ends) -> Cases:
    """Return the cases of numbers stored between these ends."""
    found = ends.within(Box(formed.lo, formed.hi))
    return Cases(found.lo, found.hi, formed.width)


def half_width(cases: Cases) -> Floats:
    """Return half of the widest box of every element."""
    return np.asarray((box.add_up(cases.hi, -cases.lo) / 2).max(axis=0))


def apart(cases: Cases, reference: Floats, where: Bools) -> Cases:
    """Return the cases of stored - reference; 0 elsewhere."""
    lo = np.where(where, box.add_down(cases.lo, -reference), 0.0)
    hi = np.where(where, box.add_up(cases.hi, -reference), 0.0)
    return Cases(lo, hi, cases.width)
