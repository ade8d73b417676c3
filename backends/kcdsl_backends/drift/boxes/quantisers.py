"""Quantisers (section 2): their scales, the steps of their codes, and boxes through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.numerics import Activations
from kcdsl.model.numerics.formats import (
    E8M0_EXPONENTS,
    NESTED_LEAST,
    NESTED_MOST,
    CodeFormat,
    Format,
    ScaleLayout,
)
from kcdsl_backends.drift.boxes import Box, NoBound, down, overflow, up
from kcdsl_backends.drift.boxes.rounding import Rounding, StoredResult, power_of_two

SLACK = 2.0**-22
"""Bounds the relative error of a float32 ratio and product together."""
_WIDER = 1.0 + 2.0**-20


@dataclass(frozen=True, slots=True)
class Tops:
    """Boxes of the last code above zero, and of the magnitude of the last code below zero."""

    above: Box
    below: Box


@dataclass(frozen=True, slots=True)
class Quantiser:
    """The quantisers of all elements of a box.

    The box `scale` starts at 0 where a scale may be 0. `ratio` bounds x/s from one side, x >= 0.
    """

    form: CodeFormat
    scale: Box
    tops: Tops
    ratio: Ratio


Push = Callable[[Tensor], Tensor]
Ratio = Callable[[Tensor, Tensor, Push], Tensor]


def code_error(form: CodeFormat, size: Tensor, scale: Tensor, *, least: bool = True) -> Tensor:
    """Return the quantisation error of numbers of at most this size, without saturation; `least`:
    it is at most the number itself."""
    if form.integer:
        step = torch.minimum(size, scale / 2) if least else scale / 2
        return (step + size * 2.0**-20) * _WIDER
    return (form.grid.unit_roundoff * size + scale * form.grid.underflow) * _WIDER


def group_maximum(magnitude: Tensor, layout: ScaleLayout | None) -> Tensor:
    """Return the largest magnitude of the group that shares an element's scale."""
    if layout is None or layout.whole:
        return magnitude.amax().expand_as(magnitude)
    if not layout.columns:
        return magnitude.amax(-1, keepdim=True).expand_as(magnitude)
    width, size = magnitude.shape[-1], layout.columns
    padded = torch.nn.functional.pad(magnitude, (0, -width % size))
    blocks = padded.reshape(*magnitude.shape[:-1], -1, size).amax(-1)
    return blocks.repeat_interleave(size, dim=-1)[..., :width]


def quantiser(x: Box, spec: Activations, weight: str, node: str) -> Quantiser:
    """Return the scales and codes of the input x of a linear.

    Args:
        weight: the weight of the linear, whose input may have a static scale.
        node: the node to name in errors.

    Raises:
        NoBound: there is no static scale, or the input may exceed it.
    """
    if spec.static:
        return static_quantiser(x, spec, weight, node)
    form = spec.codes
    if spec.nested:  # the multiple may round to 0, so codes are unknown
        _, most = nested_scales(x, spec, weight, node)
        return known_steps(form, x, Box(torch.zeros_like(most), most))
    refuse_batch(x, spec, node)
    scale = scale_range(x, spec)
    if form.zero_point:
        return Quantiser(form, scale, _zero_points(x, spec), divided_by(form))
    return known_steps(form, x, scale)


def known_steps(form: CodeFormat, v: Box, scale: Box) -> Quantiser:
    """Return the quantiser of scales in a box, with the codes of a format without zero point."""
    return Quantiser(form, scale, _tops(v.lo, form.above, form.below), divided_by(form))


def _tops(like: Tensor, above: float, below: float) -> Tops:
    """Return the largest codes of every element, where they are known."""
    return Tops(*(Box.point(torch.full_like(like, top)) for top in (above, below)))


def refuse_batch(x: Box, spec: Activations, node: str) -> None:
    """Raise NoBound where an element may exceed the stated amax of a batch."""
    if not spec.batch_amax or bool((x.mag() <= spec.batch_amax).all()):
        return
    raise overflow(node, x.mag(), f" of the input may exceed {spec.batch_amax:g} (batch_amax)")


