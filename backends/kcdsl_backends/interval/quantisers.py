"""Quantised activations as the step functions that they are (section 2, Dynamic quantisation).

A number v whose group has the scale s becomes s·q(v/s). With casts to nearest every step of this is
one rounding: s = float32(amax/qmax), the code is q(float32(v/s)), the value float32(code·s). All of
them are monotone, so where v and s lie in small intervals few codes can be met, and often only one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.formats import FORMATS, Format
from kcdsl_backends.interval.box import Box, down, up
from kcdsl_backends.interval.rounding import Rounding, Stored, nearest, power_of_two

ROUNDING = 2.0**-24
"""Relative error of one rounding to float32."""
_SLACK = 2.0**-22
"""More than that of the roundings of a ratio and of a product together."""
LEAST_SCALE = 2.0**-100
"""Below it products of scales with codes may be subnormal, and lose more than `_SLACK`."""
MX_EXPONENT = {"fp8_e4m3": 8, "fp8_e5m2": 15}
MX_BLOCK = 32
CODES = {
    "fp8_e4m3": FORMATS["fp8_e4m3"],
    "fp8_e5m2": FORMATS["fp8_e5m2"],
    "int8": Format("int8", 8, 7, 127.0),
}
"""The grids of codes. The integers up to 127 are a format that has subnormal numbers only."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The least and the greatest code that numbers may get (float64, on the grid)."""

    low: Tensor
    high: Tensor


def group_maximum(magnitude: Tensor, scale: str) -> Tensor:
    """Return the largest magnitude of the group that shares an element's scale."""
    if scale in ("none", "per_tensor"):
        return magnitude.amax().expand_as(magnitude)
    if scale == "per_token":
        return magnitude.amax(-1, keepdim=True).expand_as(magnitude)
    width = magnitude.shape[-1]
    padded = torch.nn.functional.pad(magnitude, (0, -width % MX_BLOCK))
    blocks = padded.reshape(*magnitude.shape[:-1], -1, MX_BLOCK).amax(-1)
    return blocks.repeat_interleave(MX_BLOCK, dim=-1)[..., :width]


def scale_range(x: Box, format: str, scale: str) -> Box:
    """Return between which numbers the scale of each element lies; from 0 where it may be 0.

    The largest magnitude of a group is at least that of the element which is surely far from 0.
    """
    if scale == "none":
        return Box.point(torch.ones_like(x.lo))
    least = group_maximum(torch.maximum(x.lo, -x.hi).clamp_min(0), scale)
    most = group_maximum(x.mag(), scale)
    if scale == "mx":
        low, high = _mx_scale(least, format), _mx_scale(most, format)
        return Box(torch.where(least > 0, low, torch.zeros_like(low)), high)
    top = torch.full_like(least, CODES[format].largest)
    return Box(_quotient(least, top, down), _quotient(most, top, up))


def _single(x: Tensor) -> Tensor:
    """Return numbers rounded to float32."""
    return x.to(torch.float32).to(torch.float64)


def _quotient(a: Tensor, b: Tensor, push: Callable[[Tensor], Tensor]) -> Tensor:
    """Return float32(a/b) for a float32 b, or where a is no float32 number its bound from one side.

    The quotient of two float32 numbers, rounded to float64 first, is that rounded once.
    """
    ratio = a / b
    return _single(torch.where(_single(a) == a, ratio, push(ratio))).clamp_min(0)


def _mx_scale(amax: Tensor, format: str) -> Tensor:
    """Return 2^(floor(log2 amax) - emax), the exponent within that of E8M0."""
    _, exponent = torch.frexp(amax)
    return power_of_two((exponent - 1 - MX_EXPONENT[format]).clamp(-127, 127))


def codes(v: Box, scale: Box, format: str) -> Codes:
    """Return the codes q(v/s) that numbers in v may get with scales (> 0) in `scale`."""
    form = CODES[format]
    return Codes(
        torch.where(
            v.lo >= 0, _code(v.lo, scale.hi, form, down), -_code(-v.lo, scale.lo, form, up)
        ),
        torch.where(
            v.hi >= 0, _code(v.hi, scale.lo, form, up), -_code(-v.hi, scale.hi, form, down)
        ),
    )


