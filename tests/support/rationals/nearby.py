"""Stored parameters of both kernels at every θ' in a weight ball, in rational numbers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.numerics.formats import CODES, FLOAT32, FORMATS, LAYOUTS, Format
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from tests.support.rationals.cells import (
    ZERO,
    Cells,
    Pair,
    Shape,
    cut,
    exponent,
    meet,
    nearest,
    rounded,
    sub,
)
from tests.support.rationals.quantisers import LEAST_SCALE, hull, plain

_SMALL = Fraction(1, 2**20)


@dataclass(frozen=True, slots=True)
class _Held:
    """The enclosures of one element's stored number, and of that number minus the element."""

    value: Pair
    off: Pair


def both(
    shape: Shape, values: Sequence[Fraction], rho: Fraction,
    kernels: tuple[KernelNumerics, KernelNumerics], linear: bool,
) -> tuple[Cells, Cells, Cells]:  # fmt: skip
    """Return T, I and D of a parameter of every θ' in the region; `values` are float32 numbers.

    Raises:
        Rejected: "bound/overflow", "parameter/scale" or "parameter/shape".
    """
    if linear and len(shape) != 2:
        raise Rejected("parameter/shape", "a linear weight is not a matrix")
    around = [_around(value, rho) for value in values]
    t, i = (_held(shape, around, kernel, linear) for kernel in kernels)
    same = _way(kernels[0], linear) == _way(kernels[1], linear)
    apart = [
        (ZERO, ZERO) if same else meet(sub(two.off, one.off), sub(two.value, one.value))
        for one, two in zip(t, i, strict=True)
    ]
    cells = (tuple(h.value for h in t), tuple(h.value for h in i), tuple(apart))
    return Cells(shape, cells[0]), Cells(shape, cells[1]), Cells(shape, cells[2])


def _around(value: Fraction, rho: Fraction) -> Pair:
    """Return the least and the greatest float32 number within ρ|w|."""
    far = rho * abs(value)
    return -_single_below(far - value), _single_below(value + far)


def _single_below(value: Fraction) -> Fraction:
    """Return the greatest float32 number that is at most the value."""
    most = Fraction(FLOAT32.largest)
    if value >= most:
        return most
    found = rounded(value, FLOAT32)
    if found <= value:
        return found
    bits = struct.unpack("<i", struct.pack("<f", float(found)))[0]
    if found > 0:
        return Fraction(struct.unpack("<f", struct.pack("<i", bits - 1))[0])
    if found < 0:
        return Fraction(struct.unpack("<f", struct.pack("<i", bits + 1))[0])
    return -Fraction(1, 2**149)


def _way(kernel: KernelNumerics, linear: bool) -> tuple[str, ...]:
    how = "cut off" if kernel.cut_weights else "to nearest"
    stored, steps = FLOAT32, tuple[str, ...]()
    if linear and kernel.weights[1] != "none":
        steps = kernel.weights
        if kernel.activations[0] != "none":
            return steps
    elif linear and not _within(FLOAT32, FORMATS[kernel.weights[0]]):
        stored, steps = FORMATS[kernel.weights[0]], (kernel.weights[0], how)
    return steps if _within(stored, kernel.holding) else (*steps, kernel.holding.name, how)


def _held(
    shape: Shape, around: Sequence[Pair], kernel: KernelNumerics, linear: bool
) -> list[_Held]:
    as_it_is = [_Held(v, (ZERO, ZERO)) for v in around]
    if not linear:
        return [_cast(v, h, kernel.holding, kernel) for v, h in zip(around, as_it_is, strict=True)]
    if kernel.late:
        raise Rejected("parameter/scale", "no region around weights whose scales come late")
    kind, scale = kernel.weights
    if scale == "none":
        form = FORMATS[kind]
        found = [_cast(v, h, form, kernel) for v, h in zip(around, as_it_is, strict=True)]
        if _within(FORMATS[kind], kernel.holding):
            return found
    else:
        if kernel.scale_format != FLOAT32:
            raise Rejected("parameter/scale", "no region around scales that are rounded")
        found = _coded(shape, around, kind, scale)
        if kernel.activations[0] != "none":
            return found
    return [_cast(v, h, kernel.holding, kernel) for v, h in zip(around, found, strict=True)]