def scale_range(x: Box, spec: Activations) -> Box:
    """Return a box of the dynamic scale of each element, from 0 where it may be 0.

    The largest magnitude of a group is at least the greatest lower bound of its elements'.
    """
    form, layout = spec.codes, spec.layout
    if layout is None:
        return Box.point(torch.ones_like(x.lo))
    if form.zero_point:
        (low, low_most), (high, high_most) = _ends(x, layout)
        least, most = _added(low, high, down), _added(low_most, high_most, up)
    else:
        least = group_maximum(torch.maximum(x.lo, -x.hi).clamp_min(0), layout)
        most = group_maximum(x.mag(), layout).clamp_min(spec.batch_amax)
        least, most = least.clamp_max(spec.amax_limit), most.clamp_max(spec.amax_limit)
    if layout.rule == "floor":
        powers = [_floor(end, form.top_exponent) for end in (least, most)]
        return Box(torch.where(least > 0, powers[0], 0.0), powers[1])
    top = torch.full_like(least, form.divisor)
    found = Box(quotient(least, top, down), quotient(most, top, up))
    if layout.rule == "ceil":
        found = Box(torch.where(found.lo > 0, _ceil(found.lo), 0.0), _ceil(found.hi))
    at_least = max(form.least_scale, spec.least_scale)
    return Box(found.lo.clamp_min(at_least), found.hi.clamp_min(at_least))


def nested_scales(x: Box, spec: Activations, weight: str, node: str) -> tuple[Tensor, Tensor]:
    """Return upper bounds of the scale s of the tensor and of the scale m·s of each group.

    m is within 1/16 of amax/(divisor·s), or 2^-6 where that is less.

    Raises:
        NoBound: as `static_scale` does.
    """
    form, magnitude = spec.codes, x.mag()
    if spec.input_scale:
        whole = static_scale(x.lo, spec, weight, node)
    else:
        whole = up(magnitude.amax() / (form.divisor * NESTED_MOST)).expand_as(magnitude)
    group = group_maximum(magnitude, spec.layout) * (17 / 16) / form.divisor
    return whole, up(torch.maximum(group, whole * NESTED_LEAST), 4)


