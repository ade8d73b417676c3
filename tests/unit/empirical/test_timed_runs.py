"""Timing: enough runs, warm-up apart, failures never a fast run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kcdsl.ir.terms import Family
from kcdsl_backends.empirical import runtime


class Clock:
    """A clock that moves one step with each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def timed(lab: Any, forward: Any, rounds: int = 5, seconds: float = 1e9, step: float = 1.0) -> Any:
    return runtime.time_requests(
        forward,
        lab.requests(4),
        rounds=rounds,
        seconds=seconds,
        device=torch.device("cpu"),
        clock=Clock(step),
    )


def test_every_request_runs_once_a_round_and_warm_up_is_not_counted(lab: Any) -> None:
    calls: list[tuple[int, ...]] = []

    def forward(tokens: tuple[int, ...]) -> torch.Tensor:
        calls.append(tokens)
        return torch.zeros(1)

    found = timed(lab, forward)
    assert len(calls) == runtime.WARM_UP + 20
    assert [run.key for run in found.runs[:4]] == [r.key for r in lab.requests(4)]
    assert {float(run.values["latency"][0]) for run in found.runs} == {1.0}
    assert found.peak_memory is not None
    assert found.peak_memory > 1e6


def test_the_time_limit_ends_after_the_fewest_rounds(lab: Any) -> None:
    found = timed(lab, lambda tokens: torch.zeros(1), rounds=100, seconds=0.0)
    assert len(found.runs) == 4 * runtime.FEWEST_ROUNDS


def test_a_failed_run_has_no_time_and_equals_nothing(lab: Any) -> None:
    def forward(tokens: tuple[int, ...]) -> torch.Tensor:
        raise RuntimeError("no memory")

    found = timed(lab, forward)
    assert all(math.isnan(run.values["latency"][0]) for run in found.runs)
    assert set(found.repeats.values()) == {(0, 2)}


def test_repeats_compare_bits(lab: Any) -> None:
    turn = iter(range(1000))
    found = timed(lab, lambda tokens: torch.tensor([float(next(turn))]))
    assert set(found.repeats.values()) == {(0, 2)}
    assert set(timed(lab, lambda tokens: torch.zeros(2)).repeats.values()) == {(2, 2)}


@pytest.mark.parametrize(
    ("q", "budget", "wanted"),
    [
        ("95/100", None, 64),
        ("99/100", None, 299),
        ("1/2", ("5/100", "requests"), 64),
        ("1/2", ("1/100", "requests"), 299),
        ("95/100", ("5/100", "windows"), 59 * 16),
    ],
)
def test_enough_runs_are_made_to_decide_a_clause(
    lab: Any, q: str, budget: Any, wanted: int
) -> None:
    clause = lab.clause(
        lab.statistic("quantile", "latency", q), family=Family.RUNTIME, budget=budget
    )
    assert runtime.runs_needed(clause) == wanted
    assert runtime.rounds_needed([clause], [10, 0, 40]) == math.ceil(wanted / 10)
    assert runtime.is_runtime(clause)


def test_failure_rates_need_no_timing(lab: Any) -> None:
    clause = lab.clause(lab.statistic("aggregate", "failure_rate"))
    assert not runtime.is_runtime(clause)
