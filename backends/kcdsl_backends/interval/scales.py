"""The scales and the largest codes that quantised activations may have (section 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.formats import FORMATS, Format
from kcdsl.model.numerics import Activations
from kcdsl.model.weights import LEAST_FULL_SCALE, QMAX
from kcdsl_backends.interval.box import Box, down, up
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.rounding import power_of_two

SLACK = 2.0**-22
"""More than the relative roundings of a ratio and of a product together."""
MX_EXPONENT = {"fp8_e4m3": 8, "fp8_e5m2": 15}
MX_BLOCK = 32
GROUPS = {"mx": MX_BLOCK, "group_128": 128}
"""How many numbers of a row share a scale, where not all of them do."""
_INTEGER = Format("integer", 8, 7, 255.0)
CODES = {
    "fp8_e4m3": FORMATS["fp8_e4m3"],
    "fp8_e5m2": FORMATS["fp8_e5m2"],
    "int8": Format("int8", 8, 7, 127.0),
    "int8_full": _INTEGER,
    "uint8": _INTEGER,
}
"""The grids of codes. The integers are a format that has subnormal numbers only; a code of uint8
counts from its zero point."""
_LARGEST = {"int8_full": (127.0, 128.0)}
"""Largest code above and below zero, where that is not the largest number of the grid."""
STEPS_UINT8 = 255.0


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

    format: str
    scale: Box
    tops: Tops
    ratio: Ratio


Push = Callable[[Tensor], Tensor]
Ratio = Callable[[Tensor, Tensor, Push], Tensor]


def group_maximum(magnitude: Tensor, scale: str) -> Tensor:
    """Return the largest magnitude of the group that shares an element's scale."""
    if scale in ("none", "per_tensor"):
        return magnitude.amax().expand_as(magnitude)
    if scale == "per_token":
        return magnitude.amax(-1, keepdim=True).expand_as(magnitude)
    width, size = magnitude.shape[-1], GROUPS[scale]
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
    if spec.scale == "static":
        return static_quantiser(x, spec, weight, node)
    format = spec.format
    tops = _zero_points(x, spec.scale) if format == "uint8" else fixed_tops(x.lo, format)
    return Quantiser(format, scale_range(x, format, spec.scale), tops, RATIOS[format])


def fixed_tops(like: Tensor, format: str) -> Tops:
    """Return the largest codes of a format without a zero point."""
    above, below = _LARGEST.get(format, (CODES[format].largest, CODES[format].largest))
    return Tops(*(Box.point(torch.full_like(like, top)) for top in (above, below)))


def scale_range(x: Box, format: str, scale: str) -> Box:
    """Return between which numbers the dynamic scale of each element lies; from 0 where it may be.

    The largest magnitude of a group is at least that of the element which is surely far from 0.
    """
    if scale == "none":
        return Box.point(torch.ones_like(x.lo))
    if format == "uint8":
        (low, low_most), (high, high_most) = _ends(x, scale)
        least, most = _added(low, high, down), _added(low_most, high_most, up)
    else:
        least = group_maximum(torch.maximum(x.lo, -x.hi).clamp_min(0), scale)
        most = group_maximum(x.mag(), scale)
    if scale == "mx":
        low, high = _mx_scale(least, format), _mx_scale(most, format)
        return Box(torch.where(least > 0, low, torch.zeros_like(low)), high)
    top = torch.full_like(least, STEPS_UINT8 if format == "uint8" else QMAX[format])
    found = Box(quotient(least, top, down), quotient(most, top, up))
    if format != "int8_full":
        return found
    return Box(found.lo.clamp_min(LEAST_FULL_SCALE), found.hi.clamp_min(LEAST_FULL_SCALE))


def _ends(x: Box, scale: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return how far below and above zero a group reaches, each from least to most."""
    low = group_maximum((-x.hi).clamp_min(0), scale), group_maximum((-x.lo).clamp_min(0), scale)
    high = group_maximum(x.lo.clamp_min(0), scale), group_maximum(x.hi.clamp_min(0), scale)
    return low, high


def _zero_points(x: Box, scale: str) -> Tops:
    """Return 255 - z and z, z the nearest even of float32(-min/s)."""
    (low, low_most), (high, high_most) = _ends(x, scale)
    around = scale_range(x, "uint8", scale)

    def share(part: Tensor, other: Tensor, factor: float) -> Tensor:
        total = (part + other).clamp_min(2.0**-1000)
        return STEPS_UINT8 * (part / total) * factor

    def zero(part: Tensor, by: Tensor, ratio: Tensor, push: Push) -> Tensor:
        exact = quotient(part, by, push)
        one = torch.round(torch.where(by > 0, exact, ratio))
        other = torch.round(ratio)
        met = torch.maximum(one, other) if push is down else torch.minimum(one, other)
        return met.clamp(0, STEPS_UINT8)

    first = zero(low, around.hi, share(low, high_most, 1 - SLACK), down)
    last = zero(low_most, around.lo, share(low_most, high, 1 + SLACK), up)
    return Tops(Box(STEPS_UINT8 - last, STEPS_UINT8 - first), Box(first, last))


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
    scale, form = static_scale(x.lo, spec, weight, node), CODES[spec.format]
    if spec.format == "uint8":
        found = spec.calibrated(weight)
        zero = 0 if found is None else found.zero_point
        above, below = STEPS_UINT8 - zero, float(zero)
        ends = Box.point(torch.full_like(x.lo, above)), Box.point(torch.full_like(x.lo, below))
        tops = Tops(*ends)
    else:
        tops = fixed_tops(x.lo, spec.format)
    # to half a step beyond the last integer a code is off by no more than elsewhere
    beyond = 0.5 if form.min_exponent > 0 else 0.0
    high = (tops.above.lo + beyond) * scale * (1 + SLACK)
    low = (tops.below.lo + beyond) * scale * (1 + SLACK)
    over = torch.maximum(x.hi - high, -x.lo - low)
    if not bool((over <= 0).all()):
        flat = int(torch.nan_to_num(over / scale, nan=torch.inf).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat), over.shape)]
        side = high if bool((x.hi - high).flatten()[flat] >= (-x.lo - low).flatten()[flat]) else low
        limit = f"{float(side.flatten()[flat]):g} ({spec.format} with its static scale)"
        raise NoBound(node, f"overflow reachable: element {index} of the input may exceed {limit}")
    return Quantiser(spec.format, Box.point(scale), tops, either)


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


RATIOS: dict[str, Ratio] = {**dict.fromkeys(CODES, quotient), "int8_full": reciprocal}
"""How a kernel divides by a dynamic scale."""


def _added(a: Tensor, b: Tensor, push: Push) -> Tensor:
    """Return float32(a + b), or where that is not known its bound from one side."""
    total = a + b
    known = (total - a == b) & (total - b == a) & (single(a) == a) & (single(b) == b)
    return single(torch.where(known, total, push(total))).clamp_min(0)


def _mx_scale(amax: Tensor, format: str) -> Tensor:
    """Return 2^(floor(log2 amax) - emax), the exponent within that of E8M0."""
    _, exponent = torch.frexp(amax)
    return power_of_two((exponent - 1 - MX_EXPONENT[format]).clamp(-127, 127))
