"""Every metric against closed forms on categorical pairs."""

from __future__ import annotations

import math
from functools import partial

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.metrics import MEASURES
from kcdsl.metrics.definition import CONFIDENCES
from kcdsl_backends.empirical.metrics import (
    policies,
    ranks,
    sampled,
    states,
)
from kcdsl_backends.empirical.metrics import (
    policies as calibration,
)
from kcdsl_backends.empirical.metrics.measures import (
    AGGREGATES,
    SAMPLED_FUNCTIONS,
    STATE_FUNCTIONS,
    gradient_function,
)
from kcdsl_backends.empirical.metrics.policies import (
    PolicyPair,
    Unnormalised,
    check_normalised,
    policy_pair,
)
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from tests.support import reference_metrics as reference
from tests.support.reference_metrics import PAIR_FUNCTIONS, of_pair, top_tokens

P = [0.5, 0.3, 0.2]
Q = [0.25, 0.25, 0.5]


def pair_of(p: list[float], q: list[float], temperature: float = 1.0) -> PolicyPair:
    """Return the pair whose policies are p and q."""
    z = torch.log(torch.tensor([p, q], dtype=torch.float64)) * temperature
    return policy_pair(z[:1], z[1:], temperature)


def swapped(pair: PolicyPair) -> PolicyPair:
    """Return the pair with the kernels exchanged."""
    return PolicyPair(pair.infer_logits, pair.train_logits, pair.infer_log, pair.train_log)


def log_ratio(pair: PolicyPair, tokens: torch.Tensor) -> torch.Tensor:
    """Return ln p(y) - ln q(y) of the given tokens, [N]."""
    at = tokens[:, None]
    return (pair.train_log.gather(-1, at) - pair.infer_log.gather(-1, at))[:, 0]


def one(values: torch.Tensor) -> float:
    assert values.shape == (1,)
    return float(values[0])


def random_pair(scale: float, vocabulary: int = 32, rows: int = 16, seed: int = 3) -> PolicyPair:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    d = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    return policy_pair(z, z + scale * d, 1.0)


def test_kl_is_of_train_relative_to_infer() -> None:
    pair = pair_of(P, Q)
    forward = sum(a * math.log(a / b) for a, b in zip(P, Q, strict=True))
    backward = sum(b * math.log(b / a) for a, b in zip(P, Q, strict=True))
    assert one(reference.kl_train_infer(pair)) == pytest.approx(forward, rel=1e-13)
    assert one(reference.kl_infer_train(pair)) == pytest.approx(backward, rel=1e-13)
    assert one(reference.kl_train_infer(swapped(pair))) == pytest.approx(backward, rel=1e-13)
    assert forward != pytest.approx(backward, rel=0.05)
    assert MEASURES["kl"].estimates == "KL(train || infer)"
    assert MEASURES["kl_infer_train"].estimates == "KL(infer || train)"


def test_divergences_have_their_closed_forms() -> None:
    pair = pair_of(P, Q)
    zipped = list(zip(P, Q, strict=True))
    tv = sum(abs(a - b) for a, b in zipped) / 2
    hellinger = 1 - sum(math.sqrt(a * b) for a, b in zipped)
    middle = [(a + b) / 2 for a, b in zipped]
    js = sum(
        0.5 * a * math.log(a / m) + 0.5 * b * math.log(b / m)
        for (a, b), m in zip(zipped, middle, strict=True)
    )
    jeffreys = sum((a - b) * math.log(a / b) for a, b in zipped)
    assert one(policies.total_variation(pair)) == pytest.approx(tv, rel=1e-13)
    assert one(reference.hellinger_squared(pair)) == pytest.approx(hellinger, rel=1e-13)
    assert one(reference.jensen_shannon(pair)) == pytest.approx(js, rel=1e-13)
    assert one(reference.jeffreys(pair)) == pytest.approx(jeffreys, rel=1e-13)
    assert one(reference.log_ratio_linf(pair)) == pytest.approx(math.log(2.5), rel=1e-13)


def test_temperature_divides_the_logits() -> None:
    z = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    other = torch.tensor([[1.5, 2.0, 3.0]], dtype=torch.float64)
    hot, cold = policy_pair(z, other, 2.0), policy_pair(z / 2, other / 2, 1.0)
    assert torch.equal(hot.train_log, cold.train_log)
    assert one(reference.kl_train_infer(hot)) < one(
        reference.kl_train_infer(policy_pair(z, other, 1.0))
    )


def test_kl_is_infinite_only_for_one_sided_impossible_tokens() -> None:
    z = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64)
    full = torch.tensor([[0.0, 0.0, 0.0]], dtype=torch.float64)
    assert one(reference.kl_train_infer(policy_pair(full, z, 1.0))) == math.inf
    assert one(reference.kl_infer_train(policy_pair(full, z, 1.0))) == pytest.approx(math.log(1.5))
    same = policy_pair(z, z, 1.0)
    assert one(reference.kl_train_infer(same)) == 0
    assert one(reference.logit_l2(same)) == 0


