"""Storing a result (section 2): the error of a cast, and where a cast makes a value known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine import before_casts, cases
from kcdsl_certs.recheck.affine.adjoint import units
from kcdsl_certs.recheck.affine.cases import Cases, Ends, Together
from kcdsl_certs.recheck.affine.ellipsoids import LinearImage
from kcdsl_certs.recheck.affine.form import Form, StepRemainder, Uncast, Version, Walk
from kcdsl_certs.recheck.affine.independent import Split, only_sure
from kcdsl_certs.recheck.affine.remainders import Remainder
from kcdsl_certs.recheck.affine.reverse_passes import batch_limit, gram_norm, rows
from kcdsl_certs.recheck.affine.tape import (
    VJP,
    Apart,
    Averaged,
    Gather,
    NonlinearPart,
    Share,
    Shared,
    TapeEntry,
)
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, Bools, Floats, raised
from kcdsl_certs.recheck.interval.state import SUMMED
from kcdsl_certs.recheck.numerics.formats import FLOAT32, Format, cut
from kcdsl_certs.recheck.numerics.kernel import stepped

_LARGEST = 2.0**150  # above it the error terms do not cover float64 underflow


@dataclass(frozen=True, slots=True)
class Early:
    """A free cast of known numbers with their error, u(|known| + |error|) + η.

    `known` bounds u·|known| + η, `whole` all of it.
    """

    u: float
    known: Floats
    whole: Floats


@dataclass(frozen=True, slots=True)
class Formed:
    """A result before it is stored.

    `reference` is f̃, `carried` the error bound of the linear part, `radius` an elementwise bound of
    the rest (remainders, float64 errors and the error inside the operation), `bent` an elementwise
    bound of the parts that `nonlinear`, `averaged` and `share` bound for functionals. `within`, if
    given, bounds |v - f̃| as well; `sure` marks elements with v = f̃ for any incoming error.
    `early` is a free cast before the last operation, not included in the radius; `split` holds
    the parts of both.
    """

    reference: Floats
    carried: Floats
    operands: tuple[tuple[int, VJP], ...]
    radius: Floats
    centre: Floats | None = None
    bent: Floats | None = None
    nonlinear: tuple[NonlinearPart, ...] = ()
    share: Share | None = None
    within: Floats | None = None
    sure: Bools | None = None
    cases: Cases | None = None  # of the result before it is stored
    split: Split | None = None
    early: Early | None = None
    averaged: Averaged | None = None
    gather: Gather | None = None
    shared: Shared | None = None  # its rest is the radius without the shared part
    own: Floats | None = None  # additional error of other readings of the operands
    image: LinearImage | None = None  # of a large linear whose input has norms, in place of passes

    @property
    def cast_early(self) -> Formed:
        """Return the same result with its early cast included in the radius."""
        if self.early is None:
            return self
        cast, shared = self.early.whole, self.shared
        if shared is not None:
            shared = replace(shared, rest=raised(shared.rest + cast))
        return replace(self, radius=raised(self.radius + cast), shared=shared, early=None)

    @property
    def still(self) -> Bools:
        """Return which elements equal f̃ exactly."""
        found = (self.carried == 0) & (self.radius == 0)
        for more in (self.bent, self.centre):
            found = found if more is None else found & (more == 0)
        return np.asarray(found)

    @property
    def loose(self) -> Floats:
        """Return β ≥ |v - f̃| from the operands alone; adjoint roundings are relative to it."""
        found = self.carried + self.radius
        for more in (self.bent, None if self.centre is None else np.abs(self.centre)):
            found = found if more is None else found + more
        return np.asarray(raised(found) + TINY)

    @property
    def deviation(self) -> Floats:
        """Return the smallest known β ≥ |v - f̃|."""
        return self.loose if self.within is None else np.minimum(self.loose, self.within)


def round_result(
    walk: Walk,
    node: Node,
    formed: Formed,
    form: Format,
    inner: Format,
    rounds: bool = True,
    tight: bool = False,
    sums: bool = False,
) -> Form:
    """Store a result in a format, write its entry and return its form.

    `inner` is the format of the arithmetic that formed it; `rounds` False: the cast is part of the
    radius already; `tight`: the result of a cast by steps is bounded by reverse passes; `sums`: the
    free cast's error from incoming errors may be bounded by their sums over rows. Raises Rejected
    "bound/overflow" or "bound/not-finite".
    """
    if not walk.kernel.stepped and node.name in walk.problem.several:
        return _append_versions(walk, node, formed, form, inner, rounds, sums)
    bare, formed = formed, formed.cast_early
    reference, deviation = formed.reference, formed.deviation
    _finite(reference, deviation)
    loose, passed = formed.loose, None
    if rounds and sums:
        passed = before_casts.bound_elements(walk, node, _unstored(walk, formed))
    if formed.image is not None and formed.image.far:
        elements = replace(formed.image, rest=formed.radius).elements
        passed = elements if passed is None else np.minimum(passed, elements)
    if passed is not None:
        deviation = np.minimum(deviation, passed)
    radius, split = raised(formed.radius) + TINY, _radius_parts(walk, formed)
    kept, error_bound, steps, together, uncast, apart = None, deviation, None, None, None, None
    kernel, largest = walk.kernel, np.full(reference.shape, np.inf)
    beside = None if formed.shared is None else raised(formed.shared.rest) + TINY
    u, eta = kernel.off(form)
    if rounds and not kernel.stepped:
        if walk.tape.budget is None:
            uncast = Uncast(reference, _unstored(walk, formed), kernel, form, formed.sure)
        unit = raised(u * (np.abs(reference) + deviation))
        cast = unit + eta
        if kernel.inward:
            largest = _largest_cut(reference, deviation, form, inner)
            reference, cast = _cut_middle(reference, deviation, cast)
            split = split and split.with_sure(cast)
        else:
            split = split and split.with_cast(kernel, unit, eta)
            if sums and walk.tape.budget is None:
                apart = _apart(walk, bare, form, node.name, lower=passed)
        radius, error_bound = raised(radius + cast), raised(deviation + cast)
        beside = None if beside is None else raised(beside + cast)
    elif rounds and form.precision < max(FLOAT32.precision, inner.precision):
        if tight:
            formed = replace(formed, within=_tight(walk, formed))
            deviation = formed.deviation
        spread = raised(np.abs(reference) + deviation)
        around = box.add_down(reference, -deviation), box.add_up(reference, deviation)
        if kernel.inward:  # a known number on the grid does not change: it is the edge of a step
            still = formed.still
            around = np.where(still, reference, around[0]), np.where(still, reference, around[1])
        lo, hi = (stepped(end, form, kernel) for end in around)
        if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
            raise _overflow(~(np.isfinite(lo) & np.isfinite(hi)), form)
        cast = np.maximum(raised(u * spread), eta)
        step = np.minimum(cast, kernel.units * half_step(box.up(spread), form))
        moved = reference
        if kernel.inward:
            largest = _largest_cut(reference, deviation, form, inner)
            moved, step = _cut_middle(reference, deviation, step)
            cast = np.where(_one_sign(reference, deviation), cast / 2, cast)
        ends = Ends(lo, hi, form, kernel.inward)
        found = None if formed.cases is None else cases.stored(formed.cases, ends)
        steps = StepRemainder(reference, _unstored(walk, formed), ends, found)
        kept = box.add_up(hi, -lo) / 2 > cast
        if found is not None:
            kept = kept & (cases.half_width(found) > cast)
            lo, hi = found.lo.min(axis=0), found.hi.max(axis=0)
        middle = lo / 2 + hi / 2
        half = np.maximum(box.add_up(hi, -middle), box.add_up(middle, -lo))
        wide = raised(radius + step)
        split = None if split is None else _known_where(split.with_sure(step), kept, half)
        radius = np.where(kept, wide, half)
        beside = None if beside is None else np.where(kept, raised(beside + step), half)
        error_bound = np.where(kept, raised(deviation + step), half)
        reference = np.where(kept, moved, middle)
        if found is not None:
            rest = np.where(kept, wide, 0.0)
            together = Together(cases.apart(found, reference, ~kept), rest)
    if formed.sure is not None:
        radius, error_bound = (
            np.where(formed.sure, 0.0, radius),
            np.where(formed.sure, 0.0, error_bound),
        )
        split = None if split is None else _known_where(split, ~formed.sure, np.zeros(radius.shape))
    size = np.minimum(raised(np.abs(reference) + error_bound), largest)
    if not bool((size <= form.largest).all()):
        raise _overflow(~(size <= form.largest), form)
    _finite(reference, size, most=_LARGEST)
    centre = formed.centre
    operands, nonlinear, share = formed.operands, formed.nonlinear, formed.share
    averaged = formed.averaged
    if kept is not None and not kept.any():
        kept, operands, centre, nonlinear, share, averaged = None, (), None, (), None, None
        beside = None
    elif kept is not None and kept.all():
        kept = None
    if kept is not None and centre is not None:
        centre = np.where(kept, centre, 0.0)
    shared = None
    if formed.shared is not None and beside is not None and formed.sure is None:
        shared = replace(formed.shared, rest=beside)
    entry = TapeEntry(
        error_bound,
        operands,
        radius,
        centre,
        kept,
        nonlinear,
        share,
        together=together,
        split=split,
        apart=apart,
        averaged=averaged,
        gather=formed.gather if kept is None and operands else None,
        shared=shared,
    )
    if passed is not None or formed.within is not None:  # adjoint roundings scale with `loose`
        loose = loose if formed.sure is None else np.where(formed.sure, 0.0, loose)
        entry = replace(entry, error_bound=raised(loose + error_bound), near=error_bound)
    found = None if steps is None else steps.cases
    place = walk.tape.add(entry)
    return Form(reference, error_bound, place, steps=steps, uncast=uncast, cases=found)


def _append_versions(
    walk: Walk,
    node: Node,
    formed: Formed,
    form: Format,
    inner: Format,
    rounds: bool,
    sums: bool,
) -> Form:
    """Append the common part of all readings of a result; store the additional error of each.

    Sums are formed once: only their casts differ. Anything else may be computed for each reading,
    but the shared effect of other weights on both kernels is the same in all of them.
    """
    kernel, reference = walk.kernel, formed.reference
    once, whole = node.op in SUMMED, formed.cast_early.deviation
    nothing, shared = np.zeros(reference.shape), formed.shared
    bare, inside = (formed.radius, nothing) if once else (nothing, formed.radius)
    if shared is not None and not once:
        bare, inside = shared.size, raised(shared.rest)
        shared = replace(shared, rest=nothing)
    own = inside
    if formed.early is not None:
        own = own + formed.early.whole
    if formed.own is not None:
        own, whole = own + formed.own, raised(whole + formed.own)
    common = replace(formed, radius=bare, early=None, within=None, shared=shared)
    _finite(reference, whole)
    error_bound = common.deviation
    if formed.within is not None:
        error_bound = np.minimum(error_bound, formed.within)
    entry, norms = replace(_unstored(walk, common), near=error_bound), None
    place = walk.tape.add(entry)
    around = None
    if rounds and sums:
        around = before_casts.find_ellipsoids(walk, node, place, reference.shape)
    if around is not None:
        each, norms = around
        error_bound = np.minimum(error_bound, each)
        walk.tape.sharpen(place, error_bound)
        whole = np.minimum(whole, raised(error_bound + own))
        norms = raised(norms + np.linalg.norm(inside, axis=-1, keepdims=True) * (1 + 2.0**-40))
    u, eta = kernel.off(form)
    cast, largest = np.zeros(reference.shape), np.full(reference.shape, np.inf)
    if rounds:
        cast = raised(u * raised(np.abs(reference) + whole)) + eta
        if kernel.inward:
            largest = _largest_cut(reference, whole, form, inner)
            cast = np.minimum(cast, raised(np.abs(reference) + whole))
    own = raised(own + cast) + TINY
    if formed.sure is not None:
        own, error_bound = np.where(formed.sure, 0.0, own), np.where(formed.sure, 0.0, error_bound)
    size = np.minimum(raised(np.abs(reference) + whole + cast), largest)
    if not bool((size <= form.largest).all()):
        raise _overflow(~(size <= form.largest), form)
    _finite(reference, size, most=_LARGEST)
    apart = None
    if rounds and sums and walk.tape.budget is None and not kernel.inward:
        lower = None if around is None else raised(error_bound + inside)
        apart = _apart(walk, formed, form, node.name, lower=lower, norms=norms)
    if apart is not None:
        radius = np.maximum(apart.radius - formed.radius, 0.0) + inside
        if formed.own is not None:
            radius = radius + (1 + 2 * u) * (1 + u) * formed.own
        apart = replace(apart, radius=raised(radius + 2.0**-50 * formed.radius) + TINY)
    walk.versions[node.name] = Version(own, apart)
    return Form(reference, error_bound, place)


def _apart(
    walk: Walk,
    formed: Formed,
    form: Format,
    name: str,
    lower: Floats | None = None,
    norms: Floats | None = None,
) -> Apart | None:
    """Return bounds of a free cast's error: from the reference, and from row sums of the error.

    The magnitudes of n numbers sum to at most √n times their norm. `lower` bounds the elements of
    the error, and `norms` [..., 1] the norms of its rows, if known.
    """
    shape = formed.reference.shape
    deep, near = before_casts.asked(walk, name, "norm", shape)
    asked = deep | near
    if formed.image is not None and (formed.image.far or asked.any()):
        norms = replace(formed.image, rest=formed.radius).totals
    if norms is not None:
        asked = np.zeros_like(asked)
    elif not asked.any():
        return None
    early, known = 0.0, np.zeros(())
    if formed.early is not None:
        early, known = formed.early.u, formed.early.known
    entry = _unstored(walk, formed)
    error_bound = entry.nearest if lower is None else np.minimum(entry.nearest, lower)
    whole = raised(error_bound.sum(axis=-1, keepdims=True) * (1 + shape[-1] * 2.0**-52))
    total = whole.copy()
    if norms is not None:
        total = np.minimum(total, raised(np.sqrt(float(shape[-1])) * norms))
    for row in rows(asked):
        floor, whole_row = 0 if deep[row].any() else walk.tape.cut, units(shape, row, 0, shape[-1])
        norm = gram_norm(walk.tape, len(walk.tape.entries), whole_row, entry, floor)
        total[row] = np.minimum(total[row], raised(np.sqrt(float(shape[-1])) * np.asarray(norm)))
    if not (total < whole).any():
        return None
    u, eta = walk.kernel.off(form)
    more = early + u * (1 + early)
    cap = raised(more * error_bound)
    cast = u * (np.abs(formed.reference) + known) + eta
    radius = raised(formed.radius + known + cast) + TINY
    sums = raised(more * total)
    return Apart(radius, Remainder(-cap, cap, sums).nonlinear, cap, sums)


def _radius_parts(walk: Walk, formed: Formed) -> Split | None:
    """Return the parts of the radius; None for worst-case bounds."""
    if walk.tape.budget is None:
        return None
    split = only_sure(raised(formed.radius)) if formed.split is None else formed.split
    return split.with_sure(TINY)


def _known_where(split: Split, kept: Bools, half: Floats) -> Split:
    """Return the parts where something was kept; elsewhere the error of a known value."""
    most, root = (np.where(kept, part, 0.0) for part in (split.most, split.root))
    return Split(np.where(kept, split.sure, half), most, root)


def _tight(walk: Walk, formed: Formed) -> Floats:
    """Return a bound of |v - f̃| from reverse passes, element by element."""
    entry, deviation = _unstored(walk, formed), formed.deviation.copy()
    above, step = len(walk.tape.entries), batch_limit(walk)
    for row in np.ndindex(*deviation.shape[:-1]):
        for first in range(0, deviation.shape[-1], step):
            count = min(step, deviation.shape[-1] - first)
            where = (*row, slice(first, first + count))
            functionals = units(deviation.shape, row, first, count)
            bound = walk.tape.bound(above, functionals, formed=entry)
            deviation[where] = np.minimum(deviation[where], bound.magnitude(walk.tape.region))
    return deviation


def _unstored(walk: Walk, formed: Formed) -> TapeEntry:
    """Return the entry of a result before it is stored."""
    entry = TapeEntry(
        formed.loose,
        formed.operands,
        raised(formed.radius) + TINY,
        formed.centre,
        None,
        formed.nonlinear,
        formed.share,
        near=None if formed.within is None else formed.deviation,
        split=_radius_parts(walk, formed),
        averaged=formed.averaged,
        gather=formed.gather,
        shared=formed.shared,
    )
    return walk.tape.counted(entry)


def _one_sign(reference: Floats, deviation: Floats) -> Bools:
    """Return which results have a known sign before they are stored."""
    return np.asarray(np.abs(reference) >= deviation)


def _cut_middle(reference: Floats, deviation: Floats, most: Floats) -> tuple[Floats, Floats]:
    """Return the middle of the reference after casts toward zero by at most `most`, and its
    distance to both ends; if the sign is not known, the reference and `most`."""
    most = np.minimum(most, raised(np.abs(reference) + deviation))
    moved = reference - np.sign(reference) * (most / 2)
    away = raised(most / 2 + 2.0**-52 * np.abs(reference))
    one = _one_sign(reference, deviation)
    return np.where(one, moved, reference), np.where(one, away, most)


def _largest_cut(reference: Floats, deviation: Floats, form: Format, inner: Format) -> Floats:
    """Return the largest possible size of a result after a cast toward zero.

    Raises Rejected "bound/overflow" if it may be infinite before.
    """
    before = raised(np.abs(reference) + deviation)
    if not bool((before <= inner.largest).all()):
        raise _overflow(~(before <= inner.largest), inner)
    return cut(before, form)


def half_step(size: Floats, form: Format) -> Floats:
    """Return half the distance of grid points up to a magnitude: the largest error of nearest."""
    exponent = np.maximum(np.frexp(size)[1] - 1, form.least)
    return np.asarray(np.ldexp(1.0, exponent - form.precision))


def _overflow(where: np.ndarray, form: Format) -> Rejected:
    flat = int(np.argmax(where))
    place = [int(n) for n in np.unravel_index(flat, where.shape)]
    return Rejected("bound/overflow", f"element {place} may overflow {form.name}")


def _finite(*values: Floats, most: float = np.inf) -> None:
    if not all(bool((np.isfinite(v) & (np.abs(v) <= most)).all()) for v in values):
        raise Rejected("bound/not-finite", "the value has no finite bound")
