"""The fused pass over full logits: sixty-digit references, single metrics, reproducible bits."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.metrics import MEASURES
from kcdsl_backends.empirical.metrics.full_logits import BITS, FUSED, TIER_A, tier_a
from kcdsl_backends.empirical.metrics.policies import policy_pair
from tests.support.reference_metrics import PAIR_FUNCTIONS


def logits(
    rows: int, vocabulary: int, drift: float, seed: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(rows, vocabulary, generator=generator, dtype=dtype)
    return z, z + drift * torch.randn(rows, vocabulary, generator=generator, dtype=dtype)


def test_temperature_changes_the_metrics_that_declare_it() -> None:
    train, infer = logits(40, 50, 1.0)
    one, two = (tier_a(train, infer, temperature) for temperature in (1.0, 4.0))
    changed = {name for name in one if not np.allclose(one[name], two[name], rtol=1e-6)}
    assert changed == {name for name in one if MEASURES[name].tempered}


def exact(
    train: Tensor, infer: Tensor, temperature: float = 1.0
) -> tuple[dict[str, mpmath.mpf], mpmath.mpf]:
    """Return every fused metric of one row with sixty digits, from definitions alone.

    Also the size sum |q - p| |ln p| of the terms of the entropy gap.
    """
    mpf = mpmath.mpf
    z, y = ([mpf(float(v)) for v in side] for side in (train, infer))
    t = mpf(temperature)
    za = mpmath.fsum(mpmath.e ** (v / t) for v in z)
    zb = mpmath.fsum(mpmath.e ** (v / t) for v in y)
    lp = [v / t - mpmath.log(za) for v in z]
    lq = [v / t - mpmath.log(zb) for v in y]
    p, q = [mpmath.e**v for v in lp], [mpmath.e**v for v in lq]
    both = list(zip(p, q, strict=True))
    d = [b - a for a, b in zip(z, y, strict=True)]
    mean = mpmath.fsum(d) / len(d)
    forward = mpmath.fsum(a * (u - v) for a, u, v in zip(p, lp, lq, strict=True))
    backward = mpmath.fsum(b * (v - u) for b, u, v in zip(q, lp, lq, strict=True))
    middle = [mpmath.log((a + b) / 2) for a, b in both]
    js = mpmath.fsum(
        a * (u - m) / 2 + b * (v - m) / 2
        for (a, b), u, v, m in zip(both, lp, lq, middle, strict=True)
    )
    root = mpmath.sqrt
    length, other = root(mpmath.fsum(v * v for v in z)), root(mpmath.fsum(v * v for v in y))
    l2 = root(mpmath.fsum(v * v for v in d))
    size = mpmath.fsum(abs((b - a) * u) for (a, b), u in zip(both, lp, strict=True))
    found = {
        "logit_l2": l2,
        "logit_l2_centered": root(mpmath.fsum((v - mean) ** 2 for v in d)),
        "logit_linf": max(abs(v) for v in d),
        "logit_span": max(d) - min(d),
        "logit_rel_l2": l2 / length,
        "logit_cosine": mpmath.fsum(a * b for a, b in zip(z, y, strict=True)) / length / other,
        "kl": forward,
        "kl_infer_train": backward,
        "jeffreys": forward + backward,
        "js": js,
        "tv": mpmath.fsum(abs(a - b) for a, b in both) / 2,
        "hellinger2": 1 - mpmath.fsum(root(a * b) for a, b in both),
        "chi2_train_infer": mpmath.fsum(a * a / b for a, b in both) - 1,
        "chi2_infer_train": mpmath.fsum(b * b / a for a, b in both) - 1,
        "renyi_inf": max(u - v for u, v in zip(lp, lq, strict=True)),
        "log_ratio_linf": max(abs(u - v) for u, v in zip(lp, lq, strict=True)),
        "entropy_gap": mpmath.fsum(b * v for b, v in zip(q, lq, strict=True))
        - mpmath.fsum(a * u for a, u in zip(p, lp, strict=True)),
    }
    return found, size


@pytest.mark.sample(11)
@pytest.mark.parametrize("drift", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_metric_agrees_with_sixty_digits(drift: float, dtype: torch.dtype) -> None:
    train, infer = logits(2, 96, drift, seed=round(-math.log10(drift)) + 5, dtype=dtype)
    for temperature in (1.0, 0.7):
        found = tier_a(train, infer, temperature, FUSED)
        for row in range(2):
            with mpmath.workdps(60):
                expected, size = exact(train[row], infer[row], temperature)
            assert expected.keys() == set(FUSED)
            for name, value in expected.items():
                got = float(found[name][row])
                near = 1e-6 if dtype is torch.float32 else 1e-8
                slack = near * float(size) if name == "entropy_gap" else 0.0
                assert got == pytest.approx(float(value), rel=near, abs=slack), (name, temperature)


@pytest.mark.parametrize("drift", [1e-6, 1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_float32_logits_have_a_relative_error_below_a_millionth(
    drift: float, offset: float
) -> None:
    train, infer = logits(3, 32_003, drift, seed=4)
    infer = infer + offset
    found = tier_a(train, infer, 1.0, FUSED)
    exact_forms = tier_a(train.double(), infer.double(), 1.0, FUSED)
    size = terms_of_entropy(train, infer)
    for name in FUSED:
        slack = 1e-6 * size if name == "entropy_gap" else 0.0
        assert (
            np.abs(found[name] - exact_forms[name]) <= 1e-6 * exact_forms[name] + slack
        ).all(), name


def terms_of_entropy(train: Tensor, infer: Tensor) -> NDArray[np.float64]:
    lp, lq = (torch.log_softmax(side.double(), -1) for side in (train, infer))
    terms: NDArray[np.float64] = ((lq.exp() - lp.exp()) * lp).abs().sum(-1).numpy()
    return terms


def test_constant_shift_of_one_side_changes_no_policy_metric() -> None:
    train, infer = logits(3, 200, 1e-3, dtype=torch.float64)
    before, after = tier_a(train, infer), tier_a(train, infer + 4.0)
    moved = {"logit_l2", "logit_linf", "logit_rel_l2", "logit_cosine", "stable_fraction", *BITS}
    for name in TIER_A - moved:
        assert np.allclose(before[name], after[name], rtol=1e-8, atol=0), name
    assert (after["logit_l2"] > before["logit_l2"] + 1).all()


def test_permuted_tokens_and_scaled_temperatures_change_nothing() -> None:
    train, infer = logits(3, 300, 0.1, dtype=torch.float64)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    before, after = tier_a(train, infer), tier_a(train[:, order], infer[:, order])
    for name in TIER_A:
        assert np.allclose(before[name], after[name], rtol=1e-10, atol=1e-16), name
    twice = tier_a(2 * train, 2 * infer, 2.0)
    for name in ("kl", "kl_infer_train", "js", "tv", "hellinger2", "renyi_inf", "entropy_gap"):
        assert np.array_equal(before[name], twice[name]), name


@pytest.mark.sample(7)
@pytest.mark.parametrize(("rows", "vocabulary"), [(23, 5), (23, 37), (9, 4096), (7, 9001)])
@pytest.mark.parametrize("drift", [1e-7, 1e-2, 3.0])
def test_bits_are_independent_of_chunks_and_threads(
    rows: int, vocabulary: int, drift: float
) -> None:
    train, infer = logits(rows, vocabulary, drift)
    train[3, 0] = -math.inf
    infer[5, 1] = math.nan
    infer[6] = train[6]
    names = [n for n in TIER_A if vocabulary >= 10 or not n.endswith(("5", "10", "overlap"))]
    whole = tier_a(train, infer, 1.0, names, chunk=rows, threads=1)
    alone = [tier_a(train[i : i + 1], infer[i : i + 1], 1.0, names) for i in range(rows)]
    for name in names:
        parts = np.concatenate([one[name] for one in alone])
        assert whole[name].tobytes() == parts.tobytes(), name
    for chunk, threads in ((1, 2), (2, 1), (3, 2), (5, 3), (rows - 1, 2), (rows + 4, 1)):
        again = tier_a(train, infer, 1.0, names, chunk=chunk, threads=threads)
        for name in names:
            assert whole[name].tobytes() == again[name].tobytes(), (name, chunk, threads)


def test_long_vocabulary_is_equal_on_two_torch_threads() -> None:
    train, infer = logits(3, 70_001, 1e-3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = tier_a(train, infer)
        torch.set_num_threads(2)
        two = tier_a(train, infer, chunk=1)
    finally:
        torch.set_num_threads(before)
    assert all(one[name].tobytes() == two[name].tobytes() for name in TIER_A)


def test_memory_layout_of_logits_does_not_matter() -> None:
    train, infer = logits(4, 1003, 1e-2)
    padded = torch.zeros(4, 1010)
    padded[:, 3:1006] = infer
    one, two = tier_a(train, infer), tier_a(train, padded[:, 3:1006])
    assert all(one[name].tobytes() == two[name].tobytes() for name in TIER_A)


@pytest.mark.parametrize("drift", [1e-4, 0.1, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_fused_pass_agrees_with_single_metrics(drift: float, temperature: float) -> None:
    train, infer = logits(11, 512, drift, dtype=torch.float64)
    pair = policy_pair(train, infer, temperature)
    found = tier_a(train, infer, temperature)
    assert set(PAIR_FUNCTIONS) | set(BITS) == TIER_A
    for name, function in PAIR_FUNCTIONS.items():
        assert np.allclose(found[name], function(pair).numpy(), rtol=1e-8, atol=1e-15), name


def test_metrics_of_the_pass_are_described_and_in_range() -> None:
    found = tier_a(*logits(40, 64, 0.7))
    for name in TIER_A:
        measure = MEASURES[name]
        assert (measure.tier, measure.bias) == ("A", "exact")
        assert measure.low is None or (found[name] >= measure.low).all(), name
        assert measure.high is None or (found[name] <= measure.high).all(), name


def test_equal_logits_have_zero_drift() -> None:
    train, _ = logits(5, 333, 0.0)
    found = tier_a(train, train.clone())
    ones = {"logit_cosine", "stable_fraction", "rbo10"}
    for name in TIER_A - {"margin"}:
        best = 1.0 if name in ones or "overlap" in name or "jaccard" in name else 0.0
        assert (found[name] == best).all(), name


def test_tokens_excluded_by_one_side_are_infinitely_distant() -> None:
    z = torch.tensor([[0.0, 0.0, -math.inf, 1.0]])
    y = torch.tensor([[0.5, 0.0, -math.inf, 1.0]])
    found, rest = tier_a(z, y, 1.0, FUSED), tier_a(z[:, [0, 1, 3]], y[:, [0, 1, 3]], 1.0, FUSED)
    for name in FUSED:
        assert found[name] == pytest.approx(rest[name], rel=1e-6), name
    one = tier_a(torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 0.0, -math.inf]]), 1.0, FUSED)
    assert one["kl"][0] == one["chi2_train_infer"][0] == one["renyi_inf"][0] == math.inf
    assert one["kl_infer_train"][0] == pytest.approx(math.log(4 / 3))
    assert one["tv"][0] == pytest.approx(0.25)
    assert one["logit_l2"][0] == one["logit_rel_l2"][0] == math.inf
    assert math.isnan(one["logit_cosine"][0])


def test_distant_policies_keep_finite_accurate_values_in_the_pass() -> None:
    z = torch.tensor([[0.0, -800.0], [0.0, -400.0]], dtype=torch.float64)
    found = tier_a(z, -z, 1.0, FUSED)
    assert found["kl"] == pytest.approx([800, 400])
    assert found["tv"] == pytest.approx([1, 1])
    assert found["js"] == pytest.approx([math.log(2)] * 2)
    assert found["chi2_train_infer"][0] == math.inf
    assert found["chi2_train_infer"][1] == pytest.approx(math.exp(400))


@pytest.mark.parametrize("gap", [5.0, 19.0, 25.0, 60.0, 120.0])
def test_rare_tokens_of_float32_logits_do_not_underflow(gap: float) -> None:
    train = torch.tensor([[0.0, -1.0, -100.0], [0.0, -1.0, -30.0]])
    infer = train + torch.tensor([0.0, 0.0, gap])
    found, wide = (
        tier_a(train, infer, 1.0, FUSED),
        tier_a(train.double(), infer.double(), 1.0, FUSED),
    )
    for name in FUSED:
        terms = terms_of_entropy(train, infer) if name == "entropy_gap" else 0.0
        slack = 1e-6 * terms + 1e-20
        assert (np.abs(found[name] - wide[name]) <= 2e-6 * np.abs(wide[name]) + slack).all(), name


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_invalidates_only_its_row_and_all_its_metrics(broken: float, side: int) -> None:
    pair = logits(3, 50, 0.1)
    clean = tier_a(*pair)
    pair[side][1, 7] = broken
    found = tier_a(*pair)
    for name in TIER_A:
        assert math.isnan(found[name][1]), name
        assert found[name][[0, 2]].tobytes() == clean[name][[0, 2]].tobytes(), name


@pytest.mark.parametrize(
    ("train", "infer", "options"),
    [
        ((0, 16), (0, 16), {}),
        ((2, 16), (3, 16), {}),
        ((2, 16), (2, 17), {}),
        ((16,), (16,), {}),
        ((2, 1), (2, 1), {}),
        ((2, 9), (2, 9), {}),
        ((2, 16), (2, 16), {"temperature": 0.0}),
        ((2, 16), (2, 16), {"temperature": math.nan}),
        ((2, 16), (2, 16), {"metrics": {"nothing"}}),
        ((2, 16), (2, 16), {"chunk": 0}),
    ],
)
def test_empty_input_is_refused(
    train: tuple[int, ...], infer: tuple[int, ...], options: dict[str, object]
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        tier_a(torch.zeros(train), torch.zeros(infer), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_formats_are_widened_before_subtraction(dtype: torch.dtype) -> None:
    train, infer = (side.to(dtype) for side in logits(4, 64, 0.1))
    found, wide = tier_a(train, infer), tier_a(train.double(), infer.double())
    for name in TIER_A - {"ulp_max"}:
        assert np.allclose(found[name], wide[name], rtol=1e-6, atol=1e-8), name
    assert (found["ulp_max"] < wide["ulp_max"]).all()


def test_pass_is_accurate_where_the_naive_float32_sum_is_not() -> None:
    """bounds.md 11: the naive float32 sum is wrong by orders of magnitude, or negative."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1, 32768, generator=generator)
    y = z + 1e-4 * torch.randn(1, 32768, generator=generator)
    true = float(policy_kl(z.double(), y.double()))
    naive = float(policy_kl(z, y))
    assert abs(naive - true) > 5 * true
    assert tier_a(z, y, 1.0, {"kl"})["kl"][0] == pytest.approx(true, rel=1e-6)


def policy_kl(z: Tensor, y: Tensor) -> Tensor:
    lp, lq = torch.log_softmax(z, -1), torch.log_softmax(y, -1)
    return (lp.exp() * (lp - lq)).sum()
