"""The tables of docs/reference/spans.md equal the scalar map."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.scalar_map import map_scalar
from kcdsl.source.yaml_nodes import Mapping, Scalar, parse_yaml

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "spans.md"
TABLE = re.compile(
    r"^\| (plain|quoted|literal|folded) \| ranges \|\n\|---\|---\|\n((?:\|.*\n)+)", re.M
)
CODE = re.compile(r"`([^`]*)`")
SIGNS = str.maketrans({"␤": "\n", "·": " ", "⇥": "\t"})
STYLES = {"plain": {"plain"}, "quoted": {"'", '"'}, "literal": {"|"}, "folded": {">"}}


def rows() -> list[tuple[str, str, list[str]]]:
    """Return the kind, the source and the ranges of each row, as stated on the page."""
    found = []
    for kind, lines in TABLE.findall(PAGE.read_text(encoding="utf-8")):
        for line in lines.splitlines():
            first, *ranges = CODE.findall(line.replace("\\|", "|"))
            texts = [text.translate(SIGNS) for text in (first, *ranges)]
            found.append((kind, texts[0], texts[1:]))
    return found


@pytest.mark.parametrize("eol", ["\n", "\r\n"])
@pytest.mark.parametrize(("kind", "written", "ranges"), rows())
def test_row_equals_the_scalar_map(kind: str, written: str, ranges: list[str], eol: str) -> None:
    source = SourceFile("x.yaml", f"k: {written}".replace("\n", eol))
    root = parse_yaml(source, sink := Sink())
    assert isinstance(root, Mapping), [d.message for d in sink]
    scalar = root.entries[0].value
    assert isinstance(scalar, Scalar)
    assert scalar.style in STYLES[kind]
    pieces = map_scalar(source, scalar).pieces
    assert pieces is not None
    assert [source.text[a:b] for a, b in pieces] == [text.replace("\n", eol) for text in ranges]


def test_table_has_rows_of_every_kind() -> None:
    assert {kind for kind, _, _ in rows()} == set(STYLES)


ORDERING = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""What changes the order in which a line is shown."""


@pytest.mark.parametrize("sign", ["\r", *"\x85\u2028\u2029\x00\x1b\ufeff", *ORDERING])
def test_unsupported_scalars_are_refused(sign: str) -> None:
    for text in (f"k: a{sign}b\n", f"k: 'a{sign}b'\n", f"k: 1  # a{sign}b\n"):
        sink = Sink()
        assert parse_yaml(SourceFile("x.yaml", text), sink) is None
        (found,) = sink
        at = text.index(sign)
        assert found.code.id == "KC001"
        assert found.span is not None
        assert (found.span.start, found.span.end) == (at, at + 1)


@pytest.mark.parametrize(
    ("escape", "char"), [("r", "\r"), ("N", "\x85"), ("L", "\u2028"), ("P", "\u2029")]
)
def test_escapes_of_other_styles_are_mapped(escape: str, char: str) -> None:
    source = SourceFile("x.yaml", f'k: "a\\{escape}b"\n')
    root = parse_yaml(source, Sink())
    assert isinstance(root, Mapping)
    scalar = root.entries[0].value
    assert isinstance(scalar, Scalar)
    assert scalar.text == f"a{char}b"
    assert map_scalar(source, scalar).pieces == ((4, 5), (5, 7), (7, 8))


def test_lone_surrogate_is_reported() -> None:
    sink = Sink()
    parse_yaml(SourceFile("x.yaml", 'k: "\\ud835"\n'), sink)
    (found,) = sink
    assert found.code.id == "KC001"
    assert found.help is not None
    assert "\\U0001f600" in found.help


@pytest.mark.parametrize("escape", [r"\0", r"\x00", r"\u0000", r"\U00000000"])
def test_escaped_nul_is_reported(escape: str) -> None:
    sink = Sink()
    assert parse_yaml(SourceFile("x.yaml", f'k: "a{escape}b"\n'), sink) is None
    (found,) = sink
    assert found.code.id == "KC001"
    assert found.span is not None
    assert found.span.start == 3
