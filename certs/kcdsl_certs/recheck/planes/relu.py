"""ReLU: planes over its change, with any slopes (section 4).

The change of relu from n to n + D is linear on the pieces into which the lines n = 0 and n + D = 0
cut the polygon of (n, D), so that what a plane must be raised by is decided at their corners.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.box import Bools, Box, Floats, magnitude
from kcdsl_certs.recheck.planes.functional import Functional, joined

_UNIT = 2.0**-53


@dataclass(frozen=True, slots=True)
class Slopes:
    """Slopes of the planes of a ReLU, each broadcast to [B, ...shape].

    For the new deviation the slope in e below and above; for the new drift the slopes in e and in
    D, below and above.
    """

    e_below: Floats
    e_above: Floats
    a_below: Floats
    b_below: Floats
    a_above: Floats
    b_above: Floats

    def replaced(self, at: Bools, values: Floats) -> Slopes:
        """Return slopes with others, [6, elements], at some elements of the node."""
        found = []
        for slope, row in zip(self._all, values, strict=True):
            full = np.array(np.broadcast_to(slope, (1, *at.shape)))
            full[0][at] = row
            found.append(full)
        return Slopes(*found)

    @property
    def _all(self) -> tuple[Floats, ...]:
        return (
            *(self.e_below, self.e_above),
            *(self.a_below, self.b_below, self.a_above, self.b_above),
        )


@dataclass(frozen=True, slots=True)
class Polygon:
    """All (n, D) with n in `base`, D in `moved` and n + D in `result`."""

    base: Box
    moved: Box
    result: Box

    def on(self, window: tuple[slice, ...]) -> Polygon:
        """Return the polygons of the elements of a window."""
        return Polygon(*(part.map(lambda v: v[window]) for part in self._parts))

    @property
    def _parts(self) -> tuple[Box, Box, Box]:
        return self.base, self.moved, self.result

    @property
    def size(self) -> Floats:
        """Return the largest |n| + |D| + |n + D|."""
        return np.asarray(sum(magnitude(part) for part in self._parts))

    def raised_by(self, a: Floats, b: Floats, sign: float) -> tuple[Floats, Floats]:
        """Return c with change ≤ a·n + b·D + c on the polygon (sign 1; -1: ≥), and its error.

        At a given n the difference is convex in D: above, the ends of D decide; below, the place
        n + D = 0 besides.
        """
        low, high = self.base.lo, self.base.hi
        least, most = self.moved.lo, self.moved.hi
        first, last = self.result.lo, self.result.hi
        places = [low, high, np.zeros(low.shape), -least, -most]
        places += [first - least, first - most, last - least, last - most]
        found: Floats | None = None
        for place in places:
            n = np.clip(place, low, high)
            bottom, top = np.maximum(least, first - n), np.minimum(most, last - n)
            for moved in (bottom, top, np.maximum(np.minimum(-n, top), bottom)):
                change = np.maximum(n + moved, 0.0) - np.maximum(n, 0.0)
                rest = sign * (change - a * n - b * moved)
                found = rest if found is None else np.maximum(found, rest)
        assert found is not None
        error = 16 * _UNIT * (1 + np.abs(a) + np.abs(b)) * self.size
        return sign * found, error


@dataclass(frozen=True, slots=True)
class Planes:
    """A functional of the operand and constants [B] that together bound functionals from above.

    `size` are the magnitudes that a constant was summed from, `inexact` what else float64 may cost.
    """

    functional: Functional
    constant: Floats
    size: Floats
    inexact: Floats


@dataclass(frozen=True, slots=True)
class Relu:
    """The planes of a ReLU: `own` says how the deviation changes (n = h̃), `pair` the drift."""

    source: int
    reference: Floats
    own: Polygon
    pair: Polygon
    slopes: Slopes

    def above(self, f: Functional, slopes: Slopes | None) -> Planes:
        """Bound functionals from above by planes with these slopes, None: those to start with."""
        s = self.slopes if slopes is None else slopes
        batch = f.batch
        constant, size, inexact = np.zeros(batch), np.zeros(batch), np.zeros(batch)
        on_e: Adjoint | None = None
        on_d: Adjoint | None = None
        if f.e is not None:
            none = np.zeros((1,) * (1 + self.reference.ndim))
            _, on_e, (c, k, w) = self._above(f.e, self.own, (none, s.e_below), (none, s.e_above))
            constant, size, inexact = constant + c, size + k, inexact + w
        if f.d is not None:
            below, above = (s.a_below, s.b_below), (s.a_above, s.b_above)
            through, on_d, (c, k, w) = self._above(f.d, self.pair, below, above)
            on_e = joined(on_e, through)
            constant, size, inexact = constant + c, size + k, inexact + w
        return Planes(Functional(on_e, on_d), constant, size, inexact)

    def _above(
        self,
        adjoint: Adjoint,
        polygon: Polygon,
        below: tuple[Floats, Floats],
        above: tuple[Floats, Floats],
    ) -> tuple[Adjoint, Adjoint, tuple[Floats, Floats, Floats]]:
        """Return the functionals of n - h̃ and of what moves, and constant, size and error."""
        shape, window = self.reference.shape, adjoint.window

        def on(values: Floats) -> Floats:
            whole = np.broadcast_to(values, (len(values), *shape))
            return np.asarray(whole[(slice(None), *window)])

        local, centre = polygon.on(window), self.reference[window]
        over, under = np.maximum(adjoint.values, 0.0), np.minimum(adjoint.values, 0.0)
        constant, size = np.zeros(adjoint.batch), np.zeros(adjoint.batch)
        inexact = np.zeros(adjoint.batch)
        for values, (a, b), sign in ((under, below, -1.0), (over, above, 1.0)):
            a, b = on(a), on(b)
            c, error = local.raised_by(a, b, sign)
            part = values * (c + a * centre)
            wide = error + 4 * _UNIT * np.abs(a * centre)
            wide = wide + 4 * _UNIT * (np.abs(a) + np.abs(b)) * local.size  # of the adjoints
            constant = constant + _total(part)
            size = size + _total(np.abs(part))
            inexact = inexact + _total(np.abs(values) * wide)
        terms = 4 * (adjoint.values[0].size + 16) * _UNIT
        inexact = inexact * (1 + terms) + size * terms
        a = under * on(below[0]) + over * on(above[0])
        b = under * on(below[1]) + over * on(above[1])
        made = (constant, size, inexact)
        return Adjoint(a, adjoint.start), Adjoint(b, adjoint.start), made


def _total(values: Floats) -> Floats:
    return np.asarray(values.reshape(len(values), -1).sum(axis=-1))


def plain(own: Polygon, pair: Polygon) -> Slopes:
    """Return slopes where none are given: those of the sign that is more likely."""
    train, infer = pair.base, pair.result
    own_on = (own.result.lo + own.result.hi > 0).astype(np.float64)[None]
    pair_on = (train.lo + train.hi + infer.lo + infer.hi > 0).astype(np.float64)[None]
    none = np.zeros(own_on.shape)
    return Slopes(own_on, own_on, none, pair_on, none, pair_on)
