"""A changed contract on the evidence of a trace: what it may change, and what it may not."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.buckets import expand_tables, gaps
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import (
    Compare,
    Constants,
    EvidenceKind,
    FieldTest,
    KernelRef,
    Metric,
    Program,
    Slice,
    Statistic,
    TableRow,
    TableValue,
    ThresholdTable,
)
from kcdsl_backends.empirical.conclusion import conclude
from kcdsl_backends.empirical.evaluation import Evaluation, evaluate
from kcdsl_backends.empirical.setting import spoiled_slices
from kcdsl_backends.empirical.traces.changed import under
from kcdsl_backends.empirical.traces.file import Trace
from kcdsl_backends.requests import select

SHORT = FieldTest("length", "<=", Fraction(4))


def lengths(lab: Any) -> tuple[Any, ...]:
    return tuple(
        replace(request, fields={"length": Fraction(3 + i % 4)}, tokens=request.tokens[: 3 + i % 4])
        for i, request in enumerate(lab.requests(12))
    )


def of(lab: Any, program: Program) -> Evaluation:
    """Return the evaluation of a program, its slices and buckets selected as the backend does."""
    setting = lab.setting(rows=lengths(lab), infer=lab.kernel(lab.drifting(0.01)))
    file = setting.files["rows.jsonl"]
    expanded = expand_tables(program)
    return evaluate(
        replace(
            setting,
            program=program,
            slices={s.name: select(file, s) for s in expanded.slices},
            spoiled=spoiled_slices((gap, select(file, gap.slice)) for gap in gaps(program)),
            contract={
                "name": program.name,
                "version": program.version,
                "digest": f"sha256:{digest(program)}",
            },
        )
    )


def tabled(lab: Any, *rows: TableRow, otherwise: str | None = "1/2") -> Program:
    worst = Compare("<=", Statistic("max", Metric("kl")), TableValue("limits", "nat"))
    table = ThresholdTable(
        "limits", "nat", rows, None if otherwise is None else Fraction(otherwise)
    )
    return replace(lab.program(lab.clause(worst, id="T")), tables=(table,))


def trace_of(found: Evaluation) -> Trace:
    return Trace(found.evidence, found.report.to_json(), "")


def test_the_same_contract_gives_the_same_report(lab: Any) -> None:
    program = tabled(lab, TableRow(SHORT, Fraction(1, 10)))
    found = of(lab, program)
    assert conclude(under(program, trace_of(found))).dumps() == found.report.dumps()


def test_other_thresholds_are_those_of_an_evaluation_of_their_own(lab: Any) -> None:
    kl = lab.statistic("max", "kl")
    found = of(lab, lab.program(lab.clause(kl, limit="1", id="A"), lab.clause(kl, id="B")))
    changed = lab.program(
        lab.clause(kl, limit="1/1000000000", id="A", budget=("1/3", "requests")),
        lab.clause(kl, ">=", "0", id="C", slices=("few",), evidence=EvidenceKind.SAMPLE),
    )
    report = conclude(under(changed, trace_of(found)))
    assert report.dumps() == of(lab, changed).report.dumps()
    assert {row.clause for row in report.clauses} == {"A", "C"}
    assert report.verdict == "violated"
    assert found.report.verdict == "held"


@pytest.mark.parametrize("otherwise", ["1/2", None])
def test_other_tables_select_their_buckets_from_the_trace(lab: Any, otherwise: str | None) -> None:
    """Without a value for all others, requests of no row spoil every bucket, here as there."""
    found = of(lab, tabled(lab, TableRow(SHORT, Fraction(1, 10))))
    longer = TableRow(FieldTest("length", "<=", Fraction(5)), Fraction(1, 10**9))
    changed = tabled(lab, TableRow(SHORT, Fraction(1)), longer, otherwise=otherwise)
    report, own = conclude(under(changed, trace_of(found))), of(lab, changed).report
    assert replace(report, prechecks=()).dumps() == replace(own, prechecks=()).dumps()
    assert report.verdict == ("violated" if otherwise else "invalid_evidence")


def _refused(program: Program, found: Evaluation) -> str:
    with pytest.raises(Refusal) as refused:
        under(program, trace_of(found))
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code.id == "KC632"
    assert diagnostic.help
    return diagnostic.message


def test_what_the_trace_does_not_have_is_refused_by_name(lab: Any) -> None:
    clause = lab.clause(lab.statistic("max", "kl"))
    program = lab.program(clause)
    found = of(lab, program)

    def with_metric(name: str, **more: Any) -> Program:
        changed: Program = lab.program(lab.clause(lab.statistic("max", name), **more))
        return changed

    assert "reads `js`, which was not measured" in _refused(with_metric("js"), found)
    proved = lab.program(
        clause, lab.clause(lab.statistic("max", "js"), evidence=EvidenceKind.PROOF)
    )
    assert under(proved, trace_of(found)).program == proved
    other = KernelRef("torch.sdpa", ())
    assert "inference kernel" in _refused(replace(program, infer=other), found)
    assert "training kernel" in _refused(replace(program, train=other), found)
    model = replace(program.model, checkpoint="other.safetensors")
    assert "the model" in _refused(replace(program, model=model), found)
    warm = Constants(temperature=Fraction(1, 2))
    assert "temperature" in _refused(replace(program, constants=warm), found)
    moved = replace(program, data="other.jsonl")
    assert "the slice `all`" in _refused(moved, found)
    narrow = replace(program, slices=(Slice("all", where=SHORT), Slice("few")))
    assert "the slice `all`" in _refused(narrow, found)


def test_a_slice_that_was_not_selected_is_left_out(lab: Any) -> None:
    kl = lab.statistic("max", "kl")
    program = lab.program(lab.clause(kl, id="A"), lab.clause(kl, id="F", slices=("few",)))
    found = of(lab, program)
    only = replace(found.evidence, slices={"all": found.evidence.slices["all"]})
    report = conclude(under(program, Trace(only, {}, "")))
    assert {row.clause for row in report.clauses} == {"A"}
    assert report.deferred == {"F": "no slice of it was selected"}


def test_failures_are_counted_whatever_was_measured(lab: Any) -> None:
    found = of(lab, lab.program(lab.clause(lab.statistic("max", "kl"))))
    changed = lab.program(lab.clause(lab.statistic("aggregate", "failure_rate"), limit="0"))
    report = conclude(under(changed, trace_of(found)))
    assert report.clauses[0].value == 0.0
