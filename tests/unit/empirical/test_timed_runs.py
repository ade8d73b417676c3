"""Timed runs: enough rounds, separate warm-up, failures never count as fast runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import Family, KernelRef, ModelRef
from kcdsl.model.loader import load_model
from kcdsl.verdict.model import Inconclusive, verdict_name
from kcdsl_backends.empirical.decision.estimates import Settings, evaluate
from kcdsl_backends.empirical.sources.kernels import timing as runtime
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel, load_kernel
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from kcdsl_backends.empirical.table.evidence import FEWEST_ROUNDS, SliceData
from kcdsl_backends.empirical.table.requirements import is_runtime
from kcdsl_backends.requests import Request


class Clock:
    """A clock that advances one step per reading."""

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


def test_requests_run_once_per_round_without_warm_up(lab: Any) -> None:
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


def test_time_limit_applies_after_the_minimum_of_rounds(lab: Any) -> None:
    found = timed(lab, lambda tokens: torch.zeros(1), rounds=100, seconds=0.0)
    assert len(found.runs) == 4 * FEWEST_ROUNDS


def test_failed_run_has_no_time_and_no_equal_output(lab: Any) -> None:
    def forward(tokens: tuple[int, ...]) -> torch.Tensor:
        raise RuntimeError("no memory")

    found = timed(lab, forward)
    assert all(math.isnan(run.values["latency"][0]) for run in found.runs)
    assert set(found.repeats.values()) == {(0, 2)}


def test_repeats_are_compared_bitwise(lab: Any) -> None:
    turn = iter(range(1000))
    found = timed(lab, lambda tokens: torch.tensor([float(next(turn))]))
    assert set(found.repeats.values()) == {(0, 2)}
    assert set(timed(lab, lambda tokens: torch.zeros(2)).repeats.values()) == {(2, 2)}


def test_every_slice_has_timed_runs() -> None:
    assert runtime.rounds_needed([10, 0, 40]) == 7
    assert runtime.rounds_needed([100]) == runtime.rounds_needed([64]) == FEWEST_ROUNDS


def test_percentiles_of_times_need_timing(lab: Any) -> None:
    assert is_runtime(lab.clause(lab.statistic("quantile", "latency", "95/100")))


def test_failure_rates_need_no_timing(lab: Any) -> None:
    clause = lab.clause(lab.statistic("aggregate", "failure_rate"))
    assert not is_runtime(clause)


# --- generation ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(repository: Path) -> TorchKernel:
    """Return a running kernel of the tiny language model."""
    model = load_model(
        ModelRef("model.safetensors", "llama", config="config.json"),
        repository / "examples" / "tiny_lm",
    )
    return load_kernel(KernelRef("torch.eager", ()), model, "cpu")


def request(length: int) -> Request:
    return Request("r", "r", tuple(range(65, 65 + length)), {}, 1)


def generated(kernel: Any, *requests: Request, step: float = 1.0) -> Any:
    return runtime.time_requests(
        lambda tokens: kernel.forward(kernel.tokens(tokens)),
        requests,
        rounds=1,
        seconds=1e9,
        device=torch.device("cpu"),
        generate=runtime.greedy(kernel),
        clock=Clock(step),
    ).runs


def clause_of(lab: Any, name: str, limit: str = "1000", slice: str = "all") -> Any:
    left = lab.statistic("quantile", name, "1/2")
    return lab.clause(left, "<=", limit, id=name, slices=(slice,), family=Family.RUNTIME)


def test_kernel_generates_its_greedy_tokens(tiny: TorchKernel) -> None:
    prompt = request(6)
    stamps = list(runtime.greedy(tiny)(prompt, Clock(1.0)))
    assert stamps == [(float(at + 1), 1) for at in range(runtime.NEW_TOKENS)]
    run = generated(tiny, prompt)[0]
    # one reading at the beginning, one after each token
    assert {name: value.tolist() for name, value in run.values.items()} == {
        "latency": [1.0], "ttft": [1.0], "tpot": [1.0]
    }  # fmt: skip
    assert not run.problems


def test_every_step_extends_the_generated_sequence(lab: Any) -> None:
    calls: list[tuple[int, ...]] = []

    def function(tokens: tuple[int, ...]) -> torch.Tensor:
        calls.append(tokens)
        return lab.base(tokens)

    prompt = lab.requests(1)[0]
    list(runtime.greedy(lab.kernel(function))(prompt, Clock(1.0)))
    expected = prompt.tokens
    for call in calls:
        assert call == expected
        expected = (*expected, int(lab.base(expected)[-1].argmax()))
    assert len(calls) == runtime.NEW_TOKENS


def test_prefill_and_decode_have_separate_times(lab: Any) -> None:
    """The first token takes 5, each further token 2."""
    clock = Clock(0.0)
    prompt = lab.requests(1)[0]

    def function(tokens: tuple[int, ...]) -> torch.Tensor:
        clock.now += 5 if len(tokens) == prompt.length else 2
        return lab.base(tokens)

    kernel = lab.kernel(function)
    run = runtime.time_requests(
        lambda tokens: kernel.forward(kernel.tokens(tokens)),
        [prompt],
        rounds=1,
        seconds=1e9,
        device=torch.device("cpu"),
        generate=runtime.greedy(kernel),
        clock=clock,
    ).runs[0]
    assert {name: value.tolist() for name, value in run.values.items()} == {
        "latency": [5.0], "ttft": [5.0], "tpot": [2.0]
    }  # fmt: skip


def test_full_context_ends_the_generation(tiny: TorchKernel) -> None:
    longest = tiny.model.limits[1]
    assert longest is not None
    with_two = Request("two", "two", (65,) * (longest - 1), {}, 1)
    with_one = Request("one", "one", (65,) * longest, {}, 2)
    assert len(list(runtime.greedy(tiny)(with_two, Clock(1.0)))) == 2
    two, one = generated(tiny, with_two, with_one)
    assert two.values["tpot"].tolist() == [1.0]
    assert one.values["ttft"].tolist() == [1.0]
    assert "tpot" not in one.values
    assert "no token came after the first" in one.problems["tpot"]


def test_clauses_about_generation_are_decided(lab: Any) -> None:
    found = lab.evaluate(
        clause_of(lab, "ttft"), clause_of(lab, "tpot"), clause_of(lab, "tpot", "0"), seconds=1e9
    ).report
    assert [verdict_name(row.verdict) for row in found.clauses] == ["held", "held", "violated"]
    for row in found.clauses:
        assert row.unit == "s"
        assert (row.n, row.counted) == (16, "requests")  # 4 of the 20 repeat a prompt
        assert row.value is not None
        assert row.value > 0
    assert any("16 likeliest tokens" in note and "upper" in note for note in found.notes)


def test_nothing_is_generated_without_a_clause_about_it(lab: Any) -> None:
    longest = 0

    def function(tokens: tuple[int, ...]) -> torch.Tensor:
        nonlocal longest
        longest = max(longest, len(tokens))
        return lab.base(tokens)

    found = lab.evaluate(clause_of(lab, "latency"), infer=lab.kernel(function), seconds=0.0)
    assert longest == 6
    assert not any("upper" in note for note in found.report.notes)


def test_more_rounds_over_few_requests_are_inconclusive(lab: Any) -> None:
    row = lab.evaluate(clause_of(lab, "tpot", slice="few"), seconds=1e9).report.clauses[0]
    assert row.n == 3
    assert row.needed == 5
    assert isinstance(row.verdict, Inconclusive)
    assert "5 without any would show at most 50 %" in row.verdict.reason
    assert "add requests to the slice, since the timed runs of a request count as one" in str(
        row.verdict.reason
    )


@pytest.mark.parametrize("at", [6, 9])
def test_failed_generation_invalidates_the_evidence(lab: Any, at: int) -> None:
    """It fails only in the longest requests, or in a decode step."""
    rows = (*lab.requests(3), *(replace(r, key="long") for r in lab.requests(1, length=8)))

    def function(tokens: tuple[int, ...]) -> torch.Tensor:
        if len(tokens) == at + 2:
            raise RuntimeError("no memory")
        return lab.base(tokens)

    kernel = lab.kernel(function)
    runs = generated(kernel, *rows)
    assert all("no memory" in run.problems["tpot"] for run in runs)
    data = SliceData("all", (), runs)
    slow = lab.statistic("quantile", "ttft", "95/100")
    with pytest.raises(NotMeasurable, match="no memory"):
        evaluate(slow, data, "upper", Settings(0, None))


@pytest.mark.parametrize("name", ["ttft", "tpot"])
def test_encoder_generates_nothing(lab: Any, name: str) -> None:
    with pytest.raises(Refusal, match="generates nothing"):
        lab.evaluate(clause_of(lab, name), encoder=True)
