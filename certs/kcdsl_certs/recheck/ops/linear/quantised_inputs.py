"""Quantised inputs of linears (section 2): their errors, and codes times a shared scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.cases import Cases, Together
from kcdsl_certs.recheck.affine.form import Form, Walk
from kcdsl_certs.recheck.affine.tape import VJP, TapeEntry
from kcdsl_certs.recheck.interval import box, quantisers
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Bools, Box, Floats, raised
from kcdsl_certs.recheck.interval.quantisers import QuantiserSteps, Ranks
from kcdsl_certs.recheck.interval.state import gamma
from kcdsl_certs.recheck.interval.sums import FAINT_SCALE, SMALL
from kcdsl_certs.recheck.numerics.formats import (
    CODES,
    LAYOUTS,
    LEAST_POWER,
    NESTED,
    PLAIN_INPUTS,
    Format,
    layout_of,
)
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics

_FAINT_TENSOR = 2.0**-113  # nvfp4: where 1/(m·s) is infinite, any code may be the largest


def quantisation(kernel: KernelNumerics, x: Box, key: str = "") -> Floats:
    """Return Q ≥ |x̂ - x| of the quantised input of the linear with the weight `key`.

    The mx scale is a power of two made from the block's actual maximum, which is known only within
    a box. A number may saturate, but by at most 1 - qmax/2^(emax + 1) of itself. Raises Rejected
    "bound/overflow" where an unscaled format or a static scale may overflow; "rule/static-scale".
    """
    if not kernel.coded_inputs:
        return np.zeros(x.shape)
    found = (_calibrated if kernel.static_inputs else _coded)(kernel, x, key)
    return box.up(found + FAINT_SCALE)  # the scale itself may be subnormal


def _calibrated(kernel: KernelNumerics, x: Box, key: str) -> Floats:
    size, scale = box.mag(x), quantisers.steps(kernel, x, key).scale.hi
    kind = kernel.activations[0]
    if CODES[kind].grid is None:
        return box.up((np.minimum(size, scale / 2) + size * SMALL) * (1 + SMALL))
    return _cast(CODES[kind].form, size, scale)


def _coded(kernel: KernelNumerics, x: Box, key: str) -> Floats:
    kind, scale = kernel.activations
    size = box.mag(x)
    if not kernel.scaled_inputs:
        over = np.argwhere(~(size <= CODES[kind].last))
        if len(over):
            element = [int(i) for i in over[0]]
            raise Rejected("bound/overflow", f"element {element} of an input may overflow {kind}")
        return _cast(CODES[kind].form, size, np.ones(()))
    if LAYOUTS[scale].nested:
        return _nested(kernel, x, key)
    quantisers.within_batch(kernel, x)
    most = np.maximum(quantisers.largest(size, scale), kernel.batch_amax)
    if LAYOUTS[scale].floored:
        return _shifted(kind, x, size, most)
    if CODES[kind].shifted:
        above, below = quantisers.extent(x, scale)
        step = box.lifted(above.hi + below.hi) / 255
        return box.up((step * (0.5 + 2.0**-14) + size * SMALL) * (1 + SMALL))
    step = np.minimum(most, kernel.amax_limit) / CODES[kind].divisor
    if LAYOUTS[scale].ceiled:
        step = np.maximum(2 * box.up(step), 2.0**LEAST_POWER)
    step = np.maximum(box.up(step), quantisers.least_scale(kernel))
    code = CODES[kind]
    if code.grid is not None:
        rounding = _cast(code.grid, size, step)
    else:
        most = np.minimum(size, step / 2) if code.full else step / 2
        rounding = box.up((most + size * SMALL) * (1 + SMALL))
    if kernel.amax_limit == math.inf:
        return rounding
    last = kernel.amax_limit * (code.last / code.divisor) * (1 - SMALL)
    return np.maximum(rounding, box.up(np.maximum(size - last, 0.0) + size * SMALL))


def _shifted(kind: str, x: Box, size: Floats, most: Floats) -> Floats:
    """Return Q of an mx scale, whose last code is at least `kept` times the block's maximum."""
    kept = CODES[kind].last * 2.0 ** -(CODES[kind].exponent + 1)
    least = quantisers.largest(np.maximum(np.maximum(x.lo, -x.hi), 0.0), "mx")
    cut = np.minimum(size * (1 - kept), np.maximum(size - kept * least * (1 - SMALL), 0.0))
    step = np.maximum(most * 2.0 ** -CODES[kind].exponent, 2.0**LEAST_POWER)
    return np.maximum(_cast(CODES[kind].form, size, step), box.up(cut + size * SMALL))


