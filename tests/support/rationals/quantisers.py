"""Quantised activations as step functions, code by code, in rational numbers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.numerics.formats import (
    CODES,
    FLOAT32,
    LAYOUTS,
    LEAST_POWER,
    MOST_POWER,
    NESTED,
)
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from tests.support.rationals.cells import (
    ZERO,
    Cells,
    Pair,
    Shape,
    both,
    exponent,
    meet,
    rounded,
    sub,
)

_OFF = Fraction(1, 2**22)
LEAST_SCALE = Fraction(1, 2**100)  # below it, products with codes may be subnormal
_LEAST_FULL = Fraction(1, 2**23)
INTEGERS = ("int8", "int8_full", "uint8")


@dataclass(frozen=True, slots=True)
class Quantiser:
    """The quantiser of one element: bounds of its scale, and its last code above zero and below.

    `ratio`: the scale divides ("over"), its reciprocal multiplies ("times"), or either.
    """

    kind: str
    scale: Pair
    above: Pair
    below: Pair
    ratio: str


@cache
def _codes(kind: str) -> tuple[Fraction, ...]:
    """Return the non-negative codes in order."""
    if kind in INTEGERS:
        return tuple(Fraction(n) for n in range(256))
    form, found, top = CODES[kind].form, [ZERO], CODES[kind].last
    while found[-1] < top:
        place = max(exponent(found[-1]) if found[-1] else form.least, form.least)
        found.append(found[-1] + Fraction(2) ** (place - form.precision + 1))
    return tuple(found)


def largest(sizes: Sequence[Fraction], shape: Shape, scale: str) -> list[Fraction]:
    """Return the maximum of the group of every element."""
    n = shape[-1]
    height, width = LAYOUTS[scale].tile
    length = n if height else len(sizes)
    width = width or length
    found: list[Fraction] = []
    for start in range(0, len(sizes), length):
        row = sizes[start : start + length]
        for at in range(0, len(row), width):
            part = row[at : at + width]
            found += [max(part)] * len(part)
    return found


def extents(x: Cells, scale: str) -> tuple[list[Pair], list[Pair]]:
    """Return the extent of the group of every element above and below zero."""
    above = [[max(pair[side], ZERO) for pair in x.pairs] for side in (0, 1)]
    below = [[max(-pair[side], ZERO) for pair in x.pairs] for side in (1, 0)]
    first, second = (
        list(zip(*(largest(side, x.shape, scale) for side in ends), strict=True))
        for ends in (above, below)
    )
    return first, second


def quantised(
    kernel: KernelNumerics, x: Cells, errors: Sequence[Fraction], key: str
) -> tuple[Cells, Cells]:
    """Return the quantised values and their errors, met with ±errors."""
    free = Cells(x.shape, tuple((-e, e) for e in errors))
    wide = both(x, free, lambda a, e: (a[0] + e[0], a[1] + e[1]))
    if not kernel.stepped or kernel.activations[0] == "none":
        return wide, free
    pairs = []
    for pair, around, by in zip(x.pairs, wide.pairs, quantisers(kernel, x, key), strict=True):
        pairs.append(around if by.scale[0] < LEAST_SCALE else meet(hull(by, pair), around))
    value = Cells(x.shape, tuple(pairs))
    return value, both(both(value, x, sub), free, meet)


def quantisers(kernel: KernelNumerics, x: Cells, key: str) -> list[Quantiser]:
    """Return the quantiser of every element of what enters the linear with the weight `key`.

    Raises:
        Rejected: "rule/static-scale", or "bound/overflow" of a static scale.
    """
    kind, scale = kernel.activations
    if scale == "static":
        return _calibrated(kernel, x, key)
    if scale == "nvfp4":
        return [plain(kind, (ZERO, step)) for step in nested(kernel, x, key)[1]]
    if kind == "uint8":
        return [_asymmetric(a, b) for a, b in zip(*extents(x, scale), strict=True)]
    if scale == "none":
        return [plain(kind, (Fraction(1), Fraction(1)))] * len(x.pairs)
    sure = largest([max(lo, -hi, ZERO) for lo, hi in x.pairs], x.shape, scale)
    most = [max(m, Fraction(kernel.batch_amax)) for m in largest(x.mags, x.shape, scale)]
    ends = zip(sure, most, strict=True)
    return [plain(kind, (_scale(kernel, a), _scale(kernel, b))) for a, b in ends]


def nested(kernel: KernelNumerics, x: Cells, key: str) -> tuple[list[Fraction], list[Fraction]]:
    """Return the largest scales of the tensor and of groups (nvfp4), for every element.

    Raises:
        Rejected: "rule/static-scale".
    """
    kind = kernel.activations[0]
    top, (least, most) = Fraction(CODES[kind].last), map(Fraction, NESTED)
    if kernel.static is None:
        tensor = max(x.mags) / (top * most)
    else:
        tensor = Fraction(kernel.static.of(key, kind)[0][0])
    groups = largest(x.mags, x.shape, "nvfp4")
    return [tensor] * len(groups), [max(g * Fraction(17, 16) / top, least * tensor) for g in groups]


def plain(kind: str, scale: Pair) -> Quantiser:
    """Return the quantiser of a format without zero point, with a scale between two numbers."""
    above, below = (127.0, 128.0) if kind == "int8_full" else (CODES[kind].last,) * 2
    tops = (Fraction(above),) * 2, (Fraction(below),) * 2
    return Quantiser(kind, scale, *tops, "times" if kind == "int8_full" else "over")


def _scale(kernel: KernelNumerics, amax: Fraction) -> Fraction:
    kind, scale = kernel.activations
    amax = amax if kernel.amax_limit == math.inf else min(amax, Fraction(kernel.amax_limit))
    if kind == "int8_full":
        return max(rounded(amax * 2 / 255, FLOAT32), _LEAST_FULL, Fraction(kernel.least_scale))
    if scale == "mx":
        return power(exponent(amax) - CODES[kind].exponent) if amax else ZERO
    found = rounded(amax / Fraction(CODES[kind].last), FLOAT32)
    if LAYOUTS[scale].ceiled:
        return power_above(found) if found else ZERO
    return max(found, Fraction(kernel.least_scale))


def power(place: int) -> Fraction:
    """Return a power of two whose exponent fits into eight bits."""
    return Fraction(2) ** min(max(place, LEAST_POWER), MOST_POWER)


def power_above(value: Fraction) -> Fraction:
    """Return the least power of two that is at least the value."""
    below = exponent(value)
    return power(below if Fraction(2) ** below == value else below + 1)


def _asymmetric(above: Pair, below: Pair) -> Quantiser:
    least, most = (
        rounded(rounded(a + b, FLOAT32) / 255, FLOAT32) for a, b in zip(above, below, strict=True)
    )
    low = high = None
    if above[1] + below[0]:
        low = 255 * below[0] / (above[1] + below[0]) * (1 - _OFF)
    if above[0] + below[1]:
        high = 255 * below[1] / (above[0] + below[1]) * (1 + _OFF)
    zeros = [ZERO if low is None else Fraction(round(low)), Fraction(255)]
    if high is not None:
        zeros[1] = min(zeros[1], Fraction(round(high)))
    if most:
        zeros[0] = max(zeros[0], Fraction(round(rounded(below[0] / most, FLOAT32))))
    if least:
        zeros[1] = min(zeros[1], Fraction(round(rounded(below[1] / least, FLOAT32))))
    first, last = (min(zero, Fraction(255)) for zero in zeros)
    return Quantiser("uint8", (least, most), (255 - last, 255 - first), (first, last), "over")


def _calibrated(kernel: KernelNumerics, x: Cells, key: str) -> list[Quantiser]:
    kind = kernel.activations[0]
    if kernel.static is None:
        raise Rejected("rule/static-scale", "there are no static scales")
    scales, zero = kernel.static.of(key, kind)
    n, found = x.shape[-1], []
    if len(scales) not in (1, n):
        raise Rejected("rule/static-scale", f"{len(scales)} scales for {n} channels")
    more = Fraction(1, 2) if kind in INTEGERS else ZERO
    for place, (lo, hi) in enumerate(x.pairs):
        s = Fraction(scales[place % n if len(scales) > 1 else 0])
        above, below = Fraction(255 - zero), Fraction(zero)
        if kind != "uint8":
            by = plain(kind, (s, s))
            above, below = by.above[0], by.below[0]
        if hi > (above + more) * s * (1 + _OFF) or -lo > (below + more) * s * (1 + _OFF):
            raise Rejected("bound/overflow", f"element {place} may exceed its static scale")
        found.append(Quantiser(kind, (s, s), (above, above), (below, below), "free"))
    return found


def hull(by: Quantiser, x: Pair) -> Pair:
    """Return the hull of s·q(v/s) for v and s (> 0) in their boxes."""
    lo = _least(by, x[0], by.above[0]) if x[0] >= 0 else -_most(by, -x[0], by.below[1])
    hi = _most(by, x[1], by.above[1]) if x[1] >= 0 else -_least(by, -x[1], by.below[0])
    return lo, hi


def _rank(by: Quantiser, v: Fraction, s: Fraction, top: Fraction, up: bool) -> int:
    """Return the index of the code of v/s."""
    match by.ratio:
        case "over":
            ratio = rounded(v / s, FLOAT32)
        case "times":
            ratio = rounded(v * rounded(1 / s, FLOAT32), FLOAT32)
        case _:
            ratio = v / s * (1 + _OFF if up else 1 - _OFF)
    ratio = min(ratio, top)
    code = Fraction(round(ratio)) if by.kind in INTEGERS else rounded(ratio, CODES[by.kind].form)
    return bisect_left(_codes(by.kind), code)


def _most(by: Quantiser, v: Fraction, top: Fraction) -> Fraction:
    codes, s = _codes(by.kind), by.scale
    first, last = _rank(by, v, s[1], top, True), _rank(by, v, s[0], top, True)
    beyond = [
        codes[k] / ((codes[k] + codes[k - 1]) / 2) * v * (1 + _OFF)
        for k in range(first + 1, last + 1)
    ]
    return max([rounded(codes[first] * s[1], FLOAT32), *beyond])


def _least(by: Quantiser, v: Fraction, top: Fraction) -> Fraction:
    codes, s = _codes(by.kind), by.scale
    first, last = _rank(by, v, s[1], top, False), _rank(by, v, s[0], top, False)
    before = [
        codes[k] / ((codes[k] + codes[k + 1]) / 2) * v * (1 - _OFF) for k in range(first, last)
    ]
    return min([rounded(codes[last] * s[0], FLOAT32), *before])
