"""Checkpoints: safetensors files, their digest, and the tensors as exact float32.

A file is read once, into memory: what is hashed are the bytes that the tensors consist of, so
nobody can replace or rewrite the file between the two. It is never mapped.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kcdsl.diagnostics import Diagnostic, Refusal, codes, refuse
from kcdsl.model.checkpoint.headers import StoredTensor, header_of, not_readable
from kcdsl.source.files import open_file, shown

EXACT_AS_FLOAT32 = {"F32", "F16", "BF16"}
_OTHER_PROGRAM = "check model.architecture and the configuration beside the checkpoint"
_CHUNK = 1 << 22
_TYPES = {
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
    """A safetensors file in memory; `sha256` (hex) is that of the bytes in `memory`."""

    path: Path
    sha256: str
    memory: Tensor
    stored: Mapping[str, StoredTensor]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, which shares the memory of the file; ValueError for a type that torch
        does not have."""
        found = self.stored[name]
        kind = _TYPES.get(found.kind)
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


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of one file, by key.

    `tensors` holds those stored as float32, bfloat16 or float16, as float32; `others` the type of
    every tensor stored otherwise. `sha256` is that of the file, in hex.
    """

    path: Path
    sha256: str
    tensors: Mapping[str, Tensor]
    others: Mapping[str, str]

    @property
    def root_digest(self) -> str:
        """Return the OpenSSF root digest (hex) of the one file."""
        return hashlib.sha256(bytes.fromhex(self.sha256)).hexdigest()


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a safetensors file.

    Refuse a file that is missing or damaged, and one with a weight that is NaN or infinite.
    """
    tensors: dict[str, Tensor] = {}
    others: dict[str, str] = {}
    try:
        file = read_tensors(path)
    except (ValueError, OSError) as error:
        raise not_readable(path, error) from None
    for key, stored in sorted(file.stored.items()):
        if stored.kind in EXACT_AS_FLOAT32:
            tensors[key] = file.tensor(key).to(torch.float32)
        else:
            others[key] = stored.kind
    _refuse_non_finite(path, tensors)
    return Checkpoint(path, file.sha256, tensors, others)


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

    `names` gives each key's parameter name, None for a key that is not used; `expected` the shapes
    by parameter name; `optional` names that may stand for another one (a stored copy of a tied
    tensor), with that other name. Refuse, naming every tensor, a wrong type, a missing or
    unexpected tensor, two keys for one parameter, a wrong shape, and a copy that differs.
    """
    found: dict[str, str] = {}
    problems: list[Diagnostic] = []
    unexpected: list[str] = []
    for key, name in names.items():
        if name is None:
            continue
        if name not in expected and name not in optional:
            unexpected.append(key)
        elif key in checkpoint.others:
            kind = checkpoint.others[key]
            problems.append(
                Diagnostic(
                    codes.CHECKPOINT_DTYPE,
                    f"{key} is stored as {kind}; supported: F32, BF16, F16",
                    help="save the weights as they were trained; `numerics` says how a kernel "
                    "stores them",
                )
            )
            found[name] = key
        elif name in found:
            unexpected.append(key)
        else:
            found[name] = key
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
    problems = [
        Diagnostic(
            codes.CHECKPOINT_SHAPE,
            f"{found[name]} has shape {tuple(checkpoint.tensors[found[name]].shape)};"
            f" the configuration demands {shape}",
            help=_OTHER_PROGRAM,
        )
        for name, shape in expected.items()
        if tuple(checkpoint.tensors[found[name]].shape) != shape
    ]
    problems += [
        Diagnostic(
            codes.CHECKPOINT_TENSORS,
            f"{found[name]} differs from {found[of]}, though the configuration ties them",
        )
        for name, of in optional.items()
        if name in found
        and not torch.equal(checkpoint.tensors[found[name]], checkpoint.tensors[found[of]])
    ]
    return problems


def _listed(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
