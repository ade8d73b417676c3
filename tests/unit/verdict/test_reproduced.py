"""Differences between two reports of one evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kcdsl.verdict.report import differences

REPORT: dict[str, Any] = {
    "schema": "kcdsl.report/3",
    "clauses": [
        {"clause": "A", "slice": "all", "value": 0.1, "verdict": "held"},
        {"clause": "A", "slice": "all", "value": None, "verdict": "inconclusive"},
    ],
    "health": {"score": 1.0},
    "notes": [],
}


def changed(**more: Any) -> dict[str, Any]:
    return {**copy.deepcopy(REPORT), **more}


def test_equal_reports_have_no_difference() -> None:
    assert differences(REPORT, changed()) == ()


def test_difference_in_the_last_bit_is_named() -> None:
    other = changed()
    other["clauses"][0]["value"] = 0.10000000000000002
    assert differences(REPORT, other) == (
        "A on all: value is 0.10000000000000002, and 0.1 was recorded",
    )
    other["clauses"][0]["value"] = True
    assert differences(changed(clauses=[{"value": 1}]), changed(clauses=[{"value": True}]))


@pytest.mark.full
def test_rows_and_sections_in_one_report_only_are_named() -> None:
    shorter = changed(clauses=REPORT["clauses"][:1])
    assert differences(REPORT, shorter) == ("A on all: in one of the reports alone",)
    assert differences(shorter, REPORT) == ("A on all: in one of the reports alone",)
    assert differences(REPORT, changed(extra=1)) == ("the section extra differs",)
    assert differences(changed(health={}), REPORT) == ("the section health differs",)


@pytest.mark.full
def test_invalid_report_differs_in_everything() -> None:
    assert len(differences({}, REPORT)) == 5
    assert differences({"clauses": 3}, {"clauses": []}) == ()
    assert differences({"clauses": ["x"]}, {"clauses": ["y"]}) == (
        "a row: in one of the reports alone",
    )
