"""Checkpoint tensors, and what kernels store of them (docs/proofs/relational-interval.md, section
2)."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.files import open_regular
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs import reading
from kcdsl_certs.recheck.graphs.graph import array_digest
from kcdsl_certs.recheck.graphs.reading import Reader
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
from kcdsl_certs.statement.manifest import Manifest, Resource
from kcdsl_certs.statement.weights import LARGEST_INDEX, SINGLE, index_of, parse_index

LONGEST_HEADER = 100_000_000
_CHUNK = 1 << 20
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as stored: dtype name of the format, shape and little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class TensorFile:
    """Tensors of a checkpoint, and the sha256 (hex) by which proofs name it: of the bytes of its
    one file, or of the manifest of an index and its shards."""

    sha256: str
    tensors: Mapping[str, Tensor]
    root_digest: str


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a header: its bytes are [start, stop) behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read(path: Path, keys: Collection[str] | None = None) -> TensorFile:
    """Return the checkpoint at `path`: these tensors of it that it has, or all.

    All of every file is hashed; what is returned are the bytes that were hashed. Raises Rejected
    "checkpoint/unreadable", or "checkpoint/format" for anything that the format does not allow: a
    header out of range, names that stand twice, unknown dtypes, sizes that do not fit shapes,
    tensors that overlap, leave holes or run past the end; of shards also a tensor that lies in
    another than the index says, in two, or in none.
    """
    try:
        index = index_of(path)
        if index is None:
            one = path / SINGLE if os.path.isdir(path) else path
            resource, _, tensors = _read_file(one, keys)
            root = hashlib.sha256(bytes.fromhex(resource.sha256)).hexdigest()
            return TensorFile(resource.sha256, tensors, root)
        return _read_shards(index, keys)
    except (OSError, ValueError) as error:
        raise Rejected("checkpoint/unreadable", f"{path}: {error}") from None
    except Rejected as error:
        if error.reason == "checkpoint/format":
            raise
        raise Rejected("checkpoint/unreadable", f"{path}: {error}") from None


def _read_shards(index: Path, keys: Collection[str] | None) -> TensorFile:
    with open_regular(index, "checkpoint/unreadable", links=False) as file:
        data = file.read(LARGEST_INDEX + 1)
    named = parse_index(data)
    resources = [Resource(index.name, len(data), hashlib.sha256(data).hexdigest())]
    tensors: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    for name in sorted(set(named.values())):
        resource, held, found = _read_file(index.parent / name, keys)
        resources.append(resource)
        tensors.update(found)
        for key in held:
            if named.get(key) != name or key in where:
                raise _bad(f"tensor {key[:80]!r} lies in {name!r}, which the index does not say")
            where[key] = name
    absent = named.keys() - where.keys()
    if absent:
        raise _bad(f"tensor {min(absent)[:80]!r} is in the index and in no shard")
    ordered = tuple(sorted(resources, key=lambda one: PurePosixPath(one.name)))
    manifest = Manifest(ordered)
    return TensorFile(manifest.weights_digest, tensors, manifest.root_digest)


def _read_file(
    path: Path, keys: Collection[str] | None
) -> tuple[Resource, frozenset[str], dict[str, Tensor]]:
    """Return the digest of a file, the names of its tensors, and those of `keys`; the file is read
    once, so that what is hashed is what is used."""
    digest = hashlib.sha256()
    with open_regular(path, "checkpoint/unreadable") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        header = file.read(_header_length(first, size))
        digest.update(first + header)
        stored = _stored(header, size - len(first) - len(header))
        found: dict[str, Tensor] = {}
        for key, one in sorted(stored.items(), key=lambda item: (item[1].start, item[1].stop)):
            wanted = keys is None or key in keys
            data = _hashed(file, one.stop - one.start, digest, wanted)
            if wanted:
                found[key] = Tensor(one.dtype, one.shape, memoryview(data))
        if file.read(1):
            raise _bad("it grew while it was read")
    ordered = {key: found[key] for key in stored if key in found}
    return Resource(path.name, size, digest.hexdigest()), frozenset(stored), ordered


def _hashed(file: BufferedReader, size: int, digest: Any, wanted: bool) -> bytearray:
    """Hash the next bytes of a file, and return them where they are wanted."""
    kept = bytearray(size if wanted else 0)
    at = 0
    while at < size:
        part = file.read(min(_CHUNK, size - at))
        if not part:
            raise _bad("it became shorter while it was read")
        digest.update(part)
        if wanted:
            kept[at : at + len(part)] = part
        at += len(part)
    return kept


def parse(content: memoryview) -> dict[str, Tensor]:
    """Return the tensors of the bytes of a safetensors file; see `read` for what is refused."""
    length = _header_length(bytes(content[:8]), len(content))
    body = content[8 + length :]
    stored = _stored(bytes(content[8 : 8 + length]), len(body))
    return {
        name: Tensor(one.dtype, one.shape, body[one.start : one.stop])
        for name, one in stored.items()
    }


def _header_length(first: bytes, size: int) -> int:
    if len(first) < 8:
        raise _bad("shorter than its header length")
    length = int.from_bytes(first, "little")
    if not 2 <= length <= min(LONGEST_HEADER, size - 8):
        raise _bad(f"a header of {length} bytes")
    return length


def _stored(header: bytes, size: int) -> dict[str, _Stored]:
    """Return where the tensors of a header lie in the `size` bytes behind it."""
    if not header.startswith(b"{"):
        raise _bad("the header does not start with '{'")
    entries = reading.load(header, "checkpoint/format")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad("__metadata__ must map strings to strings")
    found = {name: _tensor(name, entry, size) for name, entry in entries.items()}
    end = 0
    for one in sorted(found.values(), key=lambda one: (one.start, one.stop)):
        if one.start != end:
            raise _bad(f"tensors overlap or leave a hole at byte {min(one.start, end)}")
        end = one.stop
    if end != size:
        raise _bad(f"{size - end} bytes belong to no tensor")
    return found


def _tensor(name: str, entry: object, size: int) -> _Stored:
    reader = Reader(entry, f"tensor {name!r}", "checkpoint/format")
    reader.exactly("dtype", "shape", "data_offsets")
    dtype = reader.choice("dtype", tuple(_SIZES))
    shape = reader.integers("shape", 0)
    offsets = reader.integers("data_offsets", 0)
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise _bad(f"tensor {name!r} has offsets {list(offsets)[:4]}")
    if offsets[1] - offsets[0] != math.prod(shape) * _SIZES[dtype]:
        raise _bad(f"tensor {name!r}: the size does not fit dtype and shape")
    return _Stored(dtype, shape, offsets[0], offsets[1])


def _bad(what: str) -> Rejected:
    return Rejected("checkpoint/format", what)


Singles = NDArray[np.float32]


def as_float32(tensor: Tensor, name: str) -> Singles:
    """Return a stored tensor as float32: exact for F32, F16 and BF16, to nearest for F64.

    Raises Rejected "parameter/dtype" or "parameter/not-finite".
    """
    if tensor.dtype not in FLOATS:
        raise Rejected("parameter/dtype", f"{name!r} is {tensor.dtype}, not a float tensor")
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, dtype="<u2").astype(np.uint32) << np.uint32(16)
        values = bits.view(np.float32)
    else:
        kind = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}[tensor.dtype]
        values = np.frombuffer(tensor.data, dtype=kind).astype(np.float32)
    if not np.isfinite(values).all():
        raise Rejected("parameter/not-finite", f"{name!r} holds NaN or infinity")
    return values.reshape(tensor.shape)


class Parameters:
    """The checkpoint's tensors as float32 and as either kernel stores them; each made once."""

    def __init__(self, tensors: Mapping[str, Tensor], digests: Mapping[str, str]) -> None:
        """Take the tensors that a proof lists.

        Raises Rejected "parameter/missing", "parameter/digest", or what `as_float32` raises.
        """
        self._values: dict[str, Singles] = {}
        self._stored: dict[tuple[str, str, tuple[str, str, str], bool], Floats] = {}
        for key, digest in digests.items():
            if key not in tensors:
                raise Rejected("parameter/missing", f"the checkpoint has no tensor {key!r}")
            value = as_float32(tensors[key], key)
            little = value.astype("<f4", copy=False).tobytes()
            if array_digest("float32", value.shape, little) != digest:
                raise Rejected("parameter/digest", f"tensor {key!r} is not the one of the proof")
            self._values[key] = value

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._values[key].shape

    def singles(self, key: str) -> Floats:
        """Return the float32 numbers of a tensor as doubles."""
        return self._values[key].astype(np.float64)

    def plain(self, key: str, kernel: KernelNumerics) -> Floats:
        """Return a parameter that is no linear weight, as the kernel stores it."""
        return self._get(key, kernel.holding, ("", ""), kernel.cut_weights)

    def linear(self, key: str, kernel: KernelNumerics) -> Floats:
        """Return a linear weight [outputs, inputs] as the kernel stores it."""
        kernel = kernel.serving(key)
        # of codes scales come after the product
        by_codes = kernel.weights[1] != "none" and kernel.by_codes
        compute = FLOAT32 if by_codes else kernel.holding
        return self._get(key, compute, kernel.weights, kernel.cut_weights, kernel.scale_format)

    def _get(
        self,
        key: str,
        compute: Format,
        stored: tuple[str, str],
        inward: bool,
        scales: Format = FLOAT32,
    ) -> Floats:
        known = (key, compute.name, (*stored, scales.name), inward)
        if known not in self._stored:
            value = self._values[key]
            if stored != ("", ""):
                value = quantised(value, *stored, key, inward, scales)
            self._stored[known] = plain(value.astype(np.float64), compute, key, inward)
        return self._stored[known]


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
    if scale == "none":
        return plain(weight.astype(np.float64), FORMATS[kind], name, inward).astype(np.float32)
    if kind == "uint4":
        return _from_zero(weight, scale, name, stored)
    if CODES[kind].full:
        return _full_range(weight, scale, name, CODES[kind], stored)
    if scale == "nvfp4":
        return _nested(weight, kind, scale)
    scales = _kept(_scales(weight, kind, scale), stored, name)
    ratio = (weight / np.where(scales == 0, np.float32(1), scales)).astype(np.float64)
    last = CODES[kind].last
    code = np.clip(CODES[kind].rounded(np.clip(ratio, -last, last)), -last, last)
    return np.asarray(code.astype(np.float32) * scales, dtype=np.float32)


def _kept(scales: Singles, stored: Format, name: str) -> Singles:
    """Return scales as they are stored."""
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
    if scale == "mx":
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
