"""Quantised activations as step functions (section 2): codes in order, and scales in float32.

With casts to nearest s = float32(amax/qmax), the code of v is that of float32(v/s), its value
float32(code·s). Codes are numbered in order; what is best among codes i to j is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.box import Box, Floats
from kcdsl_certs.recheck.formats import nearest
from kcdsl_certs.recheck.spec import CODE_LARGEST, FORMATS, MX_BLOCK, MX_EXPONENT, Kernel

UNIT = 2.0**-24
_OFF = 2.0**-22  # more than the roundings of a ratio and of a product together
LEAST_SCALE = 2.0**-100  # below it products with codes may be subnormal, and lose more than that
Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Ladder:
    """The non-negative codes in order, and by rank [i, j] the greatest c/b⁻ and the least c/b⁺ of
    codes i to j (b⁻ and b⁺ the ends of what rounds to c)."""

    codes: Floats
    steepest: Floats
    flattest: Floats


@cache
def _ladder(kind: str) -> _Ladder:
    top = CODE_LARGEST[kind]
    if kind == "int8":
        codes = np.arange(top + 1.0)
    else:
        form = FORMATS[kind]
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


def serves(kernel: Kernel) -> bool:
    """Say whether the quantiser is a known step function: nearest casts, codes without a zero."""
    return kernel.nearest and kernel.activations[0] in ("fp8_e4m3", "fp8_e5m2", "int8")


def largest(size: Floats, scale: str) -> Floats:
    """Return the maximum over the tensor, the row or the block of 32, at every element."""
    if scale in ("none", "per_tensor"):
        return np.broadcast_to(size.max(), size.shape)
    if scale == "per_token":
        return np.broadcast_to(size.max(axis=-1, keepdims=True), size.shape)
    n = size.shape[-1]
    blocks = np.maximum.reduceat(size, np.arange(0, n, MX_BLOCK), axis=-1)
    return np.repeat(blocks, MX_BLOCK, axis=-1)[..., :n]


def scales(kernel: Kernel, x: Box) -> Box:
    """Return between which float32 numbers the scale of every element lies (from 0: unknown)."""
    kind, scale = kernel.activations
    if scale == "none":
        return box.exact(np.ones(x.shape))
    least = largest(np.maximum(np.maximum(x.lo, -x.hi), 0.0), scale)
    most = largest(box.magnitude(x), scale)
    if scale == "mx":
        powers = [
            np.ldexp(1.0, np.clip(np.frexp(m)[1] - 1 - MX_EXPONENT[kind], -127, 127))
            for m in (least, most)
        ]
        return Box(np.where(least > 0, powers[0], 0.0), powers[1])
    top = np.float64(CODE_LARGEST[kind])
    return Box(_ratio(least, top, False), _ratio(most, top, True))


def _single(values: Floats) -> Floats:
    return np.asarray(values, dtype=np.float32).astype(np.float64)


def _ratio(values: Floats, by: Floats | np.float64, upward: bool) -> Floats:
    """Return float32(values/by) of float32 numbers; of others a bound from one side."""
    whole = _single(values) == values
    once = values.astype(np.float32) / np.asarray(by, dtype=np.float32)
    pushed = (box.above if upward else box.down)(values / by)
    return np.maximum(np.where(whole, once.astype(np.float64), _single(pushed)), 0.0)


def _rank(kind: str, values: Floats, scale: Floats, upward: bool) -> Ranks:
    """Return the rank of the code of values/scale (values ≥ 0), or a bound of it."""
    ladder, top = _ladder(kind), float(CODE_LARGEST[kind])
    ratio = np.minimum(_ratio(values, scale, upward), top)
    code = np.rint(ratio) if kind == "int8" else nearest(ratio, FORMATS[kind])
    return np.searchsorted(ladder.codes, code)


def half_step(kernel: Kernel, code: Floats) -> Floats:
    """Return half the distance of codes up to this one: what a ratio is off by."""
    kind = kernel.activations[0]
    if kind == "int8":
        return np.full(code.shape, 0.5)
    form = FORMATS[kind]
    return np.asarray(np.ldexp(1.0, np.maximum(np.frexp(code)[1] - 1, form.least) - form.precision))


def codes(kernel: Kernel, x: Box, scale: Box) -> tuple[Floats, Floats]:
    """Return the least and the greatest code that numbers in x may get; scales are positive."""
    kind = kernel.activations[0]
    grid = _ladder(kind).codes
    lo, hi = np.abs(x.lo), np.abs(x.hi)
    least = np.where(
        x.lo >= 0,
        grid[_rank(kind, lo, scale.hi, False)],
        -grid[_rank(kind, lo, scale.lo, True)],
    )
    most = np.where(
        x.hi >= 0,
        grid[_rank(kind, hi, scale.lo, True)],
        -grid[_rank(kind, hi, scale.hi, False)],
    )
    return least, most


def hull(kernel: Kernel, x: Box, scale: Box) -> Box:
    """Return where the quantised values of x lie; scales are positive float32 numbers."""
    kind = kernel.activations[0]
    lo, hi = np.abs(x.lo), np.abs(x.hi)
    return Box(
        np.where(x.lo >= 0, _least(kind, lo, scale), -_most(kind, lo, scale)),
        np.where(x.hi >= 0, _most(kind, hi, scale), -_least(kind, hi, scale)),
    )


def _most(kind: str, v: Floats, scale: Box) -> Floats:
    """Return the greatest float32(c·s): c·s_h as far as s_h gives c, c/b⁻·v beyond."""
    ladder = _ladder(kind)
    first, last = _rank(kind, v, scale.hi, True), _rank(kind, v, scale.lo, True)
    sure = _single(ladder.codes[first] * scale.hi)
    beyond = ladder.steepest[np.minimum(first + 1, last), last] * v * (1 + _OFF)
    return np.where(last > first, np.maximum(sure, beyond), sure)


def _least(kind: str, v: Floats, scale: Box) -> Floats:
    """Return the least float32(c·s): c·s_l from where s_l gives c on, c/b⁺·v before."""
    ladder = _ladder(kind)
    first, last = _rank(kind, v, scale.hi, False), _rank(kind, v, scale.lo, False)
    sure = _single(ladder.codes[last] * scale.lo)
    before = ladder.flattest[first, np.maximum(last - 1, first)] * v * (1 - _OFF)
    return np.where(last > first, np.minimum(sure, before), sure)


def quantised(kernel: Kernel, x: Box, error: Floats) -> tuple[Box, Box]:
    """Return the quantised values and their errors, met with what `error` (Q) says."""
    wide, around = box.widen(x, error), box.around(np.broadcast_to(error, x.shape))
    if not serves(kernel):
        return wide, around
    scale = scales(kernel, x)
    known = scale.lo >= LEAST_SCALE
    safe = Box(np.where(known, scale.lo, 1.0), np.where(known, scale.hi, 1.0))
    found = box.meet(hull(kernel, x, safe), wide)
    value = Box(np.where(known, found.lo, wide.lo), np.where(known, found.hi, wide.hi))
    return value, box.meet(box.sub(value, x), around)
