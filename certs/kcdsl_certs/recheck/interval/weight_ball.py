"""Regions around the weights (docs/proofs/weights-region.md).

For each element of every θ' in the region: boxes of the stored number, and of its difference to the
element. For two checkpoints: the largest relative change of the weights. Elements are compared as
the float32 numbers that kernels read, and |θ' - θ| ≤ ρ|θ| is decided exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval import box, quantisers
from kcdsl_certs.recheck.interval.box import Box, Floats, above, down
from kcdsl_certs.recheck.interval.tensors import FLOATS, Tensor, as_float32
from kcdsl_certs.recheck.numerics.formats import (
    CODES,
    FLOAT32,
    FORMATS,
    LAYOUTS,
    Format,
    cut,
    nearest,
)
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics

_SMALL = 2.0**-20


@dataclass(frozen=True, slots=True)
class Stored:
    """Enclosures of the stored numbers, and of the stored minus the original numbers."""

    value: Box
    off: Box


def surrounding(weight: Floats, rho: Fraction) -> Box:
    """Return the box of float32 numbers within ρ|w| of each float32 number w, with at most one
    number too many."""
    factor = float(rho)
    factor = factor if Fraction(factor) >= rho else math.nextafter(factor, math.inf)
    far = box.above(factor * np.abs(weight))
    ends = box.down(weight - far), box.above(weight + far)
    fixed = weight == 0
    return Box(
        np.where(fixed, 0.0, -_single_below(-ends[0])), np.where(fixed, 0.0, _single_below(ends[1]))
    )


def _single_below(values: Floats) -> Floats:
    """Return the greatest float32 numbers that are not above `values`."""
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    over = found.astype(np.float64) > values
    return np.where(over, np.nextafter(found, np.float32(-np.inf)), found).astype(np.float64)


def both(
    weight: Floats,
    rho: Fraction,
    kernels: tuple[KernelNumerics, KernelNumerics],
    linear: bool,
    name: str,
) -> tuple[Box, Box, Box]:
    """Return T, I and D of a parameter of every θ' in the region.

    Args:
        weight: the parameter of the checkpoint, float32 numbers.
        kernels: the training and the inference kernel.
        linear: whether it is the weight of a linear.

    Raises:
        Rejected: "parameter/overflow", "parameter/scale" or "parameter/shape".
    """
    v = surrounding(weight, rho)
    t, i = (_stored(v, kernel, linear, name) for kernel in kernels)
    if alike(kernels, linear):
        return t.value, t.value, box.exact(np.zeros(weight.shape))
    return t.value, i.value, box.meet(box.sub(i.off, t.off), box.sub(i.value, t.value))


def alike(kernels: tuple[KernelNumerics, KernelNumerics], linear: bool) -> bool:
    """Return whether two kernels store a parameter alike, so the same number for every θ'."""
    return _way(kernels[0], linear) == _way(kernels[1], linear)


def _way(kernel: KernelNumerics, linear: bool) -> tuple[str, ...]:
    """Return everything that the stored number of a parameter depends on: its codes, and the
    formats that it is rounded to, except those that hold the number unrounded."""
    coded = linear and kernel.coded_weights
    to = [FORMATS[kernel.weights[0]]] if linear and not coded else []
    to += [] if coded and kernel.coded_inputs else [kernel.holding]
    found, held = list(kernel.weights) if coded else [], FLOAT32
    found += ["of its own checkpoint"] if kernel.served else []
    for form in to:
        if not _within(held, form):
            found += [form.name, "cut off" if kernel.cut_weights else "to nearest"]
            held = form
    return tuple(found)


def _stored(v: Box, kernel: KernelNumerics, linear: bool, name: str) -> Stored:
    as_it_is = Stored(v, box.exact(np.zeros(v.shape)))
    if not linear:
        return _cast(v, as_it_is, kernel.holding, kernel, name)
    if len(v.shape) != 2:
        raise Rejected("parameter/shape", f"linear weight {name!r} is not a matrix")
    if kernel.late:
        raise Rejected("parameter/scale", f"no region around {name!r}, whose scales come late")
    if not kernel.coded_weights:
        form = FORMATS[kernel.weights[0]]
        found = _cast(v, as_it_is, form, kernel, name)
        if _within(form, kernel.holding):
            return found
    else:
        found = _coded(v, kernel, name)
        if kernel.coded_inputs:
            return found
    return _cast(v, found, kernel.holding, kernel, name)


