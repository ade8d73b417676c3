"""Quantised activations as the step functions that they are (section 2, Dynamic quantisation).

A number v whose group has the scale s becomes s·q(v/s). With casts to nearest every step of this is
one rounding: s = float32(amax/qmax), the code is q(float32(v/s)), the value float32(code·s). All of
them are monotone, so where v and s lie in small intervals few codes can be met, and often only one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.formats import Format
from kcdsl_backends.interval.box import Box, down, up
from kcdsl_backends.interval.rounding import Rounding, Stored, power_of_two
from kcdsl_backends.interval.scales import (
    SLACK,
    Push,
    Quantiser,
    quantiser,
    single,
)

ROUNDING = 2.0**-24
"""Relative error of one rounding to float32."""
LEAST_SCALE = 2.0**-100
"""Below it products of scales with codes may be subnormal, and lose more than `SLACK`."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The least and the greatest code that numbers may get (float64, on the grid)."""

    low: Tensor
    high: Tensor


def steps(x: Box, kernel: Rounding, weight: str, node: str) -> tuple[Quantiser, Tensor] | None:
    """Return the quantiser of the input of a linear, and where it is known to be a step function.

    Elsewhere its scale is put to 1. None where casts are free.

    Raises:
        NoBound: as `quantiser`.
    """
    if kernel.free:
        return None
    found = quantiser(x, kernel.numerics.activations, weight, node)
    known = found.scale.lo >= LEAST_SCALE
    one = torch.ones_like(found.scale.lo)
    low, high = (torch.where(known, end, one) for end in (found.scale.lo, found.scale.hi))
    return replace(found, scale=Box(low, high)), known


def codes(v: Box, by: Quantiser) -> Codes:
    """Return the codes q(v/s) that numbers in v may get with scales s > 0."""
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

    Up to the roundings of ratios the hull is exact: s·q(v/s) grows with v, and with one code c it
    is c·s, for the scales s between v/b⁺ and v/b⁻ with which c is met, b⁻ and b⁺ the ends of the
    numbers that round to c. The ends of the scale are float32 numbers.
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
    """Return the code of v/s for v >= 0, at most `top`, or its bound from one side."""
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

    Up to the code of v/s_h the largest scale serves all. A code c beyond needs s <= v/b⁻, and c/b⁻
    falls within a binade from its second code on: the first code beyond, and the first second code
    of a binade, are the only ones that can be best.
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

    From the code of v/s_l on the least scale serves all. A code c before needs s >= v/b⁺, and c/b⁺
    grows within a binade: the first code, and the first binade's begin after it, can be best.
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
    """Return the power of two at the begin of a code's binade; subnormal codes: the first one."""
    _, exponent = torch.frexp(code.clamp_min(2.0**form.min_exponent))
    return power_of_two(exponent - 1)


def staircase(
    x: Box, error: Tensor, kernel: Rounding, weight: str = "", node: str = ""
) -> Stored | None:
    """Return the quantised values and their errors, each met with what `error` (Q) says.

    None where the kernel's quantiser is no known step function, as casts are free.

    Raises:
        NoBound: as `quantiser`.
    """
    found = steps(x, kernel, weight, node)
    if found is None:
        return None
    by, known = found
    hull, wide = quantised_hull(x, by), x.widen(error)
    hull = Box(
        torch.where(known, torch.maximum(hull.lo, wide.lo), wide.lo),
        torch.where(known, torch.minimum(hull.hi, wide.hi), wide.hi),
    )
    moved = (hull - x).meet(Box.around(error))
    return Stored(hull, moved)
