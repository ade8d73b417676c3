"""Records: maps between dataclasses and JSON objects, with strict reading.

A field without a value is absent, never null; an unknown field is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from kcdsl_certs.encoding.reals import Measured, Rounding, parse_real, real_text
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import LONGEST_TEXT, parse_time, plain_name, sha256_of, time_text

_Kind = TypeVar("_Kind")
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Codec:
    """Writes a value as plain data, and reads it at a place; reading raises Rejected."""

    write: Callable[[Any], Any]
    read: Callable[[Any, str], Any]


def _same(value: Any) -> Any:
    return value


def _is(what: str, fits: Callable[[Any], bool]) -> Codec:
    """Return the codec of plain values that satisfy a test."""

    def read(value: Any, place: str) -> Any:
        if not fits(value):
            raise Rejected("statement/malformed", f"{place} is not {what}")
        return value

    return Codec(_same, read)


RAW = Codec(_same, lambda value, place: value)
TEXT = _is("a text", lambda value: isinstance(value, str) and 0 < len(value) <= LONGEST_TEXT)
COUNT = _is("a count", lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= 0)
FLAG = _is("true or false", lambda value: isinstance(value, bool))
OBJECT = _is("an object", lambda value: isinstance(value, dict))
_LIST = _is("a list", lambda value: isinstance(value, list))
REAL = Codec(real_text, lambda value, place: parse_real(TEXT.read(value, place)))
TIME = Codec(time_text, lambda value, place: parse_time(TEXT.read(value, place)))
PLAIN_NAME = Codec(_same, lambda value, place: plain_name(TEXT.read(value, place), place))
DIGEST = Codec(
    lambda digest: {"sha256": digest},
    lambda value, place: sha256_of(OBJECT.read(value, place).get("sha256"), place),
)
"""A digest set; other algorithms are ignored."""


def one_of(names: Iterable[str]) -> Codec:
    """Return the codec of a text that must be one of `names`."""
    known = tuple(names)

    def read(value: Any, place: str) -> Any:
        if TEXT.read(value, place) not in known:
            raise Rejected("statement/malformed", f"{place} is {value!r}")
        return value

    return Codec(_same, read)


def constant(text: str, reason: str = "statement/malformed") -> Codec:
    """Return the codec of a constant text, such as a schema."""

    def read(value: Any, place: str) -> None:
        if TEXT.read(value, place) != text:
            raise Rejected(reason, f"{place} is not {text}")

    return Codec(lambda value: text, read)


def member(kind: type[StrEnum]) -> Codec:
    """Return the codec of a member of an enumeration, by its value."""
    by_value = one_of(each.value for each in kind)
    return Codec(lambda value: value.value, lambda value, at: kind(by_value.read(value, at)))


def measured(rounding: Rounding) -> Codec:
    """Return the codec of a double, with a decimal rounded in a direction."""
    return Codec(
        lambda value: Measured(value, rounding).to_json(),
        lambda value, place: Measured.from_json(value, rounding).value,
    )


def many(codec: Codec) -> Codec:
    """Return the codec of a tuple, as a list."""
    return Codec(
        lambda values: [codec.write(value) for value in values],
        lambda values, place: tuple(
            codec.read(value, f"{place}[{number}]")
            for number, value in enumerate(_LIST.read(values, place))
        ),
    )


def by_name(codec: Codec) -> Codec:
    """Return the codec of a mapping from names."""
    return Codec(
        lambda values: {name: codec.write(value) for name, value in values.items()},
        lambda values, place: {
            name: codec.read(value, f"{place}.{name}")
            for name, value in OBJECT.read(values, place).items()
        },
    )


@dataclass(frozen=True, slots=True)
class RecordField:
    """A field: its name in JSON, its codec, its name in the dataclass if different, the value if it
    is absent, and its getter if it is no attribute."""

    name: str
    codec: Codec
    attribute: str = ""
    absent: Any = _REQUIRED
    get: Callable[[Any], Any] | None = None

    @property
    def key(self) -> str:
        """Return the name in the dataclass."""
        return self.attribute or self.name

    def of(self, owner: Any) -> Any:
        """Return the value of an object."""
        return getattr(owner, self.key) if self.get is None else self.get(owner)


class Record(Generic[_Kind]):
    """The fields of a dataclass in JSON; `build` constructs it from the values by attribute."""

    def __init__(self, build: Callable[..., _Kind], *entries: RecordField) -> None:
        self._build, self._entries = build, entries
        self.codec = Codec(self.write, self.read)

    def write(self, value: Any) -> dict[str, Any]:
        """Return plain data without floats; absent fields are left out."""
        found = ((entry, entry.of(value)) for entry in self._entries)
        return {e.name: e.codec.write(part) for e, part in found if part != e.absent}

    def read(self, value: Any, place: str) -> _Kind:
        """Return the object of a record. Raises Rejected for a field that is missing, ill-formed or
        unknown: an unknown field could restrict the meaning of others."""
        record: dict[str, Any] = OBJECT.read(value, place)
        found = {
            entry.key: entry.codec.read(record.get(entry.name), f"{place}.{entry.name}")
            if entry.name in record or entry.absent is _REQUIRED
            else entry.absent
            for entry in self._entries
        }
        unknown = sorted(record.keys() - {entry.name for entry in self._entries})
        if unknown:
            raise Rejected("statement/unknown-field", f"{place} has {', '.join(unknown)}")
        return self._build(**found)
