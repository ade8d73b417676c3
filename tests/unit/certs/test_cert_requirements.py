"""Results that show a required clause."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from kcdsl_certs.statement import (
    CertifiedClause,
    Comparison,
    Evidence,
    ProofReference,
    Quantity,
    RequiredClause,
    Verdict,
    uncovered,
)
from tests.support.quantities import metric, norm

_KL = Comparison("C/all/0", metric("kl"), "<=", Fraction(1, 2), "nat")
_TV = Comparison("C/all/0", metric("tv"), "<=", Fraction(1, 2))
_BUDGET = Fraction(1, 10)


def required(*alternatives: tuple[Comparison, ...], **changes: Any) -> RequiredClause:
    return RequiredClause("C", "all", alternatives, **changes)


def result(of: Comparison, **changes: Any) -> CertifiedClause:
    stated: dict[str, Any] = {
        "evidence": Evidence.CENSUS,
        "method": "census/1",
        "verdict": Verdict.PASSED,
        "slice": "all",
        "n": 10,
        "exceed": 0,
    }
    named = (of.obligation, "C", of.quantity, of.op, of.tau, of.unit)
    return CertifiedClause(*named, **{**stated, **changes})


def reasons(wanted: RequiredClause, *results: CertifiedClause) -> list[str]:
    return [finding.reason for finding in uncovered(wanted, results)]


def test_every_comparison_of_an_alternative_must_be_shown() -> None:
    both, either = required((_KL, _TV)), required((_KL,), (_TV,))
    assert not reasons(both, result(_KL), result(_TV))
    assert reasons(both, result(_KL)) == ["clause/missing"]
    assert not reasons(either, result(_TV))
    failed = result(_TV, verdict=Verdict.FAILED)
    assert reasons(both, result(_KL), failed) == ["clause/not-passed"]
    assert not reasons(either, result(_KL), failed)


def test_separate_counts_do_not_show_a_joint_budget() -> None:
    """One in ten violates the first and another the second: together two in ten."""
    wanted = required((_KL, _TV), budget=_BUDGET)
    shown = (result(_KL, exceed=1, budget=_BUDGET), result(_TV, exceed=1, budget=_BUDGET))
    assert reasons(wanted, *shown) == ["clause/not-passed"]
    assert not reasons(required((_KL,), budget=_BUDGET), shown[0])


def test_separate_proofs_show_a_joint_budget() -> None:
    attention, feed_forward = (
        Comparison("C/all/0", norm("inf", block), "<=", Fraction(1, 2)) for block in ("a", "m")
    )
    proof = ProofReference("0" * 64, "c.proof.json")
    wanted = required((attention, feed_forward), budget=_BUDGET)
    proved = [
        result(of, evidence=Evidence.PROOF, method="interval/1", proof=proof)
        for of in (attention, feed_forward)
    ]
    assert not reasons(wanted, *proved)


@pytest.mark.parametrize("alternatives", [(), ((),), ((_KL,), ())])
def test_requirement_without_comparisons_is_never_shown(alternatives: Any) -> None:
    assert reasons(required(*alternatives), result(_KL)) == ["clause/not-rederivable"]


def test_result_of_another_comparison_shows_nothing() -> None:
    for other in (
        replace(_KL, obligation="C/all/1"),
        replace(_KL, quantity=Quantity("metric", "js")),
        replace(_KL, op="<"),
        replace(_KL, tau=Fraction(501, 1000)),
        replace(_KL, unit="1"),
    ):
        assert reasons(required((_KL,)), result(other)) == ["clause/threshold-mismatch"]
