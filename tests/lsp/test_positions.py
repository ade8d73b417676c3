"""Positions in three encodings, compared with Python's codecs; and texts after changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types as lsp
from lsprotocol.types import Position as Place
from lsprotocol.types import PositionEncodingKind as Encoding

from kcdsl.diagnostics.spans import Span
from kcdsl.lsp.session import Session
from kcdsl.lsp.text.documents import document, path_of
from kcdsl.lsp.text.positions import Lines, apply_changes, offset_map

TEXTS = st.text(alphabet=st.sampled_from("ab:\n\r äß€🜁\u2028\x85\ufeff"), max_size=40)
SHORT = st.text(alphabet="ab🜁", max_size=6)
ENCODINGS = st.sampled_from(list(Encoding))
CODECS = {
    Encoding.Utf8: ("utf-8", 1),
    Encoding.Utf16: ("utf-16-le", 2),
    Encoding.Utf32: ("utf-32-le", 4),
}


def count(text: str, encoding: Encoding) -> int:
    codec, width = CODECS[encoding]
    return len(text.encode(codec)) // width


def pieces(text: str) -> list[str]:
    """Return the lines of a text with their line ends, as the protocol splits it."""
    return text.replace("\r\n", "\0").replace("\r", "\1\n").replace("\0", "\2\n").split("\n")


@given(TEXTS, ENCODINGS, st.data())
def test_positions_equal_those_of_the_codec(
    text: str, encoding: Encoding, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, len(text)))
    place = Lines(text).place(offset, encoding)
    split_break = 0 < offset < len(text) and text[offset - 1 : offset + 1] == "\r\n"
    before = text[: offset - 1] if split_break else text[:offset]
    lines = before.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    assert place == Place(len(lines) - 1, count(lines[-1], encoding))
    assert Lines(text).offset(place, encoding) == (offset - 1 if split_break else offset)


@given(TEXTS, ENCODINGS, st.integers(0, 50), st.integers(0, 50))
def test_any_position_maps_into_the_text(
    text: str, encoding: Encoding, line: int, character: int
) -> None:
    lines = Lines(text)
    offset = lines.offset(Place(line, character), encoding)
    assert 0 <= offset <= len(text)
    if line < len(lines):
        assert lines.span(line).start <= offset <= lines.span(line).end
    else:
        assert offset == len(text)


@pytest.mark.parametrize(
    ("encoding", "character", "offset"),
    [
        (Encoding.Utf8, 6, 2),
        (Encoding.Utf8, 3, 1),
        (Encoding.Utf16, 3, 2),
        (Encoding.Utf16, 2, 1),
        (Encoding.Utf32, 2, 2),
    ],
)
def test_position_inside_a_character_maps_to_its_start(
    encoding: Encoding, character: int, offset: int
) -> None:
    assert Lines("ä🜁b").offset(Place(0, character), encoding) == offset


def test_unicode_separators_do_not_end_lines() -> None:
    assert len(Lines("a\x85b\u2028c\x0bd\x0ce")) == 1
    assert len(Lines("a\nb\rc\r\nd")) == 4


@given(TEXTS, ENCODINGS, st.data())
def test_incremental_changes_reproduce_the_client_text(
    text: str, encoding: Encoding, data: st.DataObject
) -> None:
    session = Session(encoding)
    session.open("file:///a.kc.yaml", 1, text)
    for version in range(2, data.draw(st.integers(2, 6))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, len(text)))
        new = data.draw(TEXTS)
        lines = Lines(text)
        places = lines.place(start, encoding), lines.place(end, encoding)
        # An editor never puts its cursor between a carriage return and its line feed.
        start, end = (lines.offset(place, encoding) for place in places)
        text = text[:start] + new + text[end:]
        found = session.change("file:///a.kc.yaml", version, [change(new, *places)])
        assert found is not None
        assert found.source.text == text
        assert found.version == version


def change(text: str, start: Place, end: Place) -> lsp.TextDocumentContentChangeEvent:
    return lsp.TextDocumentContentChangePartial(range=lsp.Range(start, end), text=text)


def test_changes_apply_in_sequence() -> None:
    changes = [
        change("🜁", Place(0, 0), Place(0, 0)),
        change("b", Place(0, 2), Place(0, 3)),
        change("\r\nc", Place(0, 3), Place(0, 3)),
    ]
    assert apply_changes("a\n", changes, Encoding.Utf16) == "🜁b\r\nc\n"
    assert (
        apply_changes(
            "a",
            [lsp.TextDocumentContentChangeWholeDocument(text) for text in ("x", "y")],
            Encoding.Utf8,
        )
        == "y"
    )


@given(SHORT, SHORT, SHORT, SHORT)
def test_mapped_offsets_point_to_the_same_characters(a: str, b: str, c: str, d: str) -> None:
    here, there = a + b + d, a + c + d
    way = offset_map(here, there)
    for offset in range(len(here) + 1):
        found = way.offset(offset)
        if found is None:
            continue
        assert 0 <= found <= len(there)
        if offset < way.start or (offset < len(here) and offset >= way.here):
            assert here[offset] == there[found]
    for offset in range(len(there) + 1):
        back = way.back.offset(offset)
        assert back is None or 0 <= back <= len(here)
    for start in range(len(here) + 1):
        for end in range(start, len(here) + 1):
            span = way.span(Span(start, end))
            assert 0 <= span.start <= span.end <= len(there)
            if end <= way.start or start >= way.here:
                assert there[span.start : span.end] == here[start:end]


def test_uris() -> None:
    found = path_of("file:///place/a%20b%23%C3%BC%25.kc.yaml")
    assert str(found) == "/place/a b#ü%.kc.yaml"
    assert path_of("untitled:Untitled-1") is None
    assert document("untitled:Untitled-1", "").folder is None
    assert document("untitled:Untitled-1", "").source.name == "untitled:Untitled-1"
