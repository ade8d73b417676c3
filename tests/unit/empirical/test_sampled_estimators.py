"""Sampled estimators: exact expectations, z-tests on a million draws, tails, weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.metrics import MEASURES
from kcdsl.metrics.sampled import RULES, Rule
from kcdsl_backends.empirical.metrics import policies, sampled, sums
from kcdsl_backends.empirical.metrics.measures import PROBABILITY_FUNCTIONS, SAMPLED_FUNCTIONS
from kcdsl_backends.empirical.metrics.policies import PolicyPair, policy_pair
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from tests.support import reference_metrics as reference

DRAWS = 1_000_000
NOTHING: list[tuple[str, list[float]]] = [
    ("nothing", []),
    ("NaN", [0.1, math.nan]),
    ("infinity", [0.1, math.inf]),
]


def categorical(vocabulary: int, drift: float, seed: int) -> PolicyPair:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(1, vocabulary, generator=generator, dtype=torch.float64)
    return policy_pair(
        z, z + drift * torch.randn(1, vocabulary, generator=generator, dtype=torch.float64), 1.0
    )


def truth(pair: PolicyPair) -> dict[str, float]:
    """Return the exact value of the quantity behind each estimator, from the policies."""
    forward = float(reference.kl_train_infer(pair)[0])
    backward = float(reference.kl_infer_train(pair)[0])
    chi2 = float(reference.chi2_train_infer(pair)[0])
    return {
        "log_ratio": -backward,
        "k1": backward,
        "k3": backward,
        "w_log_w": forward,
        "w_log_w_minus": forward,
        "tv_is": float(policies.total_variation(pair)[0]),
        "importance_ratio": 1.0,
        "chi2_token": chi2,
        "chi2_is": chi2,
        "jsd_is": float(reference.jensen_shannon(pair)[0]),
        "is_variance_inflation": 1 + chi2,
    }


@pytest.mark.parametrize(("vocabulary", "drift"), [(2, 0.3), (7, 1.0), (64, 0.02), (64, 0.6)])
def test_unbiased_estimators_match_their_closed_form(vocabulary: int, drift: float) -> None:
    pair = categorical(vocabulary, drift, seed=vocabulary)
    q = pair.infer_log.exp()[0].numpy()
    delta = (pair.train_log - pair.infer_log)[0]
    draws = np.random.default_rng(1).choice(vocabulary, size=DRAWS, p=q / q.sum())
    counts = np.bincount(draws, minlength=vocabulary)
    for name, expected in truth(pair).items():
        values = SAMPLED_FUNCTIONS[name](delta).numpy()
        assert float(q @ values) == pytest.approx(expected, rel=1e-9, abs=1e-15), name
        mean = float(counts @ values) / DRAWS
        spread = math.sqrt(max(float(counts @ (values - mean) ** 2), 0.0) / DRAWS)
        assert abs(mean - expected) <= 5 * spread / math.sqrt(DRAWS) + 1e-15, name
        assert MEASURES[name].bias == "unbiased"


def test_estimators_of_other_quantities_are_labelled() -> None:
    pair = categorical(64, 0.6, seed=1)
    q, delta = pair.infer_log.exp()[0], (pair.train_log - pair.infer_log)[0]
    backward = float(reference.kl_infer_train(pair)[0])
    second_order = float((q * SAMPLED_FUNCTIONS["k2"](delta)).sum())
    assert abs(second_order / backward - 1) > 0.01
    assert MEASURES["k2"].bias == "biased"
    assert MEASURES["mult_prob_error"].bias == "biased"
    small = categorical(64, 0.01, seed=1)
    d = (small.train_log - small.infer_log)[0]
    mean = float((small.infer_log.exp()[0] * SAMPLED_FUNCTIONS["mult_prob_error"](d)).sum())
    tv = float(policies.total_variation(small)[0])
    assert mean - 1 == pytest.approx(2 * tv, rel=0.05)


def test_directions_of_estimators_are_labelled() -> None:
    for name in ("k1", "k2", "k3"):
        assert MEASURES[name].estimates == "KL(infer || train)"
    for name in ("w_log_w", "w_log_w_minus"):
        assert MEASURES[name].estimates == "KL(train || infer)"
    for name in ("chi2_token", "chi2_is"):
        assert MEASURES[name].estimates == "chi2(train || infer)"


def test_k3_of_other_libraries_estimates_the_other_direction() -> None:
    """metrics.md 8: 1/w - 1 + ln w averages to chi2(infer||train) - KL(infer||train)."""
    pair = categorical(32, 0.6, seed=5)
    q, delta = pair.infer_log.exp()[0], (pair.train_log - pair.infer_log)[0]
    theirs = float((q * (torch.exp(-delta) - 1 + delta)).sum())
    chi2 = float(reference.chi2_infer_train(pair)[0])
    backward = float(reference.kl_infer_train(pair)[0])
    assert theirs == pytest.approx(chi2 - backward)
    assert theirs != pytest.approx(float(reference.kl_train_infer(pair)[0]), rel=0.05)


def test_control_variates_need_far_fewer_tokens() -> None:
    pair = categorical(64, 0.02, seed=9)
    q, delta = pair.infer_log.exp()[0], (pair.train_log - pair.infer_log)[0]

    def tokens_for_ten_percent(name: str) -> float:
        values = SAMPLED_FUNCTIONS[name](delta)
        mean = float((q * values).sum())
        return 100 * float((q * (values - mean) ** 2).sum()) / mean**2

    assert tokens_for_ten_percent("k1") > 1000 * tokens_for_ten_percent("k3")
    assert tokens_for_ten_percent("w_log_w") > 1000 * tokens_for_ten_percent("w_log_w_minus")


def test_estimators_are_non_negative_and_accurate_near_zero() -> None:
    size = torch.logspace(-12, 2, 300, dtype=torch.float64)
    delta = torch.cat([-size, size])
    for name in ("k2", "k3", "w_log_w_minus", "tv_is", "chi2_is", "jsd_is"):
        assert bool((SAMPLED_FUNCTIONS[name](delta) >= 0).all()), name
    tiny = torch.tensor([1e-9, -1e-9], dtype=torch.float64)
    assert SAMPLED_FUNCTIONS["jsd_is"](tiny).tolist() == pytest.approx([1.25e-19] * 2, rel=1e-8)
    edge = torch.tensor([0.9999e-3, 1.0001e-3], dtype=torch.float64)
    low, high = SAMPLED_FUNCTIONS["jsd_is"](edge)
    assert float(high / low) == pytest.approx(1 + 4e-4, rel=1e-6)
    far = SAMPLED_FUNCTIONS["jsd_is"](torch.tensor([-900.0, 700.0], dtype=torch.float64))
    assert float(far[0]) == pytest.approx(math.log(2) / 2)
    assert float(far[1]) == pytest.approx(math.exp(700) * math.log(2) / 2)


def test_swapped_sides_invert_ratios_and_exchange_tails() -> None:
    delta = torch.tensor([0.1, -0.8, 1.5, 3.0], dtype=torch.float64)
    one, other = SAMPLED_FUNCTIONS["ratio_above2"], SAMPLED_FUNCTIONS["ratio_below2"]
    assert one(delta).tolist() == other(-delta).tolist() == [0, 0, 1, 1]
    extreme = SAMPLED_FUNCTIONS["ratio_extreme"]
    assert extreme(delta).tolist() == extreme(-delta).tolist() == [0, 1, 1, 1]


def test_token_excluded_by_train_gives_the_limit_or_infinity() -> None:
    never = torch.tensor([-math.inf], dtype=torch.float64)
    found = {name: float(function(never)) for name, function in SAMPLED_FUNCTIONS.items()}
    limits = {"w_log_w": 0, "w_log_w_minus": 1, "tv_is": 0.5, "importance_ratio": 0, "chi2_is": 1,
              "chi2_token": -1, "is_variance_inflation": 0, "jsd_is": math.log(2) / 2,
              "k1": math.inf, "k2": math.inf, "k3": math.inf, "mult_prob_error": math.inf,
              "log_ratio": -math.inf, "oob_veto": 1, "oob_tis": 0, "clipfrac0": 1}  # fmt: skip
    for name, limit in limits.items():
        assert found[name] == pytest.approx(limit), name


def test_token_nearly_impossible_in_train_has_the_limit() -> None:
    delta = torch.tensor([-600.0, -699.0, -701.0, -9999.0, -math.inf], dtype=torch.float64)
    assert sampled.w_log_w_minus(delta).tolist() == pytest.approx([1.0] * 5, rel=1e-15)


def test_correlations_of_large_numbers_stay_below_one() -> None:
    x = [-1e200, -2e200, -3e200, -1e199]
    assert sampled.pearson(x, [1.0, 3.0, 2.0, 5.0]) == pytest.approx(
        float(np.corrcoef(np.array(x) / 1e200, [1, 3, 2, 5])[0, 1])
    )
    assert abs(sampled.pearson(x, [1e200, -1e200, -1e200, 1e200])) < 0.9


def test_overflowing_weights_have_no_finite_mean() -> None:
    rows = sampled.what_if([709.5, 709.5, 0.0], [3])
    assert {row.mean_raw for row in rows} == {math.inf}
    assert next(row.mean_weight for row in rows if row.rule.name == "tis") == pytest.approx(5 / 3)


def test_nan_is_never_counted_as_inside_a_band() -> None:
    broken = torch.tensor([math.nan], dtype=torch.float64)
    for name, function in SAMPLED_FUNCTIONS.items():
        assert math.isnan(float(function(broken)[0])), name


def binary(p: float) -> Tensor:
    return torch.tensor([math.log(p)], dtype=torch.float64)


def test_binary_divergence_is_a_lower_bound() -> None:
    p, q = 0.3, 0.6
    kl = [a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((p, q), (q, p))]
    assert float(sampled.binary_kl(binary(p), binary(q))) == pytest.approx(max(kl))
    assert float(sampled.prob_absdiff(binary(p), binary(q))) == pytest.approx(0.3)
    pair = categorical(16, 1.0, seed=3)
    train, infer = pair.train_log[0], pair.infer_log[0]
    most = max(float(reference.kl_train_infer(pair)[0]), float(reference.kl_infer_train(pair)[0]))
    assert bool((PROBABILITY_FUNCTIONS["binary_kl"](train, infer) <= most * (1 + 1e-12)).all())
    tv = float(policies.total_variation(pair)[0])
    assert bool((PROBABILITY_FUNCTIONS["binary_tv"](train, infer) <= tv * (1 + 1e-12)).all())
    for name in PROBABILITY_FUNCTIONS:
        assert MEASURES[name].bias == "lower_bound"


def test_binary_divergence_of_a_certain_token() -> None:
    sure, likely = binary(1.0), binary(0.9)
    assert float(sampled.binary_kl(sure, sure)) == 0
    assert float(sampled.binary_kl(sure, likely)) == math.inf


# --- tails ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0.3, 0.6, 1.0])
def test_tail_index_estimates_the_pareto_shape(shape: float) -> None:
    uniform = np.random.default_rng(3).random(200_000)
    weights_ = (1 - uniform) ** (-shape)
    assert sums.pareto_k(np.log(weights_)) == pytest.approx(shape, abs=0.1)


def test_tail_index_of_short_samples_shrinks_to_one_half() -> None:
    """The prior has the weight of ten values: 20 of an exponential law (k = 0) give a sixth."""
    rng = np.random.default_rng(8)
    found = [sums.pareto_k(np.log(rng.exponential(size=100))) for _ in range(200)]
    assert float(np.mean(found)) == pytest.approx(1 / 6, abs=0.06)


def test_heavy_tails_are_reported() -> None:
    normal = np.random.default_rng(4).standard_normal(50_000)
    assert sums.pareto_k(0.05 * normal) < 0.2
    assert sums.pareto_k(3.0 * normal) > sums.UNRELIABLE
    assert sums.pareto_k(np.zeros(100)) == -math.inf
    with pytest.raises(NotMeasurable, match="needs at least 26"):
        sums.pareto_k(np.zeros(20))


# --- remedies ------------------------------------------------------------------------------------


def test_band_is_equivalent_for_every_statistic() -> None:
    ratios = np.array([0.05, 0.15, 0.82, 1.0, 1.1, 1.3, 5.0])
    (row,) = sampled.what_if(np.log(ratios), [7], (masked(0.1, 1.2),))
    assert (row.below, row.above) == (1, 2)
    assert row.kept == pytest.approx(4 / 7)
    assert row.mean_weight == pytest.approx((0.15 + 0.82 + 1.0 + 1.1) / 7)


def masked(low: float, high: float) -> Rule:
    return Rule("band", low, high, "mask", "", "")


def inverted_k1(k1: NDArray[np.float64], low: float, high: float) -> NDArray[np.bool_]:
    """Emulate a defect of another library: -ln r is compared with [ln low, ln high] itself."""
    return (k1 >= math.log(low)) & (k1 <= math.log(high))


def test_inverted_band_rule_keeps_other_tokens() -> None:
    ratios = np.array([0.05, 0.15, 0.82, 0.9, 1.1, 1.3, 5.0, 9.0, 12.0])
    k1 = -np.log(ratios)
    wrong = inverted_k1(k1, 0.1, 1.2)
    assert ratios[wrong].tolist() == [0.9, 1.1, 1.3, 5.0, 9.0]
    (row,) = sampled.what_if(-k1, [9], (masked(0.1, 1.2),))
    assert row.mean_weight == pytest.approx((0.15 + 0.82 + 0.9 + 1.1) / 9)
    assert row.mean_weight != pytest.approx(ratios[wrong].sum() / 9)
    (row,) = sampled.what_if(-k1, [9], (masked(0.5, 2.0),))
    assert row.mean_weight == pytest.approx(ratios[inverted_k1(k1, 0.5, 2.0)].sum() / 9)


def test_correction_table_shows_each_correction_and_the_raw_mean() -> None:
    ratios = np.array([1.0, 4.0, 0.4, 5e-5, 1.0, 1.0])
    table = {row.rule.name: row for row in sampled.what_if(np.log(ratios), [3, 2, 1])}
    raw = ratios.mean()
    assert all(row.mean_raw == pytest.approx(raw) for row in table.values())
    assert table["tis"].mean_weight == pytest.approx((1 + 2 + 0.4 + 5e-5 + 1 + 1) / 6)
    assert table["tis"].kept == 1.0
    assert (table["tis"].below, table["tis"].above) == (0, 1)
    assert table["mis"].mean_weight == pytest.approx(3 / 6)
    assert table["mis"].kept == pytest.approx(3 / 6)
    assert table["icepop"].mean_weight == pytest.approx(7 / 6)
    assert table["veto"].mean_weight == pytest.approx((1 + 4 + 0.4 + 1) / 6)
    assert table["veto"].kept == pytest.approx(4 / 6)
    for rule in RULES:
        named = SAMPLED_FUNCTIONS[f"oob_{rule.name}"](torch.from_numpy(np.log(ratios)))
        row = table[rule.name]
        assert (row.below + row.above) / row.n == float(named.mean())


def test_invalid_bands_and_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="low < high"):
        sampled.what_if([0.0], [1], (masked(2.0, 0.5),))
    with pytest.raises(NotMeasurable, match="lengths"):
        sampled.what_if([0.0, 0.0], [1])
    with pytest.raises(ValueError, match="unknown rule"):
        sampled.what_if([0.0], [1], (replace(masked(0.5, 2.0), does="forget"),))  # type: ignore[arg-type]
    clipped = SAMPLED_FUNCTIONS["clipfrac0"](torch.tensor([0.79, 0.81, 1.19, 1.21]).log())
    assert clipped.tolist() == [1, 0, 0, 1]


# --- weights -------------------------------------------------------------------------------------


def test_effective_sample_size_is_one_over_one_plus_chi_squared() -> None:
    pair = categorical(6, 0.8, seed=2)
    q = pair.infer_log.exp()[0].numpy()
    counts = np.round(q * 400_000).astype(int)
    delta = np.repeat((pair.train_log - pair.infer_log)[0].numpy(), counts)
    chi2 = float(reference.chi2_train_infer(pair)[0])
    assert sampled.ess_fraction(delta) == pytest.approx(1 / (1 + chi2), rel=1e-3)
    assert sampled.ess_fraction(delta + 700) == pytest.approx(sampled.ess_fraction(delta))
    assert sampled.ess_fraction([0.3]) == 1


def test_clamped_weights_hide_the_collapse_that_raw_ones_show() -> None:
    delta = np.concatenate([np.full(999, -8.0), [12.0]])
    raw = sampled.ess_fraction(delta)
    clamped = sampled.ess_fraction(np.clip(delta, -math.log(2), math.log(2)))
    assert raw < 0.002
    assert clamped >= 4 * 4 / (1 + 4) ** 2


def test_correlations_equal_their_definition() -> None:
    a = np.log([0.1, 0.2, 0.4])
    b = np.log([0.2, 0.3, 0.5])
    assert sampled.pearson_probabilities(a, b) == pytest.approx(1)
    assert sampled.pearson(a, b) == pytest.approx(float(np.corrcoef(a, b)[0, 1]))
    assert sampled.pearson(a, -a) == -1
    with pytest.raises(NotMeasurable, match="spread"):
        sampled.pearson([1.0, 1.0], [1.0, 2.0])
    with pytest.raises(NotMeasurable, match="lengths"):
        sampled.pearson([1.0, 2.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize(("what", "values"), NOTHING)
def test_empty_and_nan_inputs_have_no_value(what: str, values: Sequence[float]) -> None:
    """metrics.md 17: other libraries return 0 on empty input and unequal shapes, and mask NaN."""
    for function in (
        sums.pareto_k,
        sampled.ess_fraction,
        lambda v: sampled.pearson(v, v),
        lambda v: sampled.pearson_probabilities(v, v),
        lambda v: sampled.what_if(v, [len(v)] if v else []),
    ):
        with pytest.raises(NotMeasurable):
            function(values)
