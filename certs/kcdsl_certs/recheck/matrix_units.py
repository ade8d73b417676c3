"""Sums formed by matrix units (section 3): terms cut off below the largest exponent."""

from __future__ import annotations

import math

import numpy as np

from kcdsl_certs.recheck import box, staircase
from kcdsl_certs.recheck.box import Floats
from kcdsl_certs.recheck.spec import CEILED, GRIDS, TILES, TOP_EXPONENT, Kernel, Unit

_GROWN = 1 + 2.0**-6  # what rounding both factors to bfloat16 may add to a term
_LOOSE = 1 + 2.0**-10
_BLOCK = 2**22


def unit_of(kernel: Kernel, dynamic: bool) -> Unit | None:
    """Return the unit of a product; `dynamic`: a linear whose input is quantised."""
    return kernel.linear_unit if dynamic else kernel.other_unit


def instructions(unit: Unit, terms: int, extra: int) -> tuple[int, int]:
    """Return the number of chains, each summed by itself, and the instructions of one at most."""
    total = math.ceil(terms / unit.chunk) + extra
    if unit.promote == 0:
        return 1, total
    one = unit.promote // unit.chunk
    return math.ceil(total / one), min(one, total)


def cut_off(
    kernel: Kernel,
    unit: Unit,
    count: tuple[int, int],
    factors: tuple[Floats, Floats],
    size: Floats,
    partial: Floats,
    dynamic: bool,
    key: str = "",
) -> Floats:
    """Return what all instructions of a sum cut off.

    With a = (K + 1)·2^-F and b = 2^-m(1 + a) an instruction adds at most a·max(c, X) + b·c to the
    error, where c is the accumulator, and what it holds is wrong already by the error before.
    """
    chains, length = count
    a = (unit.chunk + 1) * 2.0**-unit.below
    b = 2.0**-unit.kept * (1 + a)
    times = math.expm1(length * math.log1p(a + b)) / (a + b) * (1 + 2.0**-40)
    term, least = _exponents(kernel, factors, dynamic, key)
    one = chains * np.maximum(partial, term + least)
    aligned = np.minimum(one, size * _GROWN + chains * least)
    held = np.minimum(size, chains * partial)
    return box.up(times * (a * aligned + b * held), 16)


def _exponents(
    kernel: Kernel, factors: tuple[Floats, Floats], dynamic: bool, key: str
) -> tuple[Floats, Floats]:
    """Return the largest |a·b| of every sum, and what it may be more for subnormal factors."""
    left, right = factors
    rows, columns = left.shape[-2], right.shape[-1]
    step = max(1, _BLOCK // max(1, rows * columns))
    shape = (*np.broadcast_shapes(left.shape[:-2], right.shape[:-2]), rows, columns)
    found = np.zeros(shape)
    for k in range(0, left.shape[-1], step):
        products = left[..., :, k : k + step, None] * right[..., None, k : k + step, :]
        found = np.maximum(found, products.max(axis=-2))
    one, two = _least(kernel, left, right, dynamic, key)
    tall, wide = left.max(axis=-1, keepdims=True), right.max(axis=-2, keepdims=True)
    more = one * wide + two * tall + one * two
    return box.up(found * _GROWN), box.up(np.broadcast_to(more * _GROWN, shape))


def _least(
    kernel: Kernel, left: Floats, right: Floats, dynamic: bool, key: str
) -> tuple[Floats | float, Floats | float]:
    """Return what factors count for at least: the least exponent of their format, scaled."""
    formats = (kernel.compute, kernel.probabilities, kernel.scores)
    plain = 2.0 ** max(form.least for form in formats)
    if not dynamic:
        return plain, plain
    (kind, scale), (stored, shared) = kernel.activations, kernel.weights
    first: Floats | float = plain
    if kind in GRIDS:
        first = 2.0 ** GRIDS[kind].least
        if scale == "static":
            first = first * float(staircase.given(kernel, key, left.shape)[0].max())
        elif scale != "none":
            name = "per_tensor" if TILES[scale][0] != 1 else "per_token"
            top = np.maximum(staircase.largest(left, name)[..., :1], kernel.batch_amax)
            first = first * np.maximum(_scale(kind, scale) * top, kernel.least_scale)
    second: Floats | float = plain
    if stored in GRIDS:
        second = 2.0 ** GRIDS[stored].least
        if shared != "none":
            second = second * _scale(stored, shared) * float(right.max())
    return first, second


def _scale(kind: str, scale: str) -> float:
    """Return a bound of a scale over the largest number after quantisation; that has a code of at
    least 2^emax, or of half of it where scales are rounded up or are nested."""
    twice = 2.0 if scale in (*CEILED, "nvfp4") else 1.0
    return twice * 2.0 ** -TOP_EXPONENT[kind] * _LOOSE
