"""Strict readers of untrusted data: JSON, its canonical form (RFC 8785), base64, times, records.

Records are read field by field: every field is typed, none is unknown.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NoReturn

import rfc8785

from kcdsl_certs.encoding.rejected import Rejected

LARGEST_INTEGER = 2**53 - 1
DEEPEST_NESTING = 64
LARGEST_DOCUMENT = 512 * 1024 * 1024
"""The largest evidence file, in bytes, that is parsed and not only hashed."""
_STANDARD = re.compile(r"[A-Za-z0-9+/]*={0,2}", re.ASCII)
_URL_SAFE = re.compile(r"[A-Za-z0-9_-]*={0,2}", re.ASCII)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TIME = re.compile(r"(\d{4})-(\d{2})-(\d{2})T(\d{2}):(\d{2}):(\d{2})Z", re.ASCII)


def strict_load(raw: bytes, limit: int, nesting: int | None = DEEPEST_NESTING) -> Any:
    """Parse one JSON document of at most `limit` bytes, refusing everything ambiguous in JSON.

    Refused are: duplicate keys, floats and constants such as NaN, integers beyond 2^53 - 1 and -0,
    lone surrogates, any encoding but UTF-8, a byte order mark, trailing data, and more than
    `nesting` levels (None: the limit of the parser).
    """
    if len(raw) > limit:
        raise Rejected("json/size", f"{len(raw)} bytes, at most {limit} are read")
    return _load(raw, nesting, _no_float, _integer)


def loose_load(raw: bytes) -> Any:
    """Parse one JSON document that may contain floats; otherwise as strict as `strict_load`.

    Integers may have any size that Python parses, and floats must be finite.
    """
    return _load(raw, DEEPEST_NESTING, _finite, int)


def _load(
    raw: bytes,
    nesting: int | None,
    read_float: Callable[[str], float],
    read_integer: Callable[[str], int],
) -> Any:
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique_pairs,
            parse_constant=_no_float,
            parse_float=read_float,
            parse_int=read_integer,
        )
        _refuse_surrogates(text, value)
    except RecursionError:
        raise Rejected("json/nesting", "too deeply nested") from None
    except UnicodeError:
        raise Rejected("json/encoding", "not UTF-8, or a lone surrogate") from None
    except ValueError as error:
        raise Rejected("json/syntax", str(error)) from None
    if nesting is not None:
        _limit_nesting(value, nesting)
    return value


def _refuse_surrogates(text: str, value: Any) -> None:
    """Raise UnicodeError where an escape of the text left a lone surrogate in the value."""
    if _SURROGATE.search(text) is not None:
        json.dumps(value, ensure_ascii=False).encode("utf-8")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Rejected("json/float", f"{text[:40]} is not finite")
    return value


def _unique_pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in items:
        if key in record:
            raise Rejected("json/duplicate-key", f"the key {key!r} occurs twice in one object")
        record[key] = value
    return record


def _no_float(text: str) -> NoReturn:
    raise Rejected("json/float", f"{text[:40]} is a float or a constant; reals are written as text")


def _integer(text: str) -> int:
    if text == "-0" or len(text) > 17 or abs(int(text)) > LARGEST_INTEGER:
        raise Rejected("json/integer", f"{text[:40]} is outside ±(2^53 - 1)")
    return int(text)


def _limit_nesting(value: Any, left: int) -> None:
    if left == 0:
        raise Rejected("json/nesting", f"more than {DEEPEST_NESTING} levels")
    match value:
        case dict():
            for part in value.values():
                _limit_nesting(part, left - 1)
        case list():
            for part in value:
                _limit_nesting(part, left - 1)


def strict_base64(text: str) -> bytes:
    """Decode canonical base64 of the standard or the URL-safe alphabet.

    Refused are mixed alphabets, blanks, missing or superfluous padding, and non-zero spare bits
    (`QR==` decodes to the byte of `QQ==` in lenient decoders).
    """
    if _STANDARD.fullmatch(text) is not None:
        plain = text
    elif _URL_SAFE.fullmatch(text) is not None:
        plain = text.replace("-", "+").replace("_", "/")
    else:
        raise Rejected("base64/alphabet", "not base64")
    try:
        value = base64.b64decode(plain, validate=True)
    except binascii.Error as error:
        raise Rejected("base64/padding", str(error)) from None
    if base64.b64encode(value).decode("ascii") != plain:
        raise Rejected("base64/not-canonical", "the base64 is not the canonical one of its bytes")
    return value


def parse_time(text: str) -> datetime:
    """Read `YYYY-MM-DDTHH:MM:SSZ` (RFC 3339, UTC, whole seconds); nothing else is accepted."""
    found = _TIME.fullmatch(text)
    if found is None:
        raise Rejected("time/malformed", f"{text[:40]!r} is not of the form 2026-11-30T12:00:00Z")
    try:
        year, month, day, hour, minute, second = map(int, found.groups())
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError as error:
        raise Rejected("time/malformed", str(error)) from None


def time_text(moment: datetime) -> str:
    """Write an aware datetime as `YYYY-MM-DDTHH:MM:SSZ`, truncated to seconds."""
    if moment.tzinfo is None:
        raise Rejected("time/no-zone", "a time without a zone does not say when it is")
    return f"{moment.astimezone(UTC).replace(microsecond=0, tzinfo=None).isoformat()}Z"


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


_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
LONGEST_TEXT = 20_000


@dataclass(slots=True)
class Fields:
    """Reads fields of one JSON object; `done` refuses unread fields."""

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
        if not isinstance(value, str) or not 0 < len(value) <= LONGEST_TEXT:
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

    def boolean(self, name: str) -> bool:
        """Return true or false."""
        value = self._take(name)
        if not isinstance(value, bool):
            raise self._fail(name, "true or false")
        return value

    def raw(self, name: str) -> Any:
        """Return the raw value; None where the field is absent."""
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
        if not all(isinstance(v, str) and 0 < len(v) <= LONGEST_TEXT for v in values):
            raise self._fail(name, "a list of texts")
        return tuple(values)

    def sha256(self, name: str) -> str:
        """Return the hex digest of a digest set `{"sha256": …}`; other algorithms are ignored."""
        value = self._take(name)
        if not isinstance(value, dict):
            raise self._fail(name, "a digest set")
        return sha256_of(value.get("sha256"), f"{self.place}.{name}")

    def done(self) -> None:
        """Refuse unread fields: they could restrict the meaning of others."""
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
