"""Quantised activations as step functions (section 2): codes in order, and scales in float32.

With casts to nearest s = float32(amax/qmax), the code of v is that of float32(v/s), its value
float32(code·s). Codes are ranked in order; extremes over codes i to j are in a table. Codes of
uint8 are relative to their zero point.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Box, Floats
from kcdsl_certs.recheck.numerics.formats import (
    CODES,
    LAYOUTS,
    LEAST_POWER,
    MOST_POWER,
    NESTED,
    layout_of,
)
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics

UNIT = 2.0**-24
_OFF = 2.0**-22  # bounds the relative error of a float32 ratio and product together
LEAST_SCALE = 2.0**-100  # below it products with codes may be subnormal, with larger errors
LEAST_FULL = 2.0**-23  # the least scale of int8_full
Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Ladder:
    """The non-negative codes in order, and by rank [i, j] the greatest c/b⁻ and the least c/b⁺ of
    codes i to j, where [b⁻, b⁺] is the interval that rounds to c."""

    codes: Floats
    steepest: Floats
    flattest: Floats


@dataclass(frozen=True, slots=True)
class QuantiserSteps:
    """The quantisers of all elements of a box: boxes of their scales (from 0: unknown) and of the
    last codes above and below zero. `ratio`: the kernel divides by the scale ("over"), multiplies
    by its float32 reciprocal ("times"), or either ("free")."""

    kind: str
    scale: Box
    above: Box
    below: Box
    ratio: str


@cache
def _ladder(kind: str) -> _Ladder:
    if CODES[kind].grid is None:
        codes = np.arange(256.0)
    else:
        form, top = CODES[kind].form, CODES[kind].last
        grid = [0.0, 2.0 ** (form.least - form.precision + 1)]
        while grid[-1] < top:
            exponent = max(int(np.frexp(grid[-1])[1]) - 1, form.least)
            grid.append(grid[-1] + 2.0 ** (exponent - form.precision + 1))
        codes = np.array(grid)
    ends = (codes[1:] + codes[:-1]) / 2
    count = len(codes)
    rise, fall = np.zeros(count), np.zeros(count)
    rise[1:] = codes[1:] / ends
    fall[:-1] = codes[:-1] / ends
    steepest, flattest = np.zeros((count, count)), np.full((count, count), np.inf)
    for i in range(count):
        steepest[i, i:] = np.maximum.accumulate(rise[i:])
        flattest[i, i:] = np.minimum.accumulate(fall[i:])
    return _Ladder(codes, steepest, flattest)


def largest(size: Floats, scale: str) -> Floats:
    """Return the maximum over the tensor, the row or the block of a row, at every element."""
    height, width = layout_of(scale).tile
    if height == 0:
        return np.broadcast_to(size.max(), size.shape)
    if width == 0:
        return np.broadcast_to(size.max(axis=-1, keepdims=True), size.shape)
    n = size.shape[-1]
    blocks = np.maximum.reduceat(size, np.arange(0, n, width), axis=-1)
    return np.repeat(blocks, width, axis=-1)[..., :n]


def extent(x: Box, scale: str) -> tuple[Box, Box]:
    """Return boxes of max(0, max v) and max(0, -min v) over the group of every element."""
    above = Box(largest(np.maximum(x.lo, 0.0), scale), largest(np.maximum(x.hi, 0.0), scale))
    below = Box(largest(np.maximum(-x.hi, 0.0), scale), largest(np.maximum(-x.lo, 0.0), scale))
    return above, below


def given(kernel: KernelNumerics, key: str, shape: tuple[int, ...]) -> tuple[Floats, int]:
    """Return the static scale of every element that enters the linear with this weight, and z.

    Raises Rejected "rule/static-scale".
    """
    if kernel.static is None:
        raise Rejected("rule/static-scale", "there are no static scales")
    scales, zero = kernel.static.of(key, kernel.activations[0])
    if len(scales) not in (1, shape[-1]):
        raise Rejected("rule/static-scale", f"{len(scales)} scales for {shape[-1]} channels")
    return np.broadcast_to(np.array(scales, dtype=np.float64), shape), zero


def steps(kernel: KernelNumerics, x: Box, key: str) -> QuantiserSteps:
    """Return the quantisers of the input of the linear with the weight `key`.

    Raises Rejected "rule/static-scale"; "bound/overflow" where a static scale may be exceeded.
    """
    kind, scale = kernel.activations
    if kernel.static_inputs:
        return _calibrated(kernel, x, key)
    if layout_of(scale).nested:  # codes are unknown where a scale may be 0
        most = nested(kernel, x, key)[1]
        return plain(kind, Box(np.zeros(x.shape), most))
    if CODES[kind].shifted:
        return _asymmetric(x, scale)
    within_batch(kernel, x)
    return plain(kind, scales(kernel, x))


def within_batch(kernel: KernelNumerics, x: Box) -> None:
    """Refuse numbers that may exceed the stated amax of a batch that shares a scale.

    Raises Rejected "bound/overflow".
    """
    if not layout_of(kernel.activations[1]).batch:
        return
    over = np.argwhere(~(box.magnitude(x) <= kernel.batch_amax))
    if len(over):
        element = [int(i) for i in over[0]]
        raise Rejected("bound/overflow", f"element {element} may exceed the batch's largest")


def plain(kind: str, scale: Box) -> QuantiserSteps:
    """Return the quantisers of a format without a zero point, with scales in a box."""
    code = CODES[kind]
    above, below = (box.exact(np.full(scale.shape, top)) for top in (code.last, code.below))
    return QuantiserSteps(kind, scale, above, below, "times" if code.full else "over")


def _asymmetric(x: Box, scale: str) -> QuantiserSteps:
    """Return uint8: s = (max - min)/255 around zero, z the nearest even of -min/s."""
    above, below = extent(x, scale)
    wide = Box(_single(box.add_down(above.lo, below.lo)), _single(box.add_up(above.hi, below.hi)))
    steps = np.float64(255)
    found = Box(_ratio(wide.lo, steps, "over", False), _ratio(wide.hi, steps, "over", True))
    with np.errstate(divide="ignore", invalid="ignore"):
        # two enclosures of -min/s: by the scale, and as 255·(-min)/(max - min)
        least = 255 * below.lo / (below.lo + above.hi) * (1 - _OFF)
        most = 255 * below.hi / (below.hi + above.lo) * (1 + _OFF)
        by_scale = (
            _ratio(below.lo, np.where(found.hi > 0, found.hi, 1.0), "over", False),
            _ratio(below.hi, np.where(found.lo > 0, found.lo, 1.0), "over", True),
        )
    least, most = np.where(np.isnan(least), 0.0, least), np.where(np.isnan(most), 255.0, most)
    least = np.where(found.hi > 0, np.maximum(least, by_scale[0]), least)
    most = np.where(found.lo > 0, np.minimum(most, by_scale[1]), most)
    zero = Box(np.clip(np.rint(least), 0, 255), np.clip(np.rint(most), 0, 255))
    return QuantiserSteps("uint8", found, Box(255 - zero.hi, 255 - zero.lo), zero, "over")


def _calibrated(kernel: KernelNumerics, x: Box, key: str) -> QuantiserSteps:
    """Return static quantisers; integers up to half a step beyond the last code are in range."""
    kind = kernel.activations[0]
    scale, zero = given(kernel, key, x.shape)
    by = plain(kind, box.exact(scale))
    above, below = by.above.lo, by.below.lo
    if CODES[kind].shifted:
        above, below = np.full(x.shape, 255.0 - zero), np.full(x.shape, float(zero))
    more = 0.5 if CODES[kind].grid is None else 0.0
    inside = (x.hi <= (above + more) * scale * (1 + _OFF)) & (
        -x.lo <= (below + more) * scale * (1 + _OFF)
    )
    if not bool(inside.all()):
        element = [int(i) for i in np.argwhere(~inside)[0]]
        raise Rejected("bound/overflow", f"element {element} may exceed its static {kind} scale")
    return QuantiserSteps(kind, box.exact(scale), box.exact(above), box.exact(below), "free")


def nested(kernel: KernelNumerics, x: Box, key: str) -> tuple[Floats, Floats]:
    """Return upper bounds of the scale of the tensor, and of scales of groups of 16 (nvfp4).

    Raises Rejected "rule/static-scale".
    """
    kind, size = kernel.activations[0], box.mag(x)
    top, (least, most) = CODES[kind].divisor, NESTED
    if kernel.static is not None:
        tensor = given(kernel, key, x.shape)[0]
    else:
        tensor = np.broadcast_to(box.up(size.max() / (top * most)), x.shape)
    group = largest(size, "nvfp4") * (1 + 2.0**-4) / top
    return tensor, box.up(np.maximum(group, least * tensor))


def scales(kernel: KernelNumerics, x: Box) -> Box:
    """Return a box of dynamic scales, float32 numbers (from 0: unknown); not of uint8."""
    kind, scale = kernel.activations
    if not kernel.scaled_inputs:
        return box.exact(np.ones(x.shape))
    least = largest(np.maximum(np.maximum(x.lo, -x.hi), 0.0), scale)
    most = np.maximum(largest(box.magnitude(x), scale), kernel.batch_amax)
    if LAYOUTS[scale].floored:
        powers = [_power(np.frexp(m)[1] - 1 - CODES[kind].exponent) for m in (least, most)]
        return Box(np.where(least > 0, powers[0], 0.0), powers[1])
    least, most = (np.minimum(end, kernel.amax_limit) for end in (least, most))
    top = np.float64(CODES[kind].divisor)
    low, high = _ratio(least, top, "over", False), _ratio(most, top, "over", True)
    if LAYOUTS[scale].ceiled:
        return Box(np.where(low > 0, _ceiling(low), 0.0), _ceiling(high))
    bottom = least_scale(kernel)
    return Box(np.maximum(low, bottom), np.maximum(high, bottom))


def least_scale(kernel: KernelNumerics) -> float:
    """Return a lower bound of dynamic scales."""
    return max(kernel.least_scale, LEAST_FULL if CODES[kernel.activations[0]].full else 0.0)


def _power(exponent: NDArray[np.int32]) -> Floats:
    return np.ldexp(1.0, np.clip(exponent, LEAST_POWER, MOST_POWER))


def _ceiling(values: Floats) -> Floats:
    """Return the least powers of two that are not below these numbers."""
    fraction, exponent = np.frexp(values)
    return _power(np.where(fraction == 0.5, exponent - 1, exponent))


def _single(values: Floats) -> Floats:
    return np.asarray(values, dtype=np.float32).astype(np.float64)


def _ratio(values: Floats, by: Floats | np.float64, how: str, upward: bool) -> Floats:
    """Return float32(values/by) if both are float32 numbers, else a bound from one side."""
    push = box.above if upward else box.down
    if how == "free":
        return np.maximum(values / by * (1 + _OFF if upward else 1 - _OFF), 0.0)
    whole, single = _single(values) == values, np.asarray(by, dtype=np.float32)
    if how == "times":
        inverse = np.float32(1) / single
        once, other = values.astype(np.float32) * inverse, values * inverse.astype(np.float64)
    else:
        once, other = values.astype(np.float32) / single, values / by
    return np.maximum(np.where(whole, once.astype(np.float64), _single(push(other))), 0.0)


def _rank(by: QuantiserSteps, values: Floats, scale: Floats, top: Floats, upward: bool) -> Ranks:
    """Return the rank of the code of values/scale (values ≥ 0), or a bound of it."""
    ratio = np.minimum(_ratio(values, scale, by.ratio, upward), top)
    return np.searchsorted(_ladder(by.kind).codes, CODES[by.kind].rounded(ratio))


def half_step(kind: str, code: Floats) -> Floats:
    """Return half the largest distance of codes up to this one: the rounding error of a ratio."""
    if CODES[kind].grid is None:
        return np.full(code.shape, 0.5)
    form = CODES[kind].form
    return np.asarray(np.ldexp(1.0, np.maximum(np.frexp(code)[1] - 1, form.least) - form.precision))


def codes(by: QuantiserSteps, x: Box) -> tuple[Floats, Floats]:
    """Return the least and the greatest code that numbers in x may get; scales are positive."""
    grid, scale = _ladder(by.kind).codes, by.scale
    lo, hi = np.abs(x.lo), np.abs(x.hi)
    least = np.where(
        x.lo >= 0,
        grid[_rank(by, lo, scale.hi, by.above.lo, False)],
        -grid[_rank(by, lo, scale.lo, by.below.hi, True)],
    )
    most = np.where(
        x.hi >= 0,
        grid[_rank(by, hi, scale.lo, by.above.hi, True)],
        -grid[_rank(by, hi, scale.hi, by.below.lo, False)],
    )
    return least, most


def hull(by: QuantiserSteps, x: Box) -> Box:
    """Return a box of the quantised values of x; scales are positive float32 numbers."""
    lo, hi = np.abs(x.lo), np.abs(x.hi)
    return Box(
        np.where(x.lo >= 0, _least(by, lo, by.above.lo), -_most(by, lo, by.below.hi)),
        np.where(x.hi >= 0, _most(by, hi, by.above.hi), -_least(by, hi, by.below.lo)),
    )


def _most(by: QuantiserSteps, v: Floats, top: Floats) -> Floats:
    """Return the greatest float32(c·s): c·s_h for the code c at s_h, c/b⁻·v for larger codes."""
    ladder, scale = _ladder(by.kind), by.scale
    first, last = _rank(by, v, scale.hi, top, True), _rank(by, v, scale.lo, top, True)
    sure = _single(ladder.codes[first] * scale.hi)
    beyond = ladder.steepest[np.minimum(first + 1, last), last] * v * (1 + _OFF)
    return np.where(last > first, np.maximum(sure, beyond), sure)


def _least(by: QuantiserSteps, v: Floats, top: Floats) -> Floats:
    """Return the least float32(c·s): c·s_l for the code c at s_l, c/b⁺·v for smaller codes."""
    ladder, scale = _ladder(by.kind), by.scale
    first, last = _rank(by, v, scale.hi, top, False), _rank(by, v, scale.lo, top, False)
    sure = _single(ladder.codes[last] * scale.lo)
    before = ladder.flattest[first, np.maximum(last - 1, first)] * v * (1 - _OFF)
    return np.where(last > first, np.minimum(sure, before), sure)


def known(by: QuantiserSteps) -> tuple[QuantiserSteps, NDArray[np.bool_]]:
    """Return quantisers with scale 1 where the scale may be too small, and where it is not."""
    sure = by.scale.lo >= LEAST_SCALE
    scale = Box(np.where(sure, by.scale.lo, 1.0), np.where(sure, by.scale.hi, 1.0))
    return QuantiserSteps(by.kind, scale, by.above, by.below, by.ratio), sure


def quantised(kernel: KernelNumerics, x: Box, error: Floats, key: str = "") -> tuple[Box, Box]:
    """Return the quantised values and their errors, met with x ± `error` (Q).

    Raises Rejected as `steps` does.
    """
    wide, around = box.widen(x, error), box.around(np.broadcast_to(error, x.shape))
    if not kernel.stepped or not kernel.coded_inputs:
        return wide, around
    by, sure = known(steps(kernel, x, key))
    found = box.meet(hull(by, x), wide)
    value = Box(np.where(sure, found.lo, wide.lo), np.where(sure, found.hi, wide.hi))
    return value, box.meet(box.sub(value, x), around)
