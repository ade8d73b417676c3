"""A changed contract on the evidence of a trace: admitted and refused changes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.canonical import digest
from kcdsl.ir.tables import expand_tables, gaps
from kcdsl.ir.terms import (
    Clause,
    Compare,
    Constants,
    Drift,
    EvidenceKind,
    Family,
    FieldTest,
    KernelRef,
    Metric,
    Norm,
    Number,
    Program,
    Quantified,
    Region,
    RegionKind,
    Slice,
    Statistic,
    TableRow,
    TableValue,
    ThresholdTable,
)
from kcdsl_backends.empirical.collection.context import spoiled_slices
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_backends.empirical.metrics.user import functions_record, load_functions
from kcdsl_backends.empirical.questions.replay import evidence_for, same_functions
from kcdsl_backends.empirical.table.trace import Trace
from kcdsl_backends.requests import select
from tests.support.evaluation import Evaluation, evaluate

SHORT = FieldTest("length", "<=", Fraction(4))


def lengths(lab: Any) -> tuple[Any, ...]:
    return tuple(
        replace(request, fields={"length": Fraction(3 + i % 4)}, tokens=request.tokens[: 3 + i % 4])
        for i, request in enumerate(lab.requests(12))
    )


def of(lab: Any, program: Program) -> Evaluation:
    """Return the evaluation of a program, with slices and buckets selected as the backend does."""
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


def test_unchanged_contract_gives_the_same_report(lab: Any) -> None:
    program = tabled(lab, TableRow(SHORT, Fraction(1, 10)))
    found = of(lab, program)
    assert conclude(evidence_for(program, trace_of(found))).dumps() == found.report.dumps()


def test_changed_thresholds_equal_a_new_evaluation(lab: Any) -> None:
    kl = lab.statistic("max", "kl")
    found = of(lab, lab.program(lab.clause(kl, limit="1", id="A"), lab.clause(kl, id="B")))
    changed = lab.program(
        lab.clause(kl, limit="1/1000000000", id="A", budget=("1/3", "requests")),
        lab.clause(kl, ">=", "0", id="C", slices=("few",), evidence=EvidenceKind.SAMPLE),
    )
    report = conclude(evidence_for(changed, trace_of(found)))
    assert report.dumps() == of(lab, changed).report.dumps()
    assert {row.clause for row in report.clauses} == {"A", "C"}
    assert report.verdict == "violated"
    assert found.report.verdict == "held"


@pytest.mark.parametrize("otherwise", ["1/2", None])
def test_changed_tables_select_buckets_from_the_trace(lab: Any, otherwise: str | None) -> None:
    """Without `otherwise`, requests outside every row invalidate all buckets."""
    found = of(lab, tabled(lab, TableRow(SHORT, Fraction(1, 10))))
    longer = TableRow(FieldTest("length", "<=", Fraction(5)), Fraction(1, 10**9))
    changed = tabled(lab, TableRow(SHORT, Fraction(1)), longer, otherwise=otherwise)
    report, own = conclude(evidence_for(changed, trace_of(found))), of(lab, changed).report
    assert replace(report, prechecks=()).dumps() == replace(own, prechecks=()).dumps()
    assert report.verdict == ("violated" if otherwise else "invalid_evidence")


def _refused(program: Program, found: Evaluation) -> str:
    with pytest.raises(Refusal) as refused:
        evidence_for(program, trace_of(found))
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code.id == "KC632"
    assert diagnostic.help
    return diagnostic.message


def test_values_missing_in_the_trace_are_refused_by_name(lab: Any) -> None:
    clause = lab.clause(lab.statistic("max", "kl"))
    program = lab.program(clause)
    found = of(lab, program)

    def with_metric(name: str, **more: Any) -> Program:
        changed: Program = lab.program(lab.clause(lab.statistic("max", name), **more))
        return changed

    assert "reads `js`, which was not measured" in _refused(with_metric("js"), found)
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


def test_trace_must_contain_metrics_that_can_violate_a_proof(lab: Any) -> None:
    """An evaluation measures `js` and may report a violation; a trace without it must not pass."""
    kl = lab.clause(lab.statistic("max", "kl"), id="K")
    found = of(lab, lab.program(kl))

    def with_proof(name: str) -> Program:
        proof = lab.statistic("max", name)
        changed: Program = lab.program(
            kl, lab.clause(proof, limit="0", id="P", evidence=EvidenceKind.PROOF)
        )
        return changed

    assert of(lab, with_proof("js")).report.verdict == "violated"
    assert "reads `js`, which was not measured" in _refused(with_proof("js"), found)
    report = conclude(evidence_for(with_proof("tv"), trace_of(found)))
    assert report.verdict == "violated"
    nothing_gives = conclude(evidence_for(with_proof("reward_delta"), trace_of(found)))
    assert set(nothing_gives.deferred) == {"P"}


def test_slices_must_have_the_requests_of_the_preconditions(lab: Any) -> None:
    """Preconditions check the longest requests first; other requests would be checked otherwise."""
    kl = lab.statistic("max", "kl")
    long = Slice("long", where=FieldTest("length", ">=", Fraction(5)))
    short = Slice("short", where=SHORT)
    clauses = (lab.clause(kl, id="L", slices=("long",)), lab.clause(kl, id="S", slices=("short",)))
    whole = replace(lab.program(*clauses), slices=(long, short))
    found = of(lab, whole)
    less = replace(lab.program(clauses[1]), slices=(short,))
    assert "leave out 6 of the 12 requests" in _refused(less, found)
    more = replace(whole, slices=(long, short, Slice("few")))
    assert "the slice `few` of the contract is not in the trace" in _refused(more, found)
    turned = replace(whole, slices=(short, long))
    assert conclude(evidence_for(turned, trace_of(found))).verdict == "held"
    every = replace(lab.program(lab.clause(kl), *clauses), slices=(Slice("all"), long, short))
    assert conclude(
        evidence_for(replace(every, clauses=every.clauses[:1]), trace_of(of(lab, every)))
    )


def test_changed_first_requests_are_refused(lab: Any) -> None:
    kl = lab.clause(lab.statistic("max", "kl"))
    third = FieldTest("length", "==", Fraction(6))
    first, last = Slice("all"), Slice("few", where=third)
    program = replace(lab.program(kl), slices=(first, last))
    rows = tuple(replace(r, fields={"length": Fraction(6 if i > 7 else 5)}) for i, r in
                 enumerate(lab.requests(12)))  # fmt: skip
    setting = lab.setting(rows=rows)
    file = setting.files["rows.jsonl"]
    found = evaluate(
        replace(setting, program=program, slices={s.name: select(file, s) for s in (first, last)})
    )
    turned = replace(program, slices=(last, first))
    assert "stand in another order" in _refused(turned, found)


def test_untimed_requests_give_invalid_evidence(lab: Any) -> None:
    """Only three requests were timed; a clause on all of them lacks runs of the others."""

    def runtime(name: str, *slices: str, kind: str = "aggregate") -> Clause:
        clause: Clause = lab.clause(
            lab.statistic(kind, name), "<=", "1000000000000", id=name, slices=slices,
            family=Family.RUNTIME,
        )  # fmt: skip
        return clause

    few = lab.program(runtime("latency", "few", kind="max"), runtime("peak_memory", "few"))
    all_ = lab.program(runtime("latency", "all", kind="max"), runtime("peak_memory", "all"))
    setting = lab.setting(seconds=0.0)
    timed = evaluate(replace(setting, program=few))
    assert "17 requests, rows.jsonl:3 first, were not timed" in _refused(all_, timed)
    whole = evaluate(replace(setting, program=all_))
    assert "with 17 more requests than the contract times" in _refused(few, whole)
    latency = replace(few, clauses=few.clauses[:1])
    (row,) = conclude(evidence_for(latency, trace_of(whole))).clauses
    assert row.n < len(whole.evidence.timing.runs)


def test_failures_of_unread_metrics_are_ignored(lab: Any) -> None:
    """A request may have failed in a metric that only the original contract reads."""
    failures = lab.clause(lab.statistic("aggregate", "failure_rate"), limit="0", id="F")
    kl = lab.clause(lab.statistic("max", "kl"), id="K")
    js = lab.clause(lab.statistic("max", "js"), id="J")

    def broken(tokens: tuple[int, ...]) -> Any:
        if tokens == lab.requests(20)[4].tokens:
            raise RuntimeError("out of memory")
        return lab.base(tokens)

    found = lab.evaluate(failures, kl, js, infer=lab.kernel(broken))
    message = _refused(lab.program(failures, kl), found)
    assert "the request rows.jsonl:4 failed when `js` was measured too" in message
    again = conclude(evidence_for(lab.program(js, kl, failures), trace_of(found)))
    assert again.verdict == "violated"


def test_blocks_without_a_cross_check_are_refused(lab: Any) -> None:
    def drift(block: str) -> Clause:
        term = Norm("inf", Drift(block, "x"))
        clause: Clause = lab.clause(
            Quantified("forall", "x", Region(RegionKind.BALL, "all", Fraction(1)),
                       Compare("<=", term, Number(Fraction(1)))), id="D", slices=(),
        )  # fmt: skip
        return clause

    kl = lab.clause(lab.statistic("max", "kl"))
    found = lab.evaluate(kl, certified=1.0)
    assert [check.block for check in found.evidence.crosschecks] == ["attn_0"]
    assert "block `mlp_0` was not compared" in _refused(lab.program(kl, drift("mlp_0")), found)
    same = conclude(evidence_for(lab.program(kl, drift("attn_0")), trace_of(found)))
    assert set(same.deferred) == {"D"}


def test_tables_with_equal_rows_keep_their_selection(lab: Any) -> None:
    """Also where the trace alone could not select again: it lacks the field `length`."""
    found = of(lab, tabled(lab, TableRow(SHORT, Fraction(1, 10)), otherwise=None))
    assert found.report.verdict == "invalid_evidence"
    bare = replace(
        found.evidence,
        requests=tuple(replace(r, fields={}) for r in found.evidence.requests),
    )
    changed = tabled(lab, TableRow(SHORT, Fraction(9)), otherwise=None)
    report = conclude(evidence_for(changed, Trace(bare, {}, "")))
    assert report.verdict == "invalid_evidence"
    assert report.clauses[0].threshold == 9.0


def test_unselected_slice_is_omitted(lab: Any) -> None:
    kl = lab.statistic("max", "kl")
    program = lab.program(lab.clause(kl, id="A"), lab.clause(kl, id="F", slices=("few",)))
    found = of(lab, program)
    only = replace(found.evidence, slices={"all": found.evidence.slices["all"]})
    report = conclude(evidence_for(program, Trace(only, {}, "")))
    assert {row.clause for row in report.clauses} == {"A"}
    assert report.deferred == {"F": "no slice of it was selected"}


def test_failures_are_counted_for_any_metric(lab: Any) -> None:
    found = of(lab, lab.program(lab.clause(lab.statistic("max", "kl"))))
    changed = lab.program(lab.clause(lab.statistic("aggregate", "failure_rate"), limit="0"))
    report = conclude(evidence_for(changed, trace_of(found)))
    assert report.clauses[0].value == 0.0


@pytest.mark.full
def test_edited_metric_functions_are_refused(lab: Any, tmp_path: Path) -> None:
    """The contract would be compiled with the new file, but the values come from the old one."""
    text = (
        "from kcdsl import metric\n\n\n"
        '@metric(family="numerical", unit="1", better="lower", counted="request", needs=["tokens"])'
        "\ndef gap(tokens):\n    return len(tokens)\n"
    )
    (tmp_path / "kcdsl.toml").write_text('metrics = ["own.py"]\n')
    (tmp_path / "own.py").write_text(text)
    (tmp_path / "contract.yaml").write_text(
        "kcdsl: 1\ncontract: c\nversion: 1\nmodel: {checkpoint: m, architecture: llama}\n"
        "kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}\nslices: {all: {}}\n"
        "clauses:\n  A: {require: mean(gap) <= 3, level: L1}\n"
    )
    program = load_program(tmp_path / "contract.yaml")
    evidence = of(lab, lab.program(lab.clause(lab.statistic("max", "kl")))).evidence
    record = functions_record(load_functions(program, tmp_path))
    known = replace(evidence, environment={**evidence.environment, **record})
    same_functions(program, tmp_path, known)
    for edited in (text + "# another line\n", None):
        (tmp_path / "own.py").write_text(edited or text)
        with pytest.raises(Refusal, match="the file of the metric `gap`"):
            same_functions(program, tmp_path, known if edited else evidence)
    same_functions(lab.program(), tmp_path, evidence)