def _within(fine: Format, form: Format) -> bool:
    """Return whether rounding to `form` leaves numbers of `fine` unchanged."""
    return fine.precision <= form.precision and form.least - form.precision <= (
        fine.least - fine.precision
    )


def _cast(v: Box, found: Stored, form: Format, kernel: KernelNumerics, name: str) -> Stored:
    """Return a parameter after its cast, unchanged if the format holds float32 numbers."""
    if _within(FLOAT32, form):
        return found
    step, units = (cut, 2) if kernel.cut_weights else (nearest, 1)
    value = Box(step(found.value.lo, form), step(found.value.hi, form))
    if not (np.isfinite(value.lo).all() and np.isfinite(value.hi).all()):
        raise Rejected("parameter/overflow", f"{name!r} may overflow {form.name}")
    most = units * np.maximum(form.u * box.magnitude(found.value), form.eta)
    return Stored(value, box.meet(box.sub(value, v), box.widen(found.off, most)))


def _coded(v: Box, kernel: KernelNumerics, name: str) -> Stored:
    """Return codes times scales: the largest magnitude of a group lies in an interval as well."""
    kind, scale = kernel.weights
    layout = LAYOUTS[scale]
    plain = not (layout.ceiled or layout.nested) and kernel.scale_format == FLOAT32
    if not (CODES[kind].ball and plain):
        raise Rejected("parameter/scale", f"no region around {name!r}, stored as {kind} {scale}")
    near, far = np.minimum(np.abs(v.lo), np.abs(v.hi)), box.magnitude(v)
    ends = [_scale(_group(size, scale), kind, scale) for size in (near, far)]
    if not (np.isfinite(ends[1]).all() and (ends[0] >= quantisers.LEAST_SCALE).all()):
        raise Rejected("parameter/scale", f"{name!r} may have a scale that is too small")
    scales = Box(ends[0], ends[1])
    most = _farthest(far, ends[1], kind, scale)
    if CODES[kind].full:
        value = _full_range(v, scales)
    else:
        value = quantisers.hull(quantisers.plain(kind, scales), v)
    value = box.checked(box.meet(value, box.widen(v, most)), f"what is stored of {name!r}")
    return Stored(value, box.meet(box.sub(value, v), box.around(most)))


def _group(size: Floats, scale: str) -> Floats:
    rows, columns = size.shape
    tile = LAYOUTS[scale].tile
    height, width = (part or whole for part, whole in zip(tile, size.shape, strict=True))
    tops = np.maximum.reduceat(size, np.arange(0, rows, height), axis=0)
    tiles = np.maximum.reduceat(tops, np.arange(0, columns, width), axis=1)
    return np.repeat(np.repeat(tiles, height, axis=0)[:rows], width, axis=1)[:, :columns]


def _scale(amax: Floats, kind: str, scale: str) -> Floats:
    """Return the scale for a largest magnitude (float32 numbers); 1 where that is 0."""
    singles = amax.astype(np.float32)
    if LAYOUTS[scale].floored:
        found = np.ldexp(1.0, np.clip(np.frexp(amax)[1] - 1 - CODES[kind].exponent, -127, 127))
    else:
        found = (singles / np.float32(CODES[kind].divisor)).astype(np.float64)
        found = np.maximum(found, quantisers.LEAST_FULL) if CODES[kind].full else found
    return np.where(amax == 0, 1.0, found)


def _farthest(size: Floats, scale: Floats, kind: str, how: str) -> Floats:
    """Return a bound of |stored - v| for numbers |v| ≤ size."""
    code = CODES[kind]
    if code.grid is None:
        most = np.minimum(size, scale / 2) if code.full else scale / 2
        return box.up((most + size * _SMALL) * (1 + _SMALL))
    form = code.grid
    rounded = box.up((form.u * size + scale * form.eta) * (1 + _SMALL))
    if not LAYOUTS[how].floored:
        return rounded
    kept = code.last * 2.0 ** -(code.exponent + 1)
    return np.maximum(rounded, box.up(size * (1 - kept) + size * _SMALL))


