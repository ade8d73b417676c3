"""Reading of config.json: typed fields, and a refusal that names the field."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.terms import ModelRef
from kcdsl.model.files import Artefacts, companion
from kcdsl.source.files import excerpt, read_bytes, shown

LARGEST_COUNT = 1 << 24
"""No width, vocabulary or length is greater; a number beyond would only fill the memory."""
_LARGEST_CONFIG = 16 * 2**20
"""The largest config.json in bytes; real ones have thousands."""
LARGEST_DEPTH = 1 << 12
"""The greatest number of layers."""


class Fields:
    """The fields of one configuration. Each reader checks type and range."""

    def __init__(self, raw: Mapping[str, Any], architecture: str) -> None:
        self._raw = raw
        self._architecture = architecture

    def _refusal(self, message: str) -> Refusal:
        return refuse(codes.MODEL_CONFIG, f"{self._architecture} configuration: {message}")

    def check(self, holds: bool, message: str) -> None:
        """Refuse with `message` unless `holds`."""
        if not holds:
            raise self._refusal(message)

    def count(self, name: str, default: int | None = None, most: int = LARGEST_COUNT) -> int:
        """Return a positive integer up to `most`; a missing or null field takes the default."""
        value = self._raw.get(name)
        value = default if value is None else value
        self.check(value is not None, f"the field {name!r} is missing")
        good = isinstance(value, int) and not isinstance(value, bool) and value > 0
        self.check(good, f"{name!r} must be a positive integer, not {value!r}")
        assert isinstance(value, int)
        self.check(value <= most, f"{name!r} is greater than {most}")
        return value

    def number(self, name: str, default: float) -> float:
        """Return a finite positive number."""
        value = self._raw.get(name, default)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        self.check(
            good and 0 < value <= sys.float_info.max,
            f"{name!r} must be a positive number, not {value!r}",
        )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._raw.get(name, default)
        self.check(isinstance(value, bool), f"{name!r} must be true or false, not {value!r}")
        return bool(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a nested object; empty where the field is missing or null."""
        value = self._raw.get(name)
        value = {} if value is None else value
        self.check(isinstance(value, dict), f"{name!r} must be an object, not {value!r}")
        assert isinstance(value, dict)
        return value

    def kinds(self, name: str, allowed: Iterable[str]) -> tuple[str, ...]:
        """Return a list of words that are all allowed; empty where it is missing or null."""
        value = self._raw.get(name)
        value = [] if value is None else value
        good = isinstance(value, list) and set(map(str, value)) <= set(allowed)
        self.check(good, f"{name!r} must be a list of {', '.join(allowed)}, not {value!r}")
        return tuple(value)

    def require(self, name: str, allowed: Iterable[object], default: object) -> None:
        """Refuse a value outside `allowed`."""
        options = tuple(allowed)
        value = self._raw.get(name, default)
        shown = ", ".join(map(str, options))
        self.check(value in options, f"{name!r} is {value!r}; supported: {shown}")


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Refuse a missing file, and what is no JSON object."""
    return parse_config(path, read_bytes(path, _LARGEST_CONFIG + 1))


def parse_config(path: Path, data: bytes) -> dict[str, Any]:
    """Return the JSON object of a file by its bytes. Refuse what is none."""
    try:
        if len(data) > _LARGEST_CONFIG:
            raise ValueError(f"it is larger than {_LARGEST_CONFIG} bytes")
        raw = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise refuse(codes.MODEL_CONFIG, f"{shown(path)} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise refuse(codes.MODEL_CONFIG, f"{shown(path)} must hold a JSON object")
    return raw


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of the pairs; refuse a key that readers may take one way or the other."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {excerpt(twice)!r} is given twice")
    return found


def find_config(ref: ModelRef, checkpoint: Path, base: Path | Artefacts) -> dict[str, Any]:
    """Return the configuration of a model: the file its contract names, else the config.json beside
    the checkpoint; empty for a module of the user's own that has none.

    `base` is the folder of the contract. Refuse a file that is missing or cannot be read.
    """
    files = Artefacts.of(base)
    if ref.config is not None:
        path = files.find(ref.config)
    else:
        beside = files.beside(checkpoint, "config.json")
        if beside is None and ref.module is not None:
            return {}
        path = beside or checkpoint.parent / "config.json"
    return parse_config(path, files.read(path, companion("config"), _LARGEST_CONFIG))
