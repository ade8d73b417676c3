"""A document with several errors reports all of them, even if it is not valid YAML."""

from __future__ import annotations

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile

HEAD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}}
"""


def found(clauses: str, tail: str = "") -> list[tuple[str, int, int]]:
    """Return code, line and column of every finding; line 1 is the first line of the clauses."""
    source, sink = SourceFile("c.yaml", f"{HEAD}clauses:\n{clauses}{tail}"), Sink()
    analysis = analyse(source, sink)
    assert analysis.program is None
    places = [source.position(d.span.start) for d in sink if d.span is not None]
    base = HEAD.count("\n") + 1
    return [(str(d.code), p.line - base, p.column) for d, p in zip(sink, places, strict=True)]


def test_unclosed_quotation_mark_hides_no_other_error() -> None:
    clauses = (
        '  A: {require: "p99(kl) <= 1, level: L2}\n'
        "  B: {require: p99(klx) <= 1, level: L2}\n"
        "  C: {require: p99(kl) <= 1, level: L9}\n"
    )
    assert found(clauses) == [("KC001", 2, 1), ("KC203", 2, 20), ("KC104", 3, 37)]


def test_five_errors_of_five_kinds() -> None:
    clauses = (
        "  A: {require: p99(kl) <= 1, level: L2\n"
        "  B: {require: p99(klx) <= 1, level: L2}\n"
        "  C:\n    require: max(tv <= 5%\n    level: L2\n"
        "  D: {require: p95(latency) <= 2 sek, level: L1}\n"
        "  E: [a, b\n"
    )
    codes = [code for code, _, _ in found(clauses)]
    assert sorted(codes) == ["KC001", "KC001", "KC010", "KC203", "KC302"]


def test_several_errors_in_one_expression() -> None:
    clauses = "  A: {require: 'p99(kl,, tv) <= 1 and mean(tv) = 5% and max(tv) && kl', level: L2}\n"
    assert found(clauses) == [("KC010", 1, 24), ("KC010", 1, 48), ("KC010", 1, 65)]


def test_error_elsewhere_is_reported_once() -> None:
    assert [c for c, _, _ in found("  A: {require: p99(kl) <= 1, level: L2}\n", "x: [\n")] == [
        "KC001"
    ]


def test_contract_with_only_broken_clauses() -> None:
    assert [c for c, _, _ in found("  A: {require: p99(kl) <= 1\n  B: {level: L2\n")] == [
        "KC001",
        "KC001",
    ]


def test_names_in_broken_clauses_are_not_reported_as_unused() -> None:
    source = SourceFile(
        "c.yaml",
        HEAD.replace("{all: {}}", "{all: {}, other: {}}") + "clauses:\n  A: {slices: [other]\n",
    )
    sink = Sink()
    analyse(source, sink)
    assert [str(d.code) for d in sink] == ["KC001"]
