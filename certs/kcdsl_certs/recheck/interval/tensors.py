"""Tensors of safetensors files, of shards and of ONNX files, read while they are hashed."""

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

from kcdsl_certs.encoding import onnx
from kcdsl_certs.encoding.files import open_regular
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs import strict_json
from kcdsl_certs.recheck.graphs.strict_json import Reader
from kcdsl_certs.statement.manifest import Manifest, Resource
from kcdsl_certs.statement.weights import (
    LARGEST_INDEX,
    ONNX,
    SINGLE,
    index_of,
    onnx_files,
    parse_index,
    read_onnx,
)

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
    """A tensor of a header: its bytes are [start, stop) after the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read(path: Path, keys: Collection[str] | None = None) -> TensorFile:
    """Return the checkpoint at `path`: those tensors of `keys` that it has, or all.

    Every file is hashed as a whole; the returned bytes are the hashed ones. Raises Rejected
    "checkpoint/unreadable", or "checkpoint/format" for anything that the format does not allow: a
    header out of range, duplicate names, unknown dtypes, sizes that do not fit shapes, tensors that
    overlap, leave holes or run past the end, or a tensor that is in another shard than the index
    states, in two, or in none.
    """
    try:
        index = index_of(path)
        in_graph = path.name.endswith(ONNX) and not os.path.isdir(path)
        if index is None and not in_graph:
            one = path / SINGLE if os.path.isdir(path) else path
            single = read_file(one, keys)
            sha256 = single.resource.sha256
            root = hashlib.sha256(bytes.fromhex(sha256)).hexdigest()
            return TensorFile(sha256, single.tensors, root)
        read_all = read_graph if index is None else read_index
        resources, tensors, _ = read_all(index or path, keys)
        ordered = tuple(sorted(resources, key=lambda one: PurePosixPath(one.name)))
        manifest = Manifest(ordered)
        return TensorFile(manifest.weights_digest, tensors, manifest.root_digest)
    except (OSError, ValueError) as error:
        raise Rejected("checkpoint/unreadable", f"{path}: {error}") from None
    except Rejected as error:
        if error.reason == "checkpoint/format":
            raise
        raise Rejected("checkpoint/unreadable", f"{path}: {error}") from None


def read_index(
    index: Path, keys: Collection[str] | None
) -> tuple[list[Resource], dict[str, Tensor], list[Mapping[str, str]]]:
    """Return the digests of an index and its shards, these tensors of them, and the metadata of
    each shard; see `read`."""
    with open_regular(index, "checkpoint/unreadable", links=False) as file:
        data = file.read(LARGEST_INDEX + 1)
    named = parse_index(data)
    resources = [Resource(index.name, len(data), hashlib.sha256(data).hexdigest())]
    tensors: dict[str, Tensor] = {}
    where: dict[str, str] = {}
    metadata = []
    for name in sorted(set(named.values())):
        one = read_file(index.parent / name, keys)
        resources.append(one.resource)
        tensors.update(one.tensors)
        metadata.append(one.metadata)
        for key in one.names:
            if named.get(key) != name or key in where:
                raise _bad(f"tensor {key[:80]!r} lies in {name!r}, which the index does not say")
            where[key] = name
    absent = named.keys() - where.keys()
    if absent:
        raise _bad(f"tensor {min(absent)[:80]!r} is in the index and in no shard")
    return resources, tensors, metadata


def read_graph(
    path: Path, keys: Collection[str] | None
) -> tuple[list[Resource], dict[str, Tensor], list[Mapping[str, str]]]:
    """Return the digests of an ONNX file and its external data, these tensors of it, and no
    metadata."""
    data, stored = read_onnx(path)
    coded = onnx.codes_of(data, stored)
    asked = {name for key, one in coded.items() if keys is None or key in keys
             for name in (one.codes, one.scale, one.zero_point)}  # fmt: skip
    resources = [Resource(path.name, len(data), hashlib.sha256(data).hexdigest())]
    held: dict[str, bytes] = {}
    for name in onnx_files(stored):
        with open_regular(path.parent / name, "checkpoint/unreadable") as file:
            held[name] = file.read()
        digest = hashlib.sha256(held[name]).hexdigest()
        resources.append(Resource(name, len(held[name]), digest))
    found: dict[str, Tensor] = {}
    for key, one in stored.items():
        wanted = one.dtype in FLOATS and (keys is None or key in keys)
        if not one.dtype or not (wanted or key in asked):
            continue
        content = one.data
        if one.location:
            content = memoryview(held[one.location])[one.offset : one.offset + one.length]
            if len(content) != one.length:
                raise _bad(f"tensor {key[:80]!r} lies outside of its file")
        elif one.length >= 0:
            raise _bad(f"tensor {key[:80]!r} lies in no file")
        found[key] = Tensor(one.dtype, one.shape, content)
    made = {
        key: tensor
        for key, one in coded.items()
        if (keys is None or key in keys) and (tensor := _dequantised(key, one, found)) is not None
    }
    plain = {k: t for k, t in found.items() if t.dtype in FLOATS and (keys is None or k in keys)}
    return resources, {**plain, **made}, []


def _dequantised(key: str, one: onnx.OnnxCodes, held: Mapping[str, Tensor]) -> Tensor | None:
    """Return (codes - zero points) · scales as float32, rounded once after the difference, which is
    exact; None if the operands have types that no parameter has.

    Raises Rejected "checkpoint/format" where their shapes do not fit.
    """
    parts = [held.get(name) for name in (one.codes, one.scale, one.zero_point or one.codes)]
    codes, scale, zero = parts
    if codes is None or scale is None or zero is None or scale.dtype != "F32":
        return None
    if zero.dtype != codes.dtype or codes.dtype in FLOATS:
        return None
    axis = one.axis + len(codes.shape) * (one.axis < 0)
    whole = scale.shape in ((), (1,))
    if not whole and (not 0 <= axis < len(codes.shape) or scale.shape != (codes.shape[axis],)):
        raise _bad(f"the scales of {key[:80]!r} do not fit its codes")
    if one.zero_point and zero.shape != scale.shape and not (whole and zero.shape in ((), (1,))):
        raise _bad(f"the zero points of {key[:80]!r} do not fit its scales")
    along = [1] * len(codes.shape)
    if not whole:
        along[axis] = -1
    zeros = numbers(zero) if one.zero_point else np.zeros(scale.shape, dtype=np.float32)
    if codes.dtype in ("I32", "F8_E4M3", "F8_E5M2") and zeros.any():
        return None
    with np.errstate(all="ignore"):
        value = (numbers(codes) - zeros.reshape(along)) * numbers(scale).reshape(along)
    return Tensor("F32", codes.shape, memoryview(value.astype("<f4").tobytes()))


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The digest of a file, the names of its tensors, the requested tensors, and its metadata."""

    resource: Resource
    names: frozenset[str]
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def read_file(path: Path, keys: Collection[str] | None) -> SafetensorsFile:
    """Return a file with the tensors of `keys`; it is read once, so that the used bytes are the
    hashed ones."""
    digest = hashlib.sha256()
    with open_regular(path, "checkpoint/unreadable") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        header = file.read(_header_length(first, size))
        digest.update(first + header)
        stored, metadata = _stored(header, size - len(first) - len(header))
        found: dict[str, Tensor] = {}
        for key, one in sorted(stored.items(), key=lambda item: (item[1].start, item[1].stop)):
            wanted = keys is None or key in keys
            data = _hashed(file, one.stop - one.start, digest, wanted)
            if wanted:
                found[key] = Tensor(one.dtype, one.shape, memoryview(data))
        if file.read(1):
            raise _bad("it grew while it was read")
    ordered = {key: found[key] for key in stored if key in found}
    resource = Resource(path.name, size, digest.hexdigest())
    return SafetensorsFile(resource, frozenset(stored), ordered, metadata)


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
    """Return the tensors of the bytes of a safetensors file; raises as `read` does."""
    length = _header_length(bytes(content[:8]), len(content))
    body = content[8 + length :]
    stored, _ = _stored(bytes(content[8 : 8 + length]), len(body))
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


