"""Reading records of a signed payload: every field is typed, none is unknown."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from kcdsl_certs.rejected import Rejected

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_LONGEST_TEXT = 20_000


@dataclass(slots=True)
class Fields:
    """Takes fields out of one JSON object; `done` refuses what is left over."""

    record: dict[str, Any]
    place: str
    taken: set[str] = field(default_factory=set)

    @staticmethod
    def of(value: Any, place: str) -> Fields:
        """Wrap a JSON object."""
        if not isinstance(value, dict):
            raise Rejected("statement/malformed", f"{place} is not an object")
        return Fields(value, place)

    def _take(self, name: str) -> Any:
        self.taken.add(name)
        return self.record.get(name)

    def _fail(self, name: str, what: str) -> Rejected:
        return Rejected("statement/malformed", f"{self.place}.{name} is not {what}")

    def text(self, name: str) -> str:
        """Return a text that is not empty."""
        value = self._take(name)
        if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_TEXT:
            raise self._fail(name, "a text")
        return value

    def text_or_none(self, name: str) -> str | None:
        """Return a text, or None where the field is absent."""
        return self.text(name) if name in self.record else None

    def integer(self, name: str) -> int:
        """Return an integer >= 0."""
        value = self._take(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._fail(name, "a count")
        return value

    def integer_or_none(self, name: str) -> int | None:
        """Return an integer >= 0, or None where the field is absent."""
        return self.integer(name) if name in self.record else None

    def boolean(self, name: str) -> bool:
        """Return true or false."""
        value = self._take(name)
        if not isinstance(value, bool):
            raise self._fail(name, "true or false")
        return value

    def raw(self, name: str) -> Any:
        """Return the value as it stands; None where the field is absent."""
        return self._take(name)

    def inner(self, name: str) -> Fields:
        """Return the object below this field."""
        return Fields.of(self._take(name), f"{self.place}.{name}")

    def items(self, name: str) -> list[Any]:
        """Return a list."""
        value = self._take(name)
        if not isinstance(value, list):
            raise self._fail(name, "a list")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        values = self.items(name)
        if not all(isinstance(v, str) and 0 < len(v) <= _LONGEST_TEXT for v in values):
            raise self._fail(name, "a list of texts")
        return tuple(values)

    def sha256(self, name: str) -> str:
        """Return the hex digest of a digest set `{"sha256": …}`; other algorithms are ignored."""
        value = self._take(name)
        if not isinstance(value, dict):
            raise self._fail(name, "a digest set")
        return sha256_of(value.get("sha256"), f"{self.place}.{name}")

    def sha256_or_none(self, name: str) -> str | None:
        """Return the hex digest, or None where the field is absent."""
        return self.sha256(name) if name in self.record else None

    def done(self) -> None:
        """Refuse fields that nobody asked for: they could narrow what the rest says."""
        unknown = sorted(self.record.keys() - self.taken)
        if unknown:
            raise Rejected("statement/unknown-field", f"{self.place} has {', '.join(unknown)}")


def plain_name(path: str, place: str) -> str:
    """Return the name of a file beside the certificate; refuse any other path."""
    if path in (".", "..") or any(mark in path for mark in ("/", "\\", "\0", ":")):
        raise Rejected("statement/malformed", f"{place} is not a plain file name")
    return path


def sha256_of(value: Any, place: str) -> str:
    """Return a sha256 in lower-case hex."""
    if not isinstance(value, str) or _SHA256.fullmatch(value) is None:
        raise Rejected("statement/malformed", f"{place} has no sha256 in lower-case hex")
    return value
