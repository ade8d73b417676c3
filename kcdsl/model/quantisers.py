"""Code formats and scale layouts: what quantisers are made of (docs/numerics.md).

Imports neither numpy nor torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kcdsl.model.formats import FORMATS, Format


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """The codes that stand for numbers divided by a scale.

    `grid` holds the codes; those of integers are a format of subnormal numbers. `above` and `below`
    are the last codes over zero and under it, `divisor` is what the largest magnitude is divided by
    to make a scale. `reciprocal`: a number is multiplied by the float32 reciprocal of its scale,
    not divided by it. `least_scale` is the least that a scale may be. `zero_point`: codes count
    from a zero point, and scales come from the range of the numbers.
    """

    name: str
    grid: Format
    above: float
    below: float
    divisor: float
    reciprocal: bool = False
    least_scale: float = 0.0
    zero_point: bool = False

    @property
    def integer(self) -> bool:
        """Say whether the codes are integers."""
        return self.grid.min_exponent >= 7

    @property
    def top_exponent(self) -> int:
        """Return the exponent of the last code: what an mx scale is shifted by."""
        return math.frexp(self.above)[1] - 1


def _symmetric(grid: Format, top: float | None = None) -> CodeFormat:
    top = grid.largest if top is None else top
    return CodeFormat(grid.name, grid, top, top, top)


def _full(name: str, count: float) -> CodeFormat:
    """Return integers from -count to count - 1, with scales of amax/(count - 1/2)."""
    return CodeFormat(name, _INTEGERS, count - 1, count, count - 0.5, True, LEAST_FULL_SCALE)


def _unsigned(name: str, most: float) -> CodeFormat:
    return CodeFormat(name, _INTEGERS, most, most, most, zero_point=True)


LEAST_FULL_SCALE = 2.0**-23
"""The least scale of int8_full and int4_full."""
LEAST_RANGE = 9.999999747378752e-06
"""The least range of weights of uint4: AutoAWQ's 1e-5, in float32."""
_INTEGERS = Format("integer", 8, 7, 255.0)
CODE_FORMATS: dict[str, CodeFormat] = {
    found.name: found
    for found in (
        _symmetric(FORMATS["fp8_e4m3"]),
        _symmetric(FORMATS["fp8_e5m2"]),
        _symmetric(Format("fp8_e4m3fnuz", 4, -7, 240.0), 224.0),
        _symmetric(Format("fp8_e5m2fnuz", 3, -15, 57344.0)),
        _symmetric(Format("fp6_e2m3", 4, 0, 7.5)),
        _symmetric(Format("fp6_e3m2", 3, -2, 28.0)),
        _symmetric(Format("fp4_e2m1", 2, 0, 6.0)),
        CodeFormat("int8", Format("int8", 8, 7, 127.0), 127.0, 127.0, 127.0),
        _full("int8_full", 128.0),
        _full("int4_full", 8.0),
        _unsigned("uint8", 255.0),
        _unsigned("uint4", 15.0),
    )
}
"""Every format of codes by its name. vLLM divides by 224 for e4m3fnuz, whose last code is 240."""
ACTIVATION_FORMATS = tuple(name for name in CODE_FORMATS if name not in ("int4_full", "uint4"))


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """Which elements share a scale, and how it is made of their largest magnitude.

    `rows` × `columns` elements of a matrix share one; 0: all there are. `rule` is "amax"
    (float32(amax/divisor)), "floor" (mx: the power of two of amax, less that of the last code),
    "ceil" (the power of two from float32(amax/divisor) upward), "nested" (nvfp4: an fp8_e4m3
    multiple of a float32 scale of the tensor, which may be static), or "batch" (as "amax", of all
    sequences that run together).
    """

    name: str
    rows: int
    columns: int
    rule: str = "amax"


MX_BLOCK = 32
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
        ScaleLayout("mx", 1, MX_BLOCK, "floor"),
        ScaleLayout("nvfp4", 1, 16, "nested"),
        ScaleLayout("per_batch", 0, 0, "batch"),
    )
}
"""Every layout of scales that are made of what they scale, by its name."""
WEIGHT_LAYOUTS = tuple(name for name in LAYOUTS if name not in ("per_token", "per_batch"))
ACTIVATION_LAYOUTS = tuple(
    name for name, layout in LAYOUTS.items() if name != "per_channel" and layout.rows != 128
)
NESTED_LEAST, NESTED_MOST = 2.0**-6, 448.0
"""The least and the largest multiple of the scale of a tensor that a nested scale is."""
E8M0_EXPONENTS = (-127, 127)
"""The least and the greatest exponent of a power of two that is stored in eight bits."""


def fitting_layouts(format: str) -> tuple[str, ...]:
    """Return the layouts that the scales of a format of codes may have."""
    rules = _RULES.get(format, ("amax", "batch"))
    return tuple(name for name, layout in LAYOUTS.items() if layout.rule in rules)


_RULES = {
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), ("amax", "batch", "ceil", "floor")),
    **dict.fromkeys(("fp6_e2m3", "fp6_e3m2"), ("floor",)),
    "fp4_e2m1": ("floor", "nested"),
}
