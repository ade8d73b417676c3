"""Chains whose links begin with a norm, or return constants, are confirmed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl_certs.recheck import recheck
from tests.support.chains import chained, small
from tests.support.grids import LATER
from tests.support.small_models import write_model

NORMS_FIRST = """
import torch
from torch import nn


class Network(nn.Module):
    limits = (16, 32)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        for name in ("one", "two"):
            self.add_module(f"{name}_norm", nn.LayerNorm(4))
            self.add_module(f"{name}_up", nn.Linear(4, 6))
            self.add_module(f"{name}_down", nn.Linear(6, 4))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.one_down(torch.relu(self.one_up(self.one_norm(x))))
        x = x + self.two_down(torch.relu(self.two_up(self.two_norm(x))))
        return self.head(self.norm(x))


def build(config):
    return Network()
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("pair", "seed"),
    [
        ("float16 any", 3),
        ("bfloat16 twice", 4),
        ("float32 fused", 5),
        *(
            pytest.param(pair, seed, marks=LATER)
            for pair in ("float16 any", "bfloat16 nearest", "fp8 weights", "identical")
            for seed in (6, 8, 9)
        ),
    ],
)
@pytest.mark.parametrize("ellipsoids", [False, True])
def test_links_that_begin_with_a_norm_are_confirmed(
    pair: str, seed: int, ellipsoids: bool, tmp_path: Path
) -> None:
    """Both programs have equal bounds of the state that such a link reads, in either kernel."""
    own = tmp_path / f"plain-{seed}"
    own.mkdir()
    write_model(own)
    (own / "own.json").write_text("{}")
    (own / "plain_network.py").write_text(NORMS_FIRST)
    generator = torch.Generator().manual_seed(seed)
    state = {"embed.weight": torch.randn(16, 4, generator=generator)}
    for name in ("one", "two"):
        for part, shape in (("up", (6, 4)), ("down", (4, 6))):
            state[f"{name}_{part}.weight"] = torch.randn(shape, generator=generator)
            state[f"{name}_{part}.bias"] = torch.randn(shape[0], generator=generator)
    for name in ("one_norm", "two_norm", "norm"):
        state[f"{name}.weight"] = 1 + 0.3 * torch.randn(4, generator=generator)
        state[f"{name}.bias"] = 0.3 * torch.randn(4, generator=generator)
    state["head.weight"] = torch.randn(5, 4, generator=generator)
    save_file(state, own / "own.safetensors")
    found = chained(tmp_path, "plain", pair, seed=seed, ellipsoids=ellipsoids)
    second = found.links[1].nodes
    assert next(node.op for node in second if "input" in node.inputs) == "layer_norm"
    outcome = recheck(found.document, found.checkpoint)
    assert outcome.ok, outcome


@pytest.mark.full
@pytest.mark.parametrize("pair", ["float16 any", "float64", "float32 fused"])
def test_links_with_constant_results_are_confirmed(pair: str, tmp_path: Path) -> None:
    """Where a norm has no gain its result is its bias, here zero, up to the programs' roundings."""
    small(tmp_path, "bert")
    file = tmp_path / "bert-17" / "own.safetensors"
    state = load_file(file)
    for key, value in state.items():
        if "LayerNorm" in key:
            value[::3] = 0.0
    save_file(state, file)
    for clause in (1, 3):
        found = chained(tmp_path, "bert", pair, clause)
        assert found.found.contents is not None, found.found.bounded.outcome.reason
        outcome = recheck(found.document, found.checkpoint)
        assert outcome.ok, outcome
