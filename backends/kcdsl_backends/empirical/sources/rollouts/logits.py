"""Recorded logits as a kernel: full logits of known requests, read from the file on demand.

The file holds one tensor [T, V] for each request, named by its id; a run in float32 or wider may be
stored as `gold.ID`. The file stays open: a tensor is read on demand, and compared with its digest
from when the file was hashed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.terms import KernelRef
from kcdsl.model.checkpoint.headers import StoredTensor, header_of
from kcdsl.model.files import Artefacts
from kcdsl.model.fingerprint import kernel_fingerprint
from kcdsl.source.files import open_file, shown
from kcdsl_backends.empirical.sources.kernels import NotRun
from kcdsl_backends.requests import Request

GOLD = "gold."
_TYPES: Mapping[str, tuple[str, torch.dtype | None]] = {
    "F64": ("<f8", None),
    "F32": ("<f4", None),
    "F16": ("<f2", None),
    "BF16": ("<i2", torch.bfloat16),
}
_CHUNK = 1 << 22
_WAY_OUT = "save one tensor [tokens, vocabulary] for each request, named by its id"


@dataclass(frozen=True)
class RecordedLogits(NotRun):
    """A kernel of the requests that were recorded, and of no others."""

    lacks: ClassVar[str] = "a recording of logits has no"
    instead: ClassVar[str] = "metrics of logits; or run the kernel"

    ref: KernelRef
    path: Path
    sha256: str
    stored: Mapping[str, StoredTensor]
    ids: Mapping[tuple[int, ...], str]
    """The id of each request by its tokens."""
    stream: BinaryIO
    digests: Mapping[str, str]
    """The sha256 of each tensor when the file was hashed, with which each read is compared."""

    def logits(self, ids: Any) -> Tensor:
        """Return the recorded logits [T, V] of a request, in their own format.

        Raises Refusal for tokens without recorded logits.
        """
        name = self.ids.get(_tokens(ids))
        if name is None:
            raise refuse(
                codes.KERNEL_FAILED,
                f"{shown(self.path)} has logits of recorded requests only, not of other tokens",
                help="record the logits of every request of the data, or select only requests "
                "that were recorded",
            )
        return self._tensor(name)

    def gold(self, ids: Any) -> Tensor | None:
        """Return the logits of a run in float32 or wider; None if the file has none."""
        name = f"{GOLD}{self.ids.get(_tokens(ids), '')}"
        return self._tensor(name) if name in self.stored else None

    def tokens(self, ids: Any) -> Tensor:
        """Return token ids as a tensor."""
        return torch.as_tensor(ids)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the recorded logits of tokens."""
        return self.logits(tokens)

    def fingerprint(self) -> dict[str, Any]:
        """Return the identification of the recording: its description in the contract, and its
        digest."""
        return {**kernel_fingerprint(self.ref), "recorded": {self.path.name: self.sha256}}

    def _tensor(self, name: str) -> Tensor:
        found = self.stored[name]
        kind, view = _TYPES[found.kind]
        count = int(np.prod(found.shape))
        data, at = bytearray(found.end - found.start), 0
        while at < len(data):
            read = os.preadv(self.stream.fileno(), [memoryview(data)[at:]], found.start + at)
            at += read or len(data)  # the digest detects a truncated file
        if hashlib.sha256(data).hexdigest() != self.digests[name]:
            raise refuse(
                codes.CHANGED_MEANWHILE,
                f"{shown(self.path)} changed while the command ran",
                help="run it again: its results are for the file before the change",
            )
        flat = np.frombuffer(data, dtype=kind, count=count)
        values = torch.from_numpy(flat).reshape(found.shape)
        return values if view is None else values.view(view)


