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
from kcdsl_certs.recheck.graphs import reading
from kcdsl_certs.recheck.graphs.reading import Reader
from kcdsl_certs.statement.manifest import Manifest, Resource
from kcdsl_certs.statement.weights import (
    LARGEST_INDEX,
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
        in_graph = path.name.endswith(onnx.SUFFIX) and not os.path.isdir(path)
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
    resources = [Resource(path.name, len(data), hashlib.sha256(data).hexdigest())]
    held: dict[str, bytes] = {}
    for name in onnx_files(stored):
        with open_regular(path.parent / name, "checkpoint/unreadable") as file:
            held[name] = file.read()
        digest = hashlib.sha256(held[name]).hexdigest()
        resources.append(Resource(name, len(held[name]), digest))
    found: dict[str, Tensor] = {}
    for key, one in stored.items():
        if not one.dtype or (keys is not None and key not in keys):
            continue
        content = one.data
        if one.location:
            content = memoryview(held[one.location])[one.offset : one.offset + one.length]
            if len(content) != one.length:
                raise _bad(f"tensor {key[:80]!r} lies outside of its file")
        elif one.length >= 0:
            raise _bad(f"tensor {key[:80]!r} lies in no file")
        found[key] = Tensor(one.dtype, one.shape, content)
    return resources, found, []


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """The digest of a file, the names of its tensors, those that were asked for, and its texts."""

    resource: Resource
    names: frozenset[str]
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def read_file(path: Path, keys: Collection[str] | None) -> SafetensorsFile:
    """Return a file with the tensors of `keys`; it is read once, so that what is hashed is what is
    used."""
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
    """Return the tensors of the bytes of a safetensors file; see `read` for what is refused."""
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
    """Return where the tensors of a header lie in the `size` bytes behind it, and its metadata."""
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
