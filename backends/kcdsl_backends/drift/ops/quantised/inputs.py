"""Quantised inputs of linears: their errors, and their entries in affine forms (section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kcdsl.model.numerics import Activations
from kcdsl.model.numerics.formats import E8M0_EXPONENTS, NESTED_MOST, CodeFormat, ScaleLayout
from kcdsl_backends.drift.affine.adjoint import Adjoint, at
from kcdsl_backends.drift.affine.cases import Cases, Together
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.result_rounding import half_step
from kcdsl_backends.drift.affine.tape import PASS, TapeEntry
from kcdsl_backends.drift.boxes import SAFE, Box, NoBound, down, gamma, refuse_overflow, up
from kcdsl_backends.drift.boxes.quantisers import (
    ROUNDING,
    SLACK,
    Codes,
    Quantiser,
    code_error,
    codes,
    group_maximum,
    nested_scales,
    quantised_hull,
    refuse_batch,
    scale_steps,
    static_quantiser,
)
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.sums import _DIVISION, _FAINT_SCALE

_FAINT_TENSOR = 2.0**-113
"""Bounds a number and the largest of its group if the reciprocal of m·s (nvfp4) is infinite, or s
is flushed to zero: then every code may be the largest one, also of zeros."""
_LEAST_POWER = 2.0 ** E8M0_EXPONENTS[0]
_OFF_ZERO = 2.0**-14
"""Bounds the move of the ends of 255 steps by roundings of the scale, in steps."""


def activation_error(x: Box, kernel: Rounding, node: str, weight: str = "") -> Tensor | None:
    """Return Q, the error of quantising a linear's input; None without it.

    Args:
        weight: the name of the linear's weight, by which it may have a static scale.

    Raises:
        NoBound: a format without scale or with a static one may overflow, a static scale is
            missing, or casts are directed.
    """
    if not kernel.numerics.activations.quantised:
        return None
    if kernel.casts.units != 1:  # no rule says how a quantiser rounds beside such casts
        raise NoBound(node, f"a quantiser beside casts {kernel.numerics.casts!r}")
    return up(_activation_error(x, kernel, node, weight) + _FAINT_SCALE)


def _activation_error(x: Box, kernel: Rounding, node: str, weight: str) -> Tensor:
    spec, magnitude = kernel.numerics.activations, x.mag()
    if spec.static:
        return _static_error(x, kernel, node, weight)
    if spec.nested:
        return _nested_error(x, spec, node, weight)
    form = spec.codes
    if form.zero_point:
        low = group_maximum((-x.lo).clamp_min(0), spec.layout)
        high = group_maximum(x.hi.clamp_min(0), spec.layout)
        step = (low + high) / form.divisor
        return up((step * (0.5 + _OFF_ZERO) + magnitude * 2.0**-20) * _DIVISION, 4)
    if spec.layout is None:
        refuse_overflow(node, magnitude, form.grid, " of the input")
    refuse_batch(x, spec, node)
    scale = _largest_scale(magnitude, spec, form)
    rounded = code_error(form, magnitude, scale, least=form.reciprocal)
    if spec.amax_limit < math.inf:
        last = spec.amax_limit * (min(form.above, form.below) / form.divisor) * (1 - 2.0**-20)
        beyond = (magnitude - last).clamp_min(0)
        rounded = torch.maximum(rounded, beyond + magnitude * 2.0**-20)
    if spec.layout is not None and spec.layout.cuts:
        rounded = torch.maximum(rounded, _saturation(x, spec))
    return up(rounded, 4)


def _largest_scale(magnitude: Tensor, spec: Activations, form: CodeFormat) -> Tensor:
    """Return an upper bound of dynamic scales, without their roundings."""
    if spec.layout is None:
        return torch.ones_like(magnitude)
    largest = group_maximum(magnitude, spec.layout).clamp(spec.batch_amax, spec.amax_limit)
    match spec.layout.rule:
        case "floor":
            scale = (largest * 2.0**-form.top_exponent).clamp_min(_LEAST_POWER)
        case "ceil":
            scale = up(2 * largest / form.divisor).clamp_min(_LEAST_POWER)
        case _:
            scale = up(largest / form.divisor)
    return scale.clamp_min(max(form.least_scale, spec.least_scale))


def _static_error(x: Box, kernel: Rounding, node: str, weight: str) -> Tensor:
    """Return Q of a static scale whose codes cover x: half a step, or the rounding to fp8."""
    spec, magnitude = kernel.numerics.activations, x.mag()
    scale = static_quantiser(x, spec, weight, node).scale.hi
    return up(code_error(spec.codes, magnitude, scale), 4)


def _nested_error(x: Box, spec: Activations, node: str, weight: str) -> Tensor:
    """Return Q of NVFP4: the rounding, or the saturation error at the largest code.

    The multiple m of the scale s of the tensor is within 1/16 of amax/(6s), or within 2^-10 if that
    is below 2^-6, or 448 if that is less. So 6·m·s is at least 15/16 of the group's own maximum, or
    that maximum less 6·2^-10·s, or 2688·s. A dynamic scale of the tensor may be subnormal.
    """
    form, magnitude = spec.codes, x.mag()
    whole, scale = nested_scales(x, spec, weight, node)
    rounded = code_error(form, magnitude, scale)
    least = group_maximum(torch.maximum(x.lo, -x.hi).clamp_min(0), spec.layout)
    kept = (15 / 16) * least * (1 - 2.0**-20)
    cut = torch.minimum(magnitude / 16, (magnitude - kept).clamp_min(0))
    faint = torch.minimum(magnitude, form.above * 2.0**-10 * whole * _DIVISION)
    most = form.above * NESTED_MOST * whole * (1 - 2.0**-20)
    cut = torch.maximum(torch.maximum(cut, faint), (magnitude - most).clamp_min(0))
    found = torch.maximum(rounded, cut + magnitude * 2.0**-20)
    return up(found if spec.input_scale else found + _FAINT_TENSOR, 4)


def _saturation(x: Box, spec: Activations) -> Tensor:
    """Return the saturation error of numbers with an mx scale.

    The scale is 2^(floor(log2 amax) - emax), so the last code is at least κ = qmax·2^-(emax+1) of
    the block's own maximum, which is known within a box. A number loses at most 1 - κ of itself,
    and nothing below κ of the least possible maximum.
    """
    form, magnitude = spec.codes, x.mag()
    kept = form.above * 2.0 ** -(form.top_exponent + 1)
    least = torch.maximum(x.lo, -x.hi).clamp_min(0)
    certain = kept * group_maximum(least, spec.layout) * (1 - 2.0**-20)
    cut = torch.minimum(magnitude * (1 - kept), (magnitude - certain).clamp_min(0))
    return cut + magnitude * 2.0**-20


Adjoints = Sequence[tuple[int, Adjoint]]
SHARE = 2.0**-2
"""Most share of Q by which a scale may move its elements; beyond it no shared scale is used."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """The scales of a tensor: reference and error bound at every element, and their entry."""

    reference: Tensor
    error_bound: Tensor
    index: int | None


def quantise(
    run: KernelRun, name: str, weight: str, index: int, x: TapeEntry, error: Tensor
) -> TapeEntry | None:
    """Return the entry of a quantised operand; None if only its error bound (Q) is known.

    Args:
        name, weight: the linear that reads it, and the name of its weight.
        index, x: the operand before.
        error: Q, elementwise.
    """
    spec = run.rounding.numerics.activations
    box = Box(x.reference - x.error_bound * SAFE, x.reference + x.error_bound * SAFE)
    step = scale_steps(box, run.rounding, weight, name)
    if step is None:
        return None
    by, known = step
    safe, found, hull = by.scale, codes(box, by), quantised_hull(box, by)
    each = found if x.cases is None else _in_cases(x.cases, found, by)
    if x.cases is not None:
        found = Codes(each.low.amin(0), each.high.amax(0))
    middle, half = (found.low + found.high) / 2, (found.high - found.low) / 2
    rounding = ROUNDING * torch.maximum(found.low.abs(), found.high.abs()) * safe.hi * SAFE
    scale = _scale(run, name, index, x, box, by)
    if scale.index is None:
        rounding = (rounding + middle.abs() * scale.error_bound) * SAFE
    own = (half * safe.hi + rounding) * SAFE
    least = own
    if x.cases is not None:
        least = (((each.high - each.low) / 2).amax(0) * safe.hi + rounding) * SAFE
    along = middle.abs() * scale.error_bound
    by_steps = known & (least <= error)
    if scale.index is not None:
        by_steps &= along <= SHARE * error
    error = torch.where(known, torch.minimum(error, _widest_step(spec, found, by, x)), error)
    keep = (~by_steps).to(own.dtype)
    weights = torch.where(by_steps, middle, 0.0)
    carried = torch.zeros_like(own) if scale.index is None else torch.where(by_steps, along, 0.0)
    reference = torch.where(by_steps, middle * scale.reference, x.reference)
    error_bound = torch.where(by_steps, own + carried, x.error_bound + error) * SAFE
    apart = up(torch.maximum(hull.hi - reference, reference - hull.lo), 2)
    error_bound = torch.where(known, torch.minimum(error_bound, apart), error_bound)
    radius = torch.where(by_steps, own + gamma(own.numel() + PASS) * carried, error) * SAFE
    straight, layout = bool(by_steps.all()), spec.layout

    def vjp(a: Adjoint) -> Adjoints:
        parts = [] if straight else [(index, a.times(keep))]
        if scale.index is not None and layout is not None:
            weighed = Adjoint(a.values * weights[at(a.window)], a.window, a.shape)
            parts.append((scale.index, _gathered(weighed, layout)))
        return parts

    kept, together = not bool(by_steps.any()), None
    if x.cases is not None:
        added = _steps(each, middle, safe, rounding, by_steps)
        rest = torch.where(by_steps, gamma(own.numel() + PASS) * carried, error) * SAFE
        together = Together(Cases(added.lo, added.hi, x.cases.width), rest)
    return TapeEntry(
        f"{name}/input", reference, error_bound, vjp, None, radius, kept=kept, together=together
    )


def _in_cases(cases: Cases, found: Codes, by: Quantiser) -> Codes:
    """Return the codes [C, ...] in every case, within those for all cases."""
    each = codes(Box(cases.low, cases.high), by)
    low = torch.minimum(torch.maximum(each.low, found.low), found.high)
    return Codes(low, torch.maximum(torch.minimum(each.high, found.high), found.low))


def _widest_step(spec: Activations, found: Codes, by: Quantiser, x: TapeEntry) -> Tensor:
    """Bound |x̂ - x|: half a step at the possible codes, times the scale, and roundings.

    With an mx scale, a limited one or a zero point the last code may be a saturated number: there
    the bound is infinite.
    """
    form, largest = by.form.grid, torch.maximum(found.low.abs(), found.high.abs())
    off = half_step(largest, form) * by.scale.hi
    off = (off + 4 * ROUNDING * (largest * by.scale.hi + x.size)) * SAFE
    cuts = spec.layout is not None and spec.layout.cuts
    if not (by.form.zero_point or cuts or spec.amax_limit < math.inf):
        return off
    inside = (found.high < by.tops.above.lo) & (-found.low < by.tops.below.lo)
    return torch.where(inside, off, torch.inf)


def _steps(each: Codes, middle: Tensor, scale: Box, rounding: Tensor, by_steps: Tensor) -> Box:
    """Return (c - ĉ)·s in every case, with its rounding; 0 outside of `by_steps`."""
    low, high = each.low - middle, each.high - middle
    least = torch.minimum(low * scale.lo, low * scale.hi) - rounding
    most = torch.maximum(high * scale.lo, high * scale.hi) + rounding
    return Box(torch.where(by_steps, down(least, 2), 0.0), torch.where(by_steps, up(most, 2), 0.0))


def _scale_shape(shape: tuple[int, ...], layout: ScaleLayout) -> tuple[int, ...]:
    if layout.whole:
        return (1,) * len(shape)
    return (*shape[:-1], -(-shape[-1] // _width(shape, layout)))


def _width(shape: tuple[int, ...], layout: ScaleLayout) -> int:
    """Return the number of elements of a row that share a scale."""
    return layout.columns or shape[-1]


def _rows(t: Tensor, layout: ScaleLayout, nothing: float = 0.0) -> Tensor:
    """Return the elements that share a scale as rows; the last group of a row is padded."""
    if layout.whole:
        return t.reshape(1, -1)
    width = _width(tuple(t.shape), layout)
    return pad(t, (0, -t.shape[-1] % width), value=nothing).reshape(-1, width)


def _spread(t: Tensor, shape: tuple[int, ...], layout: ScaleLayout) -> Tensor:
    """Return the value of its group at every element."""
    width = _width(shape, layout)
    if layout.whole or width == shape[-1]:
        return t.expand(shape)
    return t.repeat_interleave(width, -1)[..., : shape[-1]]


def _gathered(a: Adjoint, layout: ScaleLayout) -> Adjoint:
    """Return the sums of functionals over the elements that share a scale."""
    shape = _scale_shape(a.shape, layout)
    if layout.whole:
        return Adjoint.full(a.values.sum(tuple(range(1, a.values.dim())), keepdim=True))
    if shape[-1] == 1:
        window = (*a.window[:-1], (0, 1))
        return Adjoint(a.values.sum(-1, keepdim=True), window, shape)
    width, (start, stop) = _width(a.shape, layout), a.window[-1]
    first, last = start // width, -(-stop // width)
    values = pad(a.values, (start - first * width, last * width - stop))
    values = values.reshape(*values.shape[:-1], last - first, width).sum(-1)
    return Adjoint(values, (*a.window[:-1], (first, last)), shape)


def _given_back(a: Adjoint, selector: Tensor, layout: ScaleLayout) -> Adjoint:
    """Return functionals of scales as functionals of the leading elements of their groups."""
    shape = tuple(selector.shape)
    if layout.whole:
        return Adjoint.full(a.values * selector)
    width, (first, last) = _width(shape, layout), a.window[-1]
    stop = min(last * width, shape[-1])
    window = (*a.window[:-1], (first * width, stop))
    values = a.values if width == shape[-1] else a.values.repeat_interleave(width, -1)
    return Adjoint(values[..., : stop - first * width] * selector[at(window)], window, shape)


@dataclass(frozen=True, slots=True)
class _Leader:
    """The largest magnitude of every row by its leading element: reference [rows, 1], error bound,
    the selector [rows, n] of that element with its sign; `certain` where no other can lead."""

    reference: Tensor
    error_bound: Tensor
    selector: Tensor
    certain: Tensor


def _leader(
    least: Tensor, most: Tensor, x: TapeEntry, layout: ScaleLayout, *, none: bool = False
) -> _Leader:
    """Return the leading elements of the rows.

    `least` and `most` bound the magnitude of each element; an element leads for certain if no other
    one's `most` exceeds its `least`. `none`: rows of magnitude 0 are led by 0.
    """
    least, most = _rows(least, layout, -torch.inf), _rows(most, layout, -torch.inf)
    first = least.argmax(-1, keepdim=True)
    others = most.scatter(-1, first, -torch.inf).amax(-1, keepdim=True)
    certain = (least.gather(-1, first) >= others) & (least.gather(-1, first) > 0)
    chosen = _rows(x.reference, layout).gather(-1, first)
    error_bound = _rows(x.error_bound, layout).gather(-1, first)
    selector = torch.zeros_like(most).scatter(-1, first, torch.sign(chosen) * certain)
    if not none:
        return _Leader(chosen.abs(), error_bound, selector, certain)
    nothing = most.amax(-1, keepdim=True) <= 0
    zero = torch.zeros_like(error_bound)
    value, error_bound = (
        torch.where(nothing, zero, chosen.abs()),
        torch.where(nothing, zero, error_bound),
    )
    return _Leader(value, error_bound, selector, certain | nothing)


def _scale(run: KernelRun, name: str, index: int, x: TapeEntry, box: Box, by: Quantiser) -> _Scale:
    """Append the entry of the scales, if groups share scales that are not exactly known."""
    spec, around = run.rounding.numerics.activations, by.scale
    form, layout = spec.codes, spec.layout
    middle = around.lo / 2 + around.hi / 2
    error_bound = up(torch.maximum(around.hi - middle, middle - around.lo), 2)
    if layout is None or layout.rule != "amax":
        return _Scale(middle, error_bound, None)
    shape = _scale_shape(x.shape, layout)
    first_row = [_rows(t, layout)[:, :1] for t in (middle, error_bound, around.lo, around.hi)]
    if form.zero_point:
        top, roundings = form.divisor, 4
        above = _leader(box.lo, box.hi, x, layout, none=True)
        below = _leader(-box.hi, -box.lo, x, layout, none=True)
        certain = above.certain & below.certain
        value, wide = above.reference + below.reference, above.error_bound + below.error_bound
        selector = above.selector + below.selector
    else:
        top, roundings = form.divisor, 2
        lead = _leader(torch.maximum(box.lo, -box.hi), box.mag(), x, layout)
        certain, value, wide, selector = (
            lead.certain,
            lead.reference,
            lead.error_bound,
            lead.selector,
        )
    least = max(form.least_scale, spec.least_scale)
    if least:  # at its least value the scale depends on no element
        certain = certain & (first_row[2] > least)
    if spec.amax_limit < math.inf:
        certain = certain & (first_row[3] < spec.amax_limit / form.divisor * (1 - SLACK))
    moved = wide / top * SAFE
    slack = roundings * ROUNDING * first_row[3]
    reference = torch.where(certain, value / top, first_row[0]).reshape(shape)
    radius = torch.where(certain, slack, first_row[1]).reshape(shape)
    spread = torch.where(certain, (moved + slack) * SAFE, first_row[1]).reshape(shape)
    selector = selector / top * certain
    if layout.whole:
        selector = selector.reshape(x.shape)
    else:
        selector = selector.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]

    def vjp(a: Adjoint) -> Adjoints:
        return [(index, _given_back(a, selector, layout))]

    place = run.tape.add(TapeEntry(f"{name}/scale", reference, spread, vjp, None, radius))
    return _Scale(_spread(reference, x.shape, layout), _spread(spread, x.shape, layout), place)
