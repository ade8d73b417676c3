"""Formats of numbers and of codes, layouts of scales, and rounding to a format in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format; `least` is the exponent of its smallest normal number."""

    name: str
    precision: int
    least: int
    largest: float

    @property
    def u(self) -> float:
        """Return the unit roundoff."""
        return 2.0**-self.precision

    def holds(self, other: Format) -> bool:
        """Return whether every number of another format is representable in this one."""
        finer = self.precision >= other.precision and self.largest >= other.largest
        return finer and self.least - self.precision <= other.least - other.precision

    @property
    def eta(self) -> float:
        """Return half the smallest subnormal (float64: all of it, half is no double)."""
        return max(2.0 ** max(self.least - self.precision, -1074), 2.0**-1074)


_FORMATS = (
    Format("float64", 53, -1022, float.fromhex("0x1.fffffffffffffp+1023")),
    Format("float32", 24, -126, float.fromhex("0x1.fffffep+127")),
    Format("tfloat32", 11, -126, float.fromhex("0x1.ffcp+127")),
    Format("float16", 11, -14, 65504.0),
    Format("bfloat16", 8, -126, float.fromhex("0x1.fep+127")),
    Format("fp8_e4m3", 4, -6, 448.0),
    Format("fp8_e5m2", 3, -14, 57344.0),
)
FORMATS = {f.name: f for f in _FORMATS}
FLOAT32 = FORMATS["float32"]
FLOAT64 = FORMATS["float64"]

LEAST_RANGE = float.fromhex("0x1.4f8b58p-17")  # of a group in uint4: float32(1e-5)
NESTED = 2.0**-6, 448.0  # the range of a nested scale, in multiples of the tensor's scale

LEAST_POWER, MOST_POWER = -127, 127

Floats = NDArray[np.float64]

_AT_ONCE = 2**17  # most numbers rounded at a time


def nearest(values: Floats, target: Format) -> Floats:
    """Return the nearest numbers of `target`, ties to even; ±inf beyond its largest number.

    While rounding, the exponent range is unbounded above. A value that rounds to a number beyond
    the largest becomes infinite, also where the format would saturate.
    """
    if target.precision == 53:
        return values
    return _on_grid(values, target, np.rint)


def cut(values: Floats, target: Format) -> Floats:
    """Return values rounded toward zero in `target`; ±inf from the first number on that is beyond
    its largest on the grid without a limit of the exponent."""
    if target.precision == 53:
        return values
    return _on_grid(values, target, np.trunc)


