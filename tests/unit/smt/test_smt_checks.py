"""Solver checks of slices, levels, actions and parts of requirements, on source contracts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics import Diagnostic, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.terms import Program
from kcdsl_backends.smt import BACKEND
from kcdsl_backends.smt.claims import claims_of, components
from kcdsl_backends.smt.solver import Clock, Outcome, Solver

HEAD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.sdpa, numerics: {preset: torch-eager}}
data: d.jsonl
slices:
  all: {}
  long: {where: "length > 80"}
  chat: {where: 'category == "chat"'}
  code: {where: 'category == "code"'}
"""


def compiled(clauses: str, head: str = HEAD, tail: str = "") -> tuple[Program, SourceFile]:
    source, sink = SourceFile("c.kc.yaml", f"{head}clauses:\n{clauses}\n{tail}"), Sink()
    program = compile_source(source, sink, Path())
    assert program is not None, [d.message for d in sink]
    return program, source


def found(clauses: str, code: str, head: str = HEAD, tail: str = "") -> list[Diagnostic]:
    program, source = compiled(clauses, head, tail)
    return [d for d in BACKEND.consistency(program, source=source) if d.code.id == code]


def marked(diagnostic: Diagnostic) -> str:
    assert diagnostic.source is not None
    assert diagnostic.span is not None
    return diagnostic.source.text[diagnostic.span.start : diagnostic.span.end]


EVERY = "  A: {require: p99(kl) <= 0.02, slices: [all, long, chat, code], level: L1}"


# --- slices --------------------------------------------------------------------------------------


def test_slice_without_clauses_is_reported() -> None:
    (unused,) = found(
        "  A: {require: p99(kl) <= 0.02, slices: [all, long, chat], level: L1}", "KC417"
    )
    assert marked(unused) == "code"
    assert unused.severity is Severity.WARNING
    quantified = '  A: {require: "forall x in points(code): no_flip(model, x)", level: L1}'
    names = [marked(d) for d in found(quantified, "KC417")]
    assert names == ["all", "long", "chat"]
    assert found(EVERY, "KC417") == []


def test_slices_with_equal_requests_are_reported() -> None:
    head = HEAD + '  talk: {where: \'not (category != "chat") and category == "chat"\'}\n'
    (same,) = found(EVERY.replace("code]", "code, talk]"), "KC418", head)
    assert same.message == "the slices 'chat' and 'talk' have the same requests"
    assert (marked(same), same.severity) == ("talk", Severity.NOTE)
    head = HEAD + "  talk: {data: other.jsonl, where: 'category == \"chat\"'}\n"
    assert found(EVERY.replace("code]", "code, talk]"), "KC418", head) == []


def test_ball_of_radius_0_is_reported() -> None:
    clause = '  A: {{require: "forall x in {}: norm_inf(drift(attn_0, x)) <= 1", level: L1}}'
    (note,) = found(clause.format("ball(all, 0)"), "KC408")
    assert (marked(note), note.severity) == ("ball(all, 0)", Severity.NOTE)
    assert note.help == "write points(all), or a radius above 0"
    assert found(clause.format("ball(all, 1e-9)"), "KC408") == []
    assert found(clause.format("points(all)"), "KC408") == []


# --- levels --------------------------------------------------------------------------------------


def bound(name: str, require: str, where: str, level: str, more: str = "") -> str:
    return f"  {name}: {{require: {require}, slices: [{where}], level: {level}{more}}}\n"


def test_equal_bounds_with_two_levels_on_overlapping_slices() -> None:
    two = bound("A", "p99(kl) <= 0.02", "chat", "L2") + bound("B", "p99(kl) <= 0.02", "long", "L3")
    (conflict,) = found(two, "KC416")
    assert marked(conflict) == "B"
    assert (
        "the same bound means L2, higher_precision in A and L3, fallback in B" in conflict.message
    )
    assert conflict.notes == ('a request in both: {category: "chat", length: 81}',)
    apart = two.replace("[long]", "[code]")
    assert found(apart, "KC416") == []


def test_lower_level_for_a_nested_slice_is_reported() -> None:
    """The opposite order is intended: see below."""
    two = bound("A", "p99(kl) <= 0.02", "all", "L3") + bound("B", "p99(kl) <= 0.02", "long", "L2")
    (conflict,) = found(two, "KC416")
    assert "the same bound means L3, fallback in A and L2, higher_precision in B" in (
        conflict.message
    )


def test_equal_bounds_with_two_actions_are_reported() -> None:
    two = bound("A", "p99(kl) <= 0.02", "chat", "L2") + bound(
        "B", "p99(kl) <= 0.02", "long", "L2", ", then: freeze"
    )
    assert len(found(two, "KC416")) == 1
    assert found(two.replace(", then: freeze", ""), "KC416") == []


