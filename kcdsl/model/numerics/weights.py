"""The exact parameter values of a kernel: rounding and quantisation of stored weights.

A second implementation can reproduce them bit for bit (docs/proofs/relational-interval.md,
section 2). All arithmetic is float32, round to nearest even; plain casts may truncate instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.numerics import Numerics, Weights
from kcdsl.model.numerics.formats import (
    CODE_FORMATS,
    E8M0_EXPONENTS,
    FORMATS,
    LAYOUTS,
    LEAST_RANGE,
    NESTED_LEAST,
    NESTED_MOST,
    CodeFormat,
    Format,
    ScaleLayout,
)


def plain_parameter(w: Tensor, numerics: Numerics, name: str = "a weight") -> Tensor:
    """Return a parameter other than a linear weight: rounded to `compute`, as float32."""
    return _cast(w, numerics.compute, numerics, name)


def stored_constant(
    array: Tensor, format: str, numerics: Numerics, name: str = "a constant"
) -> Tensor:
    """Return a constant in the kernel: unchanged if pinned, else rounded as a parameter.

    Raises ValueError where a pinned constant is no number of its format.
    """
    if not format:
        return plain_parameter(array.to(torch.float32), numerics, name)
    if not bool((array.to(getattr(torch, format)).to(array.dtype) == array).all()):
        raise ValueError(f"{name} holds numbers that are not {format}")
    return array


def linear_weight(w: Tensor, numerics: Numerics, name: str = "a weight") -> Tensor:
    """Return the weight [out, in] of a linear as the kernel uses it, as float32.

    Stored in the format and scale of `numerics.weights`, dequantised in float32, then rounded to
    `compute`. Where the product is one of codes, scales come after it: then the weight is not
    rounded to `compute`.
    """
    stored = numerics.weights
    if stored.layout is None:
        return _cast(_cast(w, stored.format, numerics, name), numerics.compute, numerics, name)
    value = dequantised(w.to(torch.float32), stored, name)
    _refuse_beyond(value, FORMATS["float32"], FORMATS["float32"].nearest, name)
    return round_to(value, "float32" if numerics.by_codes else numerics.compute, name)


def served_weight(w: Tensor, numerics: Numerics, name: str = "a weight") -> Tensor:
    """Return a dequantised weight [out, in] of the kernel's own checkpoint, rounded to `compute`
    unless linears multiply codes."""
    if numerics.weights.layout is None:
        return linear_weight(w, numerics, name)
    return round_to(w, "float32" if numerics.by_codes else numerics.compute, name)


def dequantised(w: Tensor, stored: Weights, name: str = "a weight") -> Tensor:
    """Return the codes of a matrix [out, in] of float32 numbers times their scales, as float32."""
    form, layout = stored.codes, LAYOUTS[stored.scale]
    if form.zero_point:
        return _from_zero_points(w, stored, name)
    if layout.rule == "nested":
        return nested_codes(w, form, layout)
    scale = _in_format(_scales(w.abs(), form, layout), stored.scale_format, name)
    divisor = torch.where(scale == 0, torch.ones_like(scale), scale)
    ratio = w * (1.0 / divisor) if form.reciprocal else w / divisor
    return _code(ratio, form) * scale


def _scales(size: Tensor, form: CodeFormat, layout: ScaleLayout) -> Tensor:
    """Return the float32 scale of every element, from the magnitudes; 1 where all are zero."""
    amax = group_amax(size, layout)
    divisor = torch.full_like(amax, form.divisor)
    match layout.rule:
        case "floor":
            _, exponent = torch.frexp(amax)
            found = _power(exponent - 1 - form.top_exponent)
        case "ceil":
            fraction, exponent = torch.frexp(amax / divisor)
            found = _power(torch.where(fraction == 0.5, exponent - 1, exponent))
        case _:
            found = amax / divisor
    found = torch.where((amax == 0) | (found == 0), torch.ones_like(found), found)
    return found.clamp_min(form.least_scale)


def nested_codes(
    x: Tensor, form: CodeFormat, layout: ScaleLayout, whole: Tensor | None = None
) -> Tensor:
    """Return the codes of float32 numbers times their nested scales, as float32.

    Args:
        whole: the scale of the tensor; None: computed from its largest magnitude.
    """
    amax = group_amax(x.abs(), layout)
    if whole is None:
        whole = x.abs().amax() / torch.full_like(amax, form.divisor * NESTED_MOST)
        whole = torch.where(whole == 0, torch.ones_like(whole), whole)
    multiple = (amax / torch.full_like(amax, form.divisor) / whole).clamp(NESTED_LEAST, NESTED_MOST)
    multiple = _code(multiple, CODE_FORMATS["fp8_e4m3"])
    return _code(x * ((1.0 / whole) / multiple), form) * (multiple * whole)


def _from_zero_points(w: Tensor, stored: Weights, name: str) -> Tensor:
    """Return (code - z)·s with s = (max - min)/levels of a group and z = round(-min/s) to even."""
    form, layout = CODE_FORMATS[stored.format], LAYOUTS[stored.scale]
    high, low = _group_extreme(w, layout), -_group_extreme(-w, layout)
    scale = (high - low).clamp_min(LEAST_RANGE) / torch.full_like(w, form.divisor)
    scale = _in_format(scale, stored.scale_format, name)
    zero = (-(low / scale).round()).clamp(0, form.above)
    code = ((w / scale).round() + zero).clamp(0, form.above)
    return (code - zero) * scale


def _in_format(scale: Tensor, format: str, name: str) -> Tensor:
    """Return scales rounded to their storage format; refuse overflow."""
    return round_to(scale, format, f"the scale of {name}")


def _power(exponent: Tensor) -> Tensor:
    least, most = E8M0_EXPONENTS
    return torch.exp2(exponent.clamp(least, most).to(torch.float64)).to(torch.float32)


def _cast(w: Tensor, format: str, numerics: Numerics, name: str) -> Tensor:
    """Return a plain cast with the rounding of the kernel."""
    match numerics.weights.rounding:
        case "nearest":
            return round_to(w, format, name)
        case "toward_zero":
            return cut_to(w, format, name)
        case other:
            raise ValueError(f"weights are not rounded {other}")


def cut_to(w: Tensor, format: str, name: str = "a weight") -> Tensor:
    """Return float32 values truncated to a format, as float32; signs of zeros are kept.

    Refuse a value beyond the range of the format.
    """
    w, form = w.to(torch.float32), FORMATS[format]
    if not form.coarse:
        return w
    _refuse_beyond(w, form, form.toward_zero, name)
    return form.toward_zero(w.to(torch.float64)).to(torch.float32)


def round_to(w: Tensor, format: str, name: str = "a weight") -> Tensor:
    """Return float32 values rounded to nearest even in a format, as float32.

    Refuse overflow of the format; `name` is the tensor's name in the message.
    """
    w, form = w.to(torch.float32), FORMATS[format]
    if not form.coarse:
        return w
    _refuse_beyond(w, form, form.nearest, name)
    if form.dtype:
        return w.to(getattr(torch, form.dtype)).to(torch.float32)
    return form.nearest(w.to(torch.float64)).to(torch.float32)


def _refuse_beyond(w: Tensor, form: Format, rounded: Callable[[Tensor], Tensor], name: str) -> None:
    """Refuse values whose rounding exceeds the range of a format."""
    largest = w.abs().amax() if w.numel() else w.new_zeros(())
    if bool(rounded(largest.to(torch.float64)) <= form.largest):
        return
    raise refuse(
        codes.WEIGHT_OVERFLOW,
        f"{name} holds {float(largest):.6g}, which does not fit {form.name}, whose"
        f" largest number is {form.largest:.6g}",
        help="give the weights a scale, or choose a format with a wider range",
    )


def _code(ratio: Tensor, form: CodeFormat) -> Tensor:
    """Return the codes of w/s as float32: nearest even in the format, saturating."""
    return form.code(ratio.to(torch.float64)).to(torch.float32)


def group_amax(magnitude: Tensor, layout: ScaleLayout) -> Tensor:
    """Return for each element of a matrix the largest magnitude in its scale group."""
    return _group_extreme(magnitude, layout)


def _group_extreme(values: Tensor, layout: ScaleLayout) -> Tensor:
    """Return for each element the largest number in its group; the last group may be smaller."""
    rows, columns = values.shape
    height, width = layout.rows or rows, layout.columns or columns
    filled = torch.nn.functional.pad(
        values, (0, -columns % width, 0, -rows % height), value=-torch.inf
    )
    tiles = filled.view(filled.shape[0] // height, height, filled.shape[1] // width, width)
    largest = tiles.amax(dim=(1, 3))
    spread = largest.repeat_interleave(height, dim=0).repeat_interleave(width, dim=1)
    return spread[:rows, :columns]