def _full_range(v: Box, scales: Box) -> Box:
    """Return codes of v·(1/s) in -128 … 127 times s, everything in float32."""
    slow, fast = (np.float32(1) / end.astype(np.float32) for end in (scales.hi, scales.lo))
    lo, hi = v.lo.astype(np.float32), v.hi.astype(np.float32)
    codes = [
        np.clip(np.rint(x * inverse), -128, 127).astype(np.float64)
        for x, inverse in ((lo, np.where(lo >= 0, slow, fast)), (hi, np.where(hi >= 0, fast, slow)))
    ]
    low = codes[0] * np.where(codes[0] >= 0, scales.lo, scales.hi)
    high = codes[1] * np.where(codes[1] >= 0, scales.hi, scales.lo)
    return Box(*(end.astype(np.float32).astype(np.float64) for end in (low, high)))


@dataclass(frozen=True, slots=True)
class Moved:
    """The element of a tensor with the largest relative change: `ratio` ≥ |θ' - θ|/|θ|, infinite
    if θ = 0. `inside`: all elements of the tensor are in the region.
    """

    tensor: str
    element: tuple[int, ...]
    earlier: float
    later: float
    ratio: float
    inside: bool


def same_tensors(earlier: Mapping[str, Tensor], later: Mapping[str, Tensor]) -> None:
    """Refuse checkpoints of other tensors, shapes or dtypes, and of other integers, which no region
    has: a graph may hold them as constants. Raises Rejected "transfer/tensors".
    """
    apart = sorted(earlier.keys() ^ later.keys())
    if apart:
        where = "earlier" if apart[0] in earlier else "later"
        raise Rejected("transfer/tensors", f"only the {where} checkpoint has {apart[0][:200]!r}")
    for name, one in earlier.items():
        two = later[name]
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            detail = f"{name[:200]!r} was {one.dtype} {list(one.shape)}, is {two.dtype}"
            raise Rejected("transfer/tensors", f"{detail} {list(two.shape)}")
        if one.dtype not in FLOATS and one.data != two.data:
            raise Rejected("transfer/tensors", f"{name[:200]!r} ({one.dtype}) has other numbers")


def moved(
    earlier: Mapping[str, Tensor], later: Mapping[str, Tensor], keys: Iterable[str], rho: Fraction
) -> list[Moved]:
    """Return for every named tensor the element with the largest relative change.

    Raises Rejected "transfer/tensors" for a missing tensor, and what `as_float32` raises.
    """
    found = []
    for key in sorted(keys):
        if key not in earlier or key not in later or earlier[key].shape != later[key].shape:
            raise Rejected("transfer/tensors", f"there is no {key[:200]!r} of one shape in both")
        one, two = (as_float32(part[key], key).astype(np.float64) for part in (earlier, later))
        if one.size:
            found.append(_moved(key, one, two, rho))
    return found


def _moved(key: str, one: Floats, two: Floats, rho: Fraction) -> Moved:
    size, apart = np.abs(one), np.abs(two - one)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(apart == 0, 0.0, np.where(size == 0, np.inf, above(apart / size)))
    factor = float(rho)
    low = np.nextafter(factor, 0.0) if Fraction(factor) > rho else factor
    # The product is exact if ρ has few bits; then elements exactly at the limit are frequent.
    limit = low * size if low == rho and _few_bits(low) else down(low * size)
    sure = (apart == 0) | (apart <= limit)
    inside = bool(sure.all())
    if not inside:
        inside = all(_inside(one[tuple(at)], two[tuple(at)], rho) for at in np.argwhere(~sure))
    place = tuple(int(n) for n in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    return Moved(key, place, float(one[place]), float(two[place]), float(ratio[place]), inside)


def _few_bits(factor: float) -> bool:
    """Return whether the products of a double with all float32 numbers are exact: it has at most 29
    bits, and is large enough that no product underflows."""
    numerator, denominator = factor.as_integer_ratio()
    return numerator < 2**29 and denominator <= 2**512


def _inside(one: float, two: float, rho: Fraction) -> bool:
    before, after = Fraction(float(one)), Fraction(float(two))
    return abs(after - before) <= rho * abs(before)
