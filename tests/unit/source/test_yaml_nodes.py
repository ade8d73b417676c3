"""YAML nodes: scalars by the core schema, and every trap diagnosed at its place."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kcdsl.diagnostics import Sink
from kcdsl.source.text import SourceFile
from kcdsl.source.yaml_nodes import DEPTH_LIMIT, Mapping, Node, Scalar, Sequence, parse_yaml


def read(text: str) -> tuple[Node | None, list[tuple[str, int, int]]]:
    """Parse a text; return the root and (code, line, column) of what was reported."""
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
def test_scalars(text: str, value: object) -> None:
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
    ],
)
def test_scalars_that_readers_take_differently(text: str) -> None:
    root, found = read(f"k: {text}\n")
    assert found == [("KC007", 1, 4)]
    assert isinstance(root, Mapping)
    node = root.get("k")
    assert isinstance(node, Scalar)
    assert node.broken
    assert read(f"k: '{text}'\n")[1] == []


@pytest.mark.parametrize("text", [".inf", "-.INF", ".nan", "1e999", "1e-999", "9" * 61])
def test_numbers_that_cannot_be_meant(text: str) -> None:
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
def test_traps(text: str, expected: tuple[str, int, int]) -> None:
    assert read(text)[1] == [expected]


def test_depth_is_bounded_and_hostile_nesting_is_cheap() -> None:
    assert read("[" * 100_000)[1] == [("KC012", 1, DEPTH_LIMIT + 1)]
    assert read("[" * DEPTH_LIMIT + "]" * DEPTH_LIMIT)[1] == []


def test_anchors_cannot_expand() -> None:
    text = "a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    assert {code for code, _, _ in read(text)[1]} == {"KC003"}


def test_places_count_code_points_and_skip_a_byte_order_mark() -> None:
    root, found = read("\ufeffk𝒳: [é𝒳, b]\r\n")
    assert found == []
    assert isinstance(root, Mapping)
    assert (root.entries[0].key.span.start, root.entries[0].key.span.end) == (1, 3)
    items = root.get("k𝒳")
    assert isinstance(items, Sequence)
    assert (items.items[1].span.start, items.items[1].span.end) == (10, 11)
    assert (items.span.start, items.span.end) == (5, 12)