def _nested(kernel: KernelNumerics, x: Box, key: str) -> Floats:
    """Return Q of nvfp4, whose largest code is at least 15/16 of the group's largest number, or
    that number less 6·2^-10 of the tensor's scale, or 6·448 of that scale."""
    kind, size = kernel.activations[0], box.mag(x)
    tensor, step = quantisers.nested(kernel, x, key)
    top = CODES[kind].last
    sure = quantisers.largest(np.maximum(np.maximum(x.lo, -x.hi), 0.0), "nvfp4")
    share = np.minimum(size / 16, np.maximum(size - sure * (15 / 16) * (1 - SMALL), 0.0))
    small = np.minimum(size, tensor * (top * 2.0**-10) * (1 + SMALL))
    beyond = np.maximum(size - tensor * (top * NESTED[1]) * (1 - SMALL), 0.0)
    cut = np.maximum(np.maximum(share, small), beyond)
    found = np.maximum(_cast(CODES[kind].form, size, step), box.up(cut + size * SMALL))
    return found if kernel.static is not None else box.up(found + _FAINT_TENSOR)


def _cast(form: Format, size: Floats, scale: Floats) -> Floats:
    return box.up((form.u * size + scale * form.eta) * (1 + SMALL))


_SHARE = 2.0**-2  # share of Q by which a shared scale may move its elements


@dataclass(frozen=True, slots=True)
class _Shared:
    """The scale of every element: reference, error bound, and entry (None: no shared scale)."""

    reference: Floats
    error_bound: Floats
    place: int | None


def quantised(walk: Walk, x: Form, error: Floats, key: str) -> Form:
    """Return x̂ = c·s with c among few codes, where few are possible; elsewhere x̂ = x ± error."""
    around = x.box
    by, known = quantisers.known(quantisers.steps(walk.kernel, around, key))
    scale = by.scale
    least, most = quantisers.codes(by, around)
    each = None if x.cases is None else _codes(by, x.cases, least, most)
    if each is not None:
        least, most = each[0].min(axis=0), each[1].max(axis=0)
    shared = _shared(walk, x, around, by)
    middle = least / 2 + most / 2
    size = np.maximum(np.abs(least), np.abs(most))
    slip = raised(quantisers.UNIT * size * scale.hi)
    along = raised(np.abs(middle) * shared.error_bound)
    if shared.place is None:
        slip, along = raised(slip + along), np.zeros(x.shape)
    own = raised((most - least) / 2 * scale.hi + slip)
    widest = own
    if each is not None:
        widest = raised((each[1] - each[0]).max(axis=0) / 2 * scale.hi + slip)
    few = known & (widest <= error)
    if shared.place is not None:
        few = few & (along <= _SHARE * error)
    error = np.where(known, np.minimum(error, _widest(walk, (least, most), by, x)), error)
    weights = np.where(few, middle, 0.0)
    reference = np.where(few, middle * shared.reference, x.reference)
    apart = quantisers.hull(by, around)
    farthest = np.maximum(box.add_up(apart.hi, -reference), box.add_up(reference, -apart.lo))
    error_bound = np.where(few, raised(own + along), raised(x.error_bound + error))
    error_bound = np.where(known, np.minimum(error_bound, farthest), error_bound) + TINY
    sums = gamma(x.reference.size + 8, UNIT)
    radius = np.where(few, raised(own + sums * along), raised(error)) + TINY
    operands: list[tuple[int, VJP]] = []
    if x.place is not None and not few.all():
        rest = ~few
        operands.append((x.place, lambda a: a.times(rest)))
    if shared.place is not None:
        operands.append((shared.place, _gathered(weights, walk.kernel.activations[1])))
    together = None
    if each is not None and x.cases is not None:
        others = np.where(few, raised(sums * along), raised(error)) + TINY
        steps = _steps((each[0] - middle, each[1] - middle), scale, slip, few, x.cases.width)
        together = Together(steps, others)
    entry = TapeEntry(error_bound, tuple(operands), radius, together=together)
    return Form(reference, error_bound, walk.tape.add(entry))


