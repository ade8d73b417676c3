"""Read a safetensors file strictly, with the standard library alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kcdsl_certs.manifest import open_regular
from kcdsl_certs.recheck import strict
from kcdsl_certs.recheck.strict import Reader
from kcdsl_certs.rejected import Rejected

LONGEST_HEADER = 100_000_000
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
class Checkpoint:
    """The tensors of a file and the sha256 (hex) of all its bytes."""

    sha256: str
    tensors: Mapping[str, Tensor]


def read(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`.

    Raises:
        Rejected: "checkpoint/unreadable", or "checkpoint/format" for anything that the format
            does not allow: a header out of range, names that stand twice, unknown dtypes, sizes
            that do not fit shapes, tensors that overlap, leave holes or run past the end.
    """
    try:
        with open_regular(path, "checkpoint/unreadable") as file:
            content = file.read()  # once, so that what is hashed is what is used
    except (OSError, ValueError, Rejected) as error:
        raise Rejected("checkpoint/unreadable", f"{path}: {error}") from None
    return Checkpoint(hashlib.sha256(content).hexdigest(), parse(memoryview(content)))


def parse(content: memoryview) -> dict[str, Tensor]:
    """Return the tensors of the bytes of a safetensors file; see `read` for what is refused."""
    if len(content) < 8:
        raise _bad("shorter than its header length")
    length = int.from_bytes(content[:8], "little")
    if not 2 <= length <= min(LONGEST_HEADER, len(content) - 8):
        raise _bad(f"a header of {length} bytes")
    header = bytes(content[8 : 8 + length])
    if not header.startswith(b"{"):
        raise _bad("the header does not start with '{'")
    entries = strict.load(header, "checkpoint/format")
    body = content[8 + length :]
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad("__metadata__ must map strings to strings")
    spans: list[tuple[int, int]] = []
    tensors = {name: _tensor(name, entry, body, spans) for name, entry in entries.items()}
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise _bad(f"tensors overlap or leave a hole at byte {min(start, end)}")
        end = stop
    if end != len(body):
        raise _bad(f"{len(body) - end} bytes belong to no tensor")
    return tensors


def _tensor(name: str, entry: object, body: memoryview, spans: list[tuple[int, int]]) -> Tensor:
    reader = Reader(entry, f"tensor {name!r}", "checkpoint/format")
    reader.exactly("dtype", "shape", "data_offsets")
    dtype = reader.choice("dtype", tuple(_SIZES))
    shape = reader.integers("shape", 0)
    offsets = reader.integers("data_offsets", 0)
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= len(body):
        raise _bad(f"tensor {name!r} has offsets {list(offsets)[:4]}")
    if offsets[1] - offsets[0] != math.prod(shape) * _SIZES[dtype]:
        raise _bad(f"tensor {name!r}: the size does not fit dtype and shape")
    spans.append((offsets[0], offsets[1]))
    return Tensor(dtype, shape, body[offsets[0] : offsets[1]])


def _bad(what: str) -> Rejected:
    return Rejected("checkpoint/format", what)