def test_looser_bound_of_a_higher_level_is_reported() -> None:
    two = bound("A", "p99(kl) <= 0.05", "all", "L3") + bound("B", "p99(kl) <= 0.02", "long", "L1")
    (conflict,) = found(two, "KC416")
    assert "the looser bound of A has the higher level, L3 against L1" in conflict.message
    lower = bound("A", "min(margin) >= 1", "all", "L3") + bound(
        "B", "min(margin) >= 2", "long", "L1"
    )
    assert len(found(lower, "KC416")) == 1


@pytest.mark.parametrize(
    "clauses",
    [
        # graduated levels on one slice
        bound("A", "p99(kl) <= 0.05", "all", "L3") + bound("B", "p99(kl) <= 0.02", "all", "L1"),
        # a higher level for a nested slice
        bound("A", "p99(kl) <= 0.02", "all", "L2") + bound("B", "p99(kl) <= 0.02", "long", "L3"),
        # another quantity, another unit
        bound("A", "p99(kl) <= 0.02", "chat", "L2") + bound("B", "p95(kl) <= 0.02", "long", "L3"),
        bound("A", "max(kl) <= 0.02", "chat", "L2")
        + bound("B", "max(kl) <= 0.02", "long", "L3", ", budget: 1% of requests"),
        # one clause on two slices
        bound("A", "p99(kl) <= 0.02", "chat, long", "L2"),
    ],
)
def test_intended_combinations_are_not_reported(clauses: str) -> None:
    assert found(clauses, "KC416") == []


def test_action_milder_than_that_of_a_lower_level_is_reported() -> None:
    two = bound("A", "p95(latency) <= 250 ms", "all", "L1", ", then: rollback") + bound(
        "B", "p99(latency) <= 900 ms", "all", "L2"
    )
    (inverted,) = found(two, "KC407")
    assert marked(inverted) == "B"
    assert inverted.message == (
        "B is L2 and leads to guard, milder than rollback of A, which is L1"
    )
    other_family = two.replace("p99(latency) <= 900 ms", "p99(kl) <= 0.1")
    assert found(other_family, "KC407") == []
    policy = "escalation: {runtime: {L1: rollback, L2: guard}}\n"
    assert found(two.replace(", then: rollback", ""), "KC407", tail=policy) == []


# --- parts of requirements -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("require", "at", "words", "severity"),
    [
        (
            "max(js) >= 0.5 and max(tv) <= 0.1 implies mean(kl) <= 0.1",
            "max(js) >= 0.5 and max(tv) <= 0.1",
            "can never hold, so nothing is required",
            Severity.ERROR,
        ),
        (
            "mean(kl) <= 0.1 implies max(hidden_l2) >= 0 or max(kl) <= 1",
            None,
            None,
            None,
        ),
        (
            "p99(logit_l2) <= 1 and p95(logit_linf) <= 2",
            "p95(logit_linf) <= 2",
            "follows from what is beside it",
            Severity.WARNING,
        ),
        (
            "p99(kl) <= 0.1 or p95(kl) <= 0.2",
            "p99(kl) <= 0.1",
            "adds nothing: another one holds where it does",
            Severity.WARNING,
        ),
        (
            "(max(js) >= 0.5 and max(tv) <= 0.1) or mean(kl) <= 0.1",
            "max(js) >= 0.5 and max(tv) <= 0.1",
            "the alternative",
            Severity.WARNING,
        ),
        (
            "forall x in points(all): norm_inf(measured_drift(attn_0, x)) <= 1 and "
            "norm_2(measured_drift(attn_0, x)) <= 0.5",
            "norm_inf(measured_drift(attn_0, x)) <= 1",
            "follows from what is beside it",
            Severity.WARNING,
        ),
    ],
)
def test_redundant_parts_of_requirements_are_reported(
    require: str, at: Any, words: Any, severity: Any
) -> None:
    where = "" if require.startswith("forall") else "slices: [all], "
    clause = f'  A: {{require: "{require}", {where}level: L1, override: direction}}'
    source, sink = SourceFile("c", f"{HEAD}clauses:\n{clause}\n"), Sink()
    program = compile_source(source, sink, Path())
    if at is None:
        # The front end knows ranges, so a part that holds by its range alone is an error there.
        assert [d.code.id for d in sink if d.severity is Severity.ERROR] == ["KC404"]
        return
    assert program is not None, [d.message for d in sink]
    (dead,) = [d for d in BACKEND.consistency(program, source=source) if d.code.id == "KC419"]
    assert marked(dead).strip("()") == at
    assert words in dead.message
    assert dead.severity is severity


@pytest.mark.parametrize(
    "require",
    [
        "p99(kl) <= 0.1 and p99(tv) <= 0.1",
        "p99(kl) <= 0.1 or p99(hidden_l2) <= 0.1",
        "p99(kl) <= 0.1 implies p99(hidden_l2) <= 0.1",
        "not (p99(kl) <= 0.1 and p99(hidden_l2) <= 0.1)",
        "p99(kl) / mean(kl) <= 9 or p99(kl) <= 0.1",
    ],
)
def test_effective_parts_of_requirements_are_not_reported(require: str) -> None:
    clause = f'  A: {{require: "{require}", slices: [all], level: L1, override: direction}}'
    assert found(clause, "KC419") == []


