"""The entries of one kernel and the reverse pass over them (section 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint, merged
from kcdsl_certs.recheck.affine.cases import Together
from kcdsl_certs.recheck.affine.ellipsoids import (
    Ellipsoids,
    Part,
    Squares,
    bound_on_ellipsoid,
    reached,
    rows_of,
)
from kcdsl_certs.recheck.affine.independent import Budget, Likely, Split, read
from kcdsl_certs.recheck.affine.many_rows import ManyRows, RowErrors, Weighted
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import UNIT, Bools, Floats

_SLIGHT = 2.0**-10  # for smaller ratios no ellipsoids are used
_OF_REST = 2.0**-3 - 2.0**-7  # a share of the rest, less than that of a prover
_MANY = 2**26  # products of a linear; from there on small terms are bounded without reverse passes
VJP = Callable[[Adjoint], Adjoint | None]
RowVJP = Callable[[Adjoint], Adjoint | ManyRows | None]


def reads_many(shape: tuple[int, ...], inputs: int) -> bool:
    """Return whether a linear of so many inputs has many products for results of a shape."""
    return math.prod(shape) * inputs >= _MANY


@dataclass(frozen=True, slots=True)
class NonlinearPart:
    """A part of o_n that is bounded functional by functional only (Definition 1.2).

    `between` returns the smallest and the largest value [B] of functionals of it; `length`, if
    given, bounds the Euclidean norm of these values together, and `around` returns ellipsoids [B,
    B] whose members sum to them.
    """

    between: Callable[[Adjoint], tuple[Floats, Floats]]
    length: Callable[[Adjoint], float] | None = None
    around: Callable[[Adjoint], list[Part]] | None = None

    def one_by_one(self, adjoint: Adjoint) -> Floats:
        """Return bounds of the sizes of functionals [B] of this part."""
        low, high = self.between(adjoint)
        return np.maximum(-low, high)

    def together(self, adjoint: Adjoint) -> float:
        """Return a bound of the Euclidean norm of all functionals of this part."""
        if self.length is not None:
            return self.length(adjoint)
        low, high = self.between(adjoint)
        return float(np.linalg.norm(np.maximum(-low, high))) * (1 + 2.0**-40)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of o_n that is at most `ratio` (one number per row) times the linear part.

    `otherwise` bounds it element by element, for functionals that read more than one row.
    """

    ratio: Floats
    otherwise: Floats


@dataclass(frozen=True, slots=True)
class Averaged:
    """Replacement of the nonlinear parts and operands of a product, of probabilities with values or
    of queries with keys, in functionals of one of its rows: the own errors of the values or keys
    are in the nonlinear part."""

    nonlinear: NonlinearPart
    operands: tuple[tuple[int, RowVJP], ...]


@dataclass(frozen=True, slots=True)
class PassedRow:
    """The terms that functionals [B] of one row of a product collect on the way to the source rows
    of an operand: ellipsoids around them, bounds of `each`, the float64 error of each, and the
    functionals of other entries."""

    parts: list[Part]
    each: Floats
    lost: Floats
    passed: tuple[tuple[int, Adjoint], ...]


Gather = Callable[[Adjoint, int], PassedRow | None]
"""Returns it for a pass that stops at an entry; None where that is on the way."""


@dataclass(frozen=True, slots=True)
class Apart:
    """The radius of an entry in two parts: a smaller radius, and a rest up to `caps` element by
    element, with row sums up to `sums` [..., 1]."""

    radius: Floats
    rest: NonlinearPart
    caps: Floats
    sums: Floats


