"""Number formats, code formats and scale layouts (docs/reference/numerics.md).

Each is defined once here, with the methods that rules need.
Imports neither numpy nor torch: only methods of tensors are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """A floating-point format.

    `precision` counts the significand bits, the hidden one included, so the unit roundoff is
    `2**-precision`. The smallest normal number is `2**min_exponent`. `dtype` names the torch type,
    "" where there is none.
    """

    name: str
    precision: int
    min_exponent: int
    largest: float
    dtype: str = ""

    def holds(self, other: Format) -> bool:
        """Return whether every number of another format is a number of this one."""
        return (
            self.precision >= other.precision
            and self.smallest_subnormal <= other.smallest_subnormal
            and self.largest >= other.largest
        )

    @property
    def unit_roundoff(self) -> float:
        """Return u = 2^-precision, the relative error of rounding to nearest."""
        return 2.0**-self.precision

    @property
    def smallest_subnormal(self) -> float:
        """Return the distance of two neighbours below the smallest normal number."""
        return 2.0 ** (self.min_exponent - self.precision + 1)

    @property
    def underflow(self) -> float:
        """Return η = half the smallest subnormal number, the absolute error near zero."""
        return self.smallest_subnormal / 2

    @property
    def coarse(self) -> bool:
        """Return whether the format is less precise than float32."""
        return self.precision < 24

    @property
    def wide(self) -> bool:
        """Return whether the format is as precise as float64."""
        return self.precision >= 53

    def spacing(self, x: Tensor) -> Tensor:
        """Return the distance from float64 numbers to the next greater magnitude of the format."""
        exponent = (x.frexp().exponent - 1).clamp_min(self.min_exponent) - (self.precision - 1)
        return ((exponent.long() + 1023) << 52).view(x.dtype)

    def nearest(self, x: Tensor) -> Tensor:
        """Round float64 values to the nearest number of the format, ties to even.

        The exponent range is unbounded above: values beyond the largest finite number are rounded
        on the grid of their binade, and the caller tests for overflow.
        """
        if self.wide:
            return x
        spacing = self.spacing(x)
        return (x / spacing).round() * spacing

    def toward_zero(self, x: Tensor) -> Tensor:
        """Truncate float64 values to the next number toward zero; zeros keep their signs.

        The exponent range is unbounded above, as in `nearest`.
        """
        if self.wide:
            return x
        spacing = self.spacing(x)
        return (x / spacing).trunc() * spacing


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("float64", 53, -1022, 1.7976931348623157e308, "float64"),
        Format("float32", 24, -126, 3.4028234663852886e38, "float32"),
        Format("tfloat32", 11, -126, 3.4011621342146535e38),
        Format("float16", 11, -14, 65504.0, "float16"),
        Format("bfloat16", 8, -126, 3.3895313892515355e38, "bfloat16"),
        Format("fp8_e4m3", 4, -6, 448.0, "float8_e4m3fn"),
        Format("fp8_e5m2", 3, -14, 57344.0, "float8_e5m2"),
    )
}


@dataclass(frozen=True, slots=True)
class Casts:
    """The rounding of casts into a format, by the value of `casts` in a specification.

    `free`: each cast has an independent error of up to `units` unit roundoffs; else it is a step
    function. `toward_zero`: no cast increases a magnitude. `units` is 1 for roundings to nearest
    and 2 for all others, whose error may be a whole unit in the last place, and below the normal
    numbers a whole subnormal.
    """

    free: bool
    toward_zero: bool
    units: int

    def step(self, x: Tensor, format: Format) -> Tensor:
        """Return float64 values after a cast that is a step function."""
        return format.toward_zero(x) if self.toward_zero else format.nearest(x)

    def unit(self, format: Format) -> float:
        """Return the bound on the relative error of a cast: u, or 2u for a directed rounding."""
        return self.units * format.unit_roundoff

    def faint(self, format: Format) -> float:
        """Return the bound on the absolute error of a cast near zero: `units` / 2 subnormals."""
        return self.units * format.underflow


CASTS = {
    "nearest": Casts(free=False, toward_zero=False, units=1),
    "any": Casts(free=True, toward_zero=False, units=1),
    "toward_zero": Casts(free=False, toward_zero=True, units=2),
    "any_toward_zero": Casts(free=True, toward_zero=True, units=2),
    "any_direction": Casts(free=True, toward_zero=False, units=2),
}


# --- codes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """A format of codes: numbers divided by a scale and rounded.

    `grid` holds the codes; integers are a format of subnormal numbers. `above` and `below` are the
    magnitudes of the largest and the least code; a scale is the largest magnitude over `divisor`.
    `reciprocal`: a number is multiplied by the float32 reciprocal of its scale, not divided by it.
    `least_scale` is the least scale. `zero_point`: codes are relative to a zero point, and scales
    come from the range of the numbers.

    `rules` are the scale rules (`ScaleLayout.rule`) that it supports. `static`: scales may be
    calibrated. `weights`: weights may have this format. `activations`: inputs of linears may have
    it. `ball`: bounds exist for a weight ball around weights of this format. `units`: there are
    matrix units that multiply its codes.
    """

    name: str
    grid: Format
    above: float
    below: float
    divisor: float
    reciprocal: bool = False
    least_scale: float = 0.0
    zero_point: bool = False
    rules: tuple[str, ...] = ("amax", "batch")
    static: bool = False
    weights: bool = True
    activations: bool = True
    ball: bool = False
    units: bool = False

    @property
    def integer(self) -> bool:
        """Return whether the codes are integers."""
        return self.grid.min_exponent >= 7

    @property
    def signed_byte(self) -> bool:
        """Return whether the codes are signed integers of eight bits."""
        return self.integer and not self.zero_point and self.above == 127.0

    @property
    def top_exponent(self) -> int:
        """Return the exponent of the largest code, by which an mx scale is shifted."""
        return math.frexp(self.above)[1] - 1

    @property
    def cuts(self) -> bool:
        """Return whether saturation may exceed a rounding error, whatever the scale."""
        return self.zero_point or self.divisor > self.above

    def code(self, ratio: Tensor) -> Tensor:
        """Return the codes of float64 numbers that are already divided by their scale,
        saturating."""
        return self.grid.nearest(ratio).clamp(-self.below, self.above)


LEAST_RANGE = 9.999999747378752e-06
"""The least range of weights of uint4: AutoAWQ's 1e-5, in float32."""
_LEAST_FULL = 2.0**-23
"""The least scale of int8_full and int4_full."""
_POWERS = ("amax", "batch", "ceil", "floor")
_INTEGERS = Format("integer", 8, 7, 255.0)


