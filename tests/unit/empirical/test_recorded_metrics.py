"""Metrics that recorded runs feed: sequences, behaviour, gradients, routes, times, records."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from kcdsl_backends.empirical.metrics import (
    behaviour,
    calibration,
    observability,
    reinforcement,
    routing,
    sequences,
    serving,
)
from kcdsl_backends.empirical.metrics.aggregates import AGGREGATES
from kcdsl_backends.empirical.metrics.evidence import Unmeasured
from kcdsl_backends.empirical.metrics.measures import MEASURES, UNMEASURED
from kcdsl_backends.empirical.metrics.policies import PolicyPair, policy_pair
from kcdsl_backends.empirical.metrics.recorded import RECORDED, RECORDED_FUNCTIONS

# --- sequences -----------------------------------------------------------------------------------


def test_sequences_have_their_closed_forms() -> None:
    delta = [0.1, -0.3, 0.5]
    assert sequences.seq_log_ratio(delta) == pytest.approx(0.3)
    assert sequences.geo_ratio(delta) == pytest.approx(math.exp(0.1))
    assert sequences.seq_max_abs(delta) == 0.5
    assert sequences.seq_k3(delta) == pytest.approx(math.exp(0.3) - 1 - 0.3)
    assert sequences.seq_k3([800.0]) == math.inf
    assert sequences.ess_sequences([delta, delta]) == 1
    assert sequences.ess_sequences([[0.0], [math.log(3)]]) == pytest.approx(16 / 20)
    assert sequences.tail_mass_sequences([[0.5, 0.5], [0.1], [-0.8], [0.0]]) == 0.5
    assert sequences.max_token_kl([0.0, 0.2, 0.1]) == 0.2


def test_what_leaves_the_range_of_float64_is_infinite_and_never_a_failure() -> None:
    assert sequences.geo_ratio([9999.0, 0.0]) == math.inf
    assert sequences.geo_ratio([-9999.0, 0.0]) == 0
    assert sequences.ppl_ratio([-9999.0, -1.0], [-1.0, -1.0]) == math.inf
    assert sequences.seq_log_ratio([1e308, 1e308]) == math.inf
    with pytest.raises(Unmeasured, match="not finite"):
        sequences.ess_sequences([[1e308, 1e308], [0.0, 0.0]])


def test_the_rounding_of_equal_values_is_no_correlation() -> None:
    values = [[709.4900000000001] * n for n in (3, 2, 7)]
    with pytest.raises(Unmeasured, match="never vary"):
        sequences.intraclass_correlation(values)
    assert sequences.intraclass_correlation([[1.0, 1.0], [1.0 + 1e-9] * 2]) == 1


def test_the_sign_of_perplexities_is_train_minus_inference() -> None:
    train, infer = [-2.0, -3.0], [-1.0, -3.0]
    assert sequences.log_ppl_diff(train, infer) == 0.5
    assert sequences.ppl_ratio(train, infer) == pytest.approx(math.exp(2.5) / math.exp(2.0))
    assert sequences.log_ppl_diff(infer, train) == -0.5
    with pytest.raises(Unmeasured, match="2 and 1 tokens"):
        sequences.log_ppl_diff(train, infer[:1])


def test_composed_tv_is_monotone_and_vacuous_at_one() -> None:
    assert sequences.composed_tv([0.1] * 5) == pytest.approx(1 - 0.9**5)
    assert sequences.composed_tv([1e-12] * 3) == pytest.approx(3e-12, rel=1e-9)
    assert sequences.composed_tv([0.1, 1.0]) == 1
    assert sequences.composed_tv([0.1] * 6) > sequences.composed_tv([0.1] * 5)
    for broken in ([-0.1], [1.1]):
        with pytest.raises(Unmeasured, match="total variation"):
            sequences.composed_tv(broken)


def test_noise_scales_with_the_root_of_the_length_and_bias_with_the_length() -> None:
    rng = np.random.default_rng(2)
    noise = [rng.standard_normal(64) for _ in range(600)]
    bias = [np.full(64, 0.01) + 1e-6 * rng.standard_normal(64) for _ in range(50)]
    assert sequences.length_scaling(noise).slope == pytest.approx(0.5, abs=0.05)
    fit = sequences.length_scaling(bias)
    assert fit.slope == pytest.approx(1.0, abs=1e-3)
    assert fit.groups == 6
    for few in ([[0.1] * 8] * 7, [[0.1] * 3] * 9, [[0.0] * 8] * 9, []):
        with pytest.raises(Unmeasured):
            sequences.length_scaling(few)


def test_tokens_of_a_sequence_that_move_together_are_one_token() -> None:
    rng = np.random.default_rng(5)
    together = [np.full(20, shared) for shared in rng.standard_normal(200)]
    alone = [rng.standard_normal(20) for _ in range(400)]
    half = [s + rng.standard_normal(20) for s in rng.standard_normal(2000)]
    assert sequences.intraclass_correlation(together) == pytest.approx(1)
    assert abs(sequences.intraclass_correlation(alone)) < 0.02
    assert sequences.intraclass_correlation(half) == pytest.approx(0.5, abs=0.05)
    unequal = sequences.intraclass_correlation([[1.0, 2.0], [3.0, 4.0, 5.0], [6.0]])
    assert unequal == pytest.approx((7.5 - 5 / 6) / (7.5 + (11 / 6 - 1) * 5 / 6))
    for few in ([[1.0, 2.0]], [[1.0], [2.0]], [[1.0, 1.0], [1.0, 1.0]]):
        with pytest.raises(Unmeasured):
            sequences.intraclass_correlation(few)


# --- behaviour -----------------------------------------------------------------------------------


def test_rewards_are_paired_and_prompts_are_the_unit() -> None:
    found = behaviour.paired([1.0, 0.0, 0.5], [0.5, 0.0, 0.5])
    assert [found.mean, found.gap, found.n] == pytest.approx([-0.5 / 3, 0.5 / 3, 3])
    assert found.error == pytest.approx(float(np.std([-0.5, 0, 0], ddof=1)) / math.sqrt(3))
    grouped = behaviour.paired_by_prompt(["a", "a", "b"], [0, 0, 0], [1, 0, 0])
    assert (grouped.mean, grouped.n) == (0.25, 2)
    assert behaviour.paired([1.0], [2.0]).error is None
    with pytest.raises(Unmeasured, match="prompts"):
        behaviour.paired_by_prompt(["a"], [0, 0], [1, 0])


def test_flips_that_cancel_are_a_rate_and_no_gap() -> None:
    found = behaviour.flips([1, 1, 0, 0, 0, 1], [1, 0, 1, 0, 0, 0])
    assert (found.gained, found.lost, found.n) == (1, 2, 6)
    assert [found.rate, found.gap] == pytest.approx([0.5, 1 / 6])
    assert found.p_value == pytest.approx(float(binomtest(1, 3, 0.5).pvalue))
    assert behaviour.flips([1, 0], [1, 0]).p_value == 1
    with pytest.raises(Unmeasured, match="0 or 1"):
        behaviour.flips([0.5], [1])


def test_outputs_parse_or_follow_a_schema_or_match() -> None:
    texts = ['{"a": 1}', "{'a': 1}", "[1, NaN]", "3", '{"a": true, "b": "x"}', "[" * 100_000]
    assert behaviour.parses_as_json(texts).tolist() == [1, 0, 0, 1, 1, 0]
    assert behaviour.calls_tool(texts, {"a": (int, float)}).tolist() == [1, 0, 0, 0, 0, 0]
    assert behaviour.calls_tool(texts, {"a": bool, "b": str}).tolist() == [0, 0, 0, 0, 1, 0]
    assert behaviour.exact_matches(["x ", "y"], ["x", "z"]).tolist() == [1, 0]
    with pytest.raises(Unmeasured, match="references"):
        behaviour.exact_matches(["x"], [])


# --- gradients -----------------------------------------------------------------------------------


def test_gradient_bias_has_its_closed_forms() -> None:
    delta, advantages = [math.log(2), math.log(0.5)], [1.0, 2.0]
    assert reinforcement.adv_weighted_mean(delta, advantages) == pytest.approx((1 - 1) / 2)
    assert reinforcement.adv_weighted_bias(delta, [1.0, -1.0]) == pytest.approx(0.75)
    assert reinforcement.is_variance_inflation(delta) == pytest.approx((4 + 0.25) / 2)
    assert reinforcement.grad_cosine([1.0, 0.0], [1.0, 1.0]) == pytest.approx(math.sqrt(0.5))
    assert reinforcement.grad_cosine([1e200, 0.0], [1e-200, 0.0]) == 1
    near = reinforcement.grad_cosine([1.0, 0.0], [1.0, 1e-9])
    assert near <= 1
    assert reinforcement.grad_rel_bias([3.0, 4.0], [3.0, 5.0]) == pytest.approx(0.2)
    for function in (reinforcement.grad_cosine, reinforcement.grad_rel_bias):
        with pytest.raises(Unmeasured, match="zero"):
            function([0.0, 0.0], [1.0, 0.0])


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_gradient_bias_of_ratios_beyond_float64() -> None:
    mean = reinforcement.adv_weighted_mean
    assert mean([800.0, 0.0], [1.0, 1.0]) == math.inf
    assert mean([800.0, 0.0], [-1.0, 1.0]) == -math.inf
    assert mean([800.0, math.log(2)], [0.0, 1.0]) == pytest.approx(0.5)
    assert mean([709.5, 709.5], [1.0, 1.0]) == pytest.approx(math.exp(709.5))
    with pytest.raises(Unmeasured, match="both sides"):
        mean([800.0, 800.0], [1.0, -1.0])
    assert reinforcement.is_variance_inflation([800.0, 0.0]) == math.inf
    near = [709.5 / 2] * 2
    assert reinforcement.is_variance_inflation(near) == pytest.approx(math.exp(709.5))


# --- routes --------------------------------------------------------------------------------------


def test_routes_agree_as_sets() -> None:
    train = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    infer = np.array([[[1, 0], [2, 4]], [[0, 1], [3, 2]]])
    assert routing.router_agreement(train, infer).tolist() == [1.0, 0.75]
    assert routing.any_flip(train, infer).tolist() == [1, 0]
    assert routing.tokens_any_flip(train, infer) == 0.5
    assert RECORDED_FUNCTIONS["router_agreement"](train, infer) == 0.75
    assert routing.router_margin(np.array([[[0.1, 0.7, 0.5]]]), 1).tolist() == [
        [pytest.approx(0.2)]
    ]
    found = routing.drift_by_flip([0.5, 0.1, 0.3], [1, 0, 0])
    assert found == {"flip": (0.5, 1), "no_flip": (pytest.approx(0.2), 2)}
    assert routing.drift_by_flip([0.5], [0])["flip"] == (None, 0)


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
def test_routes_that_are_none_are_refused(train: Any, infer: Any) -> None:
    with pytest.raises(Unmeasured):
        routing.tokens_any_flip(train, infer)


# --- times and records ---------------------------------------------------------------------------


def test_times_of_tokens() -> None:
    one = serving.Served(1.0, [1.5, 1.7, 2.1])
    two = serving.Served(0.0, [3.0])
    assert serving.time_to_first_token(one) == 0.5
    assert serving.time_per_output_token(one) == pytest.approx(0.3)
    assert serving.latency(one) == pytest.approx(1.1)
    assert serving.throughput([one, two]) == pytest.approx(4 / 3)
    assert serving.kv_memory(2, 4, 8, 10, 2) == 2 * 2 * 4 * 8 * 10 * 2
    assert serving.determinism_window({"a": ["x", "x", "y"], "b": ["z"]}) == (1, 2)
    with pytest.raises(Unmeasured, match="one token"):
        serving.time_per_output_token(two)
    for broken in (serving.Served(1.0, []), serving.Served(2.0, [1.0]),
                   serving.Served(0.0, [2.0, 1.0]), serving.Served(math.nan, [1.0])):  # fmt: skip
        with pytest.raises(Unmeasured):
            serving.time_to_first_token(broken)
    with pytest.raises(Unmeasured):
        serving.throughput([])
    with pytest.raises(Unmeasured, match="repeated"):
        serving.determinism_window({"a": ["x"]})
    with pytest.raises(Unmeasured):
        serving.kv_memory(0, 1, 1, 1, 1)


def test_records_are_counted_with_null_as_missing() -> None:
    records: list[dict[str, Any]] = [
        {"request": "a", "seed": 0, "print": "x", "replay_signature": "s"},
        {"request": "b", "seed": None, "print": "y", "replay_signature": None},
    ]
    assert observability.coverage(records, ["seed", "print"]) == {"seed": (1, 2), "print": (2, 2)}
    assert observability.complete(records, ["seed", "print"]) == (1, 2)
    assert observability.equal_fingerprints(records, "print", "x") == (1, 2)
    assert observability.replayed(records, {"a": "s", "b": "t"}) == (1, 2)
    assert observability.replayed(records, {"a": "other"}) == (0, 2)
    with pytest.raises(Unmeasured, match="no records"):
        observability.complete([], ["seed"])
    with pytest.raises(Unmeasured, match="required"):
        observability.coverage(records, [])
    with pytest.raises(Unmeasured, match="two records"):
        observability.replayed([records[0], records[0]], {})


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


def test_aggregates_join_the_arrays_of_requests() -> None:
    gap = AGGREGATES["nll_gap"]
    assert gap.of([[np.array([0.2, -0.1])], [np.array([0.2])]]) == pytest.approx(0.1)
    assert gap.of([[np.array([-0.3])]]) == pytest.approx(0.3)
    ranked, hits = np.full(100, 0.2), np.zeros(100)
    assert AGGREGATES["ace_gap"].of([[ranked, hits, ranked, hits]]) == 0
    for name in AGGREGATES:
        with pytest.raises(Unmeasured):
            AGGREGATES[name].of([])
        with pytest.raises(Unmeasured):
            AGGREGATES[name].of([[np.empty(0)] * len(AGGREGATES[name].inputs)])
    with pytest.raises(Unmeasured, match="fewer than 5"):
        AGGREGATES["ace_gap"].of([[np.zeros(3)] * 4])


# --- the registry --------------------------------------------------------------------------------


def test_every_metric_that_only_records_feed_has_its_function_and_its_reason() -> None:
    assert set(RECORDED) == set(RECORDED_FUNCTIONS) == set(UNMEASURED)
    assert set(RECORDED) & set(MEASURES) == set()
    assert all(function.__doc__ for function in RECORDED_FUNCTIONS.values())


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_the_language_and_the_records_agree_on_a_metric(name: str) -> None:
    from kcdsl.metrics import METRICS

    metric, measure = METRICS[name], RECORDED[name]
    assert (metric.better, str(metric.dimension)) == (measure.better, measure.unit)
    assert measure.low == (None if metric.lower is None else float(metric.lower))
    assert measure.high == (None if metric.upper is None else float(metric.upper))
    assert metric.counted == {"slice": "window"}.get(measure.counted, measure.counted)
    assert metric.signed == (measure.low is None and measure.counted == "request")


SHORT: dict[str, tuple[Any, ...]] = {
    "grad_cosine": ([], []),
    "grad_rel_bias": ([], []),
    "adv_weighted_bias": ([], []),
    "reward_delta": ([], []),
    "refusal_flip": ([], []),
    "json_parse_gap": ([], []),
    "tool_schema_gap": ([], []),
    "exact_match_gap": ([], []),
    "log_ppl_diff": ([], []),
    "ppl_ratio": ([], []),
    "noise_ratio": (torch.empty(0, 2),) * 3,
    "topk_tail_kl": (torch.empty(0, 2),) * 2,
    "topk_tail_tv": (torch.empty(0, 2),) * 2,
    "router_agreement": (np.empty((0, 1, 1), dtype=int),) * 2,
    "tokens_any_flip": (np.empty((0, 1, 1), dtype=int),) * 2,
    "router_margin": (np.empty((0, 1, 2)), 1),
    "kv_memory": (0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_nothing_recorded_is_never_a_value(name: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        RECORDED_FUNCTIONS[name](*SHORT.get(name, ([],)))