def test_vacuous_implication_is_reported_once() -> None:
    clause = (
        '  A: {require: "max(js) >= 0.5 and max(tv) <= 0.1 implies mean(kl) <= 0.1", '
        "slices: [all, long], level: L1, override: direction}"
    )
    program, source = compiled(clause)
    codes = [d.code.id for d in BACKEND.consistency(program, source=source)]
    assert codes.count("KC419") == 1
    assert "KC413" not in codes


TABLE = """tables:
  tau: {unit: nats, rows: [{where: "length > 80", value: 0.05}], otherwise: 0.01}
"""


def test_tables_are_checked_bucket_by_bucket() -> None:
    clauses = bound("A", "max(kl) <= table(tau)", "all", "L1")
    clauses += bound("B", "max(kl) <= 0.05", "all", "L1")
    clauses += bound("C", "max(kl) <= 0.05", "long", "L1")
    clauses += bound("D", "max(kl) <= 0.02", "long", "L1")
    messages = [d.message for d in found(clauses, "KC415", HEAD + TABLE)]
    # D is tighter than the bucket of A for long requests, which is therefore implied.
    assert "A follows on the slice all[tau: length > 80] from D" in messages
    assert "B follows from D and A" in messages or "B follows from A and D" in messages
    assert "C follows from D" in messages
    assert len(messages) == 3, messages


@pytest.mark.full
def test_slice_that_is_a_union_of_others() -> None:
    head = HEAD + '  brief: {where: "length <= 80"}\n'
    for statistic in ("mean", "p99", "max"):
        parts = bound("A", f"{statistic}(kl) <= 0.1", "long", "L1")
        parts += bound("B", f"{statistic}(kl) <= 0.1", "brief", "L1")
        whole = bound("C", f"{statistic}(kl) <= 0.1", "all", "L1")
        (redundant,) = found(parts + whole, "KC415", head)
        assert redundant.message == "C follows from A and B"
        assert "every request of all is in one of long, brief" in redundant.notes[0]
        tighter = whole.replace("0.1", "0.09")
        names = [d.message[0] for d in found(parts + tighter, "KC415", head)]
        assert "C" not in names
    overlapping = HEAD + '  brief: {where: "length <= 90"}\n'
    mean = bound("A", "mean(kl) <= 0.1", "long", "L1") + bound(
        "B", "mean(kl) <= 0.1", "brief", "L1"
    )
    mean += bound("C", "mean(kl) <= 0.1", "all", "L1")
    assert found(mean, "KC415", overlapping) == []


# --- time ----------------------------------------------------------------------------------------


def test_exhausted_time_leaves_everything_undecided() -> None:
    program, _ = compiled(EVERY + "\n  B: {require: p99(tv) <= 0.02, slices: [all], level: L1}")
    clock = Clock(1000, 1)
    clock._start -= 10
    assert clock.allowance() == 0
    import z3

    context = z3.Context()
    solver = Solver(context, clock)
    assert solver.decide(z3.BoolVal(True, context)) is Outcome.UNKNOWN
    codes = [d.code.id for d in BACKEND.consistency(program, 1000, total_ms=1)]
    assert "KC414" in codes
    assert "KC415" not in codes


def test_zero_total_time_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        Clock(10, 0)


def test_progress_is_reported() -> None:
    program, _ = compiled(EVERY)
    told: list[tuple[str, int, int]] = []
    BACKEND.consistency(program, report=lambda *said: told.append(said))
    assert told[-1] == ("clauses", 4, 4)
    assert told[0] == ("clauses", 0, 4)


def test_solver_answers_are_reproducible() -> None:
    clauses = EVERY + "\n" + bound("B", "p95(kl) <= 0.05", "all, chat", "L1")
    clauses += bound("C", "max(tv) <= 0.3", "all, long", "L1")
    clauses += bound("D", "mean(kl) >= 0.5", "chat", "L1", ", override: direction")
    program, source = compiled(clauses)
    first = BACKEND.consistency(program, source=source)
    assert first
    assert first == BACKEND.consistency(program, source=source)


def test_independent_clauses_are_checked_separately() -> None:
    clauses = (
        bound("A", "p99(kl) <= 0.1", "all", "L1")
        + bound("B", "p99(tv) <= 0.1", "all", "L1")
        + bound("C", "p99(kl) <= 0.1", "long", "L1")
        + bound("D", "p99(hidden_l2) <= 0.1", "all", "L1")
        + bound("E", "p95(latency) <= 1 s", "all", "L1")
    )
    program, _ = compiled(clauses)
    groups = components(claims_of(program.clauses)[""])
    assert [[c.clause.id for c in group] for group in groups] == [["A", "B", "C"], ["D"], ["E"]]
