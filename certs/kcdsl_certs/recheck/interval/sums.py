"""Roundings of sums of products (section 3): any order, tensor cores, shards, late scales."""

from __future__ import annotations

import math

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval import box, quantisers
from kcdsl_certs.recheck.interval.box import Box, Floats
from kcdsl_certs.recheck.numerics.formats import CODES, LAYOUTS
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics, Unit

SMALL = 2.0**-20
_FLUSHED = 2.0**-126
_CUT_TERM = 2.0**-9 + 2.0**-20  # relative error of a product of factors truncated by 2^-10 each
FAINT_SCALE, _FAINT_PRODUCT = 2.0**-133, 2.0**-117


def by_late_scales(
    kernel: KernelNumerics,
    factors: tuple[Floats, Floats],
    size: Floats,
    product: Floats,
    error: Floats,
    biased: bool,
) -> Floats:
    """Return the error where scales multiply sums of codes: underflow in units of codes times the
    greatest scale, and two casts of a sum that is stored, one before a bias.

    `factors` are the magnitudes of the input and of the weight, which is no smaller than its scale;
    `size` is S, `product` the magnitude of the sum without bias, `error` that of the sum. Raises
    Rejected "bound/overflow" where a sum of codes may overflow.
    """
    n, scale = factors[0].shape[-1], float(factors[1].max()) * (1 + SMALL)
    lost = np.full(size.shape, (2 * n + 8) * _FLUSHED * scale)
    most = kernel.accumulate.largest
    if kernel.late == "stored_sums":
        u, eta = kernel.off(kernel.compute)
        cast = box.up(u * (1 + u) * box.up(product + error + lost)) + eta * (1 + scale)
        lost = box.up(lost + cast * (2 if biased else 1) * (1 + 2.0**-6))
        most = min(most, kernel.compute.largest)
    codes = box.up(factors[0].sum(axis=-1, keepdims=True) * (1 + SMALL)) * 2 * kernel.most_code
    if kernel.other_unit is None:
        close = np.asarray((n + 8) * kernel.accumulate.u <= 2.0**-4)
    else:
        close = (8 * error <= size) | (size == 0)
    if not bool(((codes <= most) & close).all()):
        raise Rejected("bound/overflow", "a sum of products with codes may overflow")
    return box.up(lost)


def reduced(kernel: KernelNumerics, size: Floats, error: Floats) -> Floats | float:
    """Return the error where the parts of a linear are stored and added in the compute format:
    every term is rounded once for each part, and once with a bias.

    Raises Rejected "bound/overflow" where a sum of parts may leave the format.
    """
    if kernel.shards == 1:
        return 0.0
    u, eta = kernel.off(kernel.compute)
    factor = math.expm1((kernel.shards + 1) * math.log1p(u)) * (1 + 2.0**-40)
    tiny = 2 * (kernel.shards + 1) * (1 + factor) * eta
    lost = box.up(box.up(size + error) * factor + tiny)
    if not bool((size + error + lost <= kernel.compute.largest).all()):
        raise Rejected("bound/overflow", f"a sum of parts may overflow {kernel.compute.name}")
    return lost


def clipped(kernel: KernelNumerics, x: Box, weight: Box, key: str) -> Floats | float:
    """Return the saturation error of a linear that adds products of bytes two by two in 16 bits.

    A pair of products of codes 0 … 255 with codes w, w' of one sign exceeds 2^15 - 1 by at most
    255|w + w'| - (2^15 - 1). Pairing the largest with the next largest gives the greatest sum.
    Raises Rejected "rule/weight" unless the weight is a point.
    """
    if not kernel.paired:
        return 0.0
    if not weight.point:
        raise Rejected("rule/weight", "sums of bytes in 16 bits with a weight that is not known")
    entries = weight.lo
    whole = np.abs(entries) if LAYOUTS[kernel.weights[1]].height else np.abs(entries).max()
    most = whole.max(axis=1) if whole.ndim else np.full(len(entries), whole)
    unit = most / CODES[kernel.weights[0]].below
    losses = []
    for part in (np.maximum(entries, 0.0), np.maximum(-entries, 0.0)):
        falling = -np.sort(-part, axis=1)
        if falling.shape[1] % 2:
            falling = np.hstack([falling, np.zeros((len(falling), 1))])
        two = falling.reshape(len(falling), -1, 2).sum(axis=2)
        beyond = np.maximum(255 * two - 32767 * (1 - SMALL) * unit[:, None], 0.0)
        losses.append(beyond.sum(axis=1))
    step = quantisers.steps(kernel, x, key).scale.hi.max(axis=-1, keepdims=True)
    return box.up(np.maximum(*losses) * step * (1 + SMALL) * (1 + 2.0**-44))


def flushed(
    kernel: KernelNumerics, left: Floats, right: Floats, columns: int | None = None
) -> Floats | float:
    """Return the error of kernels coarser than float32 that read and store subnormals as zero.

    Each operand, product and partial sum may lose up to 2^-126; an operand's loss is multiplied by
    the other factor. Of products of codes the product of both scales may be subnormal too.
    """
    n = columns or left.shape[-1]
    scaled = n * _FAINT_PRODUCT if kernel.coded_inputs else 0.0
    if not kernel.coarse and not kernel.shortened:
        return scaled
    sizes = left.sum(axis=-1, keepdims=True), right.sum(axis=-2, keepdims=True) * (columns or 1)
    lost = box.up((sizes[0] + sizes[1] + 2 * n + 4) * (1 + SMALL)) * _FLUSHED
    return box.up(lost + scaled)