def _on_grid(values: Floats, target: Format, whole: Callable[[Floats], Floats]) -> Floats:
    if values.size <= _AT_ONCE:
        return _rounded(values, target, whole)
    found = np.empty(values.shape)
    into, flat = found.reshape(-1), values.reshape(-1)
    for start in range(0, flat.size, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        into[part] = _rounded(flat[part], target, whole)
    return found


def _rounded(values: Floats, target: Format, whole: Callable[[Floats], Floats]) -> Floats:
    _, exponent = np.frexp(values)
    spacing = np.maximum(exponent - 1, target.least) - (target.precision - 1)
    # Two steps each way: 2^±spacing alone may leave the range of doubles.
    half = spacing // 2
    scaled = np.ldexp(np.ldexp(values, -half), half - spacing)
    rounded = np.ldexp(np.ldexp(whole(scaled), half), spacing - half)
    beyond = np.abs(rounded) > target.largest
    return np.where(beyond, np.copysign(np.inf, values), rounded)


@dataclass(frozen=True, slots=True)
class Layout:
    """The tile of numbers that share a scale: its rows and columns (0: all).

    `ceiled`: scales are the least powers of two that are not below amax over the divisor.
    `floored`: the power of two of amax over that of the largest code (mx). `nested`: float8
    multiples of a scale of the tensor (nvfp4). `batch`: sequences of a batch share a scale.
    """

    height: int
    width: int
    ceiled: bool = False
    floored: bool = False
    nested: bool = False
    batch: bool = False

    @property
    def tile(self) -> tuple[int, int]:
        """Return rows and columns."""
        return self.height, self.width


LAYOUTS = {
    "per_tensor": Layout(0, 0),
    "per_batch": Layout(0, 0, batch=True),
    "per_channel": Layout(1, 0),
    "per_token": Layout(1, 0),
    "block_128": Layout(128, 128),
    "block_128_e8m0": Layout(128, 128, ceiled=True),
    "group_128_e8m0": Layout(1, 128, ceiled=True),
    "group_32": Layout(1, 32),
    "group_64": Layout(1, 64),
    "group_128": Layout(1, 128),
    "mx": Layout(1, 32, floored=True),
    "nvfp4": Layout(1, 16, nested=True),
}
PLAIN_WEIGHTS = ("per_tensor", "per_channel", "block_128", "group_32", "group_64", "group_128")
PLAIN_INPUTS = ("per_tensor", "per_token", "group_32", "group_64", "group_128")


def layout_of(scale: str) -> Layout:
    """Return the layout of this name; that of one plain scale if there is no dynamic scale."""
    return LAYOUTS.get(scale, LAYOUTS["per_tensor"])


@dataclass(frozen=True, slots=True)
class CodeGrid:
    """A format of codes in units of a scale, with the layouts of scales that it may have in
    weights, activations, and caches of keys and values.

    Codes reach from -`below` to `last`, and a scale is amax over `divisor`. `grid` is the
    floating-point format of codes that are not integers. `shifted`: codes are relative to a zero
    point. `ball`: there is a rule for all weights near those of a checkpoint.
    """

    name: str
    grid: Format | None
    last: float
    below: float
    divisor: float
    weights: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    shifted: bool = field(default=False, kw_only=True)
    ball: bool = field(default=False, kw_only=True)

    @property
    def form(self) -> Format:
        """Return the floating-point format of codes that are not integers."""
        assert self.grid is not None
        return self.grid

    @property
    def exponent(self) -> int:
        """Return the exponent of the last code."""
        return math.frexp(self.last)[1] - 1

    @property
    def full(self) -> bool:
        """Return whether there is one code more below zero than above it."""
        return self.below > self.last

    def rounded(self, values: Floats) -> Floats:
        """Return the nearest codes, ties to even, without saturation."""
        return np.rint(values) if self.grid is None else nearest(values, self.grid)


def _floating(form: Format, last: float, *layouts: tuple[str, ...], ball: bool = False) -> CodeGrid:
    return CodeGrid(form.name, form, last, last, last, *layouts, ball=ball)


_CACHES = ("per_tensor", "per_head", "per_token_head", "static")
_SIMPLE = PLAIN_WEIGHTS, (*PLAIN_INPUTS, "per_batch", "static"), _CACHES
_FP8 = (
    ("none", *PLAIN_WEIGHTS, "block_128_e8m0", "group_128_e8m0", "mx"),
    ("none", *PLAIN_INPUTS, "group_128_e8m0", "per_batch", "mx", "static"),
    ("none", *_CACHES),
)
_CODES = (
    _floating(FORMATS["fp8_e4m3"], 448.0, *_FP8, ball=True),
    _floating(FORMATS["fp8_e5m2"], 57344.0, *_FP8, ball=True),
    # The last code is 224, as in AMD's kernels.
    _floating(Format("fp8_e4m3fnuz", 4, -7, 240.0), 224.0, *_SIMPLE),
    _floating(Format("fp8_e5m2fnuz", 3, -15, 57344.0), 57344.0, *_SIMPLE),
    _floating(Format("fp6_e2m3", 4, 0, 7.5), 7.5, ("mx",), ("mx",)),
    _floating(Format("fp6_e3m2", 3, -2, 28.0), 28.0, ("mx",), ("mx",)),
    _floating(Format("fp4_e2m1", 2, 0, 6.0), 6.0, ("mx", "nvfp4"), ("mx", "nvfp4")),
    CodeGrid("int8", None, 127.0, 127.0, 127.0, *_SIMPLE, ball=True),
    CodeGrid("int8_full", None, 127.0, 128.0, 127.5, *_SIMPLE, ball=True),
    CodeGrid("int4_full", None, 7.0, 8.0, 7.5, PLAIN_WEIGHTS),
    CodeGrid("uint4", None, 15.0, 15.0, 15.0, PLAIN_WEIGHTS, shifted=True),
    CodeGrid("uint8", None, 255.0, 255.0, 255.0, (), (*PLAIN_INPUTS, "static"), shifted=True),
)
CODES = {code.name: code for code in _CODES}