@dataclass(frozen=True, slots=True)
class Shared:
    """A part s of o that is the same in both kernels, |s| ≤ size: the effect of weights near those
    of the checkpoint on a known number at the node `name`.

    `rest` bounds |o - s|, the radius of the entry all of o. Where an entry was not `kept`, s is
    zero and the rest is all of o.
    """

    name: str
    size: Floats
    rest: Floats


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """One line e = Σ L e_m + o of the form.

    `error_bound` ≥ |e|; each of `operands` is the place of e_m with the pullback of its map;
    |o - centre| ≤ radius for the part of o bounded element by element; `nonlinear` bounds
    functionals of the rest of o. Where `kept` is False the maps, the nonlinear parts and the centre
    are zero.
    """

    error_bound: Floats
    operands: tuple[tuple[int, VJP], ...] = ()
    radius: Floats | None = None
    centre: Floats | None = None
    kept: Bools | None = None
    nonlinear: tuple[NonlinearPart, ...] = ()
    share: Share | None = None
    near: Floats | None = None  # a smaller bound of |e|, found by reverse passes
    together: Together | None = None  # for functionals, instead of the radius
    ellipsoids: Ellipsoids = field(default_factory=dict)
    split: Split | None = None  # the radius in parts; None: all of it is sure
    apart: Apart | None = None  # for functionals, instead of the radius
    averaged: Averaged | None = None
    gather: Gather | None = None  # for ellipsoids of functionals of one row of a product
    shared: Shared | None = None  # for functionals of both kernels, instead of the radius
    rows: RowErrors | None = None  # for functionals of single rows, instead of a pass
    weighted: Weighted | None = None  # for small functionals of one row of a linear, so too
    squares: Squares | None = None  # of errors, with weights
    length: Floats | None = None  # a bound of the norms of rows [..., 1]

    @property
    def nearest(self) -> Floats:
        """Return the smallest bound of |e| that is known."""
        return self.error_bound if self.near is None else self.near


@dataclass(frozen=True, slots=True)
class Bound:
    """a·e ∈ centre ± radius + α·(x - centre of the region), each [B]; `input` is α.

    With a budget the radius does not include the roundings of `likely`, nor the part `shared` with
    the other kernel: functionals of it and its size, by node.
    """

    centre: Floats
    radius: Floats
    input: Adjoint | None
    likely: Likely | None = None
    budget: Budget | None = None
    shared: Mapping[str, tuple[Adjoint, Floats]] = field(default_factory=dict)

    def wide(self, other: Bound | None = None) -> Floats:
        """Return the radius including its roundings, together with those of `other`."""
        both = self.likely
        if other is not None and other.likely is not None:
            both = other.likely if both is None else both.plus(other.likely)
        if both is None or self.budget is None:
            return self.radius
        return self.radius + both.bound(self.budget)

    def magnitude(self, region: Floats | None) -> Floats:
        """Return the largest |a·e|, the region included."""
        wide = self.wide()
        if self.input is not None and region is not None:
            wide = wide + self.input.sizes(region)
        return box.up(np.abs(self.centre) + wide, 16)

    def around(self, region: Floats | None) -> Floats:
        """Return how far a·e may be from `centre`, the region included."""
        wide = self.wide()
        if self.input is not None and region is not None:
            wide = wide + self.input.sizes(region)
        return box.up(wide, 16)


@dataclass(slots=True)
class _Frame:
    """Sums of the terms since the last share, with the `ratio` of that share."""

    centre: Floats
    radius: Floats
    ratio: float
    likely: Likely | None
    shared: Floats | float = 0.0