def _floats(grid: Format, *rules: str, top: float | None = None, **may: bool) -> CodeFormat:
    """Return a code format whose codes are numbers of a format; `may` are flags of `CodeFormat`."""
    last, given = top or grid.largest, rules or ("amax", "batch")
    return CodeFormat(grid.name, grid, last, last, last, rules=given, **may)


CODE_FORMATS: dict[str, CodeFormat] = {
    found.name: found
    for found in (
        _floats(FORMATS["fp8_e4m3"], *_POWERS, static=True, ball=True, units=True),
        _floats(FORMATS["fp8_e5m2"], *_POWERS, static=True, ball=True, units=True),
        _floats(Format("fp8_e4m3fnuz", 4, -7, 240.0), top=224.0, static=True, units=True),
        _floats(Format("fp8_e5m2fnuz", 3, -15, 57344.0), static=True, units=True),
        _floats(Format("fp6_e2m3", 4, 0, 7.5), "floor"),
        _floats(Format("fp6_e3m2", 3, -2, 28.0), "floor"),
        _floats(Format("fp4_e2m1", 2, 0, 6.0), "floor", "nested"),
        CodeFormat(
            *("int8", Format("int8", 8, 7, 127.0), 127.0, 127.0, 127.0), static=True, ball=True
        ),
        CodeFormat(
            *("int8_full", _INTEGERS, 127.0, 128.0, 127.5),
            reciprocal=True, least_scale=_LEAST_FULL, static=True, ball=True,
        ),
        CodeFormat(
            *("int4_full", _INTEGERS, 7.0, 8.0, 7.5),
            reciprocal=True, least_scale=_LEAST_FULL, activations=False,
        ),
        CodeFormat(
            *("uint8", _INTEGERS, 255.0, 255.0, 255.0),
            zero_point=True, rules=("amax",), static=True, weights=False,
        ),
        CodeFormat(
            *("uint4", _INTEGERS, 15.0, 15.0, 15.0), zero_point=True, activations=False
        ),
    )
}  # fmt: skip
"""Every code format by name. vLLM divides by 224 for e4m3fnuz, whose largest code is 240."""


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """The elements that share a scale, and the rule that computes it from their largest magnitude.

    `rows` × `columns` elements of a matrix share one; 0: all. `rule` is "amax"
    (float32(amax/divisor)), "floor" (mx: the power of two of amax over that of the largest code),
    "ceil" (float32(amax/divisor) rounded up to a power of two), "nested" (nvfp4: an fp8_e4m3
    multiple of a float32 scale of the tensor, which may be static), or "batch" ("amax" over all
    sequences of a batch).
    """

    name: str
    rows: int
    columns: int
    rule: str = "amax"

    @property
    def whole(self) -> bool:
        """Return whether all elements of a tensor share one scale."""
        return (self.rows, self.columns) == (0, 0)

    @property
    def cuts(self) -> bool:
        """Return whether a scale may be so small that saturation exceeds a rounding error."""
        return self.rule in ("floor", "nested")

    def fits(self, form: CodeFormat) -> bool:
        """Return whether a code format supports this layout."""
        return self.rule in form.rules


LAYOUTS: dict[str, ScaleLayout] = {
    found.name: found
    for found in (
        ScaleLayout("per_tensor", 0, 0),
        ScaleLayout("per_channel", 1, 0),
        ScaleLayout("per_token", 1, 0),
        ScaleLayout("block_128", 128, 128),
        ScaleLayout("group_32", 1, 32),
        ScaleLayout("group_64", 1, 64),
        ScaleLayout("group_128", 1, 128),
        ScaleLayout("block_128_e8m0", 128, 128, "ceil"),
        ScaleLayout("group_128_e8m0", 1, 128, "ceil"),
        ScaleLayout("mx", 1, 32, "floor"),
        ScaleLayout("nvfp4", 1, 16, "nested"),
        ScaleLayout("per_batch", 0, 0, "batch"),
    )
}
"""Every layout of dynamic scales, by name."""
WEIGHT_LAYOUTS = tuple(name for name in LAYOUTS if name not in ("per_token", "per_batch"))
ACTIVATION_LAYOUTS = tuple(
    name for name, layout in LAYOUTS.items() if name != "per_channel" and layout.rows <= 1
)
NESTED_LEAST, NESTED_MOST = 2.0**-6, 448.0
"""The least and the largest nested scale, as a multiple of the scale of the tensor."""
E8M0_EXPONENTS = (-127, 127)
"""The least and the largest exponent of an 8-bit power-of-two scale."""