def _stored(header: bytes, size: int) -> tuple[dict[str, _Stored], dict[str, str]]:
    """Return the places of a header's tensors in the `size` bytes after it, and its metadata."""
    if not header.startswith(b"{"):
        raise _bad("the header does not start with '{'")
    entries = strict_json.load(header, "checkpoint/format")
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
    return found, metadata


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


_INTEGERS = {"I8": "<i1", "U8": "<u1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


def integers(tensor: Tensor, kind: str) -> NDArray[Any]:
    """Return a tensor of integers of a type. Raises ValueError for one of another type."""
    if tensor.dtype != kind:
        raise ValueError(f"a tensor is {tensor.dtype}, not {kind}")
    return np.frombuffer(tensor.data, dtype=_INTEGERS[kind]).reshape(tensor.shape)


def numbers(tensor: Tensor) -> Singles:
    """Return a tensor of numbers or of codes as float32."""
    if tensor.dtype in ("F8_E4M3", "F8_E5M2"):
        raw = np.frombuffer(tensor.data, dtype=np.uint8)
        wide, bias = (3, 7) if tensor.dtype == "F8_E4M3" else (2, 15)
        return _table(wide, bias)[raw].reshape(tensor.shape)
    if tensor.dtype in _INTEGERS:
        return integers(tensor, tensor.dtype).astype(np.float32)
    return as_float32(tensor, "a scale")


def _table(wide: int, bias: int) -> Singles:
    """Return the numbers of all 256 codes with `wide` fraction bits; NaN for unused codes."""
    found = np.empty(256, dtype=np.float32)
    for code in range(256):
        power, fraction = (code & 127) >> wide, code % 2**wide
        size = (fraction / 2**wide + (power > 0)) * 2.0 ** (max(power, 1) - bias)
        last = (code & 127) == 127 if wide == 3 else power == 31
        found[code] = np.nan if last else (-size if code & 128 else size)
    return found
