"""Strict JSON: no floats, no duplicate keys, integers that every parser reads alike."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import strict_load

MOST_VALUES = 2**24  # a parsed value takes 60 bytes or more


def load(data: bytes, reason: str) -> Any:
    """Parse strict JSON of at most 2^24 values. Raises Rejected with the given reason."""
    if data.count(b",") > MOST_VALUES:
        raise Rejected(reason, f"more than {MOST_VALUES} values")
    try:
        return strict_load(data, len(data), nesting=None)
    except Rejected as rejection:
        raise Rejected(reason, f"not strict JSON: {rejection.detail[:200]}") from None


def canonical(value: Any) -> bytes:
    """Return the canonical JSON (RFC 8785) of data without floats.

    Raises Rejected "document/json" for values that are nested too deeply.
    """
    try:
        found = _sorted(value)
        text = json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise Rejected("document/json", "nested too deeply") from None
    return text.encode("utf-8")


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
        return {key: _sorted(value[key]) for key in keys}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


class Reader:
    """Typed access to the fields of a parsed object; anything unexpected raises Rejected."""

    def __init__(self, value: Any, place: str, reason: str = "document/field") -> None:
        self.place = place
        self.reason = reason
        if not isinstance(value, dict):
            raise self.fail("must be an object")
        self._value: dict[str, Any] = value

    @property
    def value(self) -> Mapping[str, Any]:
        """Return the object as parsed."""
        return self._value

    def fail(self, what: str) -> Rejected:
        """Return a rejection that names this place."""
        return Rejected(self.reason, f"{self.place} {what}")

    def exactly(self, *names: str, optional: tuple[str, ...] = ()) -> Reader:
        """Return this object; refuse it unless it has these fields and at most the optional."""
        missing = [n for n in names if n not in self._value]
        extra = [k for k in self._value if k not in names and k not in optional]
        if missing or extra:
            raise self.fail(f"has missing fields {missing} or unknown fields {extra[:5]}")
        return self

    def has(self, name: str) -> bool:
        """Return whether the field is there."""
        return name in self._value

    def raw(self, name: str) -> Any:
        """Return a field as parsed."""
        if name not in self._value:
            raise self.fail(f"lacks {name!r}")
        return self._value[name]

    def text(self, name: str) -> str:
        """Return a string field."""
        value = self.raw(name)
        if not isinstance(value, str):
            raise self.fail(f"{name!r} must be a string")
        return value

    def choice(self, name: str, among: tuple[str, ...]) -> str:
        """Return a string field; refuse one that is not in `among`."""
        value = self.text(name)
        if value not in among:
            raise self.fail(f"{name!r} must be one of {', '.join(among)}, not {value[:40]!r}")
        return value

    def integer(self, name: str, least: int) -> int:
        """Return an integer field, at least `least`."""
        return integer(self.raw(name), least, self.fail(f"{name!r} must be an integer ≥ {least}"))

    def integers(self, name: str, least: int) -> tuple[int, ...]:
        """Return a list of integers, each at least `least`."""
        wrong = self.fail(f"{name!r} must be a list of integers ≥ {least}")
        return tuple(integer(item, least, wrong) for item in self.items(name))

    def items(self, name: str) -> list[Any]:
        """Return a list field."""
        value = self.raw(name)
        if not isinstance(value, list):
            raise self.fail(f"{name!r} must be a list")
        return value

    def entries(self, name: str) -> dict[str, Any]:
        """Return an object field."""
        value = self.raw(name)
        if not isinstance(value, dict):
            raise self.fail(f"{name!r} must be an object")
        return value

    def reader(self, name: str) -> Reader:
        """Return an object field for reading."""
        return Reader(self.raw(name), f"{self.place}.{name}", self.reason)

    def real(self, name: str) -> float:
        """Return a finite real written by float.hex()."""
        return real(self.raw(name), self.fail(f"{name!r} must be a finite float.hex() string"))


def integer(value: Any, least: int, wrong: Rejected) -> int:
    """Return value if it is an integer (no bool) ≥ least; raise `wrong` otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise wrong
    return value


def real(value: Any, wrong: Rejected) -> float:
    """Return the finite double that float.hex() wrote; raise `wrong` otherwise."""
    if not isinstance(value, str) or len(value) > 32:
        raise wrong
    try:
        number = float.fromhex(value)
    except (ValueError, OverflowError):
        raise wrong from None
    if not math.isfinite(number) or number.hex() != value:
        raise wrong
    return number