def _codes(by: QuantiserSteps, of: Cases, least: Floats, most: Floats) -> tuple[Floats, Floats]:
    """Return the least and the greatest codes in every case, within those of all cases."""
    low, high = quantisers.codes(by, Box(of.lo, of.hi))
    return np.clip(low, least, most), np.clip(high, least, most)


def _widest(walk: Walk, codes: tuple[Floats, Floats], by: QuantiserSteps, x: Form) -> Floats:
    """Return a bound of |x̂ - x|: half a step at the largest possible code, and float32 roundings.

    With mx, a limited scale, or a zero point, the last code may be a saturated number: no bound.
    """
    farthest = np.maximum(np.abs(codes[0]), np.abs(codes[1]))
    step = quantisers.half_step(by.kind, farthest) * by.scale.hi
    step = raised(step + 4 * quantisers.UNIT * (farthest * by.scale.hi + x.size))
    limited = walk.kernel.amax_limit < math.inf
    floored = layout_of(walk.kernel.activations[1]).floored
    if not (floored or CODES[by.kind].shifted or limited):
        return step
    return np.where((codes[1] < by.above.lo) & (-codes[0] < by.below.lo), step, np.inf)


def _steps(codes: tuple[Floats, Floats], scale: Box, slip: Floats, few: Bools, width: int) -> Cases:
    """Return the cases (code - middle code)·scale of codes [cases, ...]; 0 where not `few`."""
    lo = np.minimum(codes[0] * scale.lo, codes[0] * scale.hi) - slip
    hi = np.maximum(codes[1] * scale.lo, codes[1] * scale.hi) + slip
    return Cases(np.where(few, box.down(lo), 0.0), np.where(few, box.above(hi), 0.0), width)


def _gathered(weights: Floats, scale: str) -> VJP:
    """Return the adjoint map of the scale: Σ α·c over the elements of a group."""

    def vjp(adjoint: Adjoint) -> Adjoint:
        values = adjoint.values * weights[adjoint.window]
        if not LAYOUTS[scale].height:
            axes = tuple(range(1, values.ndim))
            return Adjoint(values.sum(axis=axes, keepdims=True), (0,) * len(axes))
        width, begin = _wide(weights.shape, scale), adjoint.start[-1]
        group = begin // width
        # the starts of groups, relative to the start of the window
        steps = np.arange(group * width, begin + values.shape[-1], width) - begin
        sums = np.add.reduceat(values, np.maximum(steps, 0), axis=-1)
        return Adjoint(sums, (*adjoint.start[:-1], group))

    return vjp


def _wide(shape: tuple[int, ...], scale: str) -> int:
    """Return the number of elements of a row that share a scale."""
    return LAYOUTS[scale].tile[1] or shape[-1]


def _given_back(adjoint: Adjoint, picked: Floats, scale: str) -> Adjoint:
    """Return functionals of scales as functionals of the leading elements."""
    if not LAYOUTS[scale].height:
        return Adjoint(adjoint.values * picked, (0,) * picked.ndim)
    width, n = _wide(picked.shape, scale), picked.shape[-1]
    begin = adjoint.start[-1] * width
    spread = np.repeat(adjoint.values, width, axis=-1)[..., : n - begin]
    window = (*adjoint.window[:-1], slice(begin, begin + spread.shape[-1]))
    return Adjoint(spread * picked[window], (*adjoint.start[:-1], begin))


@dataclass(frozen=True, slots=True)
class _Lead:
    """The leading elements, which determine the scales of all rows: their indices, their parts of
    amax (uint8: of max - min), their error bounds, and where it is certain that they lead."""

    at: Ranks
    value: Floats
    error_bound: Floats
    certain: Bools


def _lead(size: Box, x: Form, scale: str, none: bool) -> _Lead:
    """Return the leading elements of the groups; `size` is a box of the magnitude of each element.

    `none`: groups of magnitude 0 are led by 0.
    """
    lo, hi = (_groups(part, scale, -np.inf) for part in (size.lo, size.hi))
    at, every = lo.argmax(axis=-1), np.arange(len(lo))
    others = hi.copy()
    others[every, at] = -np.inf
    lead = lo[every, at]
    certain = (lead >= others.max(axis=-1)) & (lead > 0)
    value, error_bound = (
        _groups(part, scale, 0.0)[every, at] for part in (x.reference, x.error_bound)
    )
    nowhere = (hi.max(axis=-1) <= 0) & none
    value, error_bound = np.where(nowhere, 0.0, np.abs(value)), np.where(nowhere, 0.0, error_bound)
    return _Lead(np.where(nowhere, -1, at), value, error_bound, certain | nowhere)


