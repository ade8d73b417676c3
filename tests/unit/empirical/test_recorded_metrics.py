"""Metrics of recorded runs: sequences, behaviour, gradients, routes, times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.metrics import MEASURES, RECORDED, UNMEASURED
from kcdsl_backends.empirical.metrics import (
    policies as calibration,
)
from kcdsl_backends.empirical.metrics import (
    recorded,
    sampled,
    sums,
)
from kcdsl_backends.empirical.metrics import (
    recorded as sequences,
)
from kcdsl_backends.empirical.metrics.measures import AGGREGATES, function_of
from kcdsl_backends.empirical.metrics.policies import PolicyPair, policy_pair
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable

# --- sequences -----------------------------------------------------------------------------------


def joined(parts: Any) -> tuple[list[float], list[int]]:
    """Return concatenated sequences, and their lengths."""
    return [float(v) for part in parts for v in part], [len(part) for part in parts]


def correlation(parts: Any) -> float:
    return sums.intraclass_correlation(*joined(parts))


def test_sequences_have_their_closed_forms() -> None:
    delta = [0.1, -0.3, 0.5]
    assert sequences.seq_log_ratio(delta) == pytest.approx(0.3)
    assert sequences.geo_ratio(delta) == pytest.approx(math.exp(0.1))
    assert sequences.seq_max_abs(delta) == 0.5
    assert sequences.seq_k3(delta) == pytest.approx(math.exp(0.3) - 1 - 0.3)
    assert sequences.seq_k3([800.0]) == math.inf
    assert sampled.ess_fraction([0.3, 0.3]) == 1
    assert sampled.ess_fraction([0.0, math.log(3)]) == pytest.approx(16 / 20)
    assert sequences.tail_mass([1.0, 0.1, -0.8, 0.0]) == 0.5
    assert sequences.max_token_kl([0.0, 0.2, 0.1]) == 0.2


def test_overflow_is_infinite_and_not_a_failure() -> None:
    assert sequences.geo_ratio([9999.0, 0.0]) == math.inf
    assert sequences.geo_ratio([-9999.0, 0.0]) == 0
    assert sequences.ppl_ratio([-9999.0, -1.0], [-1.0, -1.0]) == math.inf
    assert sequences.seq_log_ratio([1e308, 1e308]) == math.inf
    with pytest.raises(NotMeasurable, match="not finite"):
        sampled.ess_fraction([math.inf, 0.0])


def test_rounding_of_equal_values_gives_no_correlation() -> None:
    values = [[709.4900000000001] * n for n in (3, 2, 7)]
    with pytest.raises(NotMeasurable, match="never vary"):
        correlation(values)
    assert correlation([[1.0, 1.0], [1.0 + 1e-9] * 2]) == 1


def test_perplexity_difference_is_train_minus_infer() -> None:
    train, infer = [-2.0, -3.0], [-1.0, -3.0]
    assert sequences.log_ppl_diff(train, infer) == 0.5
    assert sequences.ppl_ratio(train, infer) == pytest.approx(math.exp(2.5) / math.exp(2.0))
    assert sequences.log_ppl_diff(infer, train) == -0.5
    with pytest.raises(NotMeasurable, match="2 and 1 tokens"):
        sequences.log_ppl_diff(train, infer[:1])


def test_composed_tv_is_monotone_and_at_most_one() -> None:
    assert sequences.composed_tv([0.1] * 5) == pytest.approx(1 - 0.9**5)
    assert sequences.composed_tv([1e-12] * 3) == pytest.approx(3e-12, rel=1e-9)
    assert sequences.composed_tv([0.1, 1.0]) == 1
    assert sequences.composed_tv([0.1] * 6) > sequences.composed_tv([0.1] * 5)
    for broken in ([-0.1], [1.1]):
        with pytest.raises(NotMeasurable, match="total variation"):
            sequences.composed_tv(broken)


def test_noise_grows_with_the_root_of_length_and_bias_linearly() -> None:
    rng = np.random.default_rng(2)
    noise = [rng.standard_normal(64) for _ in range(600)]
    bias = [np.full(64, 0.01) + 1e-6 * rng.standard_normal(64) for _ in range(50)]
    assert sums.length_scaling(*joined(noise)) == pytest.approx(0.5, abs=0.05)
    assert sums.length_scaling(*joined(bias)) == pytest.approx(1.0, abs=1e-3)
    for few in ([[0.1] * 8] * 7, [[0.1] * 3] * 9, [[0.0] * 8] * 9, []):
        with pytest.raises(NotMeasurable):
            sums.length_scaling(*joined(few))


def test_correlated_tokens_of_a_sequence_count_as_one() -> None:
    rng = np.random.default_rng(5)
    together = [np.full(20, shared) for shared in rng.standard_normal(200)]
    alone = [rng.standard_normal(20) for _ in range(400)]
    half = [s + rng.standard_normal(20) for s in rng.standard_normal(2000)]
    assert correlation(together) == pytest.approx(1)
    assert abs(correlation(alone)) < 0.02
    assert correlation(half) == pytest.approx(0.5, abs=0.05)
    unequal = correlation([[1.0, 2.0], [3.0, 4.0, 5.0], [6.0]])
    assert unequal == pytest.approx((7.5 - 5 / 6) / (7.5 + (11 / 6 - 1) * 5 / 6))
    for few in ([[1.0, 2.0]], [[1.0], [2.0]], [[1.0, 1.0], [1.0, 1.0]]):
        with pytest.raises(NotMeasurable):
            correlation(few)
        with pytest.raises(NotMeasurable, match="tokens of rollouts"):
            sums.intraclass_correlation([1.0, 2.0], [3.0])


# --- behaviour -----------------------------------------------------------------------------------


def test_outputs_parse_follow_a_schema_or_match() -> None:
    texts = ['{"a": 1}', "{'a': 1}", "[1, NaN]", "3", '{"a": true, "b": "x"}', "[" * 100_000]
    assert recorded.parses_as_json(texts).tolist() == [1, 0, 0, 1, 1, 0]
    assert recorded.calls_tool(texts, {"a": (int, float)}).tolist() == [1, 0, 0, 0, 0, 0]
    assert recorded.calls_tool(texts, {"a": bool, "b": str}).tolist() == [0, 0, 0, 0, 1, 0]
    assert recorded.exact_matches(["x ", "y"], ["x", "z"]).tolist() == [1, 0]
    with pytest.raises(NotMeasurable, match="references"):
        recorded.exact_matches(["x"], [])


# --- gradients -----------------------------------------------------------------------------------


def test_gradients_of_a_batch_are_summed_before_they_are_compared() -> None:
    assert recorded.grad_cosine([1.0, 0.0], [1.0, 1.0], [2]) == pytest.approx(math.sqrt(0.5))
    assert recorded.grad_cosine([1e200, 0.0], [1e-200, 0.0], [2]) == 1
    assert recorded.grad_cosine([1.0, 0.0], [1.0, 1e-9], [2]) <= 1
    assert recorded.grad_rel_bias([3.0, 4.0], [3.0, 5.0], [2]) == pytest.approx(0.2)
    assert recorded.grad_rel_bias([1.0, 4.0, 2.0, 0.0], [1.0, 5.0, 2.0, 0.0], [2, 2]) == (
        pytest.approx(0.2)
    )
    for function in (recorded.grad_cosine, recorded.grad_rel_bias):
        with pytest.raises(NotMeasurable, match="zero"):
            function([0.0, 0.0], [1.0, 0.0], [2])
        with pytest.raises(NotMeasurable, match="different sizes"):
            function([1.0, 0.0], [1.0, 0.0], [1])
        with pytest.raises(NotMeasurable, match="different sizes"):
            function([1.0, 0.0, 1.0], [1.0, 0.0, 1.0], [2, 1])


# --- routes --------------------------------------------------------------------------------------


def test_routes_agree_as_sets() -> None:
    train = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    infer = np.array([[[1, 0], [2, 4]], [[0, 1], [3, 2]]])
    assert recorded.router_agreement(train, infer).tolist() == [1.0, 0.75]
    assert recorded.any_flip(train, infer).tolist() == [1, 0]
    assert recorded.mean_of(recorded.any_flip(train, infer)) == 0.5
    shares = [recorded.router_agreement(train[i : i + 1], infer[i : i + 1]) for i in (0, 1)]
    assert recorded.least_agreement(np.concatenate(shares), [2]) == 0.75
    with pytest.raises(NotMeasurable, match="numbers of layers"):
        recorded.least_agreement(np.concatenate(shares), [2, 1])
    assert recorded.router_margin(np.array([[[0.1, 0.7, 0.5]]]), 1).tolist() == [
        [pytest.approx(0.2)]
    ]


@pytest.mark.parametrize(
    ("train", "infer"),
    [
        (np.zeros((0, 1, 1), dtype=int), np.zeros((0, 1, 1), dtype=int)),
        (np.zeros((1, 1, 1), dtype=int), np.zeros((1, 2, 1), dtype=int)),
        (np.array([[[0, 0]]]), np.array([[[0, 1]]])),
        (np.array([[[-1]]]), np.array([[[0]]])),
        (np.array([[[0.5]]]), np.array([[[0.5]]])),
    ],
)
def test_invalid_routes_are_refused(train: Any, infer: Any) -> None:
    with pytest.raises(NotMeasurable):
        recorded.any_flip(train, infer)


# --- times ---------------------------------------------------------------------------------------


def test_token_times() -> None:
    one = recorded.Served(1.0, [1.5, 1.7, 2.1])
    two = recorded.Served(0.0, [3.0])
    assert recorded.time_to_first_token(one) == 0.5
    assert recorded.time_per_output_token(one) == pytest.approx(0.3)
    assert recorded.latency(one) == pytest.approx(1.1)
    assert recorded.kv_memory(2, 4, 8, 10, 2) == 2 * 2 * 4 * 8 * 10 * 2
    with pytest.raises(NotMeasurable, match="one token"):
        recorded.time_per_output_token(two)
    for broken in (recorded.Served(1.0, []), recorded.Served(2.0, [1.0]),
                   recorded.Served(0.0, [2.0, 1.0]), recorded.Served(math.nan, [1.0])):  # fmt: skip
        with pytest.raises(NotMeasurable):
            recorded.time_to_first_token(broken)
    with pytest.raises(NotMeasurable):
        recorded.kv_memory(0, 1, 1, 1, 1)


# --- calibration ---------------------------------------------------------------------------------


def pair_of(p: list[list[float]], q: list[list[float]]) -> PolicyPair:
    logits = [torch.log(torch.tensor(side, dtype=torch.float64)) for side in (p, q)]
    return policy_pair(logits[0], logits[1], 1.0)


def test_proper_scores_are_paired_differences() -> None:
    p, q = [[0.5, 0.3, 0.2]], [[0.25, 0.25, 0.5]]
    found = calibration.scores(pair_of(p, q), torch.tensor([0]))
    brier = [(0.5**2 + 0.3**2 + 0.2**2), (0.75**2 + 0.25**2 + 0.5**2)]
    assert found.brier.tolist() == pytest.approx([brier[1] - brier[0]])
    assert found.nll.tolist() == pytest.approx([math.log(0.5 / 0.25)])
    assert found.train_ranked.tolist()[0] == pytest.approx([0.5, 0.3, 0.2])
    assert (found.train_hits.tolist(), found.infer_hits.tolist()) == ([[1, 0, 0]], [[0, 1, 0]])
    with pytest.raises(ValueError, match="labels"):
        calibration.scores(pair_of(p, q), torch.tensor([0, 1]))


def test_adaptive_calibration_averages_over_ranks_and_bins() -> None:
    ranked = np.array([[0.6, 0.2], [0.6, 0.2], [0.9, 0.05], [0.9, 0.05]])
    hits = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    expected = (abs(0.6 - 0.5) + abs(0.9 - 1) + abs(0.05 - 0) + abs(0.2 - 0.5)) / 4
    assert calibration.adaptive_calibration_error(ranked, hits, 2) == pytest.approx(expected)
    order = [3, 0, 2, 1]
    again = calibration.adaptive_calibration_error(ranked[order], hits[order], 2)
    assert again == calibration.adaptive_calibration_error(ranked, hits, 2)
    with pytest.raises(ValueError, match="bins"):
        calibration.adaptive_calibration_error(ranked, hits, 5)


def test_aggregates_concatenate_the_arrays_of_requests() -> None:
    gap = AGGREGATES["nll_gap"]
    assert gap.of([[np.array([0.2, -0.1])], [np.array([0.2])]]) == pytest.approx(0.1)
    assert gap.of([[np.array([-0.3])]]) == pytest.approx(0.3)
    ranked, hits = np.full(100, 0.2), np.zeros(100)
    assert AGGREGATES["ace_gap"].of([[ranked, hits, ranked, hits]]) == 0
    for name in AGGREGATES:
        with pytest.raises(NotMeasurable):
            AGGREGATES[name].of([])
        with pytest.raises(NotMeasurable):
            AGGREGATES[name].of([[np.empty(0)] * len(AGGREGATES[name].inputs)])
    with pytest.raises(NotMeasurable, match="fewer than 5"):
        AGGREGATES["ace_gap"].of([[np.zeros(3)] * 4])


# --- the registry --------------------------------------------------------------------------------


def test_recording_metrics_state_reason_and_columns() -> None:
    assert set(RECORDED) == set(UNMEASURED)
    assert set(RECORDED) & set(MEASURES) == set()
    assert all(m.columns or m.needs == ("gold",) for m in RECORDED.values())


ALONE: dict[str, tuple[Any, ...]] = {
    "noise_ratio": (torch.empty(0, 2),) * 3,
    "topk_tail_kl": (torch.empty(0, 2),) * 2,
    "topk_tail_tv": (torch.empty(0, 2),) * 2,
    "router_margin": (np.empty((0, 1, 2)), 1),
}


@pytest.mark.parametrize("name", sorted(n for n, m in RECORDED.items() if ":" in str(m.entry)))
def test_empty_recordings_have_no_value(name: str) -> None:
    metric = RECORDED[name]
    with pytest.raises(ValueError):  # noqa: PT011
        function_of(metric)(*ALONE.get(name, ([],) * len(metric.reads)))
