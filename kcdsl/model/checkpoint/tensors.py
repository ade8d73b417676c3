"""Checkpoints: safetensors files, their digests, and the tensors as exact float32.

The hashed bytes are the bytes of the tensors, so a file cannot be replaced between hashing and
use. A small checkpoint is read into memory once; tensors of a large one are read on demand
(`ranges`). No file is memory-mapped.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kcdsl.diagnostics import Diagnostic, Refusal, codes, refuse
from kcdsl.model.checkpoint.headers import (
    INDEX_SUFFIX,
    CheckpointHeaders,
    StoredTensor,
    header_of,
    not_readable,
    read_headers,
    weights_entry,
)
from kcdsl.model.checkpoint.ranges import (
    RESIDENT,
    HashedFile,
    changed,
    hashed_file,
    manifest_of,
)
from kcdsl.source.files import open_file, shown
from kcdsl_certs.statement.manifest import Resource

EXACT_AS_FLOAT32 = {"F32", "F16", "BF16"}
_OTHER_PROGRAM = "check model.architecture and the configuration beside the checkpoint"
_CHUNK = 1 << 22
_ROWS = 256
_PART = 1 << 22
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file in memory; `sha256` (hex) is the digest of the bytes in `memory`."""

    path: Path
    sha256: str
    memory: Tensor
    stored: Mapping[str, StoredTensor]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, which shares the memory of the file; ValueError for a type that torch
        does not have."""
        found = self.stored[name]
        kind = TYPES.get(found.kind)
        if kind is None:
            raise ValueError(f"{name} is stored as {found.kind}")
        part = self.memory[found.start : found.end]
        if found.start % kind.itemsize:
            part = part.clone()
        return part.view(kind).reshape(found.shape)


def read_tensors(path: Path) -> TensorFile:
    """Read a safetensors file, once; ValueError where it is damaged or changes meanwhile.

    Raises Refusal where there is no such file, and for a pipe or a device.
    """
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError:
            raise ValueError(f"its {size} bytes do not fit in memory") from None
        view, digest, at = memoryview(memory.numpy().data), hashlib.sha256(), 0
        while at < size:
            count = stream.readinto(view[at : at + _CHUNK])
            if not count:
                raise ValueError("it became shorter while it was read")
            digest.update(view[at : at + count])
            at += count
        if stream.read(1):
            raise ValueError("it grew while it was read")
    return TensorFile(path, digest.hexdigest(), memory, header_of(view, size))


class StoredTensors(Mapping[str, Tensor]):
    """Tensors that are read from files at each access, as float32."""

    def __init__(self, stored: Mapping[str, StoredTensor], files: Mapping[str, HashedFile]) -> None:
        """Take the header entry and the file of each tensor."""
        self.stored = stored
        self._files = files

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __getitem__(self, key: str) -> Tensor:
        """Read a tensor. Refuse one that is NaN or infinite, and a file that changed."""
        one = self.stored[key]
        return self._read(key, one.start, one.end).reshape(one.shape)

    def narrow(self, key: str) -> Tensor:
        """Read a tensor in its stored type."""
        return self[key].to(TYPES[self.stored[key].kind])

    def rows(self, key: str, numbers: Tensor) -> Tensor:
        """Read these rows of a matrix."""
        one = self.stored[key]
        width = (one.end - one.start) // one.shape[0]
        starts = [one.start + width * number for number in numbers.tolist()]
        found = [self._read(key, start, start + width) for start in starts]
        return torch.stack(found).reshape(-1, *one.shape[1:])

    def blocks(self, key: str) -> Iterator[Tensor]:
        """Yield a matrix in blocks of rows."""
        one = self.stored[key]
        step = _ROWS * (one.end - one.start) // max(one.shape[0], 1)
        for start in range(one.start, one.end, max(step, 1)):
            yield self._read(key, start, min(start + step, one.end))

    def _read(self, key: str, start: int, end: int) -> Tensor:
        kind, file = TYPES[self.stored[key].kind], self._files[key]
        size = kind.itemsize
        found, at = torch.empty((end - start) // size), start
        while at < end:  # in parts, to limit temporary memory
            stop = min((at // _PART + 1) * _PART, end)
            stop = min(stop + (start - stop) % size, end)
            raw = torch.frombuffer(file.read(at, stop), dtype=torch.uint8)
            if raw.storage_offset() % size or raw.data_ptr() % size:
                raw = raw.clone()
            part = found[(at - start) // size : (stop - start) // size].copy_(raw.view(kind))
            _refuse_non_finite(file.path, {key: part})
            at = stop
        return found


def _unread(key: str) -> Tensor:
    raise KeyError(key)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint, by key.

    `tensors` holds those stored as float32, bfloat16 or float16, as float32; `others` the type of
    every other tensor, which `stored` reads in a type of torch. Proofs name a checkpoint by
    `sha256` (hex): the digest of its one file, or of the manifest of an index and its shards.
    `root` is the OpenSSF root digest (hex) of several files.
    """

    path: Path
    sha256: str
    tensors: Mapping[str, Tensor]
    others: Mapping[str, str]
    root: str | None = None
    stored: Callable[[str], Tensor] = _unread

    @property
    def root_digest(self) -> str:
        """Return the OpenSSF root digest (hex)."""
        return self.root or hashlib.sha256(bytes.fromhex(self.sha256)).hexdigest()

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor; nothing is read for it."""
        if isinstance(self.tensors, StoredTensors):
            return self.tensors.stored[key].shape
        return tuple(self.tensors[key].shape)

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors of one shape are equal; large ones are compared in blocks."""
        held, shape = self.tensors, self.shape(one)
        if not isinstance(held, StoredTensors) or len(shape) != 2:
            return torch.equal(held[one], held[other])
        pairs = zip(held.blocks(one), held.blocks(other), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def load_checkpoint(path: Path, admitted: Callable[[Path], Path] = lambda path: path) -> Checkpoint:
    """Read a checkpoint: a safetensors file, an index of shards, or the folder of either.

    Up to `RESIDENT` bytes are read at once; in larger checkpoints each tensor at its access.
    `admitted` returns the path of a shard that may be read. Refuse a file that is missing or
    damaged, and a weight that is NaN or infinite.
    """
    entry = weights_entry(path)
    several = entry.name.endswith(INDEX_SUFFIX)
    if not several and _size(entry) <= RESIDENT:
        file = _resident(entry)
        tensors, whole = _taken(file)
        others = {k: one.kind for k, one in sorted(file.stored.items()) if k not in tensors}
        return Checkpoint(path, file.sha256, tensors, others, None, whole.__getitem__)
    headers = read_headers(path, admitted)
    large = sum(map(_size, headers.files)) > RESIDENT
    found, files, stored = (_read_on_demand if large else _read_at_once)(headers)
    others = {k: t.kind for k, t in headers.tensors.items() if t.kind not in EXACT_AS_FLOAT32}
    if headers.index is None:
        return Checkpoint(path, files[0].sha256, found, others, None, stored)
    index, data = headers.index
    files.append(Resource(index.name, len(data), hashlib.sha256(data).hexdigest()))
    manifest = manifest_of(files)
    return Checkpoint(path, manifest.weights_digest, found, others, manifest.root_digest, stored)


_Read = tuple[Mapping[str, Tensor], list[Resource], Callable[[str], Tensor]]


def _read_at_once(headers: CheckpointHeaders) -> _Read:
    """Return the tensors of all files, in memory, the digests of the files, and what reads tensors
    of other types."""
    found: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    files: list[Resource] = []
    for path, header in headers.files.items():
        file = _resident(path)
        if file.stored != header:
            raise changed(path)
        tensors, others = _taken(file)
        found |= tensors
        whole |= others
        files.append(Resource(path.name, file.memory.numel(), file.sha256))
    return dict(sorted(found.items())), files, whole.__getitem__


def _read_on_demand(headers: CheckpointHeaders) -> _Read:
    """Return the tensors of all files, not yet read, the digests of the files, and what reads
    tensors of other types."""
    where: dict[str, HashedFile] = {}
    files: list[Resource] = []
    for path, header in headers.files.items():
        file = hashed_file(path)
        end = min((one.start for one in header.values()), default=file.size)
        if header_of(file.read(0, end), file.size) != header:
            raise changed(path)
        where |= dict.fromkeys(header, file)
        files.append(Resource(path.name, file.size, file.sha256))
    every = headers.tensors

    def read(key: str) -> Tensor:
        one = every[key]
        raw = bytearray(where[key].read(one.start, one.end))
        kind = TYPES[one.kind]
        flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
        return flat.reshape(one.shape)

    stored = {k: one for k, one in every.items() if one.kind in EXACT_AS_FLOAT32}
    return StoredTensors(stored, where), files, read


def is_large(path: Path, admitted: Callable[[Path], Path] = lambda path: path) -> bool:
    """Return whether the weights of a checkpoint exceed `RESIDENT` bytes."""
    entry = weights_entry(path)
    files = read_headers(path, admitted).files if entry.name.endswith(INDEX_SUFFIX) else (entry,)
    return sum(map(_size, files)) > RESIDENT


def _size(path: Path) -> int:
    with open_file(path) as stream:
        return os.fstat(stream.fileno()).st_size


def _resident(path: Path) -> TensorFile:
    try:
        return read_tensors(path)
    except (ValueError, OSError) as error:
        raise not_readable(path, error) from None


def _taken(file: TensorFile) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a file that are exact as float32, and the others of a type of torch."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, Tensor] = {}
    for key, stored in sorted(file.stored.items()):
        if stored.kind in EXACT_AS_FLOAT32:
            tensors[key] = file.tensor(key).to(torch.float32)
        elif stored.kind in TYPES:
            others[key] = file.tensor(key).clone()
    _refuse_non_finite(file.path, tensors)
    return tensors, others


def _refuse_non_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    bad = [key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise refuse(
            codes.CHECKPOINT_NOT_FINITE,
            f"{shown(path)} holds NaN or infinite weights in {_listed(bad)}",
            help="take a checkpoint from before the training diverged",
        )


def match_tensors(
    checkpoint: Checkpoint,
    names: Mapping[str, str | None],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, str],
) -> dict[str, str]:
    """Return the checkpoint key of every expected parameter.

    `names` maps keys to parameter names, None for unused keys; `expected` has the shapes by
    parameter name; `optional` maps a stored copy of a tied tensor to its original. Refuse, naming
    every tensor, a wrong type, a missing or unexpected tensor, two keys for one parameter, a wrong
    shape, and a copy that differs.
    """
    found: dict[str, str] = {}
    problems: list[Diagnostic] = []
    unexpected: list[str] = []
    stored: dict[str, list[str]] = {}
    for key, name in names.items():
        if name is None:
            continue
        if name not in expected and name not in optional:
            unexpected.append(key)
        elif key in checkpoint.others:
            stored.setdefault(checkpoint.others[key], []).append(key)
            found[name] = key
        elif name in found:
            unexpected.append(key)
        else:
            found[name] = key
    for kind, keys in stored.items():
        verb = "is" if len(keys) == 1 else "are"
        problems.append(
            Diagnostic(
                codes.CHECKPOINT_DTYPE,
                f"{_listed(keys, 3)} {verb} stored as {kind}; supported: F32, BF16, F16",
                help="save the weights as they were trained; `numerics` says how a kernel "
                "stores them",
            )
        )
    missing = [name for name in expected if name not in found]
    if missing:
        problems.append(
            Diagnostic(
                codes.CHECKPOINT_TENSORS,
                f"the checkpoint lacks {_listed(missing)}",
                help=_OTHER_PROGRAM,
            )
        )
    if unexpected:
        problems.append(
            Diagnostic(
                codes.CHECKPOINT_TENSORS,
                f"the architecture does not know {_listed(unexpected)}",
                help=_OTHER_PROGRAM,
            )
        )
    if not problems:
        problems += _shape_problems(checkpoint, found, expected, optional)
    if problems:
        raise Refusal(problems)
    return {name: found[name] for name in expected}


def _shape_problems(
    checkpoint: Checkpoint,
    found: Mapping[str, str],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, str],
) -> list[Diagnostic]:
    wrong = [
        (found[name], checkpoint.shape(found[name]), shape)
        for name, shape in expected.items()
        if checkpoint.shape(found[name]) != shape
    ]
    problems = []
    if wrong:
        key, has, wants = wrong[0]
        said = f"{key} has shape {has}; the configuration demands {wants}"
        if len(wrong) > 1:
            cases = [f"{key} has {has}, not {wants}" for key, has, wants in wrong]
            said = f"{len(wrong)} tensors have other shapes than the configuration demands: "
            said += _listed(cases, 3)
        problems.append(Diagnostic(codes.CHECKPOINT_SHAPE, said, help=_OTHER_PROGRAM))
    problems += [
        Diagnostic(
            codes.CHECKPOINT_TENSORS,
            f"{found[name]} differs from {found[of]}, though the configuration ties them",
            help="write `tie_word_embeddings: false` into config.json if both are meant, else save "
            "the model again",
        )
        for name, of in optional.items()
        if name in found
        and not (
            checkpoint.shape(found[name]) == checkpoint.shape(found[of])
            and checkpoint.equal(found[name], found[of])
        )
    ]
    return problems


def _listed(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
