"""The files of a checkpoint and the headers of its tensors, read without torch and without weights.

A checkpoint is one safetensors file, an index `*.safetensors.index.json` with its shards, or a
folder that has either under the name that Hugging Face gives it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.source.files import (
    excerpt,
    is_file,
    is_folder,
    json_value,
    open_file,
    read_bytes,
    shown,
)

SINGLE = "model.safetensors"
"""The one file of weights in a folder of Hugging Face."""
INDEX = "model.safetensors.index.json"
"""The file of a folder that says in which shard each tensor lies."""
INDEX_SUFFIX = ".index.json"
ADAPTER = "adapter_config.json"
"""The file of an adapter, which transformers adds to the weights of its folder if PEFT is there."""
_LARGEST_HEADER = 100_000_000
_POINTER = "it is a pointer of Git LFS, without the weights"
_LARGEST_INDEX = 1 << 26
_MOST_SHARDS = 10_000
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "C64": 64,
    "BOOL": 8,
    "F4": 4,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its type, its shape and its bytes."""

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CheckpointHeaders:
    """The headers of the files of a checkpoint; no weight is read.

    `files` has the headers of each file of weights, in the order of their names. `index` is the
    file that names the shards, with its bytes; None for a single file.
    """

    files: Mapping[Path, Mapping[str, StoredTensor]]
    index: tuple[Path, bytes] | None = None

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """Return type, shape and file offsets of every tensor by its key, sorted."""
        found = {key: one for header in self.files.values() for key, one in header.items()}
        return dict(sorted(found.items()))

    @property
    def places(self) -> dict[str, Path]:
        """Return the file of every tensor."""
        return {key: path for path, header in self.files.items() for key in header}


