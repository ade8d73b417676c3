"""Quantised activations as step functions, code by code, in rational numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

from kcdsl_certs.recheck.rationals.cells import (
    ZERO,
    Cells,
    Pair,
    both,
    exponent,
    meet,
    rounded,
    sub,
)
from kcdsl_certs.recheck.spec import CODE_LARGEST, FLOAT32, FORMATS, MX_EXPONENT, Kernel

_OFF = Fraction(1, 2**22)
LEAST_SCALE = Fraction(1, 2**100)  # below it products with codes may be subnormal
_STEPPED = ("fp8_e4m3", "fp8_e5m2", "int8")


@cache
def _codes(kind: str) -> tuple[Fraction, ...]:
    """Return the non-negative codes in order."""
    top = CODE_LARGEST[kind]
    if kind == "int8":
        return tuple(Fraction(n) for n in range(top + 1))
    form, found = FORMATS[kind], [ZERO]
    while found[-1] < top:
        place = max(exponent(found[-1]) if found[-1] else form.least, form.least)
        found.append(found[-1] + Fraction(2) ** (place - form.precision + 1))
    return tuple(found)


def quantised(
    kernel: Kernel,
    x: Cells,
    errors: Sequence[Fraction],
    least: Sequence[Fraction],
    most: Sequence[Fraction],
) -> tuple[Cells, Cells]:
    """Return the quantised values and their errors, met with ±errors.

    `least` and `most` bound the largest magnitude of every element's group.
    """
    free = Cells(x.shape, tuple((-e, e) for e in errors))
    wide = both(x, free, lambda a, e: (a[0] + e[0], a[1] + e[1]))
    kind, scale = kernel.activations
    if not kernel.nearest or kind not in _STEPPED:
        return wide, free
    pairs = []
    for pair, around, low, high in zip(x.pairs, wide.pairs, least, most, strict=True):
        s = _scale(kind, scale, low), _scale(kind, scale, high)
        pairs.append(around if s[0] < LEAST_SCALE else meet(hull(kind, pair, s), around))
    value = Cells(x.shape, tuple(pairs))
    return value, both(both(value, x, sub), free, meet)


def _scale(kind: str, scale: str, amax: Fraction) -> Fraction:
    if scale == "none":
        return Fraction(1)
    if amax == 0:
        return ZERO
    if scale == "mx":
        return Fraction(2) ** min(max(exponent(amax) - MX_EXPONENT[kind], -127), 127)
    return rounded(amax / CODE_LARGEST[kind], FLOAT32)


def hull(kind: str, x: Pair, s: Pair) -> Pair:
    """Return where s·q(v/s) lies for v and s (> 0) in their boxes."""
    lo = _least(kind, x[0], s) if x[0] >= 0 else -_most(kind, -x[0], s)
    hi = _most(kind, x[1], s) if x[1] >= 0 else -_least(kind, -x[1], s)
    return lo, hi


def _rank(kind: str, v: Fraction, s: Fraction) -> int:
    """Return the place of the code of v/s."""
    ratio = min(rounded(v / s, FLOAT32), Fraction(CODE_LARGEST[kind]))
    code = Fraction(round(ratio)) if kind == "int8" else rounded(ratio, FORMATS[kind])
    return bisect_left(_codes(kind), code)


def _most(kind: str, v: Fraction, s: Pair) -> Fraction:
    codes, first, last = _codes(kind), _rank(kind, v, s[1]), _rank(kind, v, s[0])
    beyond = [
        codes[k] / ((codes[k] + codes[k - 1]) / 2) * v * (1 + _OFF)
        for k in range(first + 1, last + 1)
    ]
    return max([rounded(codes[first] * s[1], FLOAT32), *beyond])


def _least(kind: str, v: Fraction, s: Pair) -> Fraction:
    codes, first, last = _codes(kind), _rank(kind, v, s[1]), _rank(kind, v, s[0])
    before = [
        codes[k] / ((codes[k] + codes[k + 1]) / 2) * v * (1 - _OFF) for k in range(first, last)
    ]
    return min([rounded(codes[last] * s[0], FLOAT32), *before])
