"""A quantised input of a linear with casts to nearest: codes times the scale they share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck import box, staircase
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.cases import Cases, Together
from kcdsl_certs.recheck.affine.form import UNIT, Form, Walk, raised
from kcdsl_certs.recheck.affine.tape import FAINT, Entry, Pull
from kcdsl_certs.recheck.box import Bools, Box, Floats
from kcdsl_certs.recheck.rules.state import gamma
from kcdsl_certs.recheck.spec import CODE_LARGEST

_SHARE = 2.0**-2  # of Q, that a shared scale may move its elements by


@dataclass(frozen=True, slots=True)
class _Shared:
    """The scale of every element: reference, reach, and the entry it is (None: none is shared)."""

    reference: Floats
    reach: Floats
    place: int | None


def quantised(walk: Walk, x: Form, error: Floats) -> Form:
    """Return x̂ = c·s: where few codes can be met c is nearly known, elsewhere x̂ = x ± error."""
    around = x.box
    scale = staircase.scales(walk.kernel, around)
    known = scale.lo >= staircase.LEAST_SCALE
    scale = Box(np.where(known, scale.lo, 1.0), np.where(known, scale.hi, 1.0))
    least, most = staircase.codes(walk.kernel, around, scale)
    each = None if x.cases is None else _codes(walk, x.cases, least, most, scale)
    if each is not None:
        least, most = each[0].min(axis=0), each[1].max(axis=0)
    shared = _shared(walk, x, around, scale)
    middle = least / 2 + most / 2
    size = np.maximum(np.abs(least), np.abs(most))
    slip = raised(staircase.UNIT * size * scale.hi)
    along = raised(np.abs(middle) * shared.reach)
    if shared.place is None:
        slip, along = raised(slip + along), np.zeros(x.shape)
    own = raised((most - least) / 2 * scale.hi + slip)
    widest = own
    if each is not None:
        widest = raised((each[1] - each[0]).max(axis=0) / 2 * scale.hi + slip)
    few = known & (widest <= error)
    if shared.place is not None:
        few = few & (along <= _SHARE * error)
    error = np.where(known, np.minimum(error, _widest(walk, (least, most), scale, x)), error)
    weights = np.where(few, middle, 0.0)
    reference = np.where(few, middle * shared.reference, x.reference)
    apart = staircase.hull(walk.kernel, around, scale)
    farthest = np.maximum(box.add_up(apart.hi, -reference), box.add_up(reference, -apart.lo))
    reach = np.where(few, raised(own + along), raised(x.reach + error))
    reach = np.where(known, np.minimum(reach, farthest), reach) + FAINT
    sums = gamma(x.reference.size + 8, UNIT)
    radius = np.where(few, raised(own + sums * along), raised(error)) + FAINT
    operands: list[tuple[int, Pull]] = []
    if x.place is not None and not few.all():
        rest = ~few
        operands.append((x.place, lambda a: a.times(rest)))
    if shared.place is not None:
        operands.append((shared.place, _gathered(weights, walk.kernel.activations[1])))
    together = None
    if each is not None and x.cases is not None:
        others = np.where(few, raised(sums * along), raised(error)) + FAINT
        steps = _steps((each[0] - middle, each[1] - middle), scale, slip, few, x.cases.width)
        together = Together(steps, others)
    entry = Entry(reach, tuple(operands), radius, together=together)
    return Form(reference, reach, walk.tape.add(entry))


def _codes(walk: Walk, of: Cases, least: Floats, most: Floats, scale: Box) -> tuple[Floats, Floats]:
    """Return the least and the greatest codes in every case, within those of all cases."""
    low, high = staircase.codes(walk.kernel, Box(of.lo, of.hi), scale)
    return np.clip(low, least, most), np.clip(high, least, most)


def _widest(walk: Walk, codes: tuple[Floats, Floats], scale: Box, x: Form) -> Floats:
    """Return a bound of |x̂ - x|: half a step of the farthest code met, and float32 roundings.

    With mx the largest code may stand for numbers that were cut off: no bound.
    """
    kind, name = walk.kernel.activations
    farthest = np.maximum(np.abs(codes[0]), np.abs(codes[1]))
    step = staircase.half_step(walk.kernel, farthest) * scale.hi
    step = raised(step + 4 * staircase.UNIT * (farthest * scale.hi + x.size))
    cut = (name == "mx") & (farthest >= CODE_LARGEST[kind])
    return np.where(cut, np.inf, step)


def _steps(codes: tuple[Floats, Floats], scale: Box, slip: Floats, few: Bools, width: int) -> Cases:
    """Return what codes [cases, ...] less a middle one add, times the scale; 0 where not few."""
    lo = np.minimum(codes[0] * scale.lo, codes[0] * scale.hi) - slip
    hi = np.maximum(codes[1] * scale.lo, codes[1] * scale.hi) + slip
    return Cases(np.where(few, box.down(lo), 0.0), np.where(few, box.above(hi), 0.0), width)


def _gathered(weights: Floats, scale: str) -> Pull:
    """Return the pullback of the scale: Σ α·c over the elements of a group."""

    def pull(adjoint: Adjoint) -> Adjoint:
        values = adjoint.values * weights[adjoint.window]
        if scale == "per_token":
            return Adjoint(values.sum(axis=-1, keepdims=True), (*adjoint.start[:-1], 0))
        axes = tuple(range(1, values.ndim))
        return Adjoint(values.sum(axis=axes, keepdims=True), (0,) * len(axes))

    return pull


def _shared(walk: Walk, x: Form, around: Box, scale: Box) -> _Shared:
    """Write the entry of the scales: |v|/qmax of the largest element, where it is certain which."""
    kind, name = walk.kernel.activations
    middle = scale.lo / 2 + scale.hi / 2
    half = np.maximum(box.add_up(scale.hi, -middle), box.add_up(middle, -scale.lo))
    if name not in ("per_token", "per_tensor"):
        return _Shared(middle, half, None)
    rows = (-1, x.shape[-1]) if name == "per_token" else (1, -1)
    least = np.maximum(around.lo, -around.hi).reshape(rows)
    most = box.magnitude(around).reshape(rows)
    leader = least.argmax(axis=-1)
    every = np.arange(len(leader))
    others = most.copy()
    others[every, leader] = -np.inf
    lead = least[every, leader]
    certain = (lead >= others.max(axis=-1)) & (lead > 0)
    value, reach = (part.reshape(rows)[every, leader] for part in (x.reference, x.reach))
    first = (np.arange(least.size).reshape(rows)[:, 0],)
    mid, wide, top = (part.reshape(-1)[first] for part in (middle, half, scale.hi))
    qmax = float(CODE_LARGEST[kind])
    rounding = 2 * staircase.UNIT * top
    reference = np.where(certain, np.abs(value) / qmax, mid)
    own = np.where(certain, rounding, wide) + FAINT
    moved = np.where(certain, raised(reach / qmax + rounding), wide) + FAINT
    picked = np.zeros(least.shape)
    picked[every, leader] = np.where(certain, np.sign(value) / qmax, 0.0)
    picked = picked.reshape(x.shape)
    shape = (*x.shape[:-1], 1) if name == "per_token" else (1,) * len(x.shape)

    def pull(adjoint: Adjoint) -> Adjoint:
        if name == "per_tensor":
            return Adjoint(adjoint.values * picked, (0,) * len(x.shape))
        window = (*adjoint.window[:-1], slice(None))
        return Adjoint(adjoint.values * picked[window], (*adjoint.start[:-1], 0))

    operands = () if x.place is None else ((x.place, pull),)
    entry = Entry(moved.reshape(shape), operands, own.reshape(shape))
    place = walk.tape.add(entry)
    spread = tuple(np.broadcast_to(part.reshape(shape), x.shape) for part in (reference, moved))
    return _Shared(spread[0], spread[1], place)
