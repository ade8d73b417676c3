"""Functionals of deviation and drift, ReLUs, and the tape over which they are propagated back.

An entry states for functionals f of its node f = vjp(f) + r, with r in centre ± radius element
by element plus at most `nonlinear` functional by functional; or, at a ReLU, that f is at most
another functional plus a constant: a linear bound of its change with any slopes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint, merged
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import UNIT, Bools, Box, Floats, magnitude


@dataclass(frozen=True, slots=True)
class FunctionalBatch:
    """A batch of functionals; `e` holds a and `d` holds b, None where they are zero."""

    e: Adjoint | None
    d: Adjoint | None

    @property
    def parts(self) -> tuple[Adjoint, ...]:
        """Return the parts that are not zero."""
        return tuple(part for part in (self.e, self.d) if part is not None)

    @property
    def batch(self) -> int:
        """Return the number of functionals."""
        return self.parts[0].batch

    @property
    def terms(self) -> int:
        """Return the number of coefficients of one functional."""
        return sum(part.values[0].size for part in self.parts)

    def map(self, change: Callable[[Adjoint], Adjoint]) -> FunctionalBatch:
        """Return both parts changed in the same way."""
        return FunctionalBatch(
            None if self.e is None else change(self.e),
            None if self.d is None else change(self.d),
        )

    def times(self, factor: float) -> FunctionalBatch:
        """Return the functionals multiplied by a number."""
        return self.map(lambda a: Adjoint(a.values * factor, a.start))

    def masked(self, kept: tuple[Bools | None, Bools | None]) -> FunctionalBatch:
        """Return the functionals with zeros where an element is not kept."""
        e, d = (
            part if part is None or mask is None else part.times(mask)
            for part, mask in zip((self.e, self.d), kept, strict=True)
        )
        return FunctionalBatch(e, d)

    def sums(self, weights: tuple[Floats, Floats]) -> Floats:
        """Return Σ a·weights_e + Σ b·weights_d [B]."""
        found = np.zeros(self.batch)
        for part, weight in zip((self.e, self.d), weights, strict=True):
            if part is not None:
                found = found + part.sums(weight)
        return found

    def sizes(self, weights: tuple[Floats, Floats]) -> Floats:
        """Return Σ |a|·weights_e + Σ |b|·weights_d [B]."""
        found = np.zeros(self.batch)
        for part, weight in zip((self.e, self.d), weights, strict=True):
            if part is not None:
                found = found + part.sizes(weight)
        return found


def joined(one: Adjoint | None, two: Adjoint | None) -> Adjoint | None:
    """Return a sum in which None is zero."""
    if one is None or two is None:
        return two if one is None else one
    return merged(one, two)


def together(one: FunctionalBatch, two: FunctionalBatch) -> FunctionalBatch:
    """Return the sum of functionals of one node."""
    return FunctionalBatch(joined(one.e, two.e), joined(one.d, two.d))


@dataclass(frozen=True, slots=True)
class Slopes:
    """Slopes of the planes of a ReLU, each broadcast to [B, ...shape].

    For the new deviation: the slope in e of the lower and the upper plane; for the new drift: the
    slopes in e and in D of both planes.
    """

    e_below: Floats
    e_above: Floats
    a_below: Floats
    b_below: Floats
    a_above: Floats
    b_above: Floats

    def replaced(self, at: Bools, values: Floats) -> Slopes:
        """Return the slopes with `values` [6, elements] at the elements of the mask `at`."""
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

        At a given n the difference is convex in D: its maximum is at an end of D, its minimum at an
        end or at n + D = 0.
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
        error = 16 * UNIT * (1 + np.abs(a) + np.abs(b)) * self.size
        return sign * found, error


@dataclass(frozen=True, slots=True)
class Planes:
    """A functional of the operand and constants [B] that together bound functionals from above.

    `size` is the sum of magnitudes of a constant's terms, `inexact` bounds other float64 errors.
    """

    functional: FunctionalBatch
    constant: Floats
    size: Floats
    inexact: Floats


@dataclass(frozen=True, slots=True)
class Relu:
    """The planes of a ReLU; polygons of the deviation (`own`, n = h̃) and the drift (`pair`)."""

    source: int
    reference: Floats
    own: Polygon
    pair: Polygon
    slopes: Slopes

    def above(self, f: FunctionalBatch, slopes: Slopes | None) -> Planes:
        """Bound functionals from above by planes with these slopes; None: the entry's slopes."""
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
        return Planes(FunctionalBatch(on_e, on_d), constant, size, inexact)

    def _above(
        self,
        adjoint: Adjoint,
        polygon: Polygon,
        below: tuple[Floats, Floats],
        above: tuple[Floats, Floats],
    ) -> tuple[Adjoint, Adjoint, tuple[Floats, Floats, Floats]]:
        """Return the functionals of n - h̃ and of the moved part, and constant, size and error."""
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
            wide = error + 4 * UNIT * np.abs(a * centre)
            wide = wide + 4 * UNIT * (np.abs(a) + np.abs(b)) * local.size  # of the adjoints
            constant = constant + _total(part)
            size = size + _total(np.abs(part))
            inexact = inexact + _total(np.abs(values) * wide)
        terms = 4 * (adjoint.values[0].size + 16) * UNIT
        inexact = inexact * (1 + terms) + size * terms
        a = under * on(below[0]) + over * on(above[0])
        b = under * on(below[1]) + over * on(above[1])
        made = (constant, size, inexact)
        return Adjoint(a, adjoint.start), Adjoint(b, adjoint.start), made