def _groups(part: Floats, scale: str, rest: float) -> Floats:
    """Return the elements that share a scale as rows; the last group is padded with `rest`."""
    if not LAYOUTS[scale].height:
        return part.reshape(1, -1)
    n, width = part.shape[-1], _wide(part.shape, scale)
    ends = [(0, 0)] * (part.ndim - 1) + [(0, -n % width)]
    return np.pad(part, ends, constant_values=rest).reshape(-1, width)


def _leads(kind: str, around: Box, x: Form, scale: str) -> list[tuple[_Lead, Floats]]:
    """Return the leading elements, each with the derivative of the scale by the element."""
    lo, hi = around.lo, around.hi
    ones = _groups(np.ones(x.shape), scale, 0.0)
    if not CODES[kind].shifted:
        size = Box(np.maximum(lo, -hi), np.maximum(np.abs(lo), np.abs(hi)))
        return [(_lead(size, x, scale, False), _groups(np.sign(x.reference), scale, 0.0))]
    return [
        (_lead(Box(lo, hi), x, scale, True), ones),
        (_lead(Box(-hi, -lo), x, scale, True), -ones),
    ]


def _shared(walk: Walk, x: Form, around: Box, by: QuantiserSteps) -> _Shared:
    """Write the entry of the scales, as a function of the leading elements if these are certain."""
    name, scale = walk.kernel.activations[1], by.scale
    middle = scale.lo / 2 + scale.hi / 2
    half = np.maximum(box.add_up(scale.hi, -middle), box.add_up(middle, -scale.lo))
    if name not in PLAIN_INPUTS:
        return _Shared(middle, half, None)
    parts = middle, half, scale.lo, scale.hi
    mid, wide, low, top = (_groups(part, name, 0.0)[:, 0] for part in parts)
    leads = _leads(by.kind, around, x, name)
    certain = np.logical_and.reduce([lead.certain for lead, _ in leads])
    qmax = float(CODES[by.kind].divisor)
    bottom = quantisers.least_scale(walk.kernel)
    if bottom:
        certain = certain & (low > bottom)
    if walk.kernel.amax_limit < math.inf:
        certain = certain & (top < walk.kernel.amax_limit / qmax * (1 - 2.0**-22))
    rounding = (4 if CODES[by.kind].shifted else 2) * quantisers.UNIT * top
    value = sum((lead.value for lead, _ in leads), np.zeros(mid.shape))
    error_bound = sum((lead.error_bound for lead, _ in leads), np.zeros(mid.shape))
    reference = np.where(certain, value / qmax, mid)
    own = np.where(certain, rounding, wide) + TINY
    moved = np.where(certain, raised(error_bound / qmax + rounding), wide) + TINY
    slopes = np.zeros(leads[0][1].shape)
    for lead, slope in leads:
        chosen = np.flatnonzero(certain & (lead.at >= 0))
        slopes[chosen, lead.at[chosen]] += slope[chosen, lead.at[chosen]] / qmax
    picked = _ungrouped(slopes, x.shape, name)
    shape = (*x.shape[:-1], -1) if LAYOUTS[name].height else (1,) * len(x.shape)

    def vjp(adjoint: Adjoint) -> Adjoint:
        return _given_back(adjoint, picked, name)

    operands = () if x.place is None else ((x.place, vjp),)
    entry = TapeEntry(moved.reshape(shape), operands, own.reshape(shape))
    place = walk.tape.add(entry)
    spread = [np.broadcast_to(part[:, None], slopes.shape) for part in (reference, moved)]
    one, two = (_ungrouped(part, x.shape, name) for part in spread)
    return _Shared(one, two, place)


def _ungrouped(rows: Floats, shape: tuple[int, ...], scale: str) -> Floats:
    """Return the inverse of `_groups` in the shape of the elements."""
    if not LAYOUTS[scale].height:
        return rows.reshape(shape)
    return rows.reshape(*shape[:-1], -1)[..., : shape[-1]]
