"""The entropy of the training policy for charts, from the pass over full logits."""

from __future__ import annotations

import math

import pytest
import torch

from kcdsl_backends.empirical.metrics.full_logits import tier_a


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_entropy_equals_that_of_the_training_policy(temperature: float, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    train = (8 * torch.randn(60, 300, generator=generator, dtype=torch.float64)).to(kind)
    infer = train + torch.randn(60, 300, generator=generator, dtype=torch.float64).to(kind)
    log = (train.double() / temperature).log_softmax(-1)
    expected = -(log.exp() * log).sum(-1).numpy()
    found = tier_a(train, infer, temperature, {"entropy"})["entropy"]
    assert found == pytest.approx(expected, rel=2e-6)


def test_entropy_of_uniform_masked_and_deterministic_policies() -> None:
    train = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf], [90.0, 0, 0, 0]])
    found = tier_a(train, train, 1.0, {"entropy"})["entropy"]
    assert found[:2] == pytest.approx([math.log(4), math.log(2)])
    assert 0 <= found[2] < 1e-30
    undefined = tier_a(torch.full((1, 4), math.nan), train[:1], 1.0, {"entropy"})["entropy"]
    assert math.isnan(undefined[0])
