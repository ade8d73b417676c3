"""Types of request fields, inferred from predicates."""

from __future__ import annotations

import pytest

from kcdsl.check.compile import analyse
from kcdsl.check.expressions.fields import field_sorts
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: rows.jsonl
slices:
"""
TAIL = "clauses: {A: {require: mean(kl) <= 1, slices: [a], level: L1}}\n"


def found(*slices: str) -> list[tuple[str, str]]:
    """Return code and marked text of every finding about the predicates a, b, c …"""
    lines = [f"  {'abcdef'[i]}: {{{text}}}\n" for i, text in enumerate(slices)]
    source, sink = SourceFile("x", HEAD + "".join(lines) + TAIL), Sink()
    analyse(source, sink)
    return [
        (d.code.id, source.text[d.span.start : d.span.end] if d.span is not None else "")
        for d in sink
    ]


@pytest.mark.parametrize(
    "where",
    [
        'category == "safety"',
        "score > 0.5 and score != 1",
        "flagged == true or flagged != false",
        "kind in ['a', 'b', \"c\"]",
        "not (length <= 128)",
        "length in [1, 2, 3]",
        'category == "a" implies score >= -1e-3',
        "5 <= score",
    ],
)
def test_consistent_field_types_are_accepted(where: str) -> None:
    assert (
        found(
            f"where: {where!r}" if "'" not in where else f'where: "{where}"'.replace('"c"', "'c'")
        )
        == []
    )


@pytest.mark.parametrize(
    ("slices", "at"),
    [
        (["where: score > 5", "where: 'score == \"5\"'"], 'score == "5"'),
        (["where: 'score == \"5\"'", "where: score > 5"], "score > 5"),
        (["where: 'score == \"5\" or score == 5'"], "score == 5"),
        (["where: flag == true", "where: flag == 1"], "flag == 1"),
        (["where: 'flag == \"true\"'", "where: flag == true"], "flag == true"),
        (["where: 'kind in [1, \"a\"]'"], '"a"'),
        (["where: not (kind == 1)", "where: 'kind != \"1\"'"], 'kind != "1"'),
        (["where: 'length == \"5\"'"], 'length == "5"'),
        (["where: length == true"], "length == true"),
        (["data: rows.jsonl, where: x == 1", "where: x == true"], "x == true"),
        (["data: o.jsonl, where: x == 1", "data: o.jsonl, where: x == true"], "x == true"),
    ],
)
def test_field_with_two_types_is_reported(slices: list[str], at: str) -> None:
    assert found(*slices) == [("KC217", at)]


def test_fields_of_different_files_are_different_fields() -> None:
    assert found("where: x == 1", "data: other.jsonl, where: x == true") == []


def test_first_use_of_a_field_is_shown() -> None:
    source = SourceFile(
        "x", HEAD + "  a: {where: score > 5}\n  b: {where: \"score == '5'\"}\n" + TAIL
    )
    sink = Sink()
    analysis = analyse(source, sink)
    (diagnostic,) = sink
    (label,) = diagnostic.labels
    assert source.text[label.span.start : label.span.end] == "score > 5"
    assert label.text == "a number here"
    assert dict(field_sorts(analysis.slices, "rows.jsonl")) == {"length": "Int", "score": "Real"}


def test_table_uses_one_type_of_field() -> None:
    table = """tables:
  t:
    unit: nats
    rows:
      - {where: 'kind == "a"', value: 1}
      - {where: kind == 1, value: 2}
    otherwise: 3
clauses: {A: {require: mean(kl) <= table(t), slices: [a], level: L1}}
"""
    source, sink = SourceFile("x", HEAD + "  a: {}\n" + table), Sink()
    analyse(source, sink)
    assert "KC217" in [d.code.id for d in sink]
