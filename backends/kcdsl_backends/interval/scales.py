"""The scales and the largest codes that quantised activations may have (section 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.formats import E8M0_EXPONENTS, NESTED_LEAST, NESTED_MOST, CodeFormat, ScaleLayout
from kcdsl.model.numerics import Activations
from kcdsl_backends.interval.box import Box, down, up
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.rounding import power_of_two

SLACK = 2.0**-22
"""More than the relative roundings of a ratio and of a product together."""


@dataclass(frozen=True, slots=True)
class Tops:
    """The largest code above zero, and below zero without its sign, from least to greatest."""

    above: Box
    below: Box


@dataclass(frozen=True, slots=True)
class Quantiser:
    """What is known of the quantisers of all elements of a box.

    `scale` from 0 where it may be 0. `ratio` forms x/s for x >= 0, pushed to one side.
    """

    form: CodeFormat
    scale: Box
    tops: Tops
    ratio: Ratio


Push = Callable[[Tensor], Tensor]
Ratio = Callable[[Tensor, Tensor, Push], Tensor]


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
        node: whom to name where there is none.

    Raises:
        NoBound: there is no static scale, or the input may exceed it.
    """
    if spec.static:
        return static_quantiser(x, spec, weight, node)
    form = spec.codes
    if spec.nested:  # the multiple may be cut to 0, so no code is known
        _, most = nested_scales(x, spec, weight, node)
        return known_steps(form, x, Box(torch.zeros_like(most), most))
    refuse_batch(x, spec, node)
    scale = scale_range(x, spec)
    if form.zero_point:
        return Quantiser(form, scale, _zero_points(x, spec), divided_by(form))
    return known_steps(form, x, scale)


def known_steps(form: CodeFormat, v: Box, scale: Box) -> Quantiser:
    """Return the quantiser of scales in a box, with the codes of a format without zero point."""
    return Quantiser(form, scale, fixed_tops(v.lo, form), divided_by(form))


def fixed_tops(like: Tensor, form: CodeFormat) -> Tops:
    """Return the largest codes of a format without a zero point."""
    return Tops(*(Box.point(torch.full_like(like, top)) for top in (form.above, form.below)))


def refuse_batch(x: Box, spec: Activations, node: str) -> None:
    """Raise NoBound where an element may be larger than any of a batch is said to be."""
    if not spec.batch_amax or bool((x.mag() <= spec.batch_amax).all()):
        return
    flat = int(x.mag().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), x.lo.shape)]
    raise NoBound(
        node,
        f"overflow reachable: element {index} of the input may exceed {spec.batch_amax:g}"
        " (batch_amax)",
    )


def scale_range(x: Box, spec: Activations) -> Box:
    """Return between which numbers the dynamic scale of each element lies; from 0 where it may be.

    The largest magnitude of a group is at least that of the element which is surely far from 0.
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
    """Return what the scale s of the tensor and the scale m·s of each group do not exceed.

    m is within 1/16 of amax/(divisor·s), or 2^-6 where that is less.

    Raises:
        NoBound: as `static_scale`.
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
    """Return how far below and above zero a group reaches, each from least to most."""
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
        NoBound: the linear has none, or as many as its input has no channels.
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
    """Return the quantiser of a static scale, which holds the whole box.

    Raises:
        NoBound: as `static_scale`, or some element may be beyond the last code.
    """
    scale, form = static_scale(x.lo, spec, weight, node), spec.codes
    if form.zero_point:
        found = spec.calibrated(weight)
        zero = 0 if found is None else found.zero_point
        above, below = form.above - zero, float(zero)
        ends = Box.point(torch.full_like(x.lo, above)), Box.point(torch.full_like(x.lo, below))
        tops = Tops(*ends)
    else:
        tops = fixed_tops(x.lo, form)
    # to half a step beyond the last integer a code is off by no more than elsewhere
    beyond = 0.5 if form.integer else 0.0
    high = (tops.above.lo + beyond) * scale * (1 + SLACK)
    low = (tops.below.lo + beyond) * scale * (1 + SLACK)
    over = torch.maximum(x.hi - high, -x.lo - low)
    if not bool((over <= 0).all()):
        flat = int(torch.nan_to_num(over / scale, nan=torch.inf).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat), over.shape)]
        side = high if bool((x.hi - high).flatten()[flat] >= (-x.lo - low).flatten()[flat]) else low
        limit = f"{float(side.flatten()[flat]):g} ({spec.format} with its static scale)"
        raise NoBound(node, f"overflow reachable: element {index} of the input may exceed {limit}")
    return Quantiser(form, Box.point(scale), tops, either)


def single(x: Tensor) -> Tensor:
    """Return numbers rounded to float32."""
    return x.to(torch.float32).to(torch.float64)


def quotient(a: Tensor, b: Tensor, push: Push) -> Tensor:
    """Return float32(a/b) for a float32 b, or where a is no float32 number its bound from one side.

    The quotient of two float32 numbers, rounded to float64 first, is that rounded once.
    """
    ratio = a / b
    return single(torch.where(single(a) == a, ratio, push(ratio))).clamp_min(0)


def reciprocal(a: Tensor, b: Tensor, push: Push) -> Tensor:
    """Return float32(a·float32(1/b)) likewise; the product of float32 numbers is a float64 one."""
    product = a * single(1.0 / b)
    return single(torch.where(single(a) == a, product, push(product))).clamp_min(0)


def either(a: Tensor, b: Tensor, push: Push) -> Tensor:
    """Return a bound from one side of a/b, as a quotient or a product with 1/b may be rounded."""
    return (a / b * (1 - SLACK if push is down else 1 + SLACK)).clamp_min(0)


def divided_by(form: CodeFormat) -> Ratio:
    """Return how a kernel divides by a dynamic scale."""
    return reciprocal if form.reciprocal else quotient


def _added(a: Tensor, b: Tensor, push: Push) -> Tensor:
    """Return float32(a + b), or where that is not known its bound from one side."""
    total = a + b
    known = (total - a == b) & (total - b == a) & (single(a) == a) & (single(b) == b)
    return single(torch.where(known, total, push(total))).clamp_min(0)


def _floor(amax: Tensor, shift: int) -> Tensor:
    """Return 2^(floor(log2 amax) - shift), the exponent within that of E8M0."""
    _, exponent = torch.frexp(amax)
    return power_of_two((exponent - 1 - shift).clamp(*E8M0_EXPONENTS))


def _ceil(scale: Tensor) -> Tensor:
    """Return the least power of two that is no smaller, within the range of E8M0."""
    fraction, exponent = torch.frexp(scale)
    power = torch.where(fraction == 0.5, exponent - 1, exponent)
    return power_of_two(power.clamp(*E8M0_EXPONENTS))
