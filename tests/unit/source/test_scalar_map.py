"""The map from decoded characters to source positions: corner cases."""

from __future__ import annotations

import pytest

from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.scalar_map import map_scalar
from kcdsl.source.yaml_nodes import Mapping, Scalar, parse_yaml
from kcdsl.syntax.parser import parse_expression


def value(text: str) -> tuple[SourceFile, Scalar]:
    """Return the scalar under `k`."""
    source = SourceFile("x.yaml", text)
    root = parse_yaml(source, Sink())
    assert isinstance(root, Mapping)
    node = root.get("k")
    assert isinstance(node, Scalar)
    return source, node


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("k: a target b\n", "target"),
        ("k: 'it''s a target'\n", "target"),
        ('k: "\\u0041\\n\\ttarget"\n', "target"),
        ('k: "a \\\n  target"\n', "target"),
        ('k: "a\n\n  target"\n', "target"),
        ("k: |\n  a\n  target\n", "target"),
        ("k: |+  # comment\n\n  a\n   target\n\n", "target"),
        ("k: |2-\n    a\n  target\n", "target"),
        ("k: >-\r\n  a\r\n  b\r\n\r\n  target\r\n", "target"),
        ("k: >\n  a\n    more\n  target\n", "target"),
        ("k: >1\n  a\n target\n", "target"),
        ("k: a\n  b\n  target\n", "target"),
        ("k: é𝒳\n  target\n", "target"),
        ("k: >-\n\n\n  target\n", "target"),
    ],
)
def test_word_is_mapped_to_its_source(text: str, word: str) -> None:
    source, scalar = value(text)
    start = scalar.text.index(word)
    mapped = map_scalar(source, scalar)
    assert mapped.pieces is not None
    span = mapped.span(start, start + len(word))
    assert source.text[span.start : span.end] == word


def test_end_of_text_is_after_its_last_character() -> None:
    source, scalar = value("k: >-\n  abc\n\nz: 1\n")
    span = map_scalar(source, scalar).span(3, 4)
    assert (span.start, span.end) == (11, 11)
    source, scalar = value("k: ''\n")
    assert map_scalar(source, scalar).span(0, 0).start == 4


def test_differing_decoding_maps_to_the_whole_scalar() -> None:
    source, scalar = value("k: |\n  abc\n")
    mapped = map_scalar(source, scalar._replace(text="abd\n"))
    assert mapped.pieces is None
    assert mapped.span(1, 2) == scalar.span


@pytest.mark.parametrize("text", ["k: |\n", "k: >-\n\nz: 1\n", "k: |+\n\n\n"])
def test_empty_block_scalars_are_mapped(text: str) -> None:
    source, scalar = value(text)
    assert map_scalar(source, scalar).pieces is not None


def test_refused_nodes_are_mapped() -> None:
    source, sink = SourceFile("x.yaml", "k: *a\n"), Sink()
    root = parse_yaml(source, sink)
    assert isinstance(root, Mapping)
    alias = root.get("k")
    assert isinstance(alias, Scalar)
    assert alias.broken
    assert map_scalar(source, alias).pieces == ((3, 4), (4, 5))


@pytest.mark.parametrize("chomp", ["", "-", "+"])
@pytest.mark.parametrize("body", ["  \n     \n", "\n", "", "    \n  a\n\n", "   a\n     \n  b\n"])
def test_indentation_indicators_are_mapped(chomp: str, body: str) -> None:
    for digit in (1, 2):
        for sign in "|>":
            for header in (f"{sign}{digit}{chomp}", f"{sign}{chomp}{digit}"):
                source, scalar = value(f"k: {header}\n{body}")
                mapped = map_scalar(source, scalar)
                assert mapped.pieces is not None
                assert len(mapped.pieces) == len(scalar.text)


def test_deep_indentation_is_mapped_in_time() -> None:
    deep = " " * 60_000
    for text in (f"k: |1\n{deep}a\n", f"k: |\n{deep}\n", f"k: |+1\n{deep}\n"):
        source, scalar = value(text)
        assert map_scalar(source, scalar).pieces is not None


def test_unmappable_expression_is_refused() -> None:
    source, scalar = value("k: |\n  p99(klx) <= 0.02\n")
    sink = Sink()
    other = scalar._replace(text="p99(klx) <= 0.03\n")
    assert parse_expression(source, other, sink) is None
    (found,) = sink
    assert found.code.id == "KC999"
    assert found.span == scalar.span
    assert found.fix is None
    assert found.help is not None
    assert "double quotation marks" in found.help
