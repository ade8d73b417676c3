"""Top-k lists, divergence of greedy decoding, and bitwise equality."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from kcdsl_backends.empirical.metrics import policies, ranks, states
from kcdsl_backends.empirical.metrics import recorded as sequences
from kcdsl_backends.empirical.metrics.full_logits import tier_a, top_of_rows
from kcdsl_backends.empirical.metrics.measures import LIST_METRICS
from kcdsl_backends.empirical.metrics.policies import policy_pair, total_variation
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from tests.support.reference_metrics import (
    kl_train_infer,
    top_tokens,
)

TEN = np.arange(10)[None, :]


def kendall_by_pairs(a: list[int], b: list[int]) -> float:
    """Return Fagin's K^(1/2) by its four cases."""
    total = 0.0
    for i, j in itertools.combinations(sorted({*a, *b}), 2):
        in_a, in_b = [i in a, j in a], [i in b, j in b]
        if all(in_a) and all(in_b):
            total += (a.index(i) < a.index(j)) != (b.index(i) < b.index(j))
        elif all(in_a) and any(in_b):
            total += (a.index(i) < a.index(j)) != in_b[0]
        elif all(in_b) and any(in_a):
            total += (b.index(i) < b.index(j)) != in_a[0]
        elif all(in_a) or all(in_b):
            total += 0.5
        else:
            total += 1
    return total / (len(a) * (3 * len(a) - 1) / 2)


def test_kendall_distance_equals_its_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (rng.choice(14, size=5, replace=False).tolist() for _ in range(2))
        found = ranks.kendall_distance(np.array([a]), np.array([b]), 5)
        assert float(found[0]) == pytest.approx(kendall_by_pairs(a, b)), (a, b)


def test_equal_and_disjoint_lists_are_the_ends_of_each_scale() -> None:
    other = TEN + 100
    one = dict.fromkeys(set(LIST_METRICS) - {"kendall10"}, (1, 0))
    ends = {**one, "kendall10": (0, 1)}
    same = {name: LIST_METRICS[name][0](TEN, TEN) for name in ends}
    apart = {name: LIST_METRICS[name][0](TEN, other) for name in ends}
    for name, (equal, disjoint) in ends.items():
        assert float(same[name][0]) == pytest.approx(equal, abs=1e-15), name
        assert float(apart[name][0]) == pytest.approx(disjoint, abs=1e-15), name


def test_overlaps_ignore_order_and_rank_biased_overlap_does_not() -> None:
    turned = TEN[:, ::-1].copy()
    assert ranks.overlap(TEN, turned, 10)[0] == ranks.jaccard(TEN, turned, 10)[0] == 1
    assert ranks.jaccard(TEN, TEN + 5, 10)[0] == pytest.approx(5 / 15)
    agreement = [len({*range(d)} & {*range(9, 9 - d, -1)}) / d for d in range(1, 11)]
    p = 0.9
    rbo = p**10 * agreement[-1] + (1 - p) / p * sum(
        p**d * a for d, a in enumerate(agreement, start=1)
    )
    assert float(ranks.rank_biased_overlap(TEN, turned, 10)[0]) == pytest.approx(rbo)
    swapped_early, swapped_late = TEN.copy(), TEN.copy()
    swapped_early[0, [0, 1]], swapped_late[0, [8, 9]] = [1, 0], [9, 8]
    early = ranks.rank_biased_overlap(TEN, swapped_early, 10)[0]
    assert early < ranks.rank_biased_overlap(TEN, swapped_late, 10)[0] < 1


def test_incomparable_lists_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        ranks.overlap(TEN, TEN[:, :5], 5)
    with pytest.raises(ValueError, match="one shape"):
        ranks.overlap(TEN[:0], TEN[:0], 5)
    with pytest.raises(ValueError, match="depth 11"):
        ranks.jaccard(TEN, TEN, 11)
    with pytest.raises(ValueError, match="persistence"):
        ranks.rank_biased_overlap(TEN, TEN, 10, 1.0)