def rounding_of_sums(
    kernel: KernelNumerics,
    factors: tuple[Floats, Floats],
    size: tuple[Floats, Floats],
    *,
    extra: int = 0,
    before: int = 2,
    dynamic: bool = False,
    key: str = "",
    columns: int | None = None,
) -> Floats:
    """Return the error of sums of products, flushing included.

    `factors` are magnitudes, `size` is S and mag(Y). `extra` counts the roundings of partial sums
    besides one for each term, `before` those of a term. `dynamic`: the input is quantised, as that
    of the linear with the weight `key`. With `columns` the left factor [..., 1] is a sum over this
    many columns, and the right one [1, ...] the maximum over them. Raises Rejected as `accumulated`
    does.
    """
    n, unit = columns or factors[0].shape[-1], unit_of(kernel, dynamic)
    lost = box.up(size[0] * _CUT_TERM) if kernel.shortened else np.zeros(())
    size = size[0] + lost, size[1] + lost
    if unit is None:
        error = accumulated(kernel, *size, n + extra, before)
        return box.up(box.up(error + lost) + flushed(kernel, *factors, columns))
    count = instructions(unit, n, extra)
    steps = count[0] + extra + 1
    error = accumulated(kernel, *size, steps, before)
    total, partial = box.up(size[0] + error), box.up(box.up(size[0] + size[1]) / 2 + error)
    cut = cut_off(kernel, unit, count, factors, total, partial, dynamic, key)
    error = box.up(error + box.up(cut * (1 + 4 * steps * kernel.accumulate.u)))
    if not bool((size[0] + error <= kernel.accumulate.largest).all()):
        raise Rejected("bound/overflow", "a sum of a matrix unit may overflow")
    return box.up(box.up(error + lost) + flushed(kernel, *factors, columns))


def accumulated(kernel: KernelNumerics, size: Floats, result: Floats, k: int, j: int) -> Floats:
    """Return A_k,j(S, Y), S = `size`, mag(Y) = `result`; refuse sums that may overflow.

    Raises Rejected "bound/not-finite" or "bound/overflow".
    """
    form = kernel.accumulate
    left = 1 - (k + j) * form.u
    if left <= 0:
        raise Rejected("bound/not-finite", f"{k + j} roundings in {form.name} have no bound")
    # left is exact, or off by less than one part in 2^50.
    partial = k * box.up(size + result) / 2 + j * size
    error = box.up(form.u * box.up(partial) / (left * (1 - 2.0**-48)) + (k + j) * form.eta)
    if not bool((size + error <= form.largest).all()):
        raise Rejected("bound/overflow", f"a partial sum may overflow {form.name}")
    return error


_GROWN = 1 + 2.0**-6  # bounds the growth of a term when both factors are rounded to bfloat16
_LOOSE = 1 + 2.0**-10
_BLOCK = 2**22


def unit_of(kernel: KernelNumerics, dynamic: bool) -> Unit | None:
    """Return the tensor core of a product; `dynamic`: a linear whose input is quantised."""
    return kernel.linear_unit if dynamic else kernel.other_unit


def instructions(unit: Unit, terms: int, extra: int) -> tuple[int, int]:
    """Return the number of independent partial sums, and the most instructions of one of them."""
    total = math.ceil(terms / unit.chunk) + extra
    if unit.promote == 0:
        return 1, total
    one = unit.promote // unit.chunk
    return math.ceil(total / one), min(one, total)


def cut_off(
    kernel: KernelNumerics,
    unit: Unit,
    count: tuple[int, int],
    factors: tuple[Floats, Floats],
    size: Floats,
    partial: Floats,
    dynamic: bool,
    key: str = "",
) -> Floats:
    """Return the truncation error of all instructions of a sum.

    With a = (K + 1)·2^-F and b = 2^-m(1 + a) an instruction adds at most a·max(c, X) + b·c to the
    error, where c is the size of the accumulator including its earlier error.
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
    kernel: KernelNumerics, factors: tuple[Floats, Floats], dynamic: bool, key: str
) -> tuple[Floats, Floats]:
    """Return the largest |a·b| of every sum, and a bound of its increase by subnormal factors."""
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
    kernel: KernelNumerics, left: Floats, right: Floats, dynamic: bool, key: str
) -> tuple[Floats | float, Floats | float]:
    """Return the least size that a unit assumes of factors: 2^(least exponent), scaled."""
    formats = (kernel.compute, kernel.probabilities, kernel.scores)
    plain = 2.0 ** max(form.least for form in formats)
    if not dynamic:
        return plain, plain
    (kind, scale), (stored, shared) = kernel.activations, kernel.weights
    first: Floats | float = plain
    if _has_grid(kind):
        first = 2.0 ** CODES[kind].form.least
        if kernel.static_inputs:
            first = first * float(quantisers.given(kernel, key, left.shape)[0].max())
        elif kernel.scaled_inputs:
            name = "per_tensor" if LAYOUTS[scale].tile[0] != 1 else "per_token"
            top = np.maximum(quantisers.largest(left, name)[..., :1], kernel.batch_amax)
            first = first * np.maximum(_scale(kind, scale) * top, kernel.least_scale)
    second: Floats | float = plain
    if _has_grid(stored):
        second = 2.0 ** CODES[stored].form.least
        if kernel.coded_weights:
            second = second * _scale(stored, shared) * float(right.max())
    return first, second


def _has_grid(kind: str) -> bool:
    """Return whether the codes of a format are floating-point numbers."""
    return kind in CODES and CODES[kind].grid is not None


def _scale(kind: str, scale: str) -> float:
    """Return a bound of the ratio of a scale to the largest quantised number, whose code is at
    least 2^emax, or half of it where scales are rounded up or nested."""
    twice = 2.0 if LAYOUTS[scale].ceiled or LAYOUTS[scale].nested else 1.0
    return twice * 2.0 ** -CODES[kind].exponent * _LOOSE
