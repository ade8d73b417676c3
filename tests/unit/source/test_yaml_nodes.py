"""YAML nodes: scalars by the core schema, and every ambiguity diagnosed at its position."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Any

import pytest
import yaml

from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.model import ERRORS
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source import yaml_nodes
from kcdsl.source.numbers import CORE_BOOL, CORE_FLOAT, CORE_NULL, NOT_FINITE, ambiguity
from kcdsl.source.yaml_nodes import (
    DEPTH_LIMIT,
    LONGEST,
    NODES,
    Mapping,
    Node,
    Scalar,
    SequenceNode,
    parse_yaml,
)


def read(text: str) -> tuple[Node | None, list[tuple[str, int, int]]]:
    """Parse a text; return the root and (code, line, column) of the findings."""
    source, sink = SourceFile("x.yaml", text), Sink()
    root = parse_yaml(source, sink)
    places = []
    for diagnostic in sink:
        assert diagnostic.span is not None
        at = source.position(diagnostic.span.start)
        places.append((diagnostic.code.id, at.line, at.column))
    return root, places


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-12", -12),
        ("+3", 3),
        ("1e-3", Fraction(1, 1000)),
        ("1.0", Fraction(1)),
        (".5", Fraction(1, 2)),
        ("1.", Fraction(1)),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("1.0.0", "1.0.0"),
        ("abc", "abc"),
        ("'1'", "1"),
        ('"true"', "true"),
        ("N", "N"),
        ("y", "y"),
    ],
)
def test_scalars_by_the_core_schema(text: str, value: object) -> None:
    root, found = read(f"k: {text}\n")
    assert isinstance(root, Mapping)
    node = root.get("k")
    assert isinstance(node, Scalar)
    assert node.value == value
    assert type(node.value) is type(value)
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "on",
        "Off",
        "YES",
        "no",
        "12:30:45",
        "1:30",
        "2026-05-26",
        "2026-05-26T10:00:00Z",
        "010",
        "1_000",
        "0x1F",
        "0o17",
        "0b11",
        ".1_0",
        "1_0.5e+3",
        "1_0:30",
        "=",
    ],
)
def test_ambiguous_scalars_are_reported(text: str) -> None:
    root, found = read(f"k: {text}\n")
    assert found == [("KC007", 1, 4)]
    assert isinstance(root, Mapping)
    node = root.get("k")
    assert isinstance(node, Scalar)
    assert node.broken
    assert read(f"k: '{text}'\n")[1] == []


@pytest.mark.parametrize("text", [".inf", "-.INF", ".nan", "1e999", "1e-999", "9" * 61])
def test_implausible_scalar_numbers_are_reported(text: str) -> None:
    assert read(f"k: {text}\n")[1] == [("KC014", 1, 4)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", ("KC002", 3, 1)),
        ("{a: 1, 'a': 3}", ("KC002", 1, 8)),
        ("a: &x 1\n", ("KC003", 1, 4)),
        ("a: *x\n", ("KC003", 1, 4)),
        ("a:\n  <<: {b: 1}\n", ("KC004", 2, 3)),
        ("a: !!str 1\n", ("KC005", 1, 4)),
        ("a: !python/object:os.system {}\n", ("KC005", 1, 4)),
        ("a: 1\n---\nb: 2\n", ("KC006", 2, 1)),
        ("", ("KC013", 1, 1)),
        ("# nothing\n", ("KC013", 1, 1)),
        ("[a, b]: 1\n", ("KC103", 1, 1)),
        ("a: b: c\n", ("KC001", 1, 5)),
        ("a: [1,\n", ("KC001", 2, 1)),
        ("\ta: 1\n", ("KC001", 1, 1)),
        ("é𝒳: 'x\n", ("KC001", 2, 1)),
        ("a: \x07\n", ("KC001", 1, 4)),
        ("a: @b\n", ("KC001", 1, 4)),
    ],
)
def test_yaml_ambiguities_are_reported(text: str, expected: tuple[str, int, int]) -> None:
    assert read(text)[1] == [expected]


def test_nesting_depth_is_limited_in_linear_time() -> None:
    assert read("[" * 100_000)[1] == [("KC012", 1, DEPTH_LIMIT + 1)]
    assert read("[" * DEPTH_LIMIT + "]" * DEPTH_LIMIT)[1] == []


def test_anchors_cannot_expand_exponentially() -> None:
    text = "a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    assert {code for code, _, _ in read(text)[1]} == {"KC003"}


def test_positions_count_code_points_without_byte_order_mark() -> None:
    root, found = read("\ufeffk𝒳: [é𝒳, b]\r\n")
    assert found == []
    assert isinstance(root, Mapping)
    assert (root.entries[0].key.span.start, root.entries[0].key.span.end) == (1, 3)
    items = root.get("k𝒳")
    assert isinstance(items, SequenceNode)
    assert (items.items[1].span.start, items.items[1].span.end) == (10, 11)
    assert (items.span.start, items.span.end) == (5, 12)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("k: !<tag:yaml.org,2002:str> foo\n", {"!<tag:yaml.org,2002:str>"}),
        ("k: &a !t foo\n", {"&a", "!t"}),
        ("k: !t &a  # why: &x !y\n  # and\n  foo\n", {"!t", "&a"}),
        ("k: &a\n", {"&a"}),
        ("&a k: foo\n", {"&a"}),
        ("k: &a [foo]\n", {"&a"}),
        ("k: !!map\n  a: 1\n", {"!!map"}),
    ],
)
def test_node_span_starts_after_its_properties(text: str, reported: set[str]) -> None:
    source, sink = SourceFile("x.yaml", text), Sink()
    root = parse_yaml(source, sink)
    assert isinstance(root, Mapping)
    shown = {text[d.span.start : d.span.end] for d in sink if d.span is not None}
    assert shown == reported
    (entry,) = root.entries
    assert text[entry.key.span.start : entry.key.span.end] == "k"
    value = text[entry.value.span.start : entry.value.span.end].rstrip()
    assert value in {"foo", "", "[foo]", "a: 1"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("k: &x {a: 1, a: 1}\n", "k: &x {a: 1}\n"),
        ("k: &x\n  a: 1\n  a: 1\n", "k: &x\n  a: 1\n"),
    ],
)
def test_fix_of_a_repeated_entry_respects_anchors(text: str, wanted: str) -> None:
    source, sink = SourceFile("x.yaml", text), Sink()
    parse_yaml(source, sink)
    (fix,) = [d.fix for d in sink if d.code.id == "KC002"]
    assert fix is not None
    for edit in fix.edits:
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    assert text == wanted


@pytest.mark.parametrize("text", ['"\\ud83d\\ude00"', '"a\\uD800"'])
@pytest.mark.parametrize("loader", [yaml.SafeLoader, yaml.CSafeLoader])
def test_lone_surrogate_is_refused_by_both_readers(
    text: str, loader: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_nodes, "_LOADER", loader)
    source, sink = SourceFile("x.yaml", f"k: {text}\n"), Sink()
    parse_yaml(source, sink)
    (found,) = sink
    assert found.code.id == "KC001"
    assert found.help is not None
    assert "\\U0001f600" in found.help


def test_multi_line_plain_scalar_is_quoted_on_one_line() -> None:
    text = "x: forall y in points(all):\n\n  z\n"
    source, sink = SourceFile("x.yaml", text), Sink()
    parse_yaml(source, sink)
    (found,) = sink
    assert found.code.id == "KC015"
    assert found.fix is not None
    (edit,) = found.fix.edits
    again = parse_yaml(SourceFile("x.yaml", f"x: {edit.text}\n"), Sink())
    assert isinstance(again, Mapping)
    assert again.entries[0].value == Scalar(
        "forall y in points(all):\nz",
        "forall y in points(all):\nz",
        '"',
        again.entries[0].value.span,
    )


@pytest.mark.full
def test_many_anchors_and_repeated_keys_are_read_in_time() -> None:
    many = "".join(f"- &a{n} 1\n" for n in range(20_000))
    assert len(read(many)[1]) == ERRORS + 1
    large = "x" * LONGEST
    repeated = f"k: '{large}'\n" + "k: 1\n" * 10_000
    assert len(read(repeated)[1]) == ERRORS + 1


@pytest.mark.full
@pytest.mark.parametrize(
    "text",
    [f"k: '{'x' * (LONGEST + 1)}'", "- 1\n" * NODES],
    ids=["value", "nodes"],
)
def test_oversized_document_is_refused(text: str) -> None:
    root, found = read(text)
    assert root is None
    assert [code for code, _, _ in found] == ["KC011"]


@pytest.mark.full
def test_document_of_the_maximum_size_is_read() -> None:
    root, found = read("- 1\n" * (NODES - 1))
    assert root is not None
    assert not found


PIECES = (
    "0", "1", "12", "60", "_", ".", ":", "e", "E", "+", "-", "x", "o", "b", "a", "T", "Z", " ",
    "yes", "No", "on", "y", "n", "true", "~", "null", "inf", "nan", "2001", "-1-1",
)  # fmt: skip


def test_strings_are_strings_in_yaml_1_1_or_reported() -> None:
    """PyYAML reads YAML 1.1: a scalar that it does not read as a string is reported."""
    resolver: Any = yaml.SafeLoader("")
    random = Random(0)
    texts = 0
    for _ in range(20_000):
        text = "".join(random.choice(PIECES) for _ in range(random.randint(1, 6))).strip()
        old = resolver.resolve(yaml.ScalarNode, text, (True, False))
        if ambiguity(text) or NOT_FINITE.fullmatch(text):
            continue
        number = CORE_FLOAT.fullmatch(text) is not None
        ours = text in CORE_NULL or text in CORE_BOOL or number
        assert ours or old == "tag:yaml.org,2002:str", text
        texts += not ours
    assert texts > 5_000


def test_tab_indentation_is_fixed() -> None:
    text = "a:\n\tb:\n  # y\n\t\tc: 1  # \t x\n\n\t\td: [1,\n\t\t   2]\r\n\te: 3\n"
    source, sink = SourceFile("x.yaml", text), Sink()
    assert parse_yaml(source, sink) is None
    (found,) = sink
    assert found.fix is not None
    assert not found.fix.safe
    for edit in reversed(found.fix.edits):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    assert text == "a:\n  b:\n  # y\n    c: 1  # \t x\n\n    d: [1,\n       2]\r\n  e: 3\n"
    # Beside lines indented by spaces, one line is fixed to match the line above it.
    source, sink = SourceFile("x.yaml", "a:\n  b: 1\n\tc: 2\n\td: 3\n"), Sink()
    assert parse_yaml(source, sink) is None
    (found,) = sink
    assert found.fix is not None
    assert [(edit.span.start, edit.text) for edit in found.fix.edits] == [(10, "  ")]