@pytest.mark.parametrize("width", [10, 127, 2560, 5000])
def test_top_tokens_equal_a_stable_sort(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    z = torch.randn(20, width, generator=generator)
    z[3] = 1.0
    z[4] = z[4].round()
    z[5, 2:] = -math.inf
    z[6, 0] = math.nan
    found = top_of_rows(z.numpy(), z.numpy().max(axis=1), 10)
    expected = top_tokens(z, 10).numpy()
    rows = [i for i in range(20) if i != 6]
    assert np.array_equal(found.tokens[rows], expected[rows])
    assert np.array_equal(found.values[rows], np.take_along_axis(z.numpy(), expected, 1)[rows])
    assert (found.tokens[6] == -1).all()
    with pytest.raises(ValueError, match="top-11"):
        top_of_rows(z.numpy()[:, :10], z.numpy().max(axis=1), 11)


# --- forks ---------------------------------------------------------------------------------------


def test_divergence_step_counts_agreeing_tokens() -> None:
    assert sequences.greedy_divergence_step([0, 0, 1, 0, 1]) == 2
    assert sequences.greedy_divergence_step([0, 0, 0]) == 3
    for broken in ([], [0.5], [math.nan]):
        with pytest.raises(NotMeasurable):
            sequences.greedy_divergence_step(broken)


def test_stable_position_keeps_its_top_token_under_the_drift() -> None:
    z = torch.tensor([[3.0, 1.0], [3.0, 1.0], [3.0, 1.0]])
    y = z + torch.tensor([[0.9, 0.0], [1.0, 0.0], [-1.1, 1.1]])
    found = tier_a(z, y, 1.0, {"stable_fraction", "top1_flip"})
    assert found["stable_fraction"].tolist() == [1, 0, 0]
    assert found["top1_flip"].tolist() == [0, 0, 1]


# --- bits ----------------------------------------------------------------------------------------


def ulps(a: float, b: float, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    pair = torch.tensor([[a, 1.0]], dtype=dtype), torch.tensor([[b, 1.0]], dtype=dtype)
    found = tier_a(*pair, 1.0, {"bitwise_mismatch_count", "ulp_max"})
    return float(found["bitwise_mismatch_count"][0]), float(found["ulp_max"][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_ulps_count_the_numbers_between_two_values(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).smallest_normal * eps
    assert ulps(1.0, 1.0 + eps, dtype) == (1, 1)
    assert ulps(1.0, 1.0 - eps / 2, dtype) == (1, 1)
    assert ulps(1.0, 2.0, dtype) == (1, 1 / eps)
    assert ulps(-1.0, -1.0 - 3 * eps, dtype) == (1, 3)
    assert ulps(0.0, -0.0, dtype) == (1, 0)
    assert ulps(tiny, -tiny, dtype) == (1, 2)
    assert ulps(5.0, 5.0, dtype) == (0, 0)


def test_formats_that_differ_are_compared_in_the_wider_one() -> None:
    z = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    y = torch.tensor([[1.0 + 2.0**-20, 2.0]])
    found = tier_a(z, y, 1.0, {"ulp_max"})
    assert float(found["ulp_max"][0]) == 8


def test_noise_ratio_is_relative_to_the_training_kernel() -> None:
    gold = torch.zeros(3, 2, dtype=torch.float64)
    train = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    infer = torch.tensor([[0.0, 3.0], [0.0, 0.0], [1.0, 0.0]])
    assert states.noise_ratio(train, infer, gold).tolist() == [3.0, 1.0, math.inf]
    for wrong in (gold[:2], gold[:, :1], gold[0]):
        with pytest.raises(ValueError, match="one shape"):
            states.noise_ratio(train, infer, wrong)
    with pytest.raises(ValueError, match="one shape"):
        states.noise_ratio(train[:0], infer[:0], gold[:0])


# --- tier B --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drift", [1e-3, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("k", [1, 5, 20, 40])
def test_lumping_never_increases_a_divergence(drift: float, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    z = 2 * torch.randn(500, 40, generator=generator, dtype=torch.float64)
    y = z + drift * torch.randn(500, 40, generator=generator, dtype=torch.float64)
    pair = policy_pair(z, y, 1.0)
    tokens = top_tokens(z, k)
    lists = pair.train_log.gather(-1, tokens), pair.infer_log.gather(-1, tokens)
    for bound, whole in (
        (policies.topk_tail_kl, kl_train_infer),
        (policies.topk_tail_tv, total_variation),
    ):
        low, exact = bound(*lists), whole(pair)
        assert bool((low >= 0).all())
        assert bool((low <= exact * (1 + 1e-9) + 1e-13).all()), bound.__name__


def test_single_unlisted_token_makes_lumping_exact() -> None:
    p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64)
    full = float((p * (p / q).log()).sum())
    assert float(policies.topk_tail_kl(p[:, :2].log(), q[:, :2].log())) == pytest.approx(full)
    assert float(policies.topk_tail_kl(p.log(), q.log())) == pytest.approx(full, rel=1e-6)
    half = float(policies.topk_tail_kl(p[:, :1].log(), q[:, :1].log()))
    assert half == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75))


@pytest.mark.parametrize(
    "broken",
    [
        torch.empty(0, 3),
        torch.empty(2, 0),
        torch.tensor([[math.nan]]),
        torch.tensor([[0.5]]),
        torch.tensor([[-0.1, -0.1]]),
        torch.zeros(2),
    ],
)
def test_invalid_probability_lists_are_refused(broken: torch.Tensor) -> None:
    with pytest.raises(NotMeasurable):
        policies.topk_tail_kl(broken, broken)
    with pytest.raises(NotMeasurable, match="one shape"):
        policies.topk_tail_tv(torch.full((1, 2), -2.0), torch.full((1, 3), -2.0))
