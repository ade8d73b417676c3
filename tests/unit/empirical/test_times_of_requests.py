"""Timed runs of one request are not separate units: limits of times count requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kcdsl.ir.terms import Clause, EvidenceKind, Family
from kcdsl.verdict.model import Held, Violated, verdict_name
from kcdsl_backends.empirical.decision.judgement import judge_for
from kcdsl_backends.empirical.decision.repeats import by_prompt, by_request, with_drawn_runs
from kcdsl_backends.empirical.decision.results import decide_clause
from kcdsl_backends.empirical.statistics.estimates import ONE_LOOK
from kcdsl_backends.empirical.table.evidence import Array, SamplingUnit, SliceData

REQUESTS, RUNS, SAMPLES = 30, 10, 150
NOISE = 3 * (0.05 * 0.95 / SAMPLES) ** 0.5
"""The tolerance of a rate of 5 % in so many samples."""


def timed(seconds: Array, tokens: int = 10) -> SliceData:
    """Return a slice with the runs of requests [requests, rounds], round after round."""
    keys = [f"rows.jsonl:{i}" for i in range(len(seconds))]
    runs = (
        SamplingUnit(key, tokens, {"latency": np.array([seconds[i, turn]])})
        for turn in range(seconds.shape[1])
        for i, key in enumerate(keys)
    )
    return SliceData("all", tuple(SamplingUnit(key, tokens) for key in keys), tuple(runs))


def alike(levels: Array, rng: np.random.Generator) -> SliceData:
    """Return requests whose runs all take nearly the same time."""
    return timed(levels[:, None] + rng.normal(0, 1e-6, (len(levels), RUNS)))


def decided(lab: Any, clause: Clause, data: SliceData) -> Any:
    return decide_clause(clause, lab.program(clause), data, seed=0, confidence=ONE_LOOK)


def quantile_clause(lab: Any) -> Clause:
    """Return a clause that nine of ten requests take less than a second."""
    return lab.clause(lab.statistic("quantile", "latency", "9/10"), family=Family.RUNTIME)


def budget_clause(lab: Any) -> Clause:
    return lab.clause(
        lab.statistic("max", "latency"), budget=("1/10", "requests"), family=Family.RUNTIME
    )


def mean_clause(lab: Any) -> Clause:
    return lab.clause(lab.statistic("mean", "latency"), family=Family.RUNTIME)


def throughput_clause(lab: Any) -> Clause:
    """Return a clause of ten tokens per second."""
    return lab.clause(lab.statistic("aggregate", "throughput"), ">=", "10", family=Family.RUNTIME)


def slow_tenth(rng: np.random.Generator) -> Array:
    return np.where(rng.random(REQUESTS) < 0.1, 2.0, 0.5)


def around_a_second(rng: np.random.Generator) -> Array:
    return rng.normal(1.0, 0.2, REQUESTS)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("made", "law"),
    [
        (quantile_clause, slow_tenth),
        (throughput_clause, around_a_second),
        (budget_clause, slow_tenth),
        (mean_clause, around_a_second),
    ],
)
def test_clause_at_its_limit_rarely_passes_or_fails(
    lab: Any, made: Callable[[Any], Clause], law: Callable[[np.random.Generator], Array]
) -> None:
    """All runs of a request are alike and the clause is exactly at its limit.

    With runs as units, 41 % of these samples pass the percentile and 30 % the mean, for a stated 5
    % (bench/coverage_times.py).
    """
    rng, clause, found = np.random.default_rng(7), made(lab), {"held": 0, "violated": 0}
    for _ in range(SAMPLES):
        name = verdict_name(decided(lab, clause, alike(law(rng), rng)).verdict)
        if name in found:
            found[name] += 1
    assert found["held"] / SAMPLES <= 0.05 + NOISE
    assert found["violated"] / SAMPLES <= 0.05 + NOISE


@pytest.mark.full
def test_independent_run_noise_does_not_violate(lab: Any) -> None:
    """One run in twenty is slow, in any request: a tenth may be.

    The slowest of ten runs of a request mostly is. No such sample is violated, and more pass than
    at the limit.
    """
    rng, clause, held = np.random.default_rng(8), quantile_clause(lab), 0
    for _ in range(SAMPLES):
        data = timed(np.where(rng.random((100, RUNS)) < 0.05, 2.0, 0.5))
        verdict = decided(lab, clause, data).verdict
        assert not isinstance(verdict, Violated)
        held += isinstance(verdict, Held)
    assert held / SAMPLES > 0.3


def test_further_rounds_add_no_evidence(lab: Any) -> None:
    few, many = timed(np.full((28, 3), 0.5)), timed(np.full((28, 1000), 0.5))
    for data in (few, many):
        row = decided(lab, quantile_clause(lab), data)
        assert verdict_name(row.verdict) == "inconclusive"
        assert (row.n, row.counted, row.needed) == (28, "requests", 29)
        assert "29 without any would show at most 10 %; add requests to the slice" in str(
            row.verdict.reason
        )
    enough = decided(lab, quantile_clause(lab), timed(np.full((29, 1), 0.5)))
    assert verdict_name(enough.verdict) == "held"


@pytest.mark.parametrize("made", [mean_clause, throughput_clause])
def test_mean_of_times_needs_twenty_requests(lab: Any, made: Callable[[Any], Clause]) -> None:
    rng = np.random.default_rng(9)
    row = decided(lab, made(lab), timed(rng.uniform(0.1, 0.2, (19, 50))))
    assert verdict_name(row.verdict) == "inconclusive"
    assert row.n == 19
    assert "19 units are too few for a limit of their mean: it takes 20" in row.verdict.reason
    assert "the timed runs of a request count as one" in row.verdict.reason
    enough = decided(lab, made(lab), timed(rng.uniform(0.1, 0.2, (20, 3))))
    assert verdict_name(enough.verdict) == "held"


def test_requests_with_equal_prompts_are_one_timed_unit(lab: Any) -> None:
    data = timed(np.full((58, 3), 0.5))
    prompts = [(i // 2,) for i in range(58)]
    row = decided(lab, quantile_clause(lab), by_prompt(data, prompts))
    assert (row.n, row.exceedance.n, verdict_name(row.verdict)) == (29, 29, "held")
    row = decided(lab, quantile_clause(lab), by_prompt(data, [(99,), *prompts[:-1]]))
    assert row.n == 30
    row = decided(lab, quantile_clause(lab), by_prompt(data, [(0,)] * 58))
    assert (row.n, verdict_name(row.verdict)) == (1, "inconclusive")
    mean = decided(lab, mean_clause(lab), by_prompt(data, [(i % 19,) for i in range(58)]))
    assert (mean.n, mean.value) == (19, 0.5)


def test_runs_of_a_request_are_resampled_uniformly() -> None:
    data = with_drawn_runs(timed(np.tile(np.arange(4.0), (2000, 1))))
    assert data.drawn is not None
    drawn = np.array([float(run.values["latency"][0]) for run in data.drawn])
    assert all(400 < np.count_nonzero(drawn == turn) < 600 for turn in range(4))
    assert with_drawn_runs(data) is data
    backwards = replace(data, runs=tuple(reversed(data.runs[:2000])), drawn=None)
    assert {run.key for run in with_drawn_runs(backwards).drawn or ()} == {
        run.key for run in data.drawn
    }
    assert [len(runs) for runs in by_request(data.runs)] == [4] * 2000


def test_census_of_a_recorded_batch_counts_every_run(lab: Any) -> None:
    data = replace(timed(np.full((5, 4), 0.5)), batch=True)
    clause = replace(quantile_clause(lab), evidence=EvidenceKind.CENSUS)
    row = decided(lab, clause, data)
    assert (verdict_name(row.verdict), row.exceedance.n, row.counted) == ("held", 20, "timed runs")
    assert judge_for(clause, data, 0, ONE_LOOK).data.drawn is None
    assert decided(lab, quantile_clause(lab), data).n == 5
    assert row.value == Fraction(1, 2)
