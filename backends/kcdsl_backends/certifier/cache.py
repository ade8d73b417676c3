"""Cache of results of earlier runs.

The key of an entry is the digest of everything that its value depends on; the entry contains its
own digest. An entry is never evidence: the independent checker re-derives a proof with cached
numbers like any other. A damaged entry counts as absent.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import secrets
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from kcdsl.source.files import open_regular

T = TypeVar("T")
ENTRY_SCHEMA = "kcdsl.cache-entry/1"
LARGEST_ENTRY = 64 * 2**20
_KINDS = frozenset({"bool", "int8", "int16", "int32", "int64", "float16", "float32", "float64"})
_MOST_UNPACKED = 1040
"""Upper bound of the expansion factor of zlib, which is 1032."""

DAMAGE = (
    *(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),
    zlib.error,
)
"""Exceptions that reading an invalid entry may raise."""


class Lookup(StrEnum):
    """The result of a lookup in the cache."""

    HIT = "hit"
    ABSENT = "absent"
    DAMAGED = "damaged"


@cache
def rules_version() -> str:
    """Return the digest (hex) of everything that a bound depends on besides its case: the source
    files of `kcdsl`, `kcdsl_backends` and `kcdsl_certs`, and the versions of torch and numpy.

    Any change of the program invalidates all earlier entries.
    """
    import kcdsl
    import kcdsl_backends
    import kcdsl_certs

    packages = (kcdsl, kcdsl_backends, kcdsl_certs)
    roots = [Path(str(package.__file__)).parent for package in packages]
    return sources_digest(roots, f"torch {torch.__version__} numpy {np.__version__}")


def sources_digest(roots: Sequence[Path], text: str) -> str:
    """Return the digest (hex) of a text and of every source file below some folders."""
    found = hashlib.sha256(text.encode())
    for root in roots:
        sources = sorted(root.rglob("*.py"))
        if not sources:
            raise RuntimeError(f"{root} has no source files, by which the cache knows the rules")
        for path in sources:
            name = f"{root.name}/{path.relative_to(root).as_posix()}"
            found.update(f"|{name}|{hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return found.hexdigest()


def key_of(parts: Mapping[str, Any]) -> str:
    """Return the key (hex) of a value that depends on this JSON data."""
    return hashlib.sha256(_canonical(dict(parts))).hexdigest()


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder of entries, safe for concurrent readers and writers."""

    folder: Path

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"

    def read(self, key: str) -> tuple[Lookup, Any]:
        """Return the value of a key; `DAMAGED` for any fault of its file."""
        try:
            with open_regular(self.path(key)) as stream:
                data = stream.read(LARGEST_ENTRY + 1)
        except FileNotFoundError:
            return Lookup.ABSENT, None
        except OSError:
            return Lookup.DAMAGED, None
        try:
            return Lookup.HIT, _value_of(data, key)
        except DAMAGE:
            return Lookup.DAMAGED, None

    def write(self, key: str, value: Any) -> bool:
        """Store a value of JSON data; return whether that succeeded."""
        body = {"schema": ENTRY_SCHEMA, "key": key, "value": value}
        data = _canonical({**body, "digest": hashlib.sha256(_canonical(body)).hexdigest()})
        target = self.path(key)
        temporary = target.with_name(f".{key}.{secrets.token_hex(6)}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as stream:
                stream.write(data)
            os.replace(temporary, target)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return False
        return True


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The entry of one key. Without a cache, reads find nothing and writes do nothing."""

    cache: Cache | None
    key: str = ""

    def read(self, made: Callable[[Any], T | None]) -> tuple[T | None, Lookup | None]:
        """Return `made(value)` and the result of the lookup; None, None without a cache.

        An entry for which `made` raises one of `DAMAGE` or returns None is damaged.
        """
        if self.cache is None:
            return None, None
        found, value = self.cache.read(self.key)
        if found is not Lookup.HIT:
            return None, found
        try:
            kept = made(value)
        except DAMAGE:
            kept = None
        return kept, found if kept is not None else Lookup.DAMAGED

    def write(self, value: Any) -> None:
        """Store a value of the types that `encode` accepts."""
        if self.cache is not None:
            self.cache.write(self.key, encode(value))


def _value_of(data: bytes, key: str) -> Any:
    """Return the value of an entry; raises one of `DAMAGE` for an invalid one."""
    if len(data) > LARGEST_ENTRY:
        raise ValueError("too large")
    entry = json.loads(data, parse_float=_no_float, parse_constant=_no_float)
    body = {name: entry[name] for name in ("schema", "key", "value")}
    digest = hashlib.sha256(_canonical(body)).hexdigest()
    if body["schema"] != ENTRY_SCHEMA or body["key"] != key or entry["digest"] != digest:
        raise ValueError("not the entry of this key")
    if data != _canonical({**body, "digest": digest}):
        raise ValueError("not as it was written")
    return body["value"]


def _no_float(text: str) -> float:
    raise ValueError(f"an entry has no number such as {text}")


def _canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode("ascii")


# --- values as plain data -------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """Encode a value as JSON data without loss: numbers, strings, tensors, tuples, lists, mappings
    with string keys, and instances of data classes of these."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return {"float": value.hex() if math.isfinite(value) else repr(value)}
        case Tensor():
            return {"tensor": _encode_tensor(value)}
        case tuple():
            return {"tuple": [encode(item) for item in value]}
        case list():
            return [encode(item) for item in value]
        case Mapping():
            if not all(isinstance(name, str) for name in value):
                raise TypeError("a mapping needs texts as keys")
            return {"mapping": {name: encode(item) for name, item in value.items()}}
        case _ if is_dataclass(value) and not isinstance(value, type):
            inside = {field.name: encode(getattr(value, field.name)) for field in fields(value)}
            return {"record": type(value).__name__, "fields": inside}
        case _:
            raise TypeError(f"{type(value).__name__} is no plain data")


def decode(value: Any, kinds: Sequence[type], device: torch.device | str = "cpu") -> Any:
    """Decode the result of `encode`, with tensors on a device; `kinds` are the admitted data
    classes.

    Raises:
        one of DAMAGE: the data are invalid.
    """

    def inner(item: Any) -> Any:
        return decode(item, kinds, device)

    match value:
        case None | bool() | int() | str():
            return value
        case list():
            return [inner(item) for item in value]
        case {"float": str(text), **rest} if not rest:
            return float(text) if text in ("inf", "-inf", "nan") else float.fromhex(text)
        case {"tensor": dict(stored), **rest} if not rest:
            return _decode_tensor(stored).to(device)
        case {"tuple": list(items), **rest} if not rest:
            return tuple(inner(item) for item in items)
        case {"mapping": dict(items), **rest} if not rest:
            return {name: inner(item) for name, item in items.items()}
        case {"record": str(name), "fields": dict(inside), **rest} if not rest:
            kind = {kind.__name__: kind for kind in kinds}[name]
            return kind(**{field: inner(item) for field, item in inside.items()})
        case _:
            raise ValueError("not a value of the cache")


def _encode_tensor(tensor: Tensor) -> dict[str, Any]:
    array = tensor.detach().cpu().contiguous().numpy()
    data = zlib.compress(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(), 1)
    text = base64.b64encode(data).decode("ascii")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "zlib": text}


def _decode_tensor(stored: Mapping[str, Any]) -> Tensor:
    if stored["dtype"] not in _KINDS:
        raise ValueError("not a tensor of the cache")
    kind, shape = np.dtype(stored["dtype"]), [int(n) for n in stored["shape"]]
    packed = base64.b64decode(stored["zlib"], validate=True)
    size = math.prod(shape) * kind.itemsize
    if any(not 0 <= n <= sys.maxsize for n in shape) or size > _MOST_UNPACKED * len(packed):
        raise ValueError("not a tensor of the cache")
    unpacked = zlib.decompressobj()
    data = unpacked.decompress(packed, size + 1)
    if len(data) != size or unpacked.unconsumed_tail:
        raise ValueError("not a tensor of the cache")
    return torch.from_numpy(np.frombuffer(data, kind.newbyteorder("<")).astype(kind).reshape(shape))
