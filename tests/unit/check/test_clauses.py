"""Both forms of a clause, and the meaning of each field."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics import Diagnostic, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import (
    Budget,
    Clause,
    Compare,
    EvidenceKind,
    Family,
    HasFields,
    Level,
    Metric,
    Number,
    Program,
    Quantified,
    RegionKind,
    Statistic,
)

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}, long: {where: length > 128}}
"""


def compiled(clauses: str) -> tuple[Program | None, Sink]:
    """Compile a contract with these clauses."""
    sink = Sink()
    return compile_source(SourceFile("x", HEAD + clauses), sink), sink


def program(clauses: str) -> Program:
    """Compile valid clauses."""
    found, sink = compiled(clauses)
    assert found is not None, [d.message for d in sink]
    return found


def diagnostics(body: str) -> list[Diagnostic]:
    """Return the diagnostics of a contract with one clause."""
    return list(compiled(f"clauses: {{A: {{{body}, level: L2}}}}\n")[1])


def clause(body: str) -> Clause:
    """Return the only clause of a contract."""
    (only,) = program(f"clauses: {{A: {{{body}, level: L2}}}}\n").clauses
    return only


@pytest.mark.parametrize(
    ("expression", "record"),
    [
        ("require: p99(kl) <= 0.02", "metric: p99_kl, threshold: 0.02"),
        ("require: p99(kl) <= 0.02", "metric: p99_kl, threshold: 0.02, op: '<=', delta: 0"),
        ("require: p99(kl) < 0.02", "metric: p99_kl, threshold: 2e-2 nats, op: '<', delta: 0.0"),
        (
            "require: mean(kl) <= 0.02, slices: [all, long]",
            "metric: mean_kl, threshold: 0.02, slices: [long, all]",
        ),
        ("require: mean(abs(log_ratio)) <= 0.01", "metric: mean_abs_log_ratio, threshold: 0.01"),
        ("require: mean(w_log_w) <= 0.001", "metric: mean_w_log_w, threshold: 1e-3"),
        ("require: p50(logit_l2) <= 1", "metric: p50_logit_l2, threshold: 1"),
        ("require: p95(logit_l2) <= 1", "metric: p95_logit_l2, threshold: 1"),
        ("require: p99(logit_l2) <= 1", "metric: p99_logit_l2, threshold: 1"),
        ("require: mean(top1_overlap) >= 99.5%", "metric: top1_overlap, threshold: 0.995"),
        ("require: mean(top1_overlap) >= 99.5%", "metric: mean_top1_overlap, threshold: 99.5%"),
        ("require: mean(top5_overlap) >= 0.9", "metric: top5_overlap, threshold: 0.9, op: '>='"),
        ("require: mean(top10_overlap) >= 0.9", "metric: top10_overlap, threshold: 0.9"),
        (
            "require: ece_gap <= 1%, budget: 1% of windows",
            "metric: ece_gap, threshold: 0.01, delta: 0.01, over: windows",
        ),
        (
            "require: p95(latency) <= 250 ms, budget: 5% of windows",
            "metric: p95_latency_ms, threshold: 250, delta: 5%, over: windows",
        ),
        ("require: p99(latency) <= 0.25 s", "metric: p99_latency_ms, threshold: 0.25 s"),
        ("require: peak_memory <= 80 GB", "metric: peak_memory_mb, threshold: 80000"),
        (
            "require: throughput >= 4000 tok/s, then: log",
            "metric: throughput_tok_s, threshold: 4000, remediation: log",
        ),
        ("require: reward_delta <= 0.02", "metric: reward_delta, threshold: 0.02"),
        (
            "require: mean(tv) <= 1%, budget: 2% of requests",
            "metric: mean_tv, threshold: 0.01, delta: 0.02, over: samples",
        ),
        ("require: 'has(trace, [rng_seed, request_shape])'", "require: [request_shape, rng_seed]"),
    ],
)
def test_both_forms_have_the_same_digest(expression: str, record: str) -> None:
    left = program(f"clauses: {{A: {{{expression}, level: L2}}}}\n")
    right = program(f"clauses:\n  - {{id: A, {record}, level: L2}}\n")
    assert digest(left) == digest(right)


