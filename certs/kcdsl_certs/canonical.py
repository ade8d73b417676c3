"""Canonical JSON (RFC 8785) without floats, and digests over it."""

from __future__ import annotations

import hashlib
from typing import Any

import rfc8785

from kcdsl_certs.rejected import Rejected


def canonical_json(value: Any) -> bytes:
    """Return the RFC 8785 bytes of plain data; floats, odd keys and large integers are refused."""
    try:
        _no_floats(value, "$")
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as error:
        raise Rejected("canonical/not-canonical", str(error)) from None
    except RecursionError:
        raise Rejected("canonical/not-canonical", "too deeply nested") from None


def canonical_digest(value: Any) -> str:
    """Return the sha256 (hex) of the canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _no_floats(value: Any, place: str) -> None:
    match value:
        case None | bool() | int() | str():
            return
        case dict():
            for key, part in value.items():
                if not isinstance(key, str):
                    raise Rejected("canonical/key", f"{place}: the key {key!r} is not text")
                _no_floats(part, f"{place}.{key}")
        case list():
            for index, part in enumerate(value):
                _no_floats(part, f"{place}[{index}]")
        case _:
            raise Rejected(
                "canonical/float" if isinstance(value, float) else "canonical/type",
                f"{place}: a {type(value).__name__} has no canonical form; write reals as text",
            )
