"""Formats of numbers and of codes, layouts of scales, and rounding to a format in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
        """Return whether every number of another format is one of this."""
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

# Grids of codes that are no integers.
GRIDS = {
    "fp8_e4m3": FORMATS["fp8_e4m3"],
    "fp8_e5m2": FORMATS["fp8_e5m2"],
    "fp8_e4m3fnuz": Format("fp8_e4m3fnuz", 4, -7, 240.0),
    "fp8_e5m2fnuz": Format("fp8_e5m2fnuz", 3, -15, 57344.0),
    "fp6_e2m3": Format("fp6_e2m3", 4, 0, 7.5),
    "fp6_e3m2": Format("fp6_e3m2", 3, -2, 28.0),
    "fp4_e2m1": Format("fp4_e2m1", 2, 0, 6.0),
}

# The last code of a format, and what amax is divided by; 224 for fnuz, as AMD's kernels have it.
CODE_LARGEST = {
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
    "fp8_e4m3fnuz": 224.0,
    "fp8_e5m2fnuz": 57344.0,
    "fp6_e2m3": 7.5,
    "fp6_e3m2": 28.0,
    "fp4_e2m1": 6.0,
    "int8": 127.0,
}
TOP_EXPONENT = {
    "fp8_e4m3": 8,
    "fp8_e5m2": 15,
    "fp8_e4m3fnuz": 7,
    "fp8_e5m2fnuz": 15,
    "fp6_e2m3": 2,
    "fp6_e3m2": 4,
    "fp4_e2m1": 2,
}
INTEGERS = ("int8", "int8_full", "int4_full", "uint4")
FULL_RANGE = {"int8_full": 128, "int4_full": 8}  # codes from -n to n - 1, the scale amax/(n - 1/2)
NIBBLES = 15  # codes of uint4 reach from 0 to this
LEAST_RANGE = float.fromhex("0x1.4f8b58p-17")  # of uint4: float32(1e-5)
NESTED = 2.0**-6, 448.0  # between which multiples of a tensor's scale a nested one is

# How many rows and columns share a scale (0: all there are).
TILES = {
    "per_tensor": (0, 0),
    "per_batch": (0, 0),
    "per_channel": (1, 0),
    "per_token": (1, 0),
    "block_128": (128, 128),
    "block_128_e8m0": (128, 128),
    "group_128_e8m0": (1, 128),
    "group_32": (1, 32),
    "group_64": (1, 64),
    "group_128": (1, 128),
    "mx": (1, 32),
    "nvfp4": (1, 16),
}
CEILED = ("block_128_e8m0", "group_128_e8m0")  # scales are powers of two, not below amax/qmax
LEAST_POWER, MOST_POWER = -127, 127

Floats = NDArray[np.float64]


def nearest(values: Floats, target: Format) -> Floats:
    """Return the nearest numbers of `target`, ties to even; ±inf beyond its largest number.

    The exponent range is taken as unbounded above while rounding, so a value that rounds to a
    number beyond the largest becomes infinite, whatever the format would do with it.
    """
    if target.precision == 53:
        return values
    return _on_grid(values, target, np.rint)


def cut(values: Floats, target: Format) -> Floats:
    """Return the numbers of `target` next to values on the side of zero; ±inf from where on the
    unbounded grid of `target` has a number beyond its largest."""
    if target.precision == 53:
        return values
    return _on_grid(values, target, np.trunc)


def _on_grid(values: Floats, target: Format, whole: Callable[[Floats], Floats]) -> Floats:
    _, exponent = np.frexp(values)
    spacing = np.maximum(exponent - 1, target.least) - (target.precision - 1)
    # Two steps each way: 2^±spacing alone may leave the range of doubles.
    half = spacing // 2
    scaled = np.ldexp(np.ldexp(values, -half), half - spacing)
    rounded = np.ldexp(np.ldexp(whole(scaled), half), spacing - half)
    beyond = np.abs(rounded) > target.largest
    return np.where(beyond, np.copysign(np.inf, values), rounded)


def saturated(values: Floats, target: Format) -> Floats:
    """Return the nearest numbers of `target`, the largest one in place of anything beyond it."""
    return np.clip(nearest(values, target), -target.largest, target.largest)
