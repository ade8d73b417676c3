"""Stored parameters of each kernel, in rational numbers (standard library alone)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from fractions import Fraction

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import array_digest
from kcdsl_certs.recheck.interval.tensors import FLOATS, Tensor
from kcdsl_certs.recheck.numerics.formats import (
    CODES,
    FLOAT32,
    FORMATS,
    LAYOUTS,
    LEAST_RANGE,
    NESTED,
    Format,
)
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from tests.support.rationals.cells import (
    Cells,
    Shape,
    cut,
    exponent,
    nearest,
    points,
    rounded,
)
from tests.support.rationals.quantisers import power, power_above

MOST_NUMBERS = 1_000_000


class RationalParameters:
    """The checkpoint's tensors as float32 numbers and as either kernel stores them."""

    def __init__(self, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Read the tensors that a proof lists.

        Raises: Rejected: "parameter/…" as in the float64 tier, or "exact/size".
        """
        self._values: dict[str, tuple[Shape, list[Fraction]]] = {}
        for key, digest in digests.items():
            if key not in tensors:
                raise Rejected("parameter/missing", f"the checkpoint has no tensor {key!r}")
            tensor = tensors[key]
            singles = _singles(tensor, key)
            data = struct.pack(f"<{len(singles)}f", *singles)
            if array_digest("float32", tensor.shape, data) != digest:
                raise Rejected("parameter/digest", f"tensor {key!r} is not the one of the proof")
            self._values[key] = tensor.shape, [Fraction(v) for v in singles]

    def singles(self, key: str) -> tuple[Shape, list[Fraction]]:
        """Return the shape and the float32 numbers of a tensor."""
        return self._values[key]

    def plain(self, key: str, kernel: KernelNumerics) -> Cells:
        """Return a parameter other than a linear weight, as the kernel stores it."""
        shape, values = self._values[key]
        return points(shape, [as_stored(v, kernel.holding, kernel) for v in values])

    def linear(self, key: str, kernel: KernelNumerics) -> Cells:
        """Return a linear weight [outputs, inputs] as the kernel stores it."""
        shape, values = self._values[key]
        if len(shape) != 2:
            raise Rejected("parameter/shape", f"linear weight {key!r} is not a matrix")
        kernel = kernel.serving(key)
        kind, scale = kernel.weights
        if scale == "none":
            found = [as_stored(v, FORMATS[kind], kernel) for v in values]
            found = [as_stored(v, FLOAT32, kernel) for v in found]
        else:
            found = _quantised(values, shape, kernel, key)
        if scale == "none" or not kernel.by_codes:  # otherwise scales are applied after the product
            found = [as_stored(v, kernel.holding, kernel) for v in found]
        return points(shape, found)


def as_stored(value: Fraction, form: Format, kernel: KernelNumerics) -> Fraction:
    """Return a parameter as a kernel casts it to a format."""
    return (cut if kernel.cut_weights else nearest)(value, form)


def _singles(tensor: Tensor, key: str) -> list[float]:
    """Return the numbers of a tensor, rounded to float32 where it is F64."""
    if tensor.dtype not in FLOATS:
        raise Rejected("parameter/dtype", f"{key!r} is {tensor.dtype}, not a float tensor")
    count = math.prod(tensor.shape)
    if count > MOST_NUMBERS:
        raise Rejected("exact/size", f"{key!r} is too large for exact arithmetic")
    if tensor.dtype == "BF16":
        bits = struct.unpack(f"<{count}H", tensor.data)
        values = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(b << 16 for b in bits)))
    else:
        code = {"F32": "f", "F16": "e", "F64": "d"}[tensor.dtype]
        values = struct.unpack(f"<{count}{code}", tensor.data)
    if not all(math.isfinite(v) for v in values):
        raise Rejected("parameter/not-finite", f"{key!r} holds NaN or infinity")
    if tensor.dtype != "F64":
        return list(values)
    try:
        return list(struct.unpack(f"<{count}f", struct.pack(f"<{count}f", *values)))
    except OverflowError:
        raise Rejected("parameter/not-finite", f"{key!r} overflows float32") from None


def _quantised(
    values: list[Fraction], shape: Shape, kernel: KernelNumerics, key: str
) -> list[Fraction]:
    rows, columns = shape
    kind, scale = kernel.weights
    height, width = LAYOUTS[scale].tile
    height, width = height or rows, width or columns
    places = [(at // columns // height, at % columns // width) for at in range(len(values))]
    high: dict[tuple[int, int], Fraction] = {}
    low: dict[tuple[int, int], Fraction] = {}
    for value, place in zip(values, places, strict=True):
        high[place] = max(high.get(place, value), value)
        low[place] = min(low.get(place, value), value)
    amax = {place: max(high[place], -low[place]) for place in high}
    found = []
    if kind == "uint4":
        for value, place in zip(values, places, strict=True):
            found.append(_from_zero(value, low[place], high[place], kernel, key))
        return found
    if scale == "nvfp4":
        top = max(amax.values())
        return [_nested(v, amax[p], top, kind) for v, p in zip(values, places, strict=True)]
    scales = {place: _kept(_scale(most, kind, scale), kernel, key) for place, most in amax.items()}
    for value, place in zip(values, places, strict=True):
        step = scales[place]
        by = step or Fraction(1)
        if CODES[kind].full:
            ratio = rounded(value * rounded(1 / by, FLOAT32), FLOAT32)
            most = int(CODES[kind].below)
            code = Fraction(max(-most, min(most - 1, round(ratio))))
        else:
            code = _code(rounded(value / by, FLOAT32), kind)
        found.append(nearest(code * step, FLOAT32))
    return found


def _kept(scale: Fraction, kernel: KernelNumerics, key: str) -> Fraction:
    """Return a scale as it is stored."""
    found = rounded(scale, kernel.scale_format)
    if found > Fraction(kernel.scale_format.largest):
        raise Rejected("parameter/scale", f"{key!r} has a scale outside its format")
    return found


def _from_zero(
    value: Fraction, low: Fraction, high: Fraction, kernel: KernelNumerics, key: str
) -> Fraction:
    wide, last = max(nearest(high - low, FLOAT32), Fraction(LEAST_RANGE)), int(CODES["uint4"].last)
    step = _kept(rounded(wide / last, FLOAT32), kernel, key)
    zero = max(0, min(last, -round(rounded(low / step, FLOAT32))))
    code = max(0, min(last, round(rounded(value / step, FLOAT32)) + zero))
    return nearest((code - zero) * step, FLOAT32)


def _nested(value: Fraction, most: Fraction, top: Fraction, kind: str) -> Fraction:
    """Return code times scale of a number, given the maxima of its group and of the tensor."""
    last = Fraction(CODES[kind].last)
    whole = rounded(top / (last * Fraction(NESTED[1])), FLOAT32) or Fraction(1)
    share = rounded(rounded(most / last, FLOAT32) / whole, FLOAT32)
    inside = max(Fraction(NESTED[0]), min(Fraction(NESTED[1]), share))
    multiple = rounded(inside, CODES["fp8_e4m3"].form)
    inverse = nearest(nearest(1 / whole, FLOAT32) / multiple, FLOAT32)
    code = _code(rounded(value * inverse, FLOAT32), kind)
    return nearest(code * rounded(multiple * whole, FLOAT32), FLOAT32)


def _scale(most: Fraction, kind: str, scale: str) -> Fraction:
    """Return the scale of a group with this largest magnitude; 1 where it would be 0."""
    if scale == "mx":
        return power(exponent(most) - CODES[kind].exponent) if most else Fraction(1)
    if CODES[kind].full:
        found = rounded(most * 2 / (2 * int(CODES[kind].below) - 1), FLOAT32)
        return max(found, Fraction(1, 2**23)) if most else Fraction(1)
    found = rounded(most / Fraction(CODES[kind].last), FLOAT32)
    if LAYOUTS[scale].ceiled and found:
        return power_above(found)
    return found or Fraction(1)


def _code(ratio: Fraction, kind: str) -> Fraction:
    largest = Fraction(CODES[kind].last)
    ratio = max(-largest, min(largest, ratio))
    code = Fraction(round(ratio)) if kind == "int8" else rounded(ratio, CODES[kind].form)
    return max(-largest, min(largest, code))