@dataclass(slots=True)
class Tape:
    """The entries of a kernel; entry 0 is the block input, |e| ≤ region.

    `cut` is where reverse passes may stop before they are made down to the input: the last entry
    at a norm, whose error bound is as small as is known.
    """

    region: Floats | None
    entries: list[TapeEntry] = field(default_factory=list)
    cut: int = 0
    settled: int = 0  # the last entry with ellipsoids from before a free cast (Rule 2.12)
    budget: Budget | None = None  # bounds hold except for a share of all runs; None: worst case
    factored: tuple[Floats, Floats] | None = None  # the last matrix with a factor R, and R
    _still: list[bool] = field(default_factory=list)
    _terms: int = 64
    _total: float = 1.0

    def add(self, entry: TapeEntry) -> int:
        """Append an entry and return its place. Raises Rejected "bound/not-finite"."""
        self.entries.append(self.counted(entry))
        self._still.append(not entry.error_bound.any())
        return len(self.entries) - 1

    def counted(self, entry: TapeEntry) -> TapeEntry:
        """Return an entry as passes may read it, without a place on the tape.

        Raises Rejected "bound/not-finite".
        """
        for values in (entry.error_bound, entry.radius, entry.centre):
            if values is not None and not bool(np.isfinite(values).all()):
                raise Rejected("bound/not-finite", "the error has no finite bound")
        if entry.centre is not None:
            # Sums of centres are signed: add a bound of their rounding for each centre.
            slack = (entry.error_bound.size + 2.0**20) * 2 * UNIT * np.abs(entry.centre)
            radius = slack if entry.radius is None else entry.radius + slack
            together = entry.together
            if together is not None:
                together = replace(together, rest=together.rest + slack)
            split = None if entry.split is None else entry.split.with_sure(slack)
            apart, shared = entry.apart, entry.shared
            if apart is not None:
                apart = replace(apart, radius=apart.radius + slack)
            if shared is not None:
                shared = replace(shared, rest=shared.rest + slack)
            entry = replace(entry, radius=radius, together=together, split=split)
            entry = replace(entry, apart=apart, shared=shared)
        self._terms += 1 + 2 * entry.error_bound.size
        self._total += float(entry.error_bound.sum())
        return entry

    @property
    def floors(self) -> tuple[int, ...]:
        """Return the entries where reverse passes may stop, in order."""
        return (self.cut, 0) if self.cut else (0,)

    @property
    def last_floor(self) -> int:
        """Return the entry where passes of the stored output stop: for a point region, the cut of
        Rule 2.12."""
        point = self.region is None or not bool(self.region.any())
        return self.cut if point and self.cut == self.settled else 0

    def sharpen(self, place: int, error_bound: Floats) -> None:
        """Store a smaller bound of the error of an entry, for passes that stop there."""
        entry = self.entries[place]
        self.entries[place] = replace(entry, near=np.minimum(entry.nearest, error_bound))

    def surround(self, place: int, ellipsoids: Ellipsoids) -> None:
        """Store ellipsoids around the errors of rows of an entry, for passes that stop there."""
        self.entries[place] = replace(self.entries[place], ellipsoids=ellipsoids)

    def bound(
        self,
        place: int,
        functionals: Adjoint,
        floor: int = 0,
        formed: TapeEntry | None = None,
        apart: bool = False,
        spare: Floats | None = None,
    ) -> Bound:
        """Return bounds of functionals of the error of one entry, by one reverse pass.

        Adjoints at `floor` or before are bounded by the error bounds there; adjoints elsewhere too
        if that bound is at most `spare` [B]. `formed` replaces the entry: the same result before
        its cast. `apart`: the part shared with the other kernel is named, not counted, and rows of
        products are not averaged. Raises Rejected "bound/not-finite".
        """
        frames = [self._new_frame(functionals.batch, 0.0)]
        pending = {place: functionals}
        many: dict[int, ManyRows] = {}
        alpha: Adjoint | None = None
        shared: dict[str, tuple[Adjoint, Floats]] | None = {} if apart else None
        while pending or many:
            at = max(pending.keys() | many.keys())
            if at in many:
                several = many.pop(at)
                few, whole = _negligible(spare, several.whole)
                if few.all():
                    frames[-1].radius = frames[-1].radius + whole
                    continue
                alone = at not in pending or pending[at].extent[0] == 1
                if alone:
                    own, rest = several.row, several.bound()
                else:  # added before they are bounded: they may cancel
                    own, rest = several.all_rows, several.lost()
                frames[-1].radius = frames[-1].radius + np.where(few, whole, rest)
                self._meet(pending, at, own.without(few), frames[-1])
            adjoint = pending.pop(at)
            if formed is None and self._still[at]:
                continue
            if at == 0:
                alpha = adjoint
                break
            entry, formed = formed or self.entries[at], None
            if at <= floor:
                rest = reached(entry.ellipsoids, entry.nearest, adjoint)
                frames[-1].radius = frames[-1].radius + rest
                continue
            few, whole = _negligible(spare, partial(adjoint.sizes, entry.nearest))
            if few.any():
                frames[-1].radius = frames[-1].radius + np.where(few, whole, 0.0)
                if few.all():
                    continue
                adjoint = adjoint.without(few)
            other = None if self.budget is not None or apart else entry.averaged
            operands: tuple[tuple[int, RowVJP], ...] = entry.operands
            if other is not None and adjoint.extent[-2] == 1:
                entry = replace(entry, nonlinear=(other.nonlinear,))
                operands = other.operands
            self._add_entry(entry, adjoint, frames, not pending and not many, shared)
            if entry.weighted is not None and not apart and adjoint.extent[-2] == 1:
                beyond = entry.weighted.bound(adjoint)
                few = beyond <= _OF_REST * frames[-1].radius
                frames[-1].radius = frames[-1].radius + np.where(few, beyond, 0.0)
                if few.all():
                    continue
                adjoint = adjoint.without(few)
            kept = adjoint if entry.kept is None else adjoint.times(entry.kept)
            for operand, vjp in operands:
                if self._still[operand]:
                    continue
                passed = vjp(kept)
                if isinstance(passed, ManyRows):
                    self._gather(pending, many, operand, passed, frames[-1])
                elif passed is not None:
                    self._meet(pending, operand, passed, frames[-1])
        return replace(self._combined(frames, alpha), shared=shared or {})

    def _new_frame(self, batch: int, ratio: float) -> _Frame:
        """Return empty sums for a batch of functionals, and count the batch in the budget."""
        zero, likely = np.zeros(batch), None
        if self.budget is not None:
            self.budget.take(batch)
            likely = Likely.nothing(batch)
        return _Frame(zero, zero, ratio, likely)

    def _add_entry(
        self,
        entry: TapeEntry,
        adjoint: Adjoint,
        frames: list[_Frame],
        alone: bool,
        shared: dict[str, tuple[Adjoint, Floats]] | None,
    ) -> None:
        """Add an entry's own terms to the last frame; the shared part to `shared`, if given."""
        frame = frames[-1]
        if shared is not None and entry.shared is not None:
            common = adjoint if entry.kept is None else adjoint.times(entry.kept)
            shared[entry.shared.name] = common, entry.shared.size
            frame.shared = frame.shared + common.sizes(entry.shared.size)
            frame.radius = frame.radius + adjoint.sizes(entry.shared.rest)
        elif entry.together is not None:
            low, high = entry.together.cases.between(adjoint)
            frame.centre = frame.centre + (low / 2 + high / 2)
            rounding = 2.0**-40 * (np.abs(low) + np.abs(high))
            frame.radius = frame.radius + (high / 2 - low / 2) + rounding
            frame.radius = frame.radius + adjoint.sizes(entry.together.rest)
        elif frame.likely is not None and entry.split is not None:
            frame.likely = frame.likely.plus(read(adjoint, entry.split))
            frame.radius = frame.radius + adjoint.sizes(entry.split.sure)
        elif entry.apart is not None:
            low, high = entry.apart.rest.between(adjoint)
            frame.radius = frame.radius + np.maximum(-low, high)
            frame.radius = frame.radius + adjoint.sizes(entry.apart.radius)
        elif entry.radius is not None:
            frame.radius = frame.radius + adjoint.sizes(entry.radius)
        if not (entry.centre is not None or entry.nonlinear or entry.share is not None):
            return
        kept = adjoint if entry.kept is None else adjoint.times(entry.kept)
        if entry.centre is not None:
            frame.centre = frame.centre + kept.sums(entry.centre)
        for part in entry.nonlinear:
            low, high = part.between(kept)
            rounding = 2.0**-40 * (np.abs(low) + np.abs(high))
            frame.centre = frame.centre + (low / 2 + high / 2)
            frame.radius = frame.radius + (high / 2 - low / 2) + rounding
        if entry.share is None:
            return
        if alone and all(size == 1 for size in kept.extent[:-1]):
            ratio = float(entry.share.ratio[kept.window[:-1]].max())
            frames.append(self._new_frame(kept.batch, ratio))
        else:
            frame.radius = frame.radius + self._share_by_rows(entry, kept, entry.share)

    def _share_by_rows(self, entry: TapeEntry, kept: Adjoint, share: Share) -> Floats:
        """Return bounds [B] of a share for functionals of any rows: for each row at most its ratio
        times the linear part, which ellipsoids of the operand bound."""
        if len(entry.operands) != 1 or not self.entries[entry.operands[0][0]].ellipsoids:
            return kept.sizes(share.otherwise)
        place, vjp = entry.operands[0]
        shapes, total = self.entries[place].ellipsoids, np.zeros(kept.batch)
        for row, part in rows_of(kept):
            found, ratio = part.sizes(share.otherwise), float(share.ratio[row].max())
            below = vjp(part) if row in shapes and ratio > _SLIGHT else None
            if below is not None:
                values = below.values.reshape(part.batch, -1)
                found = np.minimum(found, ratio * bound_on_ellipsoid(shapes[row], values))
            total = total + found
        return total * (1 + 2.0**-40)

    def _gather(
        self,
        pending: dict[int, Adjoint],
        many: dict[int, ManyRows],
        place: int,
        part: ManyRows,
        frame: _Frame,
    ) -> None:
        """Add functionals of many rows to the pending ones of an entry; if the sum does not have
        this form, bound these ones by themselves."""
        both = part if place not in many else many[place].joined(part)
        if both is not None:
            many[place] = both
            return
        frame.radius = frame.radius + part.bound()
        self._meet(pending, place, part.row, frame)

    def _meet(
        self, pending: dict[int, Adjoint], place: int, adjoint: Adjoint, frame: _Frame
    ) -> None:
        """Add an adjoint to the pending one of an entry, with the rounding error of the sum."""
        if place in pending:
            adjoint = merged(pending[place], adjoint)
            rounding = adjoint.sizes(self.entries[place].error_bound)
            frame.radius = frame.radius + 2 * UNIT * rounding
        pending[place] = adjoint

    def _combined(self, frames: list[_Frame], alpha: Adjoint | None) -> Bound:
        """Return the bound from all frames, from the last one to the first."""
        slack = 1 + 4 * self._terms * UNIT
        reached = np.zeros(())
        if alpha is not None and self.region is not None:
            reached = alpha.sizes(self.region) * slack
        last = frames.pop()
        centre, radius = last.centre, last.radius * slack
        ratio, likely, shared = last.ratio, last.likely, last.shared
        while frames:
            frame = frames.pop()
            more = ratio * (np.abs(centre) + radius + reached + shared * slack)
            if likely is not None and frame.likely is not None and self.budget is not None:
                more = more + ratio * likely.bound(self.budget) * slack
                likely = frame.likely.plus(likely)
            centre, radius = frame.centre + centre, frame.radius * slack + radius + more
            ratio, shared = frame.ratio, frame.shared + shared
        radius = box.up(radius + 2.0**-800 * self._total, 64)
        if not (np.isfinite(centre).all() and np.isfinite(radius + reached).all()):
            raise Rejected("bound/not-finite", "a functional has no finite bound")
        return Bound(centre, radius, alpha, likely, self.budget)


def _negligible(spare: Floats | None, whole: Callable[[], Floats]) -> tuple[Bools, Floats]:
    """Return which functionals [B] are at most `spare`, and their bound."""
    if spare is None:
        return np.zeros(1, dtype=np.bool_), np.zeros(1)
    found = whole()
    return found <= spare, found
