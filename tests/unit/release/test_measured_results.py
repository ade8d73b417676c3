"""Report rows as results of a certificate: nothing is overstated."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.ir.obligations import obligations_of, slices_of
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Program
from kcdsl.release.results import certified_clauses, result_of
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.result import ClauseResult, ExceedanceCount
from kcdsl_certs.statement import CertifiedClause, Comparison, Evidence, RequiredClause
from tests.support.quantities import statistic


class Rows:
    """The fields of a report that are read."""

    def __init__(self, *clauses: ClauseResult) -> None:
        self.clauses = clauses


def required(op: str, tau: Fraction, budget: Fraction | None = None) -> RequiredClause:
    wanted = Comparison("S-1/all/0", statistic("mean", "top1_overlap"), op, tau, "ratio")
    return RequiredClause("S-1", "all", ((wanted,),), budget, slice_digest="a" * 64)


def row(verdict: Verdict, value: float | None = None, **changes: Any) -> ClauseResult:
    fields: dict[str, Any] = {
        "clause": "S-1",
        "family": "statistical",
        "level": "L2",
        "slice": "all",
        "requirement": "",
        "metric": "mean(top1_overlap)",
        "unit": "ratio",
        "op": ">=",
        "value": value,
        "exact_value": None if value is None else Fraction(str(value)),
        "low": None,
        "high": None,
        "n": 20,
        "counted": "requests",
        "threshold": 0.95,
        "verdict": verdict,
        "evidence": "census",
        "confidence": 0.95,
    }
    return ClauseResult(**(fields | changes))


def result(needed: RequiredClause, found: ClauseResult) -> CertifiedClause:
    return result_of(needed, needed.alternatives, found)


def test_mean_of_19_in_20_meets_the_threshold_95_percent() -> None:
    """The double next to 0.95 is less than 19/20; the certificate states the exact quotient."""
    found = result(required(">=", Fraction(19, 20)), row(Held(), 0.95))
    assert found.verdict == "PASSED"
    assert found.value == Fraction(19, 20)
    assert found.to_json()["value"] == "0.95"


@pytest.mark.parametrize("value", [Fraction(1, 3), Fraction(0.1), Fraction(-7, 2**60), Fraction(0)])
def test_value_is_stated_exactly(value: Fraction) -> None:
    found = result(required(">=", Fraction(-1)), row(Held(), 0.0, exact_value=value))
    assert CertifiedClause.from_json(found.to_json(), "clause").value == value


def test_value_slightly_beyond_its_threshold_does_not_pass() -> None:
    """The difference is below the resolution of doubles."""
    tau = Fraction(19, 20)
    below = row(Held(), 0.95, exact_value=tau - Fraction(1, 10**40))
    assert result(required(">=", tau), below).verdict == "FAILED"


def test_contradicted_verdict_is_not_copied() -> None:
    found = result(required(">=", Fraction(19, 20)), row(Held(), 0.90))
    assert found.verdict == "FAILED"


@pytest.mark.parametrize(
    ("verdict", "value", "wanted"),
    [
        (Violated(), 0.9, "FAILED"),
        (InvalidEvidence("empty"), 0.99, "INCONCLUSIVE"),
        (InvalidEvidence("empty"), None, "INCONCLUSIVE"),
        (Inconclusive("open"), 0.99, "INCONCLUSIVE"),
    ],
)
def test_verdicts_keep_their_meaning(verdict: Verdict, value: float | None, wanted: str) -> None:
    found = result(required(">=", Fraction(19, 20)), row(verdict, value))
    assert found.verdict == wanted


@pytest.mark.parametrize(("n", "wanted"), [(59, "PASSED"), (58, "INCONCLUSIVE")])
def test_sampled_budget_is_rederived_from_its_counts(n: int, wanted: str) -> None:
    counts = ExceedanceCount(0, n, "windows", 0.0, 0.05)
    sampled = row(Held(), 1.0, evidence="sample", budget="5% of windows", exceedance=counts)
    found = result(required(">=", Fraction(19, 20), Fraction(1, 20)), sampled)
    assert found.evidence is Evidence.SAMPLE
    assert (found.verdict, found.n, found.exceed) == (wanted, n, 0)


def test_rows_are_joined_to_their_comparisons_by_name(program: Program, folder: Path) -> None:
    """In any order of the rows of a conjunction."""
    both = next(clause for clause in program.clauses if clause.id == "N-BOTH")
    rows = [
        row(Held(), value, clause="N-BOTH", obligation=each.id, metric="", op="", threshold=None)
        for each, value in zip(obligations_of(both, "all"), (0.001, 0.2), strict=True)
    ]
    results = [certified_clauses(program, folder, Rows(*some)) for some in (rows, rows[::-1])]  # type: ignore[arg-type]
    assert results[0] == results[1][::-1]
    assert [one.value for one in results[0]] == [Fraction(1, 1000), Fraction(1, 5)]
    assert len({one.quantity for one in results[0]}) == 2


def test_part_with_its_own_slice_is_decided_there_only(folder: Path) -> None:
    path = folder / "contract.yaml"
    parts = (
        f"(forall x in points({name}): norm_inf(measured_drift(attn_0, x)) <= {limit})"
        for name, limit in (("all", 0.5), ("long", 0.25))
    )
    text = path.read_text(encoding="utf-8")
    two = f'  N-TWO: {{require: "{" and ".join(parts)}", level: L2}}\n  N-KL: '
    path.write_text(text.replace("  N-KL: ", two, 1), encoding="utf-8")
    program = load_program(path)
    clause = next(clause for clause in program.clauses if clause.id == "N-TWO")
    found = [each for name in slices_of(clause) for each in obligations_of(clause, name)]
    assert [each.id for each in found] == ["N-TWO/all/0", "N-TWO/long/1"]
    rows = [
        row(Held(), 0.1, clause="N-TWO", slice=each.slice, obligation=each.id) for each in found
    ]
    results = certified_clauses(program, folder, Rows(*rows))  # type: ignore[arg-type]
    assert [(one.slice, one.tau) for one in results] == [
        ("all", Fraction(1, 2)),
        ("long", Fraction(1, 4)),
    ]
    assert [one.region.slice for one in results if one.region is not None] == ["all", "long"]


def test_each_bucket_of_a_table_is_stated_with_its_threshold(folder: Path) -> None:
    path = folder / "contract.yaml"
    text = path.read_text(encoding="utf-8")
    table = "tables: {t: {unit: nats, rows: [{where: length > 3, value: 0.5}], otherwise: 0.1}}\n"
    text = text.replace("clauses:\n", table + "clauses:\n", 1).replace("<= 0.02,", "<= table(t),")
    path.write_text(text, encoding="utf-8")
    program = load_program(path)
    rows = [
        row(Held(), 0.01, clause="N-KL", slice=each.slice, obligation=each.id)
        for clause in expand_tables(program).clauses
        if clause.id == "N-KL"
        for name in clause.slices
        for each in obligations_of(clause, name)
    ]
    results = certified_clauses(program, folder, Rows(*rows))  # type: ignore[arg-type]
    assert {result.tau for result in results} == {Fraction(1, 2), Fraction(1, 10)}
    assert [result.slice for result in results] == [each.slice for each in rows]
    for result in results:
        assert (result.tau == Fraction(1, 10)) == ("otherwise" in str(result.slice))


@pytest.mark.parametrize("verdict", [Held(), Violated()])
@pytest.mark.parametrize("word", ["or", "and"])
def test_joint_counts_are_not_stated_for_single_comparisons(
    folder: Path, word: str, verdict: Verdict
) -> None:
    """No request violates `kl <= 1e-12 or tv <= 0.5`: this states nothing about `kl` alone."""
    path = folder / "contract.yaml"
    text = path.read_text(encoding="utf-8")
    both = f"max(kl) <= 1e-12 nats {word} max(tv) <= 0.5, budget: 10% of requests"
    path.write_text(text.replace("p99(kl) <= 0.02", both, 1), encoding="utf-8")
    program = load_program(path)
    clause = next(clause for clause in program.clauses if clause.id == "N-KL")
    (only,) = obligations_of(clause, "all")
    counts = ExceedanceCount(0, 12, "requests", None, None)
    found = row(verdict, None, clause="N-KL", obligation=only.id, budget="10%", exceedance=counts)
    (result,) = certified_clauses(program, folder, Rows(found))  # type: ignore[arg-type]
    assert result.verdict == "INCONCLUSIVE"
    assert (result.exceed, result.value) == (None, None)
    assert "several comparisons" in str(result.reason)


def test_limits_of_one_term_are_not_those_of_a_difference() -> None:
    limits: dict[str, Any] = {"low": 0.96, "high": 0.99, "value": 0.97, "exact_value": None}
    found = result(required(">=", Fraction(0)), row(Held(), evidence="sample", **limits))
    assert (found.verdict, found.low, found.alpha) == ("INCONCLUSIVE", None, None)
    counterpart = result(
        required(">=", Fraction(0)),
        row(Held(), evidence="sample", **limits | {"exact_value": Fraction(97, 100)}),
    )
    assert (counterpart.verdict, counterpart.low) == ("PASSED", 0.96)
