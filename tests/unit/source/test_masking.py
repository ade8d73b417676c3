"""Unquoted expressions are read completely, and other YAML is unchanged."""

from __future__ import annotations

import pytest

from kcdsl.diagnostics import Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.yaml_nodes import Mapping, Scalar, parse_yaml
from kcdsl.source.yaml_text import mask_expressions


def read(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the texts of a flat mapping and the codes that were reported."""
    sink = Sink()
    root = parse_yaml(SourceFile("x.yaml", text), sink)
    assert isinstance(root, Mapping), [d.message for d in sink]
    values = {}
    for entry in root.entries:
        assert isinstance(entry.value, Scalar)
        assert text[entry.key.span.start : entry.key.span.end].strip("'\"") == entry.key.text
        values[entry.key.text] = entry.value.text
    return values, [d.code.id for d in sink]


@pytest.mark.parametrize(
    ("around", "expected"),
    [
        ("require: {}\n", "forall x in points(all): no_flip(model, x)"),
        ("{{require: {}}}", "forall x in ball(all, 1): no_flip(head, x)"),
        ("{{require: {}}}", "has(trace, [a, b])"),
        ("{{require: {}}}", "quantile(0.9, abs(kl)) <= (1 + f(2, 3))"),
    ],
)
def test_expressions_that_yaml_would_cut_are_read_completely(around: str, expected: str) -> None:
    values, codes = read(around.format(expected))
    assert values == {"require": expected}
    assert codes == ["KC015"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("require: quantile(0.9, kl) <= 1\n", {"require": "quantile(0.9, kl) <= 1"}),
        ("require: 'forall x in p(a): f(x, y)'\n", {"require": "forall x in p(a): f(x, y)"}),
        ("require: |-\n  forall x in p(a): f(x, y)\n", {"require": "forall x in p(a): f(x, y)"}),
        ("{a: f(, b: ')'}", {"a": "f(", "b": ")"}),
        ("{a: 'f(', b: ')'}", {"a": "f(", "b": ")"}),
        ("# forall x in p(a): f(x, y)\na: b\n", {"a": "b"}),
        ("a: b # has(trace, [x])\n", {"a": "b"}),
    ],
)
def test_plain_yaml_is_unchanged(text: str, expected: dict[str, str]) -> None:
    values, codes = read(text)
    assert values == expected
    assert codes == []


def test_replacement_keeps_offsets_and_avoids_used_characters() -> None:
    text = "\ue000\ue001 {require: f(a, b)}"
    masked = mask_expressions(text)
    assert len(masked.text) == len(text)
    assert masked.text != text
    assert masked.restore(masked.text) == text
    assert mask_expressions("a: 1").text == "a: 1"


def test_masking_is_reported_as_a_note() -> None:
    sink = Sink()
    parse_yaml(SourceFile("x.yaml", "{require: f(a, b)}"), sink)
    assert [d.severity for d in sink] == [Severity.NOTE]


def test_escaped_character_is_not_taken_as_a_replacement() -> None:
    text = 'a: "\\ue000\\U0000E001\\uE002"\nb: forall x in points(all): no_flip(model, x)\n'
    values, _ = read(text)
    assert values["a"] == "\ue000\ue001\ue002"
    assert values["b"] == "forall x in points(all): no_flip(model, x)"


def test_text_with_every_private_use_character_is_unchanged() -> None:
    every = "".join(map(chr, range(0xE000, 0xF900)))
    values, _ = read(f"a: '{every}'\nb: f(1, 2)\n")
    assert values == {"a": every, "b": "f(1, 2)"}


def test_nested_brackets_are_masked_in_time() -> None:
    deep = "(" * 100_000 + "," * 100_000 + ")" * 100_000
    assert mask_expressions(f"k: {deep}").back == {}
    assert mask_expressions("k: f((1, (2, [3])))").text.count(",") == 0
