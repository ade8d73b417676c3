"""Strict JSON, base64, times and canonical JSON."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import (
    Fields,
    canonical_json,
    loose_load,
    parse_time,
    strict_base64,
    strict_load,
    time_text,
)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a":1,"a":2}', "json/duplicate-key"),
        (b'{"x":{"a":1,"a":1}}', "json/duplicate-key"),
        (b"1.0", "json/float"),
        (b"1e999", "json/float"),
        (b"1e2", "json/float"),
        (b"NaN", "json/float"),
        (b"-Infinity", "json/float"),
        (b"-0", "json/integer"),
        (b"9007199254740992", "json/integer"),
        (b"-9007199254740992", "json/integer"),
        (b"1" * 5000, "json/integer"),
        (b'"\\ud800"', "json/encoding"),
        (b'{"\\udfff":1}', "json/encoding"),
        ('"a"'.encode("utf-16"), "json/encoding"),
        ('"a"'.encode("utf-32"), "json/encoding"),
        (b'\xef\xbb\xbf"a"', "json/syntax"),
        (b'"\xff"', "json/encoding"),
        (b"{} {}", "json/syntax"),
        (b"{} x", "json/syntax"),
        (b"", "json/syntax"),
        (b"{'a':1}", "json/syntax"),
        (b'{"a":01}', "json/syntax"),
        (b"[" * 100_000, "json/nesting"),
        (b"[" * 80 + b"]" * 80, "json/nesting"),
        (b'"' + b"a" * 200_001, "json/size"),
    ],
)
def test_invalid_json_is_refused(raw: bytes, reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        strict_load(raw, 200_000)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "raw", [b'"\\ud800"', b'{"\\udfff":1.5}', b'["\\ude00\\ud83d"]', b'"\xff"']
)
def test_invalid_unicode_is_refused_beside_floats(raw: bytes) -> None:
    with pytest.raises(Rejected) as caught:
        loose_load(raw)
    assert caught.value.reason == "json/encoding"
    assert loose_load(b'["\\ud83d\\ude00", 1.5]') == ["\U0001f600", 1.5]


@pytest.mark.parametrize("raw", [b"1e999", b"[-1e400]", b'{"a":1' + b"0" * 400 + b".5}"])
def test_infinite_floats_are_refused(raw: bytes) -> None:
    with pytest.raises(Rejected, match=r"json/float: .* is not finite"):
        loose_load(raw)


@pytest.mark.parametrize("value", ["a", ["a", 1], ["a", None], [["a"]], ["a", ""], ["x" * 20_001]])
def test_list_of_texts_has_no_other_values(value: Any) -> None:
    assert Fields({"names": ["a", "x" * 20_000]}, "record").texts("names")[0] == "a"
    with pytest.raises(Rejected, match=r"statement/malformed: record\.names is not a list"):
        Fields({"names": value}, "record").texts("names")


def test_strict_json_is_parsed() -> None:
    raw = '{"a":[1,-1,true,null,"\\ud83d\\ude00","ä"],"b":9007199254740991}'.encode()
    expected = {"a": [1, -1, True, None, "😀", "ä"], "b": 2**53 - 1}
    assert strict_load(raw, 1000) == expected
    assert strict_load(b" \n{}\n", 5) == {}


_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


@given(_PLAIN)
def test_canonical_json_is_a_fixed_point(value: Any) -> None:
    try:
        raw = canonical_json(value)
    except Rejected:
        assert any("\ud800" <= char <= "\udfff" for char in repr(value))
        return
    assert strict_load(raw, 10**6) == value
    assert canonical_json(strict_load(raw, 10**6)) == raw


@pytest.mark.parametrize(
    "value", [1.0, {"a": [0.5]}, float("nan"), {1: 2}, 2**53, "\ud800", b"x", {"a": (1.0,)}, {1}]
)
def test_canonical_json_refuses_unsupported_values(value: Any) -> None:
    with pytest.raises(Rejected) as caught:
        canonical_json(value)
    assert caught.value.reason.startswith("canonical/")


def test_canonical_json_sorts_by_utf16_code_units() -> None:
    assert canonical_json({"\ufb33": 1, "😀": 2}) == '{"😀":2,"\ufb33":1}'.encode()


@given(st.binary(max_size=80))
def test_base64_accepts_both_alphabets(data: bytes) -> None:
    assert strict_base64(base64.b64encode(data).decode()) == data
    assert strict_base64(base64.urlsafe_b64encode(data).decode()) == data


@given(st.binary(min_size=1, max_size=20), st.data())
def test_base64_has_one_encoding_per_alphabet(data: bytes, draw: st.DataObject) -> None:
    text = base64.b64encode(data).decode()
    place = draw.draw(st.integers(0, len(text) - 1))
    char = draw.draw(st.characters(min_codepoint=0, max_codepoint=300))
    other = text[:place] + char + text[place + 1 :]
    try:
        decoded = strict_base64(other)
    except Rejected:
        return
    same = other.replace("-", "+").replace("_", "/") == text
    assert (decoded == data) == same


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("QR==", "base64/not-canonical"),
        ("QQ=", "base64/padding"),
        ("QQ", "base64/padding"),
        ("QQ===", "base64/alphabet"),
        ("QQ==\n", "base64/alphabet"),
        (" QQ==", "base64/alphabet"),
        ("QQ==AAAA", "base64/alphabet"),
        ("+_==", "base64/alphabet"),
        ("ＱＱ==", "base64/alphabet"),
        ("=", "base64/padding"),
    ],
)
def test_invalid_base64_is_refused(text: str, reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        strict_base64(text)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-30", "2026-11-30T12:00:00", "2026-11-30T12:00:00+00:00", "2026-11-30t12:00:00z",
        "2026-11-30T12:00:00.5Z", "2026-02-30T12:00:00Z", "2026-11-30T24:00:00Z",
        "2026-11-30T12:00:00Z\n", "２026-11-30T12:00:00Z", "0000-01-01T00:00:00Z",
        "2026-13-01T12:00:00Z", "2026-11-30T12:60:00Z", "2026-11-30T12:00:60Z",
    ],
)  # fmt: skip
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(Rejected, match="time/malformed"):
        parse_time(text)


def test_times_are_written_in_utc_without_fractions() -> None:
    moment = datetime(2026, 11, 30, 13, 0, 59, 999999, timezone(timedelta(hours=1)))
    assert time_text(moment) == "2026-11-30T12:00:59Z"
    assert parse_time(time_text(moment)) == datetime(2026, 11, 30, 12, 0, 59, tzinfo=UTC)
    for text in ("0001-01-01T00:00:00Z", "0999-12-31T23:59:59Z", "9999-12-31T23:59:59Z"):
        assert time_text(parse_time(text)) == text  # %Y of the C library writes no leading zeros
    with pytest.raises(Rejected, match="time/no-zone"):
        time_text(datetime(2026, 11, 30))