def quantised_hull(v: Box, scale: Box, format: str) -> Box:
    """Return the hull of s·q(v/s) for v and s (> 0) in their boxes, q saturating.

    Up to the roundings of ratios the hull is exact: s·q(v/s) grows with v, and with one code c it
    is c·s, for the scales s between v/b⁺ and v/b⁻ with which c is met, b⁻ and b⁺ the ends of the
    numbers that round to c. The ends of `scale` are float32 numbers.
    """
    form = CODES[format]
    return Box(
        torch.where(
            v.lo >= 0,
            _least(v.lo.clamp_min(0), scale, form),
            -_largest((-v.lo).clamp_min(0), scale, form),
        ),
        torch.where(
            v.hi >= 0,
            _largest(v.hi.clamp_min(0), scale, form),
            -_least((-v.hi).clamp_min(0), scale, form),
        ),
    )


def _code(v: Tensor, scale: Tensor, form: Format, push: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the code of v/s for v >= 0, or its bound from one side."""
    ratio = _quotient(v.clamp_min(0), scale, push)
    return nearest(ratio.clamp_max(form.largest), form)


def _quantum(code: Tensor, form: Format) -> Tensor:
    """Return the distance from a code >= 0 to the next one."""
    _, exponent = torch.frexp(code)
    exponent = torch.where(code == 0, torch.full_like(exponent, form.min_exponent), exponent - 1)
    return power_of_two(exponent.clamp_min(form.min_exponent) - (form.precision - 1))


def _below(code: Tensor, form: Format) -> Tensor:
    """Return the distance from a code > 0 to the one before it."""
    quantum, (fraction, _) = _quantum(code, form), torch.frexp(code)
    leads = (fraction == 0.5) & (code > 2.0**form.min_exponent)
    return torch.where(leads, quantum / 2, quantum)


def _largest(v: Tensor, scale: Box, form: Format) -> Tensor:
    """Return the largest s·q(v/s) for v >= 0.

    Up to the code of v/s_h the largest scale serves all. A code c beyond needs s <= v/b⁻, and c/b⁻
    falls within a binade from its second code on: the first code beyond, and the first second code
    of a binade, are the only ones that can be best.
    """
    first, last = _code(v, scale.hi, form, up), _code(v, scale.lo, form, up)
    best = _single(first * scale.hi)
    one = first + _quantum(first, form)
    power = _binade(one, form)
    second = power + _quantum(power, form)
    second = torch.where(second < one, 2 * power + 2 * _quantum(power, form), second)
    for code in (one, second):
        met = code / (code - _below(code, form) / 2) * (v * (1 + _SLACK))
        best = torch.where(code <= last, torch.maximum(best, met), best)
    return best


def _least(v: Tensor, scale: Box, form: Format) -> Tensor:
    """Return the least s·q(v/s) for v >= 0.

    From the code of v/s_l on the least scale serves all. A code c before needs s >= v/b⁺, and c/b⁺
    grows within a binade: the first code, and the first binade's begin after it, can be best.
    """
    first, last = _code(v, scale.hi, form, down), _code(v, scale.lo, form, down)
    best = _single(last * scale.lo)
    power = _binade(first, form)
    begin = torch.where(power < first, 2 * power, power)
    for code in (first, begin):
        met = code / (code + _quantum(code, form) / 2) * (v * (1 - _SLACK))
        best = torch.where(code < last, torch.minimum(best, met), best)
    return best


def _binade(code: Tensor, form: Format) -> Tensor:
    """Return the power of two at the begin of a code's binade; subnormal codes: the first one."""
    _, exponent = torch.frexp(code.clamp_min(2.0**form.min_exponent))
    return power_of_two(exponent - 1)


def staircase(x: Box, error: Tensor, kernel: Rounding) -> Stored | None:
    """Return the quantised values and their errors, each met with what `error` (Q) says.

    None where the kernel's quantiser is no known step function: casts are free, or the codes have a
    zero point of their own (uint8).
    """
    spec = kernel.numerics.activations
    if kernel.free or spec.format not in CODES:
        return None
    scale = scale_range(x, spec.format, spec.scale)
    known = scale.lo >= LEAST_SCALE
    safe = Box(torch.where(known, scale.lo, 1.0), torch.where(known, scale.hi, 1.0))
    hull, wide = quantised_hull(x, safe, spec.format), x.widen(error)
    hull = Box(
        torch.where(known, torch.maximum(hull.lo, wide.lo), wide.lo),
        torch.where(known, torch.minimum(hull.hi, wide.hi), wide.hi),
    )
    moved = (hull - x).meet(Box.around(error))
    return Stored(hull, moved)