def test_numbers_are_in_base_units() -> None:
    found = clause("require: p95(latency) <= 250 ms")
    assert found.require == Compare(
        "<=",
        Statistic("quantile", Metric("latency"), Fraction(19, 20)),
        Number(Fraction(1, 4), "s"),
    )
    found = clause("require: mean(kl) <= 2 * 0.01 + 1 / 8")
    assert isinstance(found.require, Compare)
    assert found.require.right == Number(Fraction(29, 200), "nat")


def test_families_are_derived_from_the_metrics() -> None:
    assert clause("require: mean(kl) <= 1").family is Family.NUMERICAL
    assert clause("require: ece_gap <= 1%").family is Family.STATISTICAL
    assert clause("require: peak_memory <= 1 GB").family is Family.RUNTIME
    assert clause("require: [rng_seed]").family is Family.OBSERVABILITY
    mixed = clause("require: mean(kl) <= 1 and ece_gap <= 1%, family: S")
    assert mixed.family is Family.STATISTICAL


def test_slices_of_a_clause() -> None:
    assert clause("require: mean(kl) <= 1").slices == ("all",)
    assert clause("require: mean(kl) <= 1, slices: long").slices == ("long",)
    assert clause("require: 'forall x in points(long): no_flip(model, x)'").slices == ()


def test_budgets_of_a_clause() -> None:
    assert clause("require: mean(kl) <= 1").budget is None
    assert clause("require: mean(kl) <= 1, budget: 0% of requests").budget is None
    found = clause("require: mean(kl) <= 1, budget: 1.5% of samples").budget
    assert found == Budget(Fraction(3, 200), "requests")


def test_regions_of_a_clause() -> None:
    found = clause("require: 'forall x in hull(all, 1%): no_flip(head, x, 5)'").require
    assert isinstance(found, Quantified)
    assert (found.region.kind, found.region.radius) == (RegionKind.HULL, Fraction(1, 100))
    found = clause("require: 'forall x in hull(all): no_flip(head, x)'").require
    assert isinstance(found, Quantified)
    assert found.region.radius == 0
    found = clause("require: 'forall x in rows(all, 512, 5%): no_flip(head, x)'").require
    assert isinstance(found, Quantified)
    assert (found.region.kind, found.region.radius) == (RegionKind.ROWS, Fraction(1, 20))
    assert found.region.longest == 512
    found = clause("require: 'forall x in rows(all, 1): no_flip(head, x)'").require
    assert isinstance(found, Quantified)
    assert (found.region.longest, found.region.radius) == (1, Fraction(0))


@pytest.mark.parametrize(
    ("region", "code", "at"),
    [
        ("rows(all)", "KC206", "rows(all)"),
        ("rows(all, 1, 2, 3)", "KC206", "rows(all, 1, 2, 3)"),
        ("rows(all, 5%)", "KC206", "5%"),
        ("rows(all, 2.5)", "KC206", "2.5"),
        ("rows(all, 12 ms)", "KC206", "12 ms"),
        ("rows(all, all)", "KC206", "all"),
        ("rows(all, 0)", "KC303", "0"),
        ("rows(all, -4)", "KC303", "-4"),
        ("rows(all, 1048577)", "KC303", "1048577"),
        ("rows(all, 64, -1%)", "KC303", "-1%"),
        ("rows(none, 64)", "KC202", "none"),
        ("row(all, 64)", "KC207", "row"),
    ],
)
def test_invalid_regions_of_rows_are_refused(region: str, code: str, at: str) -> None:
    found = diagnostics(f"require: 'forall x in {region}: no_flip(head, x)'")
    assert [d.code.id for d in found if d.severity is Severity.ERROR] == [code]
    (one,) = (d for d in found if d.code.id == code)
    assert one.span is not None
    assert one.source is not None
    assert one.source.text[one.span.start : one.span.end] == at


