"""Strict readers for untrusted bytes: JSON, base64, times."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from datetime import UTC, datetime
from typing import Any, NoReturn

from kcdsl_certs.rejected import Rejected

LARGEST_INTEGER = 2**53 - 1
DEEPEST_NESTING = 64
LARGEST_DOCUMENT = 512 * 1024 * 1024
"""Bytes of an evidence file that is read and not only hashed."""
_STANDARD = re.compile(r"[A-Za-z0-9+/]*={0,2}", re.ASCII)
_URL_SAFE = re.compile(r"[A-Za-z0-9_-]*={0,2}", re.ASCII)
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z", re.ASCII)


def strict_load(raw: bytes, limit: int) -> Any:
    """Parse one JSON document of at most `limit` bytes, refusing whatever JSON leaves open.

    Refused are: duplicate keys, floats and constants such as NaN, integers beyond 2^53 - 1 and -0,
    lone surrogates, any encoding but UTF-8, a byte order mark, trailing data, deep nesting.
    """
    if len(raw) > limit:
        raise Rejected("json/size", f"{len(raw)} bytes, at most {limit} are read")
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique_pairs,
            parse_constant=_no_float,
            parse_float=_no_float,
            parse_int=_integer,
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise Rejected("json/nesting", "too deeply nested") from None
    except UnicodeError:
        raise Rejected("json/encoding", "not UTF-8, or a lone surrogate") from None
    except ValueError as error:
        raise Rejected("json/syntax", str(error)) from None
    _limit_nesting(value, DEEPEST_NESTING)
    return value


def loose_load(raw: bytes) -> Any:
    """Parse one JSON document that may hold floats; else as strict as `strict_load`.

    Integers may be of any size that Python reads, and no float is infinite or NaN.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_no_float,
            parse_float=_finite,
        )
    except RecursionError:
        raise Rejected("json/nesting", "too deeply nested") from None
    except UnicodeError:
        raise Rejected("json/encoding", "not UTF-8") from None
    except ValueError as error:
        raise Rejected("json/syntax", str(error)) from None
    _limit_nesting(value, DEEPEST_NESTING)
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Rejected("json/float", f"{text[:40]} is not finite")
    return value


def _unique_pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for key, value in items:
        if key in record:
            raise Rejected("json/duplicate-key", f"the key {key!r} stands twice in one object")
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
    """Decode base64 of the standard or the URL-safe alphabet; only the canonical spelling passes.

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
        raise Rejected("base64/not-canonical", "another spelling of the same bytes is canonical")
    return value


def parse_time(text: str) -> datetime:
    """Read `YYYY-MM-DDTHH:MM:SSZ` (RFC 3339, UTC, whole seconds); nothing else is accepted."""
    if _TIME.fullmatch(text) is None:
        raise Rejected("time/malformed", f"{text[:40]!r} is not of the form 2026-11-30T12:00:00Z")
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError as error:
        raise Rejected("time/malformed", str(error)) from None


def time_text(moment: datetime) -> str:
    """Write a time that knows its zone as `YYYY-MM-DDTHH:MM:SSZ`, cut to the second."""
    if moment.tzinfo is None:
        raise Rejected("time/no-zone", "a time without a zone does not say when it is")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