def _within(fine: Format, form: Format) -> bool:
    least = form.least - form.precision <= fine.least - fine.precision
    return fine.precision <= form.precision and least


def _cast(v: Pair, held: _Held, form: Format, kernel: KernelNumerics) -> _Held:
    if _within(FLOAT32, form):
        return held
    step, units = (cut, 2) if kernel.cut_weights else (nearest, 1)
    value = step(held.value[0], form), step(held.value[1], form)
    most = Fraction(form.u) * max(abs(end) for end in held.value)
    most = units * max(most, Fraction(2) ** (form.least - form.precision))
    return _Held(value, meet(sub(value, v), (held.off[0] - most, held.off[1] + most)))


def _coded(shape: Shape, around: Sequence[Pair], kind: str, scale: str) -> list[_Held]:
    able = ("fp8_e4m3", "fp8_e5m2", "int8", "int8_full")
    if kind not in able or LAYOUTS[scale].ceiled or scale == "nvfp4":
        raise Rejected("parameter/scale", f"no region around weights stored as {kind} {scale}")
    rows, columns = shape
    height, width = LAYOUTS[scale].tile
    height, width = height or rows, width or columns
    places = [(at // columns // height, at % columns // width) for at in range(len(around))]
    near: dict[tuple[int, int], Fraction] = {}
    far: dict[tuple[int, int], Fraction] = {}
    for place, (low, high) in zip(places, around, strict=True):
        near[place] = max(near.get(place, ZERO), min(abs(low), abs(high)))
        far[place] = max(far.get(place, ZERO), abs(low), abs(high))
    scales = {p: (_scale(near[p], kind, scale), _scale(far[p], kind, scale)) for p in far}
    if any(low < LEAST_SCALE for low, _ in scales.values()):
        raise Rejected("parameter/scale", "a scale of the weights may be too small")
    found = []
    for place, v in zip(places, around, strict=True):
        s, size = scales[place], max(abs(v[0]), abs(v[1]))
        most = _farthest(size, s[1], kind, scale)
        value = _full_range(v, s) if kind == "int8_full" else hull(plain(kind, s), v)
        value = meet(value, (v[0] - most, v[1] + most))
        found.append(_Held(value, meet(sub(value, v), (-most, most))))
    return found


def _scale(amax: Fraction, kind: str, scale: str) -> Fraction:
    if amax == 0:
        return Fraction(1)
    if scale == "mx":
        return Fraction(2) ** min(max(exponent(amax) - CODES[kind].exponent, -127), 127)
    if kind == "int8_full":
        return max(rounded(amax * 2 / 255, FLOAT32), Fraction(1, 2**23))
    return rounded(amax / Fraction(CODES[kind].last), FLOAT32)


def _farthest(size: Fraction, scale: Fraction, kind: str, how: str) -> Fraction:
    if kind == "int8":
        return (scale / 2 + size * _SMALL) * (1 + _SMALL)
    if kind == "int8_full":
        return (min(size, scale / 2) + size * _SMALL) * (1 + _SMALL)
    form = FORMATS[kind]
    tiny = Fraction(2) ** (form.least - form.precision)
    rounding = (Fraction(form.u) * size + scale * tiny) * (1 + _SMALL)
    if how != "mx":
        return rounding
    kept = Fraction(CODES[kind].last) * Fraction(1, 2 ** (CODES[kind].exponent + 1))
    return max(rounding, size * (1 - kept) + size * _SMALL)


def _full_range(v: Pair, s: Pair) -> Pair:
    slow, fast = (rounded(1 / scale, FLOAT32) for scale in (s[1], s[0]))

    def code(x: Fraction, inverse: Fraction) -> int:
        return max(-128, min(127, round(rounded(x * inverse, FLOAT32))))

    low = code(v[0], slow if v[0] >= 0 else fast)
    high = code(v[1], fast if v[1] >= 0 else slow)
    return (
        rounded(low * (s[0] if low >= 0 else s[1]), FLOAT32),
        rounded(high * (s[1] if high >= 0 else s[0]), FLOAT32),
    )
