"""Storing a result (section 2): what a cast adds, and where it makes a value known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine import cases
from kcdsl_certs.recheck.affine.adjoint import units
from kcdsl_certs.recheck.affine.cases import Cases, Ends, Together
from kcdsl_certs.recheck.affine.form import Form, Steps, Uncast, Walk, raised
from kcdsl_certs.recheck.affine.independent import Split, only_sure
from kcdsl_certs.recheck.affine.reaches import room
from kcdsl_certs.recheck.affine.tape import FAINT, Curve, Entry, Pull, Share
from kcdsl_certs.recheck.box import Bools, Floats
from kcdsl_certs.recheck.errors import Rejection
from kcdsl_certs.recheck.formats import nearest
from kcdsl_certs.recheck.spec import FLOAT32, Format

_LARGEST = 2.0**150  # beyond it float64 underflow would no longer be covered


@dataclass(frozen=True, slots=True)
class Formed:
    """A result before it is stored.

    `reference` is f̃, `carried` the reach of the linear part, `radius` all that is known element by
    element (remainders, float64 errors and the error inside the operation), `bent` an elementwise
    bound of the parts that `curved` and `share` bound for functionals. `within`, where given,
    bounds |v - f̃| as well; `sure` says where v is f̃ whatever came in; `split` takes the radius
    apart.
    """

    reference: Floats
    carried: Floats
    operands: tuple[tuple[int, Pull], ...]
    radius: Floats
    centre: Floats | None = None
    bent: Floats | None = None
    curved: tuple[Curve, ...] = ()
    share: Share | None = None
    within: Floats | None = None
    sure: Bools | None = None
    cases: Cases | None = None  # of the result before it is stored
    split: Split | None = None

    @property
    def deviation(self) -> Floats:
        """Return β ≥ |v - f̃|."""
        found = self.carried + self.radius
        for more in (self.bent, None if self.centre is None else np.abs(self.centre)):
            found = found if more is None else found + more
        found = raised(found) + FAINT
        return found if self.within is None else np.minimum(found, self.within)


def settle(
    walk: Walk,
    formed: Formed,
    form: Format,
    inner: Format,
    rounds: bool = True,
    tight: bool = False,
) -> Form:
    """Store a result in a format, write its entry and return its form.

    `inner` is the format of the arithmetic that formed it; `rounds` False: the cast is part of the
    radius already; `tight`: what a cast to nearest rounds is bounded by reverse passes.

    Raises:
        Rejection: "bound/overflow" or "bound/not-finite".
    """
    reference, deviation = formed.reference, formed.deviation
    _finite(reference, deviation)
    radius, split = raised(formed.radius) + FAINT, _split(walk, formed)
    kept, reach, steps, together, uncast = None, deviation, None, None, None
    if rounds and not walk.kernel.nearest:
        unit = raised(form.u * (np.abs(reference) + deviation))
        cast, split = unit + form.eta, split and split.with_one(unit, form.eta)
        radius, reach = raised(radius + cast), raised(deviation + cast)
        if formed.sure is None and walk.tape.budget is None:
            uncast = Uncast(reference, _unstored(walk, formed), form)
    elif rounds and form.precision < max(FLOAT32.precision, inner.precision):
        if tight:
            formed = replace(formed, within=_tight(walk, formed))
            deviation = formed.deviation
        spread = raised(np.abs(reference) + deviation)
        lo = nearest(box.add_down(reference, -deviation), form)
        hi = nearest(box.add_up(reference, deviation), form)
        if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
            raise _overflow(~(np.isfinite(lo) & np.isfinite(hi)), form)
        cast = np.maximum(raised(form.u * spread), form.eta)
        ends = Ends(lo, hi, form)
        found = None if formed.cases is None else cases.stored(formed.cases, ends)
        steps = Steps(reference, _unstored(walk, formed), ends, found)
        kept = box.add_up(hi, -lo) / 2 > cast
        if found is not None:
            kept = kept & (cases.half_width(found) > cast)
            lo, hi = found.lo.min(axis=0), found.hi.max(axis=0)
        middle = lo / 2 + hi / 2
        half = np.maximum(box.add_up(hi, -middle), box.add_up(middle, -lo))
        step = np.minimum(cast, half_step(box.up(spread), form))
        wide = raised(radius + step)
        split = None if split is None else _known_where(split.with_sure(step), kept, half)
        radius = np.where(kept, wide, half)
        reach = np.where(kept, raised(deviation + step), half)
        reference = np.where(kept, reference, middle)
        if found is not None:
            rest = np.where(kept, wide, 0.0)
            together = Together(cases.apart(found, reference, ~kept), rest)
    if formed.sure is not None:
        radius, reach = np.where(formed.sure, 0.0, radius), np.where(formed.sure, 0.0, reach)
        split = None if split is None else _known_where(split, ~formed.sure, np.zeros(radius.shape))
    size = raised(np.abs(reference) + reach)
    if not bool((size <= form.largest).all()):
        raise _overflow(~(size <= form.largest), form)
    _finite(reference, size, most=_LARGEST)
    centre = formed.centre
    operands, curved, share = formed.operands, formed.curved, formed.share
    if kept is not None and not kept.any():
        kept, operands, centre, curved, share = None, (), None, (), None
    elif kept is not None and kept.all():
        kept = None
    if kept is not None and centre is not None:
        centre = np.where(kept, centre, 0.0)
    entry = Entry(
        reach, operands, radius, centre, kept, curved, share, together=together, split=split
    )
    found = None if steps is None else steps.cases
    place = walk.tape.add(entry)
    return Form(reference, reach, place, steps=steps, uncast=uncast, cases=found)


def _split(walk: Walk, formed: Formed) -> Split | None:
    """Return the parts of the radius; None where bounds are of the worst case."""
    if walk.tape.budget is None:
        return None
    split = only_sure(raised(formed.radius)) if formed.split is None else formed.split
    return split.with_sure(FAINT)


def _known_where(split: Split, kept: Bools, half: Floats) -> Split:
    """Return the parts where something was kept; elsewhere what a known value may be off by."""
    most, root = (np.where(kept, part, 0.0) for part in (split.most, split.root))
    return Split(np.where(kept, split.sure, half), most, root)


def _tight(walk: Walk, formed: Formed) -> Floats:
    """Return a bound of |v - f̃| from reverse passes, element by element."""
    entry, deviation = _unstored(walk, formed), formed.deviation.copy()
    above, step = len(walk.tape.entries), room(walk)
    for row in np.ndindex(*deviation.shape[:-1]):
        for first in range(0, deviation.shape[-1], step):
            count = min(step, deviation.shape[-1] - first)
            where = (*row, slice(first, first + count))
            functionals = units(deviation.shape, row, first, count)
            bound = walk.tape.bound(above, functionals, formed=entry)
            deviation[where] = np.minimum(deviation[where], bound.magnitude(walk.tape.region))
    return deviation


def _unstored(walk: Walk, formed: Formed) -> Entry:
    """Return the entry of a result before it is stored."""
    entry = Entry(
        formed.deviation,
        formed.operands,
        raised(formed.radius) + FAINT,
        formed.centre,
        None,
        formed.curved,
        formed.share,
        split=_split(walk, formed),
    )
    return walk.tape.counted(entry)


def half_step(size: Floats, form: Format) -> Floats:
    """Return what nearest is off by, up to a magnitude: half the distance of its grid points."""
    exponent = np.maximum(np.frexp(size)[1] - 1, form.least)
    return np.asarray(np.ldexp(1.0, exponent - form.precision))


def _overflow(where: np.ndarray, form: Format) -> Rejection:
    flat = int(np.argmax(where))
    place = [int(n) for n in np.unravel_index(flat, where.shape)]
    return Rejection("bound/overflow", f"element {place} may overflow {form.name}")


def _finite(*values: Floats, most: float = np.inf) -> None:
    if not all(bool((np.isfinite(v) & (np.abs(v) <= most)).all()) for v in values):
        raise Rejection("bound/not-finite", "the value has no finite bound")