def test_regions_of_rows_need_a_block() -> None:
    found = diagnostics("require: 'forall x in rows(all, 64): no_flip(model, x)'")
    assert [d.code.id for d in found if d.severity is Severity.ERROR] == ["KC473"]


@pytest.mark.parametrize("version", ["true", "[2]", "{a: 3}", "1.5", '"1"'])
def test_only_the_number_of_the_language_is_a_version(version: str) -> None:
    sink, text = Sink(), f"{HEAD}clauses: {{A: {{require: p99(kl) <= 0.02, level: L2}}}}\n"
    text = text.replace("kcdsl: 1", f"kcdsl: {version}")
    assert compile_source(SourceFile("x", text), sink) is None
    assert [d.code.id for d in sink] == ["KC105"]


def test_second_name_of_a_clause_is_refused() -> None:
    named = "metric: p99_kl, threshold: 0.02"
    assert diagnostics(f"id: A, {named}") == []
    for other in ("B", "[A]"):
        (found,) = diagnostics(f"id: {other}, {named}")
        assert found.code.id == "KC106", found


@pytest.mark.parametrize("more", ["metric: mean_kl", "threshold: 0.001", "op: '<'", "op: maybe"])
def test_requirement_beside_the_fields_of_a_record_is_refused(more: str) -> None:
    (found,) = diagnostics(f"require: p99(kl) <= 0.02, {more}")
    assert found.code.id == "KC106", found


@pytest.mark.parametrize("op", ["", ", op: '<='", ", op: '<'"])
def test_stated_operator_is_no_override_of_the_direction(op: str) -> None:
    (found,) = diagnostics(f"metric: min_kl, threshold: 0.02{op}")
    assert found.code.id == "KC507"


def test_remaining_fields_of_a_clause() -> None:
    found = clause("require: [rng_seed], then: rollback")
    assert (found.action, found.level, found.require) == (
        "rollback",
        Level.L2,
        HasFields(("rng_seed",)),
    )
    found = clause("require: mean(kl) <= 1, evidence: sample")
    assert found.evidence is EvidenceKind.SAMPLE
    assert found.action is None
    assert found.text == "mean(kl) <= 1"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("require: p99(kl) <= 1, budget: 1% of requests", "KC501"),
        ("require: [rng_sead]", "KC208"),
        ("metric: mean_kl, threshold: 1, op: '>='", "KC213"),
    ],
)
def test_warnings_of_clauses(body: str, code: str) -> None:
    found, sink = compiled(f"clauses: {{A: {{{body}, level: L2}}}}\n")
    assert found is not None
    assert [(d.code.id, d.severity) for d in sink] == [(code, Severity.WARNING)]


def test_override_allows_the_other_direction() -> None:
    found = clause("require: p95(latency) >= 1 ms, override: direction")
    assert isinstance(found.require, Compare)
    assert found.require.op == ">="


def test_all_errors_are_reported_at_once() -> None:
    found, sink = compiled(
        "clauses:\n"
        "  A: {require: p99(kll) <= 0.02, level: L4}\n"
        "  B: {require: mean(kl) <= 1 ms, slices: [lnog], level: L1, then: gard}\n"
        "  C: {metric: p99_kl, threshold: 1, level: L1, evidance: proof}\n"
    )
    assert found is None
    assert sorted(d.code.id for d in sink) == [
        "KC101",
        "KC104",
        "KC202",
        "KC203",
        "KC209",
        "KC301",
    ]


def test_one_error_gives_one_diagnostic() -> None:
    _, sink = compiled(
        "clauses: {A: {require: mean(abs(kll)) + 3 <= 1 and mean(tv) <= 2%, level: L1}}\n"
    )
    assert [d.code.id for d in sink] == ["KC203"]


def test_unknown_slice_declarations_do_not_cascade() -> None:
    sink = Sink()
    text = HEAD.replace("{where: length > 128}", "{where: length >}")
    found = compile_source(
        SourceFile("x", text + "clauses: {A: {require: mean(kl) <= 1, slices: [long], level: L1}}"),
        sink,
    )
    assert found is None
    assert [d.code.id for d in sink] == ["KC010"]