def _total(values: Floats) -> Floats:
    return np.asarray(values.reshape(len(values), -1).sum(axis=-1))


def plain(own: Polygon, pair: Polygon) -> Slopes:
    """Return the default slopes: those of the sign that takes more of the box."""
    train, infer = pair.base, pair.result
    own_on = (own.result.lo + own.result.hi > 0).astype(np.float64)[None]
    pair_on = (train.lo + train.hi + infer.lo + infer.hi > 0).astype(np.float64)[None]
    none = np.zeros(own_on.shape)
    return Slopes(own_on, own_on, none, pair_on, none, pair_on)


VJP = Callable[[FunctionalBatch], Sequence[tuple[int, FunctionalBatch]]]
Pair = tuple[Floats, Floats]
"""One array for the deviation, and one for the drift."""


@dataclass(frozen=True, slots=True)
class BoundsEntry:
    """One node: reference, boxes of e and D, and its linear bounds.

    Where `kept` is False an element has neither a linear nor a nonlinear part: centre ± radius is
    its box. A ReLU has planes in place of these parts.
    """

    reference: Floats
    e: Box
    d: Box
    vjp: VJP
    centre: Pair
    radius: Pair
    kept: tuple[Bools | None, Bools | None] = (None, None)
    nonlinear: Callable[[FunctionalBatch], Floats] | None = None
    relu: Relu | None = None

    @property
    def sizes(self) -> Pair:
        """Return the largest magnitudes of e and D."""
        return box.magnitude(self.e), box.magnitude(self.d)


@dataclass(slots=True)
class BoundsTape:
    """Entries in the order of the graph; `bent` are the indices of ReLUs."""

    entries: list[BoundsEntry] = field(default_factory=list)
    bent: list[int] = field(default_factory=list)
    _still: list[bool] = field(default_factory=list)
    _total: float = 1.0

    def add(self, entry: BoundsEntry) -> int:
        """Append an entry and return its index. Raises Rejected "bound/not-finite"."""
        parts = (*entry.sizes, *entry.centre, *entry.radius, entry.reference)
        if not all(bool(np.isfinite(part).all()) for part in parts):
            raise Rejected("bound/not-finite", "deviation or drift has no finite bound")
        self.entries.append(entry)
        place = len(self.entries) - 1
        if entry.relu is not None:
            self.bent.append(place)
        self._still.append(not any(part.any() for part in entry.sizes))
        self._total += sum(float(part.sum()) for part in entry.sizes)
        return place

    def sharpen(self, place: int, e: Box, d: Box) -> None:
        """Meet the boxes of an entry with other boxes of the same quantities."""
        entry = self.entries[place]
        self.entries[place] = replace(entry, e=box.meet(entry.e, e), d=box.meet(entry.d, d))

    def between(
        self, place: int, functional: FunctionalBatch, slopes: Mapping[int, Slopes] | None = None
    ) -> tuple[Floats, Floats]:
        """Return lower and upper bounds [B] of functionals of one entry."""
        middle, wide = self.walk(place, functional, slopes or {})
        high = box.above(middle + wide)
        if not any(at <= place for at in self.bent):
            return box.down(middle - wide), high
        middle, wide = self.walk(place, functional.times(-1.0), slopes or {})
        return -box.above(middle + wide), high

    def walk(
        self, place: int, functional: FunctionalBatch, slopes: Mapping[int, Slopes]
    ) -> tuple[Floats, Floats]:
        """Return m and s ≥ 0 [B]: functionals are at most m + s, and without ReLUs at least m - s.

        `slopes` replace those of the entries of the ReLUs that they name.
        """
        count = functional.batch
        middle, wide, known = np.zeros(count), np.zeros(count), np.zeros(count)
        pending, terms = {place: functional}, 64
        while pending:
            at = max(pending)
            current, entry = pending.pop(at), self.entries[at]
            if self._still[at]:
                continue
            terms += current.terms
            if entry.relu is not None:
                planes = entry.relu.above(current, slopes.get(at))
                middle, wide = middle + planes.constant, wide + planes.inexact
                known = known + planes.size
                below: Sequence[tuple[int, FunctionalBatch]] = [
                    (entry.relu.source, planes.functional)
                ]
            else:
                middle, known = middle + current.sums(entry.centre), known + _known(current, entry)
                wide = wide + current.sizes(entry.radius)
                kept = current.masked(entry.kept)
                if entry.nonlinear is not None:
                    wide = wide + entry.nonlinear(kept)
                below = entry.vjp(kept)
            for source, part in below:
                if source in pending:
                    part = together(pending[source], part)
                    wide = wide + 2 * UNIT * part.sizes(self.entries[source].sizes)
                pending[source] = part
        slack = 4 * terms * UNIT
        wide = wide * (1 + slack) + known * slack + 2.0**-800 * self._total
        finite = np.isfinite(middle) & np.isfinite(wide)
        return np.where(finite, middle, 0.0), np.where(finite, wide, np.inf)


def _known(functional: FunctionalBatch, entry: BoundsEntry) -> Floats:
    """Return the sum of magnitudes of the constant terms."""
    centre = np.abs(entry.centre[0]), np.abs(entry.centre[1])
    return functional.sizes(centre)