def _ends(
    x: Box, layout: ScaleLayout | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return lower and upper bounds of max(0, -min) and of max(0, max) of a group."""
    low = group_maximum((-x.hi).clamp_min(0), layout), group_maximum((-x.lo).clamp_min(0), layout)
    high = group_maximum(x.lo.clamp_min(0), layout), group_maximum(x.hi.clamp_min(0), layout)
    return low, high


def _zero_points(x: Box, spec: Activations) -> Tops:
    """Return 255 - z and z, z the nearest even of float32(-min/s)."""
    (low, low_most), (high, high_most) = _ends(x, spec.layout)
    around, levels = scale_range(x, spec), spec.codes.above

    def share(part: Tensor, other: Tensor, factor: float) -> Tensor:
        total = (part + other).clamp_min(2.0**-1000)
        return levels * (part / total) * factor

    def zero(part: Tensor, by: Tensor, ratio: Tensor, push: Push) -> Tensor:
        exact = quotient(part, by, push)
        one = torch.round(torch.where(by > 0, exact, ratio))
        other = torch.round(ratio)
        met = torch.maximum(one, other) if push is down else torch.minimum(one, other)
        return met.clamp(0, levels)

    first = zero(low, around.hi, share(low, high_most, 1 - SLACK), down)
    last = zero(low_most, around.lo, share(low_most, high, 1 + SLACK), up)
    return Tops(Box(levels - last, levels - first), Box(first, last))


def static_scale(x: Tensor, spec: Activations, weight: str, node: str) -> Tensor:
    """Return the static scale of every element of the input of a linear.

    Raises:
        NoBound: the linear has none, or another number than its input has channels.
    """
    found = spec.calibrated(weight)
    if found is None:
        raise NoBound(node, f"no static scale is given for the input of {weight or 'this linear'}")
    if len(found.scales) not in (1, x.shape[-1]):
        raise NoBound(
            node,
            f"{len(found.scales)} static scales are given for the {x.shape[-1]} inputs of {weight}",
        )
    scales = torch.tensor(found.scales, dtype=torch.float64, device=x.device)
    return scales.expand_as(x)


def static_quantiser(x: Box, spec: Activations, weight: str, node: str) -> Quantiser:
    """Return the quantiser of a static scale, whose codes cover the whole box.

    Raises:
        NoBound: as `static_scale` does, or some element may be beyond the last code.
    """
    scale, form = static_scale(x.lo, spec, weight, node), spec.codes
    zero, found = 0, spec.calibrated(weight)
    if form.zero_point and found is not None:
        zero = found.zero_point
    tops = _tops(x.lo, form.above - zero, zero if form.zero_point else form.below)
    # up to half a step beyond the last integer the error is at most half a step
    beyond = 0.5 if form.integer else 0.0
    high = (tops.above.lo + beyond) * scale * (1 + SLACK)
    low = (tops.below.lo + beyond) * scale * (1 + SLACK)
    over = torch.maximum(x.hi - high, -x.lo - low)
    if not bool((over <= 0).all()):
        share = torch.nan_to_num(over / scale, nan=torch.inf)
        flat = int(share.argmax())
        side = high if bool((x.hi - high).flatten()[flat] >= (-x.lo - low).flatten()[flat]) else low
        limit = f"{float(side.flatten()[flat]):g} ({spec.format} with its static scale)"
        raise overflow(node, share, f" of the input may exceed {limit}")
    return Quantiser(form, Box.point(scale), tops, either)


def single(x: Tensor) -> Tensor:
    """Return numbers rounded to float32."""
    return x.to(torch.float32).to(torch.float64)


def quotient(a: Tensor, b: Tensor, push: Push) -> Tensor:
    """Return float32(a/b) for a float32 b; if a is not float32, a bound of it from one side.

    The quotient of two float32 numbers, rounded to float64 first, is that rounded once.
    """
    ratio = a / b
    return single(torch.where(single(a) == a, ratio, push(ratio))).clamp_min(0)


def reciprocal(a: Tensor, b: Tensor, push: Push) -> Tensor:
    """Return float32(a·float32(1/b)) likewise; products of float32 numbers are exact in float64."""
    product = a * single(1.0 / b)
    return single(torch.where(single(a) == a, product, push(product))).clamp_min(0)


def either(a: Tensor, b: Tensor, push: Push) -> Tensor:
    """Return a bound from one side of both the rounded quotient a/b and product with 1/b."""
    return (a / b * (1 - SLACK if push is down else 1 + SLACK)).clamp_min(0)


def divided_by(form: CodeFormat) -> Ratio:
    """Return the ratio by which a kernel divides by a dynamic scale."""
    return reciprocal if form.reciprocal else quotient


def _added(a: Tensor, b: Tensor, push: Push) -> Tensor:
    """Return float32(a + b) of float32 numbers, else a bound of it from one side."""
    total = a + b
    known = (total - a == b) & (total - b == a) & (single(a) == a) & (single(b) == b)
    return single(torch.where(known, total, push(total))).clamp_min(0)


def _floor(amax: Tensor, shift: int) -> Tensor:
    """Return 2^(floor(log2 amax) - shift), with the exponent in the range of E8M0."""
    _, exponent = torch.frexp(amax)
    return power_of_two((exponent - 1 - shift).clamp(*E8M0_EXPONENTS))


def _ceil(scale: Tensor) -> Tensor:
    """Return the least power of two that is not smaller, within the range of E8M0."""
    fraction, exponent = torch.frexp(scale)
    power = torch.where(fraction == 0.5, exponent - 1, exponent)
    return power_of_two(power.clamp(*E8M0_EXPONENTS))


ROUNDING = 2.0**-24
"""Relative error of one rounding to float32."""
LEAST_SCALE = 2.0**-100
"""Below it products of scales with codes may be subnormal, with larger errors than `SLACK`."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The least and the greatest possible code (float64, on the grid)."""

    low: Tensor
    high: Tensor


def scale_steps(
    x: Box, kernel: Rounding, weight: str, node: str
) -> tuple[Quantiser, Tensor] | None:
    """Return the quantiser of the input of a linear, and where it is a known step function.

    Elsewhere its scale is set to 1. None if casts are free.

    Raises:
        NoBound: as `quantiser` does.
    """
    if kernel.free:
        return None
    found = quantiser(x, kernel.numerics.activations, weight, node)
    known = found.scale.lo >= LEAST_SCALE
    one = torch.ones_like(found.scale.lo)
    low, high = (torch.where(known, end, one) for end in (found.scale.lo, found.scale.hi))
    return replace(found, scale=Box(low, high)), known


def codes(v: Box, by: Quantiser) -> Codes:
    """Return the range of codes q(v/s) of numbers in v with scales s > 0."""
    scale, above, below = by.scale, by.tops.above, by.tops.below
    return Codes(
        torch.where(
            v.lo >= 0,
            _code(v.lo, scale.hi, above.lo, by, down),
            -_code(-v.lo, scale.lo, below.hi, by, up),
        ),
        torch.where(
            v.hi >= 0,
            _code(v.hi, scale.lo, above.hi, by, up),
            -_code(-v.hi, scale.hi, below.lo, by, down),
        ),
    )


def quantised_hull(v: Box, by: Quantiser) -> Box:
    """Return the hull of s·q(v/s) for v and s (> 0) in their boxes, q saturating.

    Up to the roundings of ratios the hull is exact: s·q(v/s) grows with v, and for a code c it is
    c·s, with the scales s between v/b⁺ and v/b⁻, where [b⁻, b⁺] is the interval that rounds to c.
    The ends of the scale are float32 numbers.
    """
    tops = by.tops
    return Box(
        torch.where(
            v.lo >= 0,
            _least(v.lo.clamp_min(0), tops.above.lo, by),
            -_largest((-v.lo).clamp_min(0), tops.below.hi, by),
        ),
        torch.where(
            v.hi >= 0,
            _largest(v.hi.clamp_min(0), tops.above.hi, by),
            -_least((-v.hi).clamp_min(0), tops.below.lo, by),
        ),
    )


def _code(v: Tensor, scale: Tensor, top: Tensor, by: Quantiser, push: Push) -> Tensor:
    """Return the code of v/s for v >= 0, at most `top`, or a bound of it from one side."""
    ratio = by.ratio(v.clamp_min(0), scale, push)
    return by.form.grid.nearest(torch.minimum(ratio, top))


def _quantum(code: Tensor, form: Format) -> Tensor:
    """Return the distance from a code >= 0 to the next one."""
    return form.spacing(code.clamp_min(2.0**form.min_exponent))


def _below(code: Tensor, form: Format) -> Tensor:
    """Return the distance from a code > 0 to the one before it."""
    quantum, (fraction, _) = _quantum(code, form), torch.frexp(code)
    leads = (fraction == 0.5) & (code > 2.0**form.min_exponent)
    return torch.where(leads, quantum / 2, quantum)


def _largest(v: Tensor, top: Tensor, by: Quantiser) -> Tensor:
    """Return the largest s·q(v/s) for v >= 0.

    Up to the code of v/s_h the largest scale gives the maximum. A larger code c needs s <= v/b⁻,
    and c/b⁻ falls within a binade from its second code on: only the first larger code, and the
    first code that is the second of its binade, can be the maximum.
    """
    form, scale = by.form.grid, by.scale
    first, last = _code(v, scale.hi, top, by, up), _code(v, scale.lo, top, by, up)
    best = single(first * scale.hi)
    one = first + _quantum(first, form)
    power = _binade(one, form)
    second = power + _quantum(power, form)
    second = torch.where(second < one, 2 * power + 2 * _quantum(power, form), second)
    for code in (one, second):
        met = code / (code - _below(code, form) / 2) * (v * (1 + SLACK))
        best = torch.where(code <= last, torch.maximum(best, met), best)
    return best


def _least(v: Tensor, top: Tensor, by: Quantiser) -> Tensor:
    """Return the least s·q(v/s) for v >= 0.

    From the code of v/s_l on the least scale gives the minimum. A smaller code c needs s >= v/b⁺,
    and c/b⁺ grows within a binade: only the first code, and the start of the first binade after it,
    can be the minimum.
    """
    form, scale = by.form.grid, by.scale
    first, last = _code(v, scale.hi, top, by, down), _code(v, scale.lo, top, by, down)
    best = single(last * scale.lo)
    power = _binade(first, form)
    begin = torch.where(power < first, 2 * power, power)
    for code in (first, begin):
        met = code / (code + _quantum(code, form) / 2) * (v * (1 - SLACK))
        best = torch.where(code < last, torch.minimum(best, met), best)
    return best


def _binade(code: Tensor, form: Format) -> Tensor:
    """Return the power of two at the start of a code's binade; of the first one for subnormals."""
    _, exponent = torch.frexp(code.clamp_min(2.0**form.min_exponent))
    return power_of_two(exponent - 1)


def quantiser_steps(
    x: Box, error: Tensor, kernel: Rounding, weight: str = "", node: str = ""
) -> StoredResult | None:
    """Return the quantised values and their errors, each met with the bound `error` (Q).

    None if casts are free, so that the quantiser is not a known step function.

    Raises:
        NoBound: as `quantiser` does.
    """
    found = scale_steps(x, kernel, weight, node)
    if found is None:
        return None
    by, known = found
    hull, wide = quantised_hull(x, by), x.widen(error)
    hull = Box(
        torch.where(known, torch.maximum(hull.lo, wide.lo), wide.lo),
        torch.where(known, torch.minimum(hull.hi, wide.hi), wide.hi),
    )
    moved = (hull - x).meet(Box.around(error))
    return StoredResult(hull, moved)
