"""Requests with equal prompts: separate rows of a census, one unit of a sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kcdsl.verdict.model import Held, Inconclusive
from kcdsl_backends.empirical.decision.repeats import by_prompt
from kcdsl_backends.empirical.decision.report import conclude, slice_data
from kcdsl_backends.empirical.decision.values import recorded, require
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from kcdsl_backends.empirical.table.evidence import EvidenceTable, SamplingUnit, SliceData, Timing
from tests.support.evidence import clause, evidence

SAMPLED = (
    clause("N-RANK", "quantile", "kl", "1", q="9/10", sample=True),
    clause("N-MEAN", "mean", "top1_overlap", "0", op=">=", sample=True),
    clause("N-SHARE", "max", "kl", "1", budget="1/10", sample=True),
)
CENSUS = (clause("N-KL", "quantile", "kl", "1", q="9/10"),)


def repeating(prompts: int, found: EvidenceTable) -> EvidenceTable:
    """Return the evidence with requests that repeat `prompts` prompts."""
    return replace(
        found,
        requests=tuple(
            replace(request, tokens=(i % prompts, 1)) for i, request in enumerate(found.requests)
        ),
    )


def test_copies_of_a_request_add_no_evidence() -> None:
    """0 of 60 shows a rate of at most 10 %; 0 of 2 does not, for any number of copies."""
    found = evidence(SAMPLED + CENSUS, count=60)
    report = conclude(found)
    assert {row.n for row in report.clauses} == {60}
    assert all(isinstance(row.verdict, Held) for row in report.clauses)
    assert not any("repeat a prompt" in note for note in report.notes)
    report = conclude(repeating(2, found))
    rows = {row.clause: row for row in report.clauses}
    assert isinstance(rows["N-KL"].verdict, Held)
    assert rows["N-KL"].n == 60
    for one in SAMPLED:
        assert isinstance(rows[one.id].verdict, Inconclusive), one.id
        assert rows[one.id].n == 2
    assert "58 requests repeat a prompt and count with it in samples" in report.notes


def test_repeated_runs_of_copies_belong_to_one_request() -> None:
    found = evidence(CENSUS, count=6)
    repeats = {request.key: (3, 3) for request in found.requests}
    found = replace(found, timing=Timing(repeats=repeats))
    assert slice_data(found)["all"].repeats == (6, 6)
    assert slice_data(repeating(2, found))["all"].repeats == (2, 2)
    repeats[found.requests[0].key] = (2, 3)
    assert slice_data(repeating(2, found))["all"].repeats == (1, 2)


def test_missing_value_of_one_request_is_missing_for_its_prompt() -> None:
    values = {"kl": np.array([0.1, 0.3]), "tv": np.array([0.2, 0.2])}
    units = (
        SamplingUnit("a", 2, values),
        SamplingUnit("b", 2, {"kl": np.array([0.5, 0.1])}, problems={"tv": "no room"}),
        SamplingUnit("c", 2, values),
        SamplingUnit("d", 2, failure="out of memory"),
    )
    records = tuple({"request": u.key, "seed": None if u.key == "b" else 1} for u in units)
    found = by_prompt(SliceData("all", units, records=records), [(1,), (1,), (2,), (2,)])
    first, second = found.requests
    assert recorded("kl", first).tolist() == [0.1, 0.3, 0.5, 0.1]
    assert first.tokens == 4
    with pytest.raises(NotMeasurable, match="no room"):
        recorded("tv", first)
    with pytest.raises(NotMeasurable, match="out of memory"):
        require(second)
    assert [record["seed"] for record in found.records] == [None, 1]
