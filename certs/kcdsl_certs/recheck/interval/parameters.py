"""Checkpoint tensors as kernels store them (docs/proofs/relational-interval.md, section 2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import array_digest, array_hash
from kcdsl_certs.recheck.interval.decoding import Decoded
from kcdsl_certs.recheck.interval.served import Served
from kcdsl_certs.recheck.interval.tensors import Singles, Tensor, as_float32
from kcdsl_certs.recheck.numerics.formats import (
    CODES,
    FLOAT32,
    FORMATS,
    LAYOUTS,
    LEAST_POWER,
    LEAST_RANGE,
    MOST_POWER,
    NESTED,
    CodeGrid,
    Floats,
    Format,
    cut,
    nearest,
)
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics

_LARGE = 2**21  # size of a 16-bit matrix from which it is not expanded to float32 as a whole
_AT_ONCE = 2**19  # numbers of a large matrix read at a time, approximately


@dataclass(frozen=True, slots=True)
class _Narrow:
    """A large matrix of finite 16-bit numbers."""

    tensor: Tensor
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def singles(self, rows: slice) -> Singles:
        """Return some rows as float32."""
        height, width = self.shape
        start, stop, _ = rows.indices(height)
        data = self.tensor.data[2 * start * width : 2 * stop * width]
        return as_float32(Tensor(self.tensor.dtype, (stop - start, width), data), self.key)


def _parts(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield the rows of a large matrix, some at a time."""
    step = max(1, _AT_ONCE // max(1, shape[1]))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


class Parameters:
    """The checkpoint's tensors as float32 and as either kernel stores them, cached."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        digests: Mapping[str, str],
        served: Served | None = None,
        transposed: frozenset[str] = frozenset(),
    ) -> None:
        """Check the tensors that a proof lists; `served` is the inference kernel's own checkpoint.
        Tensors of the keys `transposed` are stored transposed in both.

        Raises Rejected "parameter/missing", "parameter/shape", "parameter/digest", or what
        `as_float32` raises.
        """
        self._values: dict[str, Singles | _Narrow] = {}
        self._served = served
        self._transposed = transposed
        self._stored: dict[tuple[str, str, tuple[str, str, str], bool, bool], Floats] = {}
        for key, digest in digests.items():
            if key not in tensors:
                raise Rejected("parameter/missing", f"the checkpoint has no tensor {key!r}")
            tensor = tensors[key]
            large = len(tensor.shape) == 2 and math.prod(tensor.shape) > _LARGE
            if large and tensor.dtype in ("BF16", "F16") and key not in transposed:
                self._values[key] = _narrow(tensor, key, digest)
                continue
            value = as_float32(tensor, key)
            if key in transposed:
                if value.ndim != 2:
                    raise Rejected("parameter/shape", f"tensor {key!r} is not a matrix")
                value = np.ascontiguousarray(value.T)
            little = value.astype("<f4", copy=False).tobytes()
            if array_digest("float32", value.shape, little) != digest:
                raise _another(key)
            self._values[key] = value

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._values[key].shape

    def singles(self, key: str) -> Floats:
        """Return the float32 numbers of a tensor as doubles."""
        if self._served is not None:
            raise Rejected("parameter/served", "a region around weights of two checkpoints")
        return self._single(key).astype(np.float64)

    def _single(self, key: str) -> Singles:
        held = self._values[key]
        return held.singles(slice(None)) if isinstance(held, _Narrow) else held

    def parts(self, key: str, *kernels: KernelNumerics) -> tuple[slice, ...]:
        """Return runs of rows of a linear weight that can be read one after the other, as stored
        numbers and rounding errors of a row depend on it alone; none if they cannot or need not."""
        if not isinstance(self._values[key], _Narrow) or self._served is not None:
            return ()
        for kernel in (one.serving(key) for one in kernels):
            coded = kernel.coded_weights or kernel.coded_inputs
            if coded or kernel.late or kernel.paired:
                return ()
        return tuple(_parts(self.shape(key)))

    def rows(self, key: str, rows: slice, *kernels: KernelNumerics) -> list[Floats]:
        """Return some rows of a linear weight as each kernel stores them, see `parts`; one array
        for kernels that store it in one way."""
        held, found, known = self._values[key], list[Floats](), dict[object, Floats]()
        value = held.singles(rows) if isinstance(held, _Narrow) else held[rows]
        for kernel in (one.serving(key) for one in kernels):
            how = kernel.holding.name, kernel.weights, kernel.cut_weights
            if how not in known:
                known[how] = _stored(value, kernel, kernel.holding, kernel.weights, key)
            found.append(known[how])
        return found

    def plain(self, key: str, kernel: KernelNumerics) -> Floats:
        """Return a parameter that is no linear weight, as the kernel stores it."""
        return self._get(key, kernel, kernel.holding, ("", ""))

    def linear(self, key: str, kernel: KernelNumerics) -> Floats:
        """Return a linear weight [outputs, inputs] as the kernel stores it."""
        kernel = kernel.serving(key)
        # where scales multiply sums of codes, the weight is not rounded to the compute format
        by_codes = kernel.coded_weights and kernel.by_codes
        compute = FLOAT32 if by_codes else kernel.holding
        return self._get(key, kernel, compute, kernel.weights)

    def _get(
        self, key: str, kernel: KernelNumerics, compute: Format, stored: tuple[str, str]
    ) -> Floats:
        inward, scales = kernel.cut_weights, kernel.scale_format
        known = (key, compute.name, (*stored, scales.name), inward, kernel.served)
        if known not in self._stored:
            if kernel.served:
                value, settled = self._of_inference(key, kernel, stored)
            else:
                value, settled = self._single(key), False
            how = ("", "") if settled else stored
            self._stored[known] = _stored(value, kernel, compute, how, key)
        return self._stored[known]

    def _of_inference(
        self, key: str, kernel: KernelNumerics, stored: tuple[str, str]
    ) -> tuple[Singles, bool]:
        """Return the inference kernel's tensor, and whether it is quantised as the numerics state.

        Raises Rejected "parameter/served" where it is quantised otherwise.
        """
        served, scaled = self._served, stored[1] in LAYOUTS
        if served is None:
            raise Rejected("internal", "there is no checkpoint of the inference kernel")
        if key not in served.coded:
            if scaled:
                raise Rejected("parameter/served", f"{key!r} is not quantised")
            found, settled = served.plain(key), False
            if key in self._transposed:
                found = np.ascontiguousarray(found.T)
        elif key in self._transposed:
            raise Rejected("parameter/served", f"{key!r} is quantised and read transposed")
        else:
            decoded = served.matrix(key)
            _refuse_other_codes(served, key, kernel)
            _refuse_other_inputs(served, key, kernel)
            _refuse_other_cache(served, key, kernel)
            if scaled:
                _refuse_otherwise(decoded, key, kernel, stored)
            found, settled = decoded.value, scaled
        if found.shape != self._values[key].shape:
            raise Rejected("parameter/shape", f"{key!r} has another shape in the two checkpoints")
        return found, settled


def _stored(
    value: Singles, kernel: KernelNumerics, compute: Format, stored: tuple[str, str], key: str
) -> Floats:
    """Return a tensor as a kernel stores it: quantised unless `stored` is empty, and rounded."""
    inward = kernel.cut_weights
    if stored != ("", ""):
        value = quantised(value, *stored, key, inward, kernel.scale_format)
    return plain(value.astype(np.float64), compute, key, inward)


def _narrow(tensor: Tensor, key: str, digest: str) -> _Narrow:
    """Return a large matrix as it is stored; raises as `Parameters` does."""
    held = _Narrow(tensor, key)
    found = array_hash("float32", held.shape)
    for rows in _parts(held.shape):
        found.update(held.singles(rows).astype("<f4", copy=False).tobytes())
    if found.hexdigest() != digest:
        raise _another(key)
    return held


def _another(key: str) -> Rejected:
    return Rejected("parameter/digest", f"tensor {key!r} is not the one of the proof")


def _refuse_otherwise(
    found: Decoded, key: str, kernel: KernelNumerics, stored: tuple[str, str]
) -> None:
    """Refuse codes and scales that are not those of the numerics, and late scales that are larger
    than the rules assume."""
    names = {"int8": ("int8", "int8_full"), "int4": ("int4_full",)}.get(found.kind, (found.kind,))
    code = CODES[stored[0]]
    alike = stored[0] in names and found.scale == stored[1] and kernel.scale_format == FLOAT32
    if not alike or found.least < -code.below:
        raise Rejected("parameter/served", f"{key!r} is stored as {found.kind} {found.scale}")
    top = 1.0 if code.grid is None else 2.0**code.exponent
    if kernel.by_codes and not float(np.abs(found.value).max()) >= found.largest_scale * top:
        raise Rejected("parameter/served", f"{key!r} has a scale larger than its codes need")


def _refuse_other_codes(served: Served, key: str, kernel: KernelNumerics) -> None:
    """Refuse quantised inputs, keys or values whose codes or layouts are not those that the
    checkpoint states."""
    cache = None if kernel.cache is None else (kernel.cache.kind, kernel.cache.scale)
    inputs = kernel.activations if kernel.coded_inputs else None
    other = served.says(key, inputs, cache)
    if other:
        said = f"the checkpoint states other codes of {other} at {key!r}"
        raise Rejected("parameter/served", said)


def _refuse_other_inputs(served: Served, key: str, kernel: KernelNumerics) -> None:
    """Refuse quantised inputs whose scales are not those that the checkpoint has."""
    if not kernel.coded_inputs:
        return
    kind = kernel.activations[0]
    most, inputs = served.largest_amax, served.inputs(key)
    if most is not None and kernel.amax_limit != most:
        raise Rejected("parameter/served", f"dynamic scales of {key!r} are of {most!r} at most")
    if inputs is None:
        return
    if kernel.static is None:
        raise Rejected("parameter/served", f"the inputs of {key!r} have static scales")
    scales, zero = kernel.static.of(key, kind)
    if scales != inputs.scales or (zero if CODES[kind].shifted else 128) != inputs.zero + 128:
        raise Rejected("parameter/served", f"the inputs of {key!r} have other static scales")


def _refuse_other_cache(served: Served, key: str, kernel: KernelNumerics) -> None:
    """Refuse a cache whose scales are not those that the checkpoint has for keys or values, and
    scales of other outputs."""
    forms, cache = key.split(".")[-2:-1], kernel.cache
    if forms not in (["k_proj"], ["v_proj"]) and served.cached(key, "output_scale") is not None:
        raise Rejected("parameter/served", f"the outputs of {key!r} are quantised")
    if cache is None:
        return
    outputs = cache.keys if forms == ["k_proj"] else cache.values
    names = ("k_scale", cache.keys), ("v_scale", cache.values), ("output_scale", outputs)
    for name, static in names:
        scale = served.cached(key, name)
        if scale is None:
            continue
        if static is None or set(static.of(key, cache.kind)[0]) != {scale}:
            raise Rejected("parameter/served", f"{name} of {key!r} is {scale!r}")


def plain(values: Floats, compute: Format, name: str, inward: bool = False) -> Floats:
    """Return values rounded to nearest even in the compute format, or cut off toward zero.

    Raises Rejected "parameter/overflow" if one is beyond the format.
    """
    found = (cut if inward else nearest)(values, compute)
    if not np.isfinite(found).all():
        raise Rejected("parameter/overflow", f"{name!r} overflows {compute.name}")
    return found


def quantised(
    weight: Singles,
    kind: str,
    scale: str,
    name: str,
    inward: bool = False,
    stored: Format = FLOAT32,
) -> Singles:
    """Return a linear weight after quantisation and dequantisation, in float32.

    `stored` is the format of its scales. Raises Rejected "parameter/shape", "parameter/scale" or
    "parameter/overflow".
    """
    if weight.ndim != 2:
        raise Rejected("parameter/shape", f"linear weight {name!r} is not a matrix")
    if scale not in LAYOUTS:
        return plain(weight.astype(np.float64), FORMATS[kind], name, inward).astype(np.float32)
    if CODES[kind].shifted:
        return _from_zero(weight, scale, name, stored)
    if CODES[kind].full:
        return _full_range(weight, scale, name, CODES[kind], stored)
    if LAYOUTS[scale].nested:
        return _nested(weight, kind, scale)
    scales = _kept(_scales(weight, kind, scale), stored, name)
    ratio = (weight / np.where(scales == 0, np.float32(1), scales)).astype(np.float64)
    last = CODES[kind].last
    code = np.clip(CODES[kind].rounded(np.clip(ratio, -last, last)), -last, last)
    with np.errstate(over="ignore"):
        return np.asarray(code.astype(np.float32) * scales, dtype=np.float32)


def _kept(scales: Singles, stored: Format, name: str) -> Singles:
    """Return scales rounded to their stored format."""
    found = nearest(scales.astype(np.float64), stored) if stored != FLOAT32 else scales
    if not np.isfinite(found).all():
        raise Rejected("parameter/scale", f"{name!r} has a scale outside {stored.name}")
    return found.astype(np.float32)


def _from_zero(weight: Singles, scale: str, name: str, stored: Format) -> Singles:
    """Return (code - z)·s, s = (max - min)/15 of a group, z = -min/s to the nearest of 0 … 15."""
    high, low = _tops(weight, scale), -_tops(-weight, scale)
    with np.errstate(over="ignore"):
        wide = np.maximum(high - low, np.float32(LEAST_RANGE))
    last = CODES["uint4"].last
    scales = _kept(wide / np.float32(last), stored, name)
    zero = np.clip(-np.rint(low / scales), 0, last)
    code = np.clip(np.rint(weight / scales) + zero, 0, last)
    return np.asarray((code - zero) * scales, dtype=np.float32)


def _full_range(weight: Singles, scale: str, name: str, of: CodeGrid, stored: Format) -> Singles:
    """Return codes in -n … n-1 of w·(1/s) times s = max(amax/(n - 1/2), 2^-23), all in float32."""
    scales = np.maximum(_amax(weight, scale) / np.float32(of.divisor), np.float32(2.0**-23))
    scales = _kept(np.where(_amax(weight, scale) == 0, np.float32(1), scales), stored, name)
    with np.errstate(divide="ignore"):
        inverse = np.where(scales == 0, np.float32(1), np.float32(1) / scales)
    code = np.clip(np.rint(weight * inverse), -of.below, of.last)
    with np.errstate(over="ignore"):
        return np.asarray(code * scales, dtype=np.float32)


def _amax(weight: Singles, scale: str) -> Singles:
    """Return the largest magnitude of the group of every element."""
    return _tops(np.abs(weight), scale)


def _tops(values: Singles, scale: str) -> Singles:
    """Return the largest number of the group of every element."""
    height, width = LAYOUTS[scale].tile
    return _spread(values, height or values.shape[0], width or values.shape[1])


def _scales(weight: Singles, kind: str, scale: str) -> Singles:
    """Return the scale of every element, float32, of the weight's shape; 1 where it would be 0."""
    amax = _amax(weight, scale)
    if LAYOUTS[scale].floored:
        _, exponent = np.frexp(amax.astype(np.float64))
        found = _power(exponent - 1 - CODES[kind].exponent)
        return np.where(amax == 0, np.float32(1), found).astype(np.float32)
    found = amax / np.float32(CODES[kind].divisor)  # one division rounded to float32
    found = np.where(found == 0, np.float32(1), found).astype(np.float32)
    if LAYOUTS[scale].ceiled:
        fraction, exponent = np.frexp(found.astype(np.float64))
        whole = _power(np.where(fraction == 0.5, exponent - 1, exponent))
        return np.where(amax == 0, np.float32(1), whole).astype(np.float32)
    return found


def _power(exponent: NDArray[np.int32]) -> Singles:
    return np.ldexp(1.0, np.clip(exponent, LEAST_POWER, MOST_POWER)).astype(np.float32)


def _nested(weight: Singles, kind: str, scale: str) -> Singles:
    """Return codes times float8 multiples of one scale of the tensor."""
    top = np.float32(CODES[kind].last)
    whole = np.abs(weight).max() / np.float32(CODES[kind].last * NESTED[1])
    whole = np.float32(1) if whole == 0 else whole
    share = (_amax(weight, scale) / top / whole).astype(np.float64)
    multiple = nearest(np.clip(share, *NESTED), CODES["fp8_e4m3"].form).astype(np.float32)
    ratio = weight * ((np.float32(1) / whole) / multiple)
    code = nearest(np.clip(ratio.astype(np.float64), -top, top), CODES[kind].form).astype(
        np.float32
    )
    return np.asarray(code * (multiple * whole), dtype=np.float32)


def _spread(size: Singles, height: int, width: int) -> Singles:
    """Return the maximum of each tile, spread over it; tiles at the far ends may be cut."""
    rows, columns = size.shape
    tops = np.maximum.reduceat(size, np.arange(0, rows, height), axis=0)
    tiles = np.maximum.reduceat(tops, np.arange(0, columns, width), axis=1)
    tall = np.repeat(tiles, height, axis=0)[:rows]
    return np.repeat(tall, width, axis=1)[:, :columns]
