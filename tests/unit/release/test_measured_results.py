"""Rows of a report as results of a certificate: nothing is overstated."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from kcdsl.release.measured import certified_clauses
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.result import ClauseResult, ExceedanceCount
from kcdsl_certs.clauses import Evidence
from kcdsl_certs.requirements import Comparison, RequiredClause


class Rows:
    """As much of a report as is read."""

    def __init__(self, *clauses: ClauseResult) -> None:
        self.clauses = clauses


def required(op: str, tau: Fraction, budget: Fraction | None = None) -> RequiredClause:
    wanted = Comparison("mean(top1_overlap)", op, tau)
    return RequiredClause("S-1", "all", ((wanted,),), budget, slice_digest="a" * 64)


def row(verdict: Verdict, value: float | None, **changes: Any) -> ClauseResult:
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


def result(monkeypatch: pytest.MonkeyPatch, needed: RequiredClause, found: ClauseResult) -> Any:
    monkeypatch.setattr("kcdsl.release.measured.required_clauses", lambda program, base: (needed,))
    (only,) = certified_clauses(None, None, Rows(found))  # type: ignore[arg-type]
    return only


def test_a_mean_of_nineteen_in_twenty_meets_its_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double next to 0.95 is less than 19/20; the exact quotient is not."""
    found = result(monkeypatch, required(">=", Fraction(19, 20)), row(Held(), 0.95))
    assert found.verdict == "PASSED"
    assert found.value == pytest.approx(0.95, abs=2e-16)
    assert Fraction(found.value) >= Fraction(19, 20)


def test_a_verdict_that_the_value_contradicts_is_not_carried_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = result(monkeypatch, required(">=", Fraction(19, 20)), row(Held(), 0.90))
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
def test_verdicts_keep_their_meaning(
    monkeypatch: pytest.MonkeyPatch, verdict: Verdict, value: float | None, wanted: str
) -> None:
    found = result(monkeypatch, required(">=", Fraction(19, 20)), row(verdict, value))
    assert found.verdict == wanted


@pytest.mark.parametrize(("n", "wanted"), [(59, "PASSED"), (58, "INCONCLUSIVE")])
def test_a_sampled_budget_is_derived_again_from_its_counts(
    monkeypatch: pytest.MonkeyPatch, n: int, wanted: str
) -> None:
    counts = ExceedanceCount(0, n, "windows", 0.0, 0.05)
    sampled = row(Held(), 1.0, evidence="sample", budget="5% of windows", exceedance=counts)
    found = result(monkeypatch, required(">=", Fraction(19, 20), Fraction(1, 20)), sampled)
    assert found.evidence is Evidence.SAMPLE
    assert (found.verdict, found.n, found.exceed) == (wanted, n, 0)
