"""A changed contract on a trace gets the verdicts of a new evaluation, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcdsl.diagnostics.model import Refusal
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest
from kcdsl.ir.tables import expand_tables, gaps
from kcdsl.ir.terms import (
    Clause,
    Compare,
    Constants,
    EvidenceKind,
    Family,
    FieldTest,
    Metric,
    Program,
    Slice,
    Statistic,
    TableRow,
    TableValue,
    ThresholdTable,
)
from kcdsl.verdict.report import Report
from kcdsl_backends.empirical.collection.context import spoiled_slices
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_backends.empirical.questions.replay import evidence_for
from kcdsl_backends.empirical.table.trace import Trace
from kcdsl_backends.requests import Request, RequestFile, select
from tests.support.evaluation import Evaluation, evaluate

SHORT = FieldTest("length", "<=", Fraction(4))
SLICES = {
    "all": Slice("all"),
    "short": Slice("short", where=SHORT),
    "more": Slice("more", data="more.jsonl"),
    "empty": Slice("empty", where=FieldTest("length", ">", Fraction(99))),
}
TIMED = frozenset({"latency", "peak_memory", "determinism"})


def _requests(file: str, lengths: tuple[int, ...]) -> RequestFile:
    rows = tuple(
        Request(
            f"{file}:{i}",
            str(i),
            tuple((3 * i + 5 * j + i * j + len(file)) % 16 for j in range(length)),
            {"length": Fraction(length)},
            i + 1,
        )
        for i, length in enumerate(lengths)
    )
    return RequestFile(file, "0" * 64, rows, SourceFile(file, "{}\n" * len(rows)))


FILES = {
    "rows.jsonl": _requests("rows.jsonl", (3, 4, 5, 6) * 3),
    "more.jsonl": _requests("more.jsonl", (9,) * 6),
}


def _kernels(lab: Any) -> Mapping[str, Callable[[tuple[int, ...]], Any]]:
    """Return kernels that drift, and kernels that fail: on all requests, or on some."""
    small = lab.drifting(0.02)

    def failing(tokens: tuple[int, ...]) -> Any:
        if len(tokens) == 9 and tokens[1] == FILES["more.jsonl"].requests[0].tokens[1]:
            raise RuntimeError("out of memory")
        return small(tokens)

    def holed(tokens: tuple[int, ...]) -> Any:
        out = small(tokens)
        return torch.where(torch.arange(len(tokens))[:, None] == 7, torch.nan, out)

    return {
        "drifts": small,
        "is hot": lambda tokens: small(tokens) / 1.3,
        "is hot where short": lambda tokens: small(tokens) / (1.3 if len(tokens) < 7 else 1),
        "is hot where long": lambda tokens: small(tokens) / (1 if len(tokens) < 7 else 1.3),
        "fails once": failing,
        "has NaN where long": holed,
    }


def evaluated(lab: Any, kernel: str, program: Program) -> Evaluation:
    """Return the evaluation of a program, with slices and buckets selected as the backend does."""
    chosen = expand_tables(program).slices

    def rows(slice_: Slice) -> tuple[Request, ...]:
        return select(FILES[slice_.data or "rows.jsonl"], slice_)

    setting = lab.setting(infer=lab.kernel(_kernels(lab)[kernel]), certified=1e6, seconds=0.0)
    return evaluate(
        replace(
            setting,
            program=program,
            files=FILES,
            slices={s.name: rows(s) for s in chosen},
            spoiled=spoiled_slices((gap, rows(gap.slice)) for gap in gaps(program)),
            contract={
                "name": program.name,
                "version": program.version,
                "digest": f"sha256:{digest(program)}",
            },
        )
    )


# --- contracts -----------------------------------------------------------------------------------

_SUBSETS = st.lists(
    st.sampled_from(["all", "short", "more", "more", "empty"]), min_size=1, max_size=2, unique=True
)
_LIMITS = st.sampled_from(["0", "1/100000000", "1/10000", "1/1000", "1/100", "1", "3600"])
_OF_TOKENS = st.tuples(
    st.sampled_from(["max", "min", "mean", "quantile"]), st.sampled_from(["kl", "tv", "js", "k3"])
)
_OF_SLICES = st.tuples(
    st.just("aggregate"),
    st.sampled_from(["ess_frac", "failure_rate", "peak_memory", "determinism", "grad_bias"]),
)
_OF_RUNS = st.tuples(st.sampled_from(["max", "quantile"]), st.just("latency"))


@st.composite
def clauses(draw: st.DrawFn, id: str, lab: Any) -> Clause:
    kind, name = draw(st.one_of(_OF_TOKENS, _OF_TOKENS, _OF_SLICES, _OF_RUNS))
    q = draw(st.sampled_from(["1/2", "9/10"])) if kind == "quantile" else None
    budget = None
    if name in ("kl", "tv") and kind != "mean" and draw(st.booleans()):
        budget = (draw(st.sampled_from(["1/4", "1/2"])), "requests")
    kinds = [None, None, EvidenceKind.SAMPLE, EvidenceKind.CENSUS, EvidenceKind.PROOF]
    found: Clause = lab.clause(
        lab.statistic(kind, name, q),
        draw(st.sampled_from(["<=", "<=", ">="])),
        draw(_LIMITS),
        id=id,
        slices=tuple(draw(_SUBSETS)),
        family=Family.RUNTIME if name in {*TIMED, "failure_rate"} else Family.NUMERICAL,
        budget=budget,
        evidence=draw(st.sampled_from(kinds)),
    )
    return found


@st.composite
def contracts(draw: st.DrawFn, lab: Any) -> Program:
    count = draw(st.integers(1, 3))
    chosen = [draw(clauses(f"C{i}", lab)) for i in range(count)]
    tables: tuple[ThresholdTable, ...] = ()
    if draw(st.booleans()):
        worst = Compare("<=", Statistic("max", Metric("kl")), TableValue("limits", "nat"))
        chosen.append(lab.clause(worst, id="T", slices=("all",)))
        otherwise = draw(st.sampled_from([None, Fraction(1), Fraction(1, 10**7)]))
        rows = (TableRow(SHORT, Fraction(draw(_LIMITS))),)
        tables = (ThresholdTable("limits", "nat", rows, otherwise),)
    named = {name for clause in chosen for name in clause.slices}
    more = draw(st.lists(st.sampled_from(sorted(SLICES)), max_size=2))
    order = draw(st.permutations(sorted(named | set(more))))
    constants = Constants(
        temperature=draw(st.sampled_from([Fraction(1)] * 5 + [Fraction(1, 2)])),
        advantage_max=draw(st.sampled_from([Fraction(1), Fraction(1), Fraction(2)])),
        score_norm_max=Fraction(1),
    )
    program: Program = lab.program(*chosen, constants=constants)
    return replace(program, slices=tuple(SLICES[name] for name in order), tables=tables)


@st.composite
def changed(draw: st.DrawFn, clause: Clause, lab: Any) -> Clause:
    """Return a clause on the same values: other slices, limit, budget, kind of evidence."""
    other = draw(clauses(clause.id, lab))
    require = clause.require
    if isinstance(require, Compare) and isinstance(other.require, Compare) and clause.id != "T":
        require = replace(require, right=other.require.right)
    return replace(
        clause,
        require=require,
        slices=draw(st.sampled_from([clause.slices, clause.slices[:1], other.slices])),
        evidence=draw(st.sampled_from([clause.evidence, other.evidence])),
    )


@st.composite
def changes(draw: st.DrawFn, lab: Any) -> tuple[Program, Program]:
    """Draw a contract, and a changed one that mostly reads the same values."""
    before, other = draw(contracts(lab)), draw(contracts(lab))
    left = draw(st.lists(st.sampled_from(before.clauses), min_size=1, unique=True))
    found = [draw(changed(clause, lab)) for clause in left]
    if draw(st.integers(0, 3)) == 0:
        found.append(draw(clauses("NEW", lab)))
    speaks = any(clause.id == "T" for clause in found)
    tables = draw(st.sampled_from([before.tables, other.tables or before.tables]))
    named = {name for clause in found for name in clause.slices}
    order = [s.name for s in draw(st.sampled_from([before, other])).slices]
    if draw(st.booleans()):
        order = [name for name in order if name in named]
    order += sorted(named - set(order))
    constants = draw(st.sampled_from([before.constants, before.constants, other.constants]))
    return before, replace(
        before,
        version="1.1.0",
        clauses=tuple(found),
        tables=tables if speaks else (),
        slices=tuple(SLICES[name] for name in order),
        constants=constants,
    )


# --- the property --------------------------------------------------------------------------------


def _said(report: Report) -> list[tuple[str, str, str, str]]:
    return [(r.clause, r.slice, r.metric, type(r.verdict).__name__) for r in report.clauses]


def _agree(lab: Any, kernel: str, before: Program, after: Program) -> None:
    """Compare the verdicts of a trace under a contract with those of a new evaluation."""
    try:
        first = evaluated(lab, kernel, before)
    except Refusal:
        return
    try:
        found = conclude(evidence_for(after, Trace(first.evidence, first.report.to_json(), "")))
    except Refusal:
        return
    own = evaluated(lab, kernel, after).report
    assert found.deferred == own.deferred
    for row, wanted in zip(_said(found), _said(own), strict=True):
        assert row[:3] == wanted[:3]
        if any(name in row[2] for name in TIMED):  # times differ, and so may their verdicts
            assert (row[3] == "InvalidEvidence") == (wanted[3] == "InvalidEvidence")
        else:
            assert row == wanted


@pytest.mark.full
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_trace_gives_the_verdicts_of_an_evaluation_or_a_refusal(
    lab: Any, data: st.DataObject
) -> None:
    kernel = data.draw(st.sampled_from(sorted(_kernels(lab))))
    before, after = data.draw(changes(lab))
    _agree(lab, kernel, before, after)
