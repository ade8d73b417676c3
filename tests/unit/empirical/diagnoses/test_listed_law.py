"""The test of tokens against their listed probabilities: exact false-alarm rate, and power."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kcdsl_backends.empirical.diagnoses.drawn_law import LAWS, listed_law, log_factors_of_list
from kcdsl_backends.empirical.sources.rollouts.record import Law, Rollout, Semantics, Side, TopLogs
from tests.support import recordings
from tests.support.recordings import unchanged

VOCABULARY = 12
RAW = Semantics("raw")


def laws(rows: int, seed: int) -> NDArray[np.float64]:
    """Return log-probabilities [rows, V]."""
    z = 2 * np.random.default_rng(seed).standard_normal((rows, VOCABULARY))
    return z - np.logaddexp.reduce(z, axis=1, keepdims=True)


def rollout(logs: NDArray[np.float64], tokens: NDArray[np.int64], depth: int) -> Rollout:
    """Return a rollout whose inference side lists its `depth` likeliest tokens."""
    order = np.argsort(-logs, axis=1, kind="stable")[:, :depth]
    own = np.take_along_axis(logs, tokens[:, None], axis=1)[:, 0]
    top = TopLogs(order, np.take_along_axis(logs, order, axis=1))
    mask = np.ones(len(tokens), np.bool_)
    return Rollout("r", (1,), tuple(tokens.tolist()), mask, None, Side(own, RAW, top))


def drawn(logs: NDArray[np.float64], law: Law, seed: int) -> NDArray[np.int64]:
    """Draw one token per row, by plain loops over the definition of the law."""
    random = np.random.default_rng(seed)
    found = []
    for row in logs:
        chances = np.exp(row / law.temperature)
        chances /= chances.sum()
        order = np.argsort(-chances, kind="stable")
        kept = law.top_k or len(row)
        if law.top_p < 1:
            kept = next(k for k in range(1, kept + 1) if chances[order[:k]].sum() >= law.top_p)
        inside = order[:kept]
        found.append(int(random.choice(inside, p=chances[inside] / chances[inside].sum())))
    return np.array(found)


@pytest.mark.parametrize("depth", [1, 3, VOCABULARY])
def test_mean_of_each_factor_is_one_with_lists(depth: int) -> None:
    """Summed over the whole vocabulary: sum_y q(y) a(y) / q(y) = 1, listed or not."""
    logs = laws(1, 0)
    total = np.zeros(len(LAWS))
    for token in range(VOCABULARY):
        found = rollout(logs, np.array([token]), depth)
        assert found.infer is not None
        total += np.exp(logs[0, token]) * np.exp(log_factors_of_list(found, found.infer)[:, 0])
    np.testing.assert_allclose(total, 1.0, rtol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("depth", [1, 5])
def test_correctly_sampled_tokens_pass(depth: int) -> None:
    for seed in range(60):
        logs = laws(150, seed)
        check = listed_law("sampling_law", [rollout(logs, drawn(logs, Law(), seed), depth)], 1.0)
        assert check.outcome == "passed", check.detail


@pytest.mark.parametrize(
    ("law", "depth", "words"),
    [
        (Law(top_k=1), 1, "greedy decoding"),
        (Law(top_k=1), 5, "greedy decoding"),
        (Law(top_k=4), 5, "top_k 4"),
        (Law(top_p=0.8), 8, "top_p 0.8"),
        (Law(temperature=0.5), 8, "temperature of 0.5"),
        (Law(temperature=2.0), VOCABULARY, "temperature of 2"),
    ],
)
def test_other_distribution_is_reported(law: Law, depth: int, words: str) -> None:
    logs = laws(400, 3)
    check = listed_law("sampling_law", [rollout(logs, drawn(logs, law, 3), depth)], 1.0)
    assert check.outcome == "failed"
    assert check.blocking
    assert words in check.detail


def test_only_unmasked_tokens_are_tested() -> None:
    logs = laws(400, 3)
    found = rollout(logs, drawn(logs, Law(top_k=1), 3), 5)
    masked = Rollout(found.key, found.prompt, found.tokens, np.arange(400) < 3, None, found.infer)
    check = listed_law("sampling_law", [masked], 1.0)
    assert check.outcome == "passed"
    assert check.detail.startswith("3 tokens")


def test_missing_lists_are_inconclusive() -> None:
    assert listed_law("sampling_law", recordings.rollouts(prompts=2), 1.0).outcome == (
        "not_applicable"
    )


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the distribution of greedy decoding."""
    likeliest = logits.argmax(-1, keepdim=True)
    return torch.full_like(logits, -1e4).scatter(-1, likeliest, 0.0)


@pytest.mark.full
def test_greedy_tokens_are_reported() -> None:
    """Both sides are unscaled and similar, so no ratio reveals that nothing was sampled."""
    found = recordings.rollouts(sampled=greedy, infer_law=unchanged, prompts=64, group=1, top=5)
    check = listed_law("sampling_law", found, 1.0)
    assert check.outcome == "failed"
    assert "greedy" in check.detail