def load_recorded_logits(
    ref: KernelRef, files: Artefacts, requests: Sequence[Request]
) -> RecordedLogits:
    """Open recorded logits and check them against the requests.

    Raises Refusal for a missing or damaged file, a request without a tensor, and a tensor without
    one row for each token, with another vocabulary, or in another format than 16, 32 or 64 bits.
    """
    assert ref.recording is not None
    assert ref.recording.file is not None
    path = files.find(ref.recording.file)
    stream = open_file(path)
    try:
        stored, digest, digests = _hashed(stream)
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from None
    files.record(ref.recording.file, digest)
    ids: dict[tuple[int, ...], str] = {}
    named: dict[str, Request] = {}
    widths: dict[int, str] = {}
    for request in requests:
        found = stored.get(request.id)
        if found is None:
            raise refuse(
                codes.ROLLOUT_COLUMN,
                f"{shown(path)} has no logits of the request {request.id!r}",
                help=_WAY_OUT,
            )
        _check(path, request, found)
        _check_gold(path, request, found, stored.get(f"{GOLD}{request.id}"))
        widths.setdefault(found.shape[1], request.id)
        other = named.setdefault(request.id, request)
        if other.tokens != request.tokens:
            raise _damaged(
                path,
                f"the requests {other.key!r} and {request.key!r} of two files have one id, so it is"
                " not known whose logits are recorded under it",
            )
        if ids.setdefault(request.tokens, request.id) != request.id:
            raise _damaged(
                path,
                f"the requests {ids[request.tokens]!r} and {request.id!r} have the same tokens, so"
                " it is not known whose logits are whose",
            )
    twofold = next((name for name in named if f"{GOLD}{name}" in named), None)
    if twofold is not None:
        raise _damaged(
            path,
            f"{GOLD}{twofold} is the id of a request, and the run in float32 of {twofold!r}",
        )
    if len(widths) > 1:
        said = ", ".join(f"{name} has {width}" for width, name in widths.items())
        raise _damaged(path, f"its requests have vocabularies of different sizes: {said}")
    return RecordedLogits(ref, path, digest, stored, ids, stream, digests)


def _check(path: Path, request: Request, found: StoredTensor) -> None:
    if found.kind not in _TYPES:
        raise _damaged(
            path, f"{request.id!r} is stored as {found.kind}, not as F64, F32, F16, BF16"
        )
    if len(found.shape) != 2 or found.shape[0] != request.length or found.shape[1] < 2:
        raise _damaged(
            path, f"{request.id!r} has the shape {found.shape} for {request.length} tokens"
        )
    size = int(np.dtype(_TYPES[found.kind][0]).itemsize) * found.shape[0] * found.shape[1]
    if size != found.end - found.start:
        raise _damaged(path, f"{request.id!r} has {found.end - found.start} bytes, not {size}")


def _check_gold(
    path: Path, request: Request, found: StoredTensor, gold: StoredTensor | None
) -> None:
    if gold is None:
        return
    _check(path, request, gold)
    if gold.kind not in ("F32", "F64") or gold.shape != found.shape:
        raise _damaged(path, f"{GOLD}{request.id} is no run in float32 or wider of the same shape")


def _hashed(stream: BinaryIO) -> tuple[dict[str, StoredTensor], str, dict[str, str]]:
    """Return the locations of the tensors of a file, its digest, and that of each tensor."""
    size = os.fstat(stream.fileno()).st_size
    first = stream.read(8)
    head = first + stream.read(min(int.from_bytes(first, "little"), size))
    stored = header_of(head, size)
    whole, digests = hashlib.sha256(head), {}
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].start, item[1].end)):
        own, left = hashlib.sha256(), tensor.end - tensor.start
        while left:
            data = stream.read(min(left, _CHUNK))
            if not data:
                raise ValueError("it became shorter while it was read")
            whole.update(data)
            own.update(data)
            left -= len(data)
        digests[name] = own.hexdigest()
    return stored, whole.hexdigest(), digests


def _damaged(path: Path, what: object) -> Exception:
    return refuse(codes.ROLLOUT_FILE, f"{shown(path)} cannot be used: {what}", help=_WAY_OUT)


def _tokens(ids: Any) -> tuple[int, ...]:
    given = torch.as_tensor(ids)
    if given.dim() != 1:
        raise refuse(
            codes.KERNEL_FAILED,
            "recorded logits are of single requests, not of batches",
            help="ask for the logits of one request at a time",
        )
    return tuple(int(t) for t in given.tolist())
