"""The exact parameter values of a kernel: rounding and quantisation of stored weights.

Defined so that a second implementation can match bit for bit (docs/relational-interval.md,
section 2). All arithmetic is float32, round to nearest even; plain casts may cut off instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.formats import FORMATS
from kcdsl.model.numerics import Numerics

QMAX = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int8_full": 127.5, "int4_full": 7.5}
LEAST_FULL_SCALE = 2.0**-23
"""The least scale of int8_full and int4_full."""
FULL_CODES = {"int8_full": 128.0, "int4_full": 8.0}
"""Formats whose codes reach from -n to n - 1, and n."""
MX_EXPONENT = {"fp8_e4m3": 8, "fp8_e5m2": 15}
MX_BLOCK = 32
TILE = 128

_TORCH_FORMATS = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def plain_parameter(w: Tensor, numerics: Numerics, name: str = "a weight") -> Tensor:
    """Return a parameter other than a linear weight: rounded to `compute`, as float32."""
    return _cast(w, numerics.compute, numerics, name)


def stored_constant(
    array: Tensor, format: str, numerics: Numerics, name: str = "a constant"
) -> Tensor:
    """Return a constant as the kernel holds it: pinned as it stands, else as a parameter.

    Raises ValueError where it is not one of its format.
    """
    if not format:
        return plain_parameter(array.to(torch.float32), numerics, name)
    if not bool((array.to(getattr(torch, format)).to(array.dtype) == array).all()):
        raise ValueError(f"{name} holds numbers that are not {format}")
    return array


def linear_weight(w: Tensor, numerics: Numerics, name: str = "a weight") -> Tensor:
    """Return the weight [out, in] of a linear as the kernel uses it, as float32.

    Stored in the format and scale of `numerics.weights`, dequantised in float32, then rounded to
    `compute`. Where activations are quantised the product is one of codes, and scales come after
    it: then the weight is not rounded to `compute`.
    """
    stored = numerics.weights
    if stored.scale == "none":
        return _cast(_cast(w, stored.format, numerics, name), numerics.compute, numerics, name)
    w = w.to(torch.float32)
    if stored.scale == "mx":
        scale = _mx_scale(w, MX_EXPONENT[stored.format])
    else:
        amax = _AMAX[stored.scale](w.abs())
        scale = amax / QMAX[stored.format]
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if stored.format in FULL_CODES:
        scale = scale.clamp_min(LEAST_FULL_SCALE)
        most = FULL_CODES[stored.format]
        code = (w * (1.0 / scale)).round().clamp(-most, most - 1)
    else:
        code = _code(w / scale, stored.format)
    by_codes = numerics.activations.format != "none"
    return round_to(code * scale, "float32" if by_codes else numerics.compute, name)


def _cast(w: Tensor, format: str, numerics: Numerics, name: str) -> Tensor:
    """Return a plain cast as the kernel makes it."""
    match numerics.weights.rounding:
        case "nearest":
            return round_to(w, format, name)
        case "toward_zero":
            return cut_to(w, format, name)
        case other:
            raise ValueError(f"weights are not rounded {other}")


def cut_to(w: Tensor, format: str, name: str = "a weight") -> Tensor:
    """Return float32 values cut off toward zero to a format, as float32; signs of zeros are kept.

    Refuse a value of a magnitude from which on the format has no next number to cut off to.
    """
    w = w.to(torch.float32)
    form = FORMATS[format]
    if form.precision >= FORMATS["float32"].precision:
        return w
    exact = w.to(torch.float64)
    leading = (torch.frexp(exact).exponent - 1).clamp_min(form.min_exponent)
    step = torch.exp2((leading - form.precision + 1).to(torch.float64))
    kept = (torch.trunc(exact / step) * step).to(torch.float32)
    _refuse_beyond(w, ~(kept.abs() <= form.largest), format, name)
    return kept


def round_to(w: Tensor, format: str, name: str = "a weight") -> Tensor:
    """Return float32 values rounded to nearest even in a format, as float32.

    Refuse a value that is beyond the largest finite number of the format; `name` is whose it is.
    """
    w = w.to(torch.float32)
    if format in ("float64", "float32"):
        return w
    if format == "tfloat32":
        rounded = _drop_bits(w, 24 - FORMATS[format].precision)
    else:
        rounded = w.to(_TORCH_FORMATS[format]).to(torch.float32)
    largest = FORMATS[format].largest
    over = (rounded.abs() > largest) | ~torch.isfinite(rounded) | (w.abs() >= _overflow(format))
    _refuse_beyond(w, over, format, name)
    return rounded


def _refuse_beyond(w: Tensor, over: Tensor, format: str, name: str) -> None:
    if not bool(over.any()):
        return
    raise refuse(
        codes.WEIGHT_OVERFLOW,
        f"{name} holds {float(w[over].abs().max()):.6g}, which does not fit {format}, whose"
        f" largest number is {FORMATS[format].largest:.6g}",
        help="give the weights a scale, or choose a format with a wider range",
    )


def _overflow(format: str) -> float:
    """Return the least magnitude that rounds beyond the largest number of a format.

    The last significand of fp8_e4m3 is even, so the tie above it rounds down and does not count.
    """
    f = FORMATS[format]
    half_step = 2.0 ** (_exponent(f.largest) - f.precision)
    edge = f.largest + half_step
    return edge if format != "fp8_e4m3" else float(torch.tensor(edge).nextafter(torch.tensor(1e9)))


def _exponent(value: float) -> int:
    """Return floor(log2(value)) for a positive number."""
    return int(torch.frexp(torch.tensor(value, dtype=torch.float64)).exponent) - 1


def _code(ratio: Tensor, format: str) -> Tensor:
    """Return the codes of w/s as float32: nearest even in the format, saturating."""
    limited = ratio.clamp(-QMAX[format], QMAX[format])
    if format == "int8":
        return limited.round()
    return limited.to(_TORCH_FORMATS[format]).to(torch.float32)


def _drop_bits(w: Tensor, bits: int) -> Tensor:
    """Round float32 values to nearest even with `bits` fewer significand bits."""
    raw = w.view(torch.int32)
    half = (1 << (bits - 1)) - 1
    kept = raw + half + ((raw >> bits) & 1)
    return (kept & ~((1 << bits) - 1)).view(torch.float32)


def _mx_scale(w: Tensor, largest_exponent: int) -> Tensor:
    """Return 2^(floor(log2 amax) - emax) for each 32 consecutive inputs, spread over them.

    The exponent stays within the range of E8M0, -127 to 127; the scale is 1 where amax is 0.
    """
    rows, columns = w.shape
    blocks = -(-columns // MX_BLOCK)
    padded = w.new_zeros(rows, blocks * MX_BLOCK)
    padded[:, :columns] = w.abs()
    amax = padded.view(rows, blocks, MX_BLOCK).amax(dim=-1)
    exponent = (torch.frexp(amax).exponent - 1 - largest_exponent).clamp(-127, 127)
    power = torch.exp2(exponent.to(torch.float64)).to(torch.float32)
    scale = torch.where(amax == 0, torch.ones_like(power), power)
    return scale.repeat_interleave(MX_BLOCK, dim=1)[:, :columns]


def _tile_amax(magnitude: Tensor, height: int) -> Tensor:
    """Return the largest magnitude of each tile 128 wide, spread over its elements."""
    rows, columns = magnitude.shape
    down, across = -(-rows // height), -(-columns // TILE)
    padded = magnitude.new_zeros(down * height, across * TILE)
    padded[:rows, :columns] = magnitude
    amax = padded.view(down, height, across, TILE).amax(dim=(1, 3))
    spread = amax.repeat_interleave(height, dim=0).repeat_interleave(TILE, dim=1)
    return spread[:rows, :columns]


_AMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "per_tensor": lambda magnitude: magnitude.amax(),
    "per_channel": lambda magnitude: magnitude.amax(dim=1, keepdim=True),
    "block_128": lambda magnitude: _tile_amax(magnitude, TILE),
    "group_128": lambda magnitude: _tile_amax(magnitude, 1),
}
