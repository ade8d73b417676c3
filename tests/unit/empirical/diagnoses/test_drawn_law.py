"""The test for tokens sampled from another law: exact false-alarm rate, and power."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl_backends.empirical.diagnoses import drawn_law as module
from kcdsl_backends.empirical.diagnoses.drawn_law import LAWS, drawn_law, log_factors
from kcdsl_backends.empirical.sources.rollouts.record import Law, Policy

VOCABULARY = 12


def logits(rows: int, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(rows, VOCABULARY, generator=made, dtype=torch.float64)


def policy(z: Tensor, q: Tensor, tokens: Tensor) -> Policy:
    return Policy("r", z, tokens, q.gather(-1, tokens[:, None])[:, 0])


@pytest.mark.parametrize("stated", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("apart", [0.0, 1.5])
def test_mean_of_each_factor_is_one_for_any_server_distribution(
    stated: float, apart: float
) -> None:
    """Summed over the whole vocabulary: sum_y q(y) a(y) / q(y) = 1, also far from train."""
    z = logits(1, 0)
    q = torch.log_softmax(z / stated + apart * logits(1, 1), -1)
    total = torch.zeros(len(LAWS), dtype=torch.float64)
    for token in range(VOCABULARY):
        at = torch.tensor([token])
        total += q[0, token].exp() * log_factors(policy(z, q, at), stated).exp()
    np.testing.assert_allclose(total.numpy(), 1.0, rtol=1e-12)


def drawn(z: Tensor, law: Law, seed: int) -> Tensor:
    """Draw one token per row, by plain loops over the definition of the law."""
    random = np.random.default_rng(seed)
    found = []
    for row in torch.softmax(z / law.temperature, -1).numpy():
        order = np.argsort(-row, kind="stable")
        kept = len(row)
        if law.top_k:
            kept = min(kept, law.top_k)
        if law.top_p < 1:
            kept = next(k for k in range(1, kept + 1) if row[order[:k]].sum() >= law.top_p)
        if law.min_p:
            kept = sum(row[i] >= law.min_p * row.max() for i in order[:kept])
        inside = order[:kept]
        found.append(int(random.choice(inside, p=row[inside] / row[inside].sum())))
    return torch.tensor(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("apart", [0.0, 0.3, 2.0])
def test_correctly_sampled_tokens_pass_for_distant_kernels(apart: float) -> None:
    for seed in range(40):
        z = logits(150, seed)
        other = z + apart * logits(150, seed + 1000)
        q = torch.log_softmax(other, -1)
        check = drawn_law("sampling_law", [policy(z, q, drawn(other, Law(), seed))], 1.0)
        assert check.outcome == "passed", check.detail


@pytest.mark.parametrize(
    ("law", "words"),
    [
        (Law(top_k=1), "greedy decoding"),
        (Law(top_k=4), "top_k 4"),
        (Law(top_p=0.8), "top_p 0.8"),
        (Law(min_p=0.1), "min_p 0.1"),
        (Law(temperature=0.5), "temperature of 0.5"),
        (Law(temperature=2.0), "temperature of 2"),
    ],
)
def test_tokens_of_another_distribution_are_reported(law: Law, words: str) -> None:
    z = logits(400, 7)
    q = torch.log_softmax(z, -1)
    check = drawn_law("sampling_law", [policy(z, q, drawn(z, law, 3))], 1.0)
    assert check.outcome == "failed"
    assert check.blocking
    assert words in check.detail
    assert check.value == law.temperature


def test_token_outside_a_filter_does_not_hide_the_fault() -> None:
    z = logits(400, 7)
    q = torch.log_softmax(z, -1)
    tokens = drawn(z, Law(top_k=2), 3)
    tokens[5] = int(z[5].argmin())
    check = drawn_law("sampling_law", [policy(z, q, tokens)], 1.0)
    assert check.outcome == "failed"
    assert "top_k 2" in check.detail


def test_no_tokens_are_inconclusive() -> None:
    assert module.drawn_law("sampling_law", [], 1.0).outcome == "not_applicable"
