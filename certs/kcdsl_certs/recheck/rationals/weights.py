"""What each kernel stores for a parameter, in rational numbers (standard library alone)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from fractions import Fraction

from kcdsl_certs.recheck.block import array_digest
from kcdsl_certs.recheck.errors import Rejection
from kcdsl_certs.recheck.rationals.cells import (
    ZERO,
    Cells,
    Shape,
    cut,
    exponent,
    nearest,
    points,
    rounded,
)
from kcdsl_certs.recheck.safetensors import FLOATS, Tensor
from kcdsl_certs.recheck.spec import (
    CODE_LARGEST,
    FLOAT32,
    FORMATS,
    FULL_RANGE,
    MX_BLOCK,
    MX_EXPONENT,
    TILE,
    Format,
    Kernel,
)

MOST_NUMBERS = 1_000_000


class RationalParameters:
    """The checkpoint's tensors as float32 numbers and as either kernel stores them."""

    def __init__(self, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Take the tensors that a proof lists.

        Raises:
            Rejection: "parameter/…" as in the float64 tier, or "exact/size".
        """
        self._values: dict[str, tuple[Shape, list[Fraction]]] = {}
        for key, digest in digests.items():
            if key not in tensors:
                raise Rejection("parameter/missing", f"the checkpoint has no tensor {key!r}")
            tensor = tensors[key]
            singles = _singles(tensor, key)
            data = struct.pack(f"<{len(singles)}f", *singles)
            if array_digest("float32", tensor.shape, data) != digest:
                raise Rejection("parameter/digest", f"tensor {key!r} is not the one of the proof")
            self._values[key] = tensor.shape, [Fraction(v) for v in singles]

    def singles(self, key: str) -> tuple[Shape, list[Fraction]]:
        """Return the shape and the float32 numbers of a tensor."""
        return self._values[key]

    def plain(self, key: str, kernel: Kernel) -> Cells:
        """Return a parameter that is no linear weight, as the kernel stores it."""
        shape, values = self._values[key]
        return points(shape, [as_stored(v, kernel.holding, kernel) for v in values])

    def linear(self, key: str, kernel: Kernel) -> Cells:
        """Return a linear weight [outputs, inputs] as the kernel stores it."""
        shape, values = self._values[key]
        if len(shape) != 2:
            raise Rejection("parameter/shape", f"linear weight {key!r} is not a matrix")
        kind, scale = kernel.weights
        if scale == "none":
            found = [as_stored(v, FORMATS[kind], kernel) for v in values]
            found = [as_stored(v, FLOAT32, kernel) for v in found]
        else:
            found = _quantised(values, shape, kind, scale, key)
        if scale == "none" or kernel.activations[0] == "none":  # else scales come after the product
            found = [as_stored(v, kernel.holding, kernel) for v in found]
        return points(shape, found)


def as_stored(value: Fraction, form: Format, kernel: Kernel) -> Fraction:
    """Return a parameter as a kernel casts it to a format."""
    return (cut if kernel.cut_weights else nearest)(value, form)


def _singles(tensor: Tensor, key: str) -> list[float]:
    """Return the numbers of a tensor, rounded to float32 where it is F64."""
    if tensor.dtype not in FLOATS:
        raise Rejection("parameter/dtype", f"{key!r} is {tensor.dtype}, not a float tensor")
    count = math.prod(tensor.shape)
    if count > MOST_NUMBERS:
        raise Rejection("exact/size", f"{key!r} is too large for exact arithmetic")
    if tensor.dtype == "BF16":
        bits = struct.unpack(f"<{count}H", tensor.data)
        values = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(b << 16 for b in bits)))
    else:
        code = {"F32": "f", "F16": "e", "F64": "d"}[tensor.dtype]
        values = struct.unpack(f"<{count}{code}", tensor.data)
    if not all(math.isfinite(v) for v in values):
        raise Rejection("parameter/not-finite", f"{key!r} holds NaN or infinity")
    if tensor.dtype != "F64":
        return list(values)
    try:
        return list(struct.unpack(f"<{count}f", struct.pack(f"<{count}f", *values)))
    except OverflowError:
        raise Rejection("parameter/not-finite", f"{key!r} overflows float32") from None


def _quantised(
    values: list[Fraction], shape: Shape, kind: str, scale: str, key: str
) -> list[Fraction]:
    rows, columns = shape
    height = {"per_tensor": rows, "block_128": TILE}.get(scale, 1)
    width = {"block_128": TILE, "group_128": TILE, "mx": MX_BLOCK}.get(scale, columns)
    amax: dict[tuple[int, int], Fraction] = {}
    for at, value in enumerate(values):
        tile = at // columns // height, at % columns // width
        amax[tile] = max(amax.get(tile, ZERO), abs(value))
    if kind in FULL_RANGE:
        places = [(at // columns // height, at % columns // width) for at in range(len(values))]
        return [
            _full_range(v, amax[p], key, FULL_RANGE[kind])
            for v, p in zip(values, places, strict=True)
        ]
    scales = {tile: _scale(most, kind, scale) for tile, most in amax.items()}
    found = []
    for at, value in enumerate(values):
        s = scales[at // columns // height, at % columns // width]
        found.append(nearest(_code(rounded(value / s, FLOAT32), kind) * s, FLOAT32))
    return found


def _full_range(value: Fraction, most: Fraction, key: str, codes: int) -> Fraction:
    step = max(rounded(most * 2 / (2 * codes - 1), FLOAT32), Fraction(1, 2**23))
    if step > Fraction(FLOAT32.largest):
        raise Rejection("parameter/scale", f"{key!r} has a scale outside float32")
    code = round(rounded(value * rounded(1 / step, FLOAT32), FLOAT32))
    return nearest(max(-codes, min(codes - 1, code)) * step, FLOAT32)


def _scale(most: Fraction, kind: str, scale: str) -> Fraction:
    """Return the scale of a group with this largest magnitude; 1 where it would be 0."""
    if most == 0:
        return Fraction(1)
    if scale == "mx":
        return Fraction(2) ** max(-127, min(127, exponent(most) - MX_EXPONENT[kind]))
    return rounded(most / CODE_LARGEST[kind], FLOAT32) or Fraction(1)


def _code(ratio: Fraction, kind: str) -> Fraction:
    largest = Fraction(CODE_LARGEST[kind])
    code = Fraction(round(ratio)) if kind == "int8" else rounded(ratio, FORMATS[kind])
    return max(-largest, min(largest, code))