def weights_folder(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint: the path itself, or the folder of the file."""
    return checkpoint if is_folder(checkpoint) else checkpoint.parent


def weights_entry(checkpoint: Path) -> Path:
    """Return the weights file or index of a checkpoint folder; any other path unchanged.

    Refuse a folder without safetensors, one with a single file and an index or further weights, of
    which servers load all, and one with an adapter.
    """
    if not is_folder(checkpoint):
        return checkpoint
    if is_file(checkpoint / ADAPTER):
        raise refuse(
            codes.CHECKPOINT_FORMAT,
            f"{shown(checkpoint)} has an adapter ({ADAPTER}), which changes the weights when it is"
            " loaded",
            help="merge it into the weights (merge_and_unload of PEFT) and save them, or name the"
            " file of weights that is meant without it",
        )
    names = sorted(os.listdir(checkpoint))
    others = [name for name in names if name.endswith(".safetensors") and name != SINGLE]
    found = [name for name in (SINGLE, INDEX) if is_file(checkpoint / name)]
    beside = [*found[1:], *others] if SINGLE in found else []
    if beside:
        raise refuse(
            codes.CHECKPOINT_FORMAT,
            f"{shown(checkpoint)} has both {SINGLE} and {excerpt(beside[0])}, and servers may load"
            " either or both",
            help="name the file that is meant, or move the others out of the folder",
        )
    if found:
        return checkpoint / found[0]
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles and not others:
        said = f"; {excerpt(pickles[0])} is a pickle, which is never loaded"
        help = "save the model with save_pretrained(FOLDER, safe_serialization=True)"
    else:
        said = ""
        help = f"name the file: {excerpt(others[0])}" if others else f"expected {SINGLE} or {INDEX}"
    message = f"{shown(checkpoint)} has neither {SINGLE} nor {INDEX}{said}"
    raise refuse(codes.FILE_MISSING, message, help=help)


def read_headers(
    checkpoint: Path, admitted: Callable[[Path], Path] = lambda path: path
) -> CheckpointHeaders:
    """Return names, types and shapes of the tensors of a checkpoint; weights are not read.

    `checkpoint` is a safetensors file, an index of shards, or the folder of either; `admitted`
    returns the path of a shard that may be read, or refuses it. Refuse missing or damaged files,
    and an index that is not exact: each tensor must be stored once, in the shard that it names.
    """
    entry = weights_entry(checkpoint)
    if not entry.name.endswith(INDEX_SUFFIX):
        return CheckpointHeaders({entry: file_header(entry)})
    data = read_bytes(entry, _LARGEST_INDEX + 1)
    named = _index(entry, data)
    shards = sorted(set(named.values()))
    if len(shards) > _MOST_SHARDS:
        raise _bad_index(entry, f"it names more than {_MOST_SHARDS} files")
    files = {admitted(entry.parent / name): name for name in shards}
    headers = {path: file_header(path) for path in files}
    _refuse_inexact(entry, named, {files[path]: header for path, header in headers.items()})
    return CheckpointHeaders(headers, (entry, data))


def file_header(path: Path) -> dict[str, StoredTensor]:
    """Return the header of a safetensors file: its tensors with their offsets. Refuse a file that
    is missing or damaged."""
    try:
        return header_of(*_beginning(path))
    except (ValueError, OSError) as error:
        raise not_readable(path, error) from None


def file_metadata(path: Path) -> dict[str, str]:
    """Return the `__metadata__` of a safetensors file; refuse as `file_header` does."""
    try:
        return metadata_of(_beginning(path)[0])
    except (ValueError, OSError) as error:
        raise not_readable(path, error) from None


def _beginning(path: Path) -> tuple[bytes, int]:
    """Return the bytes of a header, and the size of its file."""
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        first = stream.read(8)
        length = _length(first)
        if length > _LARGEST_HEADER:
            raise ValueError("its header is cut off")
        return first + stream.read(length), size


def not_readable(path: Path, error: Exception) -> Refusal:
    """Return the refusal of a file that is no valid safetensors file."""
    pointer = str(error) == _POINTER
    return refuse(
        codes.CHECKPOINT_FORMAT,
        f"{shown(path)} is not a readable safetensors file: {error}",
        help="fetch the weights: git lfs pull"
        if pointer
        else "save the weights with safetensors.torch.save_file, or fetch them again",
    )


def header_of(data: bytes | memoryview, size: int) -> dict[str, StoredTensor]:
    """Return the tensors of a file with their offsets, from its first bytes and its size in bytes.

    Tensors must fill the file without gaps; ValueError where they do not.
    """
    header = _header(data)
    header.pop("__metadata__", None)
    first = 8 + int.from_bytes(data[:8], "little")
    found = {name: _stored(name, told, first) for name, told in header.items()}
    end = first
    for name, one in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        if one.start != end:
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        end = one.end
    if end != size:
        raise ValueError(f"it has {size} bytes, and its tensors end at {end}")
    return found


def metadata_of(data: bytes | memoryview) -> dict[str, str]:
    """Return `__metadata__` from the first bytes of a file; ValueError as `header_of`."""
    found = _header(data).get("__metadata__") or {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise ValueError("its __metadata__ does not map strings to strings")
    return found


def _length(data: bytes | memoryview) -> int:
    """Return the length of a header from the first bytes of a file; ValueError for a pointer."""
    if data[:8] == b"version ":
        raise ValueError(_POINTER)
    return int.from_bytes(data[:8], "little")


def _header(data: bytes | memoryview) -> dict[str, Any]:
    length = _length(data)
    if len(data) < 8 or not 2 <= length <= min(len(data) - 8, _LARGEST_HEADER):
        raise ValueError("its header is cut off")
    return _object(bytes(data[8 : 8 + length]), "its header")


def _object(data: bytes, what: str) -> dict[str, Any]:
    """Return a JSON object; ValueError for anything else and for a repeated key."""
    try:
        found = json_value(data.decode())
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} is no object")
    return found


def _stored(name: str, told: Any, first: int) -> StoredTensor:
    match told:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [start, end], **rest}:
            numbers = [*shape, start, end]
            plain = all(type(n) is int and 0 <= n < 2**63 for n in numbers) and not rest
            if plain and (end - start) * 8 == math.prod(shape) * _BITS.get(kind, -1):
                return StoredTensor(kind, tuple(shape), first + start, first + end)
    raise ValueError(f"the type, shape and bytes of {ascii(name)[1:-1][:80]} do not fit")


# --- the index of shards --------------------------------------------------------------------------


def _index(path: Path, data: bytes) -> dict[str, str]:
    """Return the name of the shard of every tensor that an index names."""
    try:
        if len(data) > _LARGEST_INDEX:
            raise ValueError(f"it is larger than {_LARGEST_INDEX} bytes")
        raw = _object(data, "it")
    except ValueError as error:
        raise _bad_index(path, f"it is not a JSON object: {error}") from None
    named = raw.get("weight_map")
    if not isinstance(named, dict) or not named:
        raise _bad_index(path, "it has no weight_map from tensors to files")
    for key, name in named.items():
        if not isinstance(name, str) or not _is_plain(name):
            raise _bad_index(
                path, f"the file of {excerpt(key)} is {excerpt(name)!r}, no name in its folder"
            )
    return named


def _is_plain(name: str) -> bool:
    """Return whether a name is that of a safetensors file in the same folder."""
    separators = ("/", "\\", "\0", ":")
    return (
        name.endswith(".safetensors")
        and name.isprintable()
        and not any(part in name for part in separators)
    )


def _refuse_inexact(
    index: Path, named: Mapping[str, str], headers: Mapping[str, Mapping[str, StoredTensor]]
) -> None:
    """Refuse tensors that are missing, stored twice, or in another shard than the index says."""
    where: dict[str, str] = {}
    for file, header in headers.items():
        for key in header:
            if key in where:
                raise _bad_index(index, f"{excerpt(key)} lies in {where[key]} and in {file}")
            if key not in named:
                raise _bad_index(index, f"{excerpt(key)} lies in {file} and is not in the index")
            where[key] = file
    for key, file in named.items():
        if where.get(key) != file:
            found = f"lies in {where[key]}" if key in where else "is not there"
            raise _bad_index(index, f"{excerpt(key)} should lie in {file}, and {found}")


def _bad_index(path: Path, why: str) -> Refusal:
    return refuse(
        codes.CHECKPOINT_FORMAT,
        f"{shown(path)} is no index of its shards: {why}",
        help="save the checkpoint again with save_pretrained, or copy all of its files",
    )