def test_distant_policies_keep_finite_accurate_values() -> None:
    z = torch.tensor([[0.0, -700.0]], dtype=torch.float64)
    pair = policy_pair(z, -z, 1.0)
    assert one(reference.kl_train_infer(pair)) == pytest.approx(700.0, rel=1e-12)
    assert one(policies.total_variation(pair)) == pytest.approx(1.0)
    assert one(reference.jensen_shannon(pair)) == pytest.approx(math.log(2), rel=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2, 1.0])
def test_kl_agrees_with_sixty_digits(scale: float) -> None:
    pair = random_pair(scale, vocabulary=64, rows=1)
    with mpmath.workdps(60):
        p = [mpmath.e ** mpmath.mpf(float(z)) for z in pair.train_logits[0]]
        q = [mpmath.e ** mpmath.mpf(float(z)) for z in pair.infer_logits[0]]
        a, b = mpmath.fsum(p), mpmath.fsum(q)
        exact = mpmath.fsum(
            x / a * mpmath.log((x / a) / (y / b)) for x, y in zip(p, q, strict=True)
        )
    assert one(reference.kl_train_infer(pair)) == pytest.approx(float(exact), rel=1e-7)


def test_kl_is_accurate_where_the_naive_float32_sum_is_not() -> None:
    """bounds.md 11: at V = 32k and sd 1e-4 the naive sum is wrong by orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1, 32768, generator=generator)
    other = z + 1e-4 * torch.randn(1, 32768, generator=generator)
    pair = policy_pair(z, other, 1.0)
    true = float((pair.train_log.exp() * (pair.train_log - pair.infer_log)).sum())
    lp, lq = torch.log_softmax(z, -1), torch.log_softmax(other, -1)
    naive = float((lp.exp() * (lp - lq)).sum())
    assert abs(naive - true) > 5 * true
    assert one(reference.kl_train_infer(pair)) == pytest.approx(true, rel=1e-4)


def test_bregman_is_non_negative_and_continuous_at_its_series() -> None:
    d = torch.cat([torch.logspace(-12, 2, 400, dtype=torch.float64) * s for s in (1, -1)])
    values = policies.bregman(d)
    assert bool((values >= 0).all())
    edge = torch.tensor([0.999999e-3, 1.000001e-3], dtype=torch.float64)
    low, high = policies.bregman(edge)
    assert float(high / low) == pytest.approx(1 + 4e-6, rel=1e-7)


def test_probabilities_that_do_not_sum_to_one_are_refused() -> None:
    with pytest.raises(Unnormalised, match="row 1"):
        check_normalised(torch.log(torch.tensor([[0.5, 0.5], [0.5, 0.6]], dtype=torch.float64)))


@pytest.mark.parametrize(
    ("train", "infer", "temperature"),
    [((2, 3), (3, 3), 1.0), ((2, 3), (2, 4), 1.0), ((2,), (2,), 1.0), ((2, 3), (2, 3), 0.0)],
)
def test_misaligned_logits_and_missing_temperature_are_refused(
    train: tuple[int, ...], infer: tuple[int, ...], temperature: float
) -> None:
    with pytest.raises(ValueError, match=r"shape|temperature"):
        policy_pair(torch.zeros(train), torch.zeros(infer), temperature)


def test_logit_drifts_have_their_closed_forms() -> None:
    z = torch.zeros(1, 4, dtype=torch.float64)
    pair = policy_pair(z, torch.tensor([[3.0, -1.0, 0.0, 2.0]], dtype=torch.float64), 1.0)
    assert one(reference.logit_l2(pair)) == pytest.approx(math.sqrt(14))
    assert one(reference.logit_l2_centered(pair)) == pytest.approx(math.sqrt(14 - 4))
    assert one(reference.logit_linf(pair)) == 3
    assert one(reference.logit_span(pair)) == 4
    assert one(reference.margin(swapped(pair))) == 1


def test_paper_defect_4_l2_is_not_shift_invariant_but_span_is() -> None:
    pair = random_pair(0.1)
    moved = policy_pair(pair.train_logits, pair.infer_logits + 5.0, 1.0)
    assert bool((reference.logit_l2(moved) > reference.logit_l2(pair) + 1).all())
    for name in ("logit_l2_centered", "logit_span", "kl", "tv", "js", "hellinger2"):
        before, after = PAIR_FUNCTIONS[name](pair), PAIR_FUNCTIONS[name](moved)
        assert torch.allclose(before, after, rtol=1e-6, atol=1e-12), name


def test_top_k_overlap_breaks_ties_by_token_id() -> None:
    train = torch.tensor([[9.0, 8.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    infer = torch.tensor([[8.0, 9.0, 1.0, 7.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    pair = policy_pair(train, infer, 1.0)
    assert one(reference.top1_agreement(pair)) == 0
    assert one(of_pair(pair, partial(ranks.overlap, k=2), 2)) == 1
    assert one(of_pair(pair, partial(ranks.overlap, k=3), 3)) == pytest.approx(2 / 3)
    assert top_tokens(train, 5).tolist() == [[0, 1, 2, 3, 4]]
    assert one(of_pair(pair, partial(ranks.overlap, k=10), 10)) == 1
    with pytest.raises(ValueError, match="top-11"):
        top_tokens(train, 11)


def test_nan_logits_stay_nan_in_every_metric() -> None:
    z = torch.tensor([[1.0, math.nan, 0.0] + [0.0] * 9])
    pair = policy_pair(torch.zeros_like(z), z, 1.0)
    for name, function in PAIR_FUNCTIONS.items():
        if name not in ("margin", "stable_fraction"):
            assert math.isnan(one(function(pair))), name


def test_expectations_of_sampled_estimators_are_exact() -> None:
    """Exact expectations under q, so that no sampling error hides a wrong direction."""
    pair = pair_of(P, Q)
    q = pair.infer_log.exp()[0]
    tokens = torch.arange(3)
    rows = PolicyPair(
        pair.train_logits.expand(3, 3),
        pair.infer_logits.expand(3, 3),
        pair.train_log.expand(3, 3),
        pair.infer_log.expand(3, 3),
    )
    delta = log_ratio(rows, tokens)
    mean = {name: float((q * f(delta)).sum()) for name, f in SAMPLED_FUNCTIONS.items()}
    forward = one(reference.kl_train_infer(pair))
    backward = one(reference.kl_infer_train(pair))
    assert mean["importance_ratio"] == pytest.approx(1)
    assert mean["w_log_w"] == pytest.approx(forward)
    assert mean["w_log_w_minus"] == pytest.approx(forward)
    assert mean["k1"] == pytest.approx(backward)
    assert mean["k3"] == pytest.approx(backward)
    assert mean["k2"] != pytest.approx(backward, rel=1e-3)
    assert mean["log_ratio"] == pytest.approx(-backward)
    assert mean["tv_is"] == pytest.approx(one(policies.total_variation(pair)))


def test_swapped_sides_invert_w() -> None:
    pair = pair_of(P, Q)
    token = torch.tensor([0])
    delta = log_ratio(pair, token)
    assert one(SAMPLED_FUNCTIONS["importance_ratio"](delta)) == pytest.approx(2.0)
    assert one(SAMPLED_FUNCTIONS["importance_ratio"](log_ratio(swapped(pair), token))) == 0.5


def test_tokens_are_drawn_from_infer_and_repeat_with_the_seed() -> None:
    n = 200_000
    base = pair_of(P, Q)
    pair = PolicyPair(
        *(
            t.expand(n, 3)
            for t in (base.train_logits, base.infer_logits, base.train_log, base.infer_log)
        )
    )
    tokens = sampled.sample_tokens(pair, 7)
    assert torch.equal(tokens, sampled.sample_tokens(pair, 7))
    assert not torch.equal(tokens, sampled.sample_tokens(pair, 8))
    shares = np.bincount(tokens.numpy(), minlength=3) / n
    for share, q in zip(shares, Q, strict=True):
        assert abs(share - q) < 5 * math.sqrt(q * (1 - q) / n)
    delta = log_ratio(pair, tokens)
    for name, exact in (
        ("w_log_w_minus", one(reference.kl_train_infer(base))),
        ("k3", one(reference.kl_infer_train(base))),
    ):
        values = SAMPLED_FUNCTIONS[name](delta)
        assert abs(float(values.mean()) - exact) < 5 * float(values.std()) / math.sqrt(n), name
        assert bool((values >= 0).all())


def test_token_with_probability_zero_is_never_drawn() -> None:
    z = torch.tensor([[-math.inf, 0.0, -math.inf]] * 100, dtype=torch.float64)
    assert bool((sampled.sample_tokens(policy_pair(z, z, 1.0), 1) == 1).all())


def test_seeds_of_requests_are_independent_of_order() -> None:
    assert sampled.request_seed(0, "a") != sampled.request_seed(0, "b")
    assert sampled.request_seed(0, "a") != sampled.request_seed(1, "a")
    assert 0 <= sampled.request_seed(0, "a") < 2**63


def test_paper_defect_2_bias_bound_needs_the_factor_two() -> None:
    """E|w - 1| reaches 1.999 E|ln w| at a two-point example, so A G E|ln w| is no bound."""
    mass, change = 1e-10, 1e-3
    other = 1 - (1 - mass) * math.exp(-change)
    pair = pair_of([other, 1 - other], [mass, 1 - mass])
    q = pair.infer_log.exp()
    w = (-pair.log_difference).exp()
    mean_log = float((q * pair.log_difference.abs()).sum())
    spread = float((q * (w - 1).abs()).sum())
    tv = policies.total_variation(pair).numpy()
    bound = float(gradient_function(1.0, 1.0)(tv)[0])
    assert bound == pytest.approx(spread, rel=1e-6)
    assert mean_log < spread <= 2 * mean_log
    assert spread / mean_log == pytest.approx(1.999, abs=1e-3)


@given(st.floats(1e-6, 3.0), st.integers(0, 100))
def test_paper_defects_7_and_10_sharp_bounds_hold(scale: float, seed: int) -> None:
    pair = random_pair(scale, rows=4, seed=seed)
    span = reference.logit_span(pair)
    assert bool((policies.total_variation(pair) <= torch.tanh(span / 4) * (1 + 1e-9)).all())
    assert bool((reference.kl_train_infer(pair) <= span**2 / 8 * (1 + 1e-9)).all())


def test_paper_defect_10_kl_exceeds_an_eighth_of_linf_squared() -> None:
    """The 1/8 belongs to the span: for dz = (e, -e) KL approaches e^2/2."""
    z = torch.zeros(1, 2, dtype=torch.float64)
    pair = policy_pair(z, torch.tensor([[0.01, -0.01]], dtype=torch.float64), 1.0)
    kl, linf = one(reference.kl_train_infer(pair)), one(reference.logit_linf(pair))
    assert kl > linf**2 / 8
    assert kl <= one(reference.logit_span(pair)) ** 2 / 8


def test_hidden_drifts_and_embeddings_have_their_closed_forms() -> None:
    train = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    infer = torch.tensor([[1.0, 3.0], [1.0, -1.0]])
    assert states.hidden_l2(train, infer).tolist() == [3.0, 1.0]
    assert states.hidden_linf(train, infer).tolist() == [3.0, 1.0]
    assert one(states.embedding_cosine(train, infer)) == pytest.approx(math.sqrt(0.5))
    assert one(states.embedding_l2(train, infer)) == pytest.approx(math.sqrt(2 - math.sqrt(2)))
    assert one(states.embedding_cosine(train, train)) == 1
    with pytest.raises(ValueError, match="one shape"):
        states.hidden_l2(train, infer[:1])


def test_ece_uses_equal_mass_bins() -> None:
    confidence = np.array([0.2, 0.2, 0.9, 0.9])
    right = np.array([0.0, 1.0, 1.0, 1.0])
    assert calibration.expected_calibration_error(confidence, right, 2) == pytest.approx(
        0.5 * 0.3 + 0.5 * 0.1
    )
    order = np.array([3, 1, 0, 2])
    assert calibration.expected_calibration_error(
        confidence[order], right[order], 2
    ) == calibration.expected_calibration_error(confidence, right, 2)
    with pytest.raises(ValueError, match="bins"):
        calibration.expected_calibration_error(confidence, right, 5)


def test_ece_gap_of_equal_kernels_is_zero() -> None:
    pair = pair_of(P, P)
    values = calibration.confidences(pair, torch.tensor([0]))
    assert values["ece_train_right"].tolist() == [1.0]
    assert values["ece_train"].tolist() == pytest.approx([0.5])
    parts = [[values[name] for name in CONFIDENCES]] * 20
    assert AGGREGATES["ece_gap"].of(parts) == 0
    with pytest.raises(NotMeasurable, match="1 positions cannot fill 15 bins"):
        AGGREGATES["ece_gap"].of(parts[:1])
    with pytest.raises(ValueError, match="labels"):
        calibration.confidences(pair, torch.tensor([0, 1]))


def test_every_metric_function_is_described_and_in_range() -> None:
    pair = random_pair(0.5)
    for name, function in PAIR_FUNCTIONS.items():
        measure = MEASURES[name]
        values = function(pair)
        assert values.shape == (16,)
        assert measure.low is None or bool((values >= measure.low).all()), name
        assert measure.high is None or bool((values <= measure.high).all()), name
        assert (measure.tier, measure.bias) == ("A", "exact")
    assert set(SAMPLED_FUNCTIONS) <= set(MEASURES)
    assert set(STATE_FUNCTIONS) <= set(MEASURES)
    assert all(MEASURES[name].tier == "C" and MEASURES[name].noisy for name in SAMPLED_FUNCTIONS)
    assert MEASURES["k2"].bias == "biased"


def test_language_and_backend_list_the_same_metrics() -> None:
    from kcdsl.metrics import METRICS, UNMEASURED

    assert set(METRICS) == set(MEASURES) | set(UNMEASURED)
    assert set(MEASURES) & set(UNMEASURED) == set()
    assert all(reason for reason in UNMEASURED.values())
