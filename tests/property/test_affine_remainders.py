"""Remainders of second order: no input of a large region leaves the bounds.

Float64 kernels: roundings are negligible beside the curvature of softmax, norms, activations and
products, which the attack on the input exploits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.architectures.bert import build as build_bert
from kcdsl.model.architectures.llama import build as build_llama
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.drift.affine import kernel
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.boxes import NoBound

CONFIGS = {
    "llama": {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 8, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16, "tie_word_embeddings": True, "attention_bias": True,
    },
    "bert": {
        "model_type": "bert", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 8, "max_position_embeddings": 16,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    },
}  # fmt: skip
COARSE = resolve({"preset": "torch-eager", "compute": "bfloat16"})
FLOAT32 = resolve({"preset": "torch-eager", "compute": "float32"})
EXACT = resolve({"preset": "torch-eager", "compute": "float64", "accumulate": "float64"})
TOKENS = (1, 5, 2)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a small model with scores large enough for a non-uniform softmax."""
    folder: Path = tmp_path_factory.mktemp(str(request.param))
    torch.manual_seed(5)
    config = CONFIGS[str(request.param)]
    module = (build_llama if request.param == "llama" else build_bert)(config)
    state = {name: torch.randn_like(p) * 0.6 + 0.05 for name, p in module.named_parameters()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(
        ModelRef("model.safetensors", architecture=str(request.param), tokenizer="bytes"), folder
    )


@pytest.mark.full
@pytest.mark.parametrize("block", ["attn_0", "mlp_0", "norm_1", "layer_0"])
@pytest.mark.parametrize("radius", [1e-6, 1e-3, 2e-2, 1e-1])
def test_inputs_of_a_large_region_are_within_the_bounds(
    model: Model, block: str, radius: float
) -> None:
    factory = ProblemFactory(model, EXACT, EXACT, torch.device("cpu"))
    problem, centre = factory.problem(block, TOKENS), factory.centre(block, TOKENS)
    assert centre is not None
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    try:
        run = affine_run(problem.graph, problem.train, centre, spread, 2.0**-24)
    except NoBound:
        assert radius > 1e-3, "a small region always has a bound"
        return
    index = run.computed[problem.graph.output]
    entry = run.tape.entries[index]
    simulator = problem.simulators()[0]
    generator = torch.Generator().manual_seed(7)
    closest = 0.0
    for attempt in range(24):
        if attempt % 2:
            a = torch.zeros(entry.shape, dtype=torch.float64)
            place = int(torch.randint(0, a.numel(), (), generator=generator))
            a.view(-1)[place] = 1.0 if attempt % 4 == 1 else -1.0
        else:
            a = torch.randn(entry.shape, dtype=torch.float64, generator=generator)
            if attempt % 4 == 0:  # one row, as the remainder of a norm is bounded there
                a[:-1] = 0
        functional = Adjoint.full(a.unsqueeze(0))
        if attempt % 4 == 0:
            rows = entry.shape[0]
            functional = Adjoint(
                a[rows - 1 :].unsqueeze(0), ((rows - 1, rows), (0, entry.shape[1])), entry.shape
            )
        low, high = run.tape.bound(index, functional).with_region(run.tape.radius)
        reached = 0.0

        def objective(x: Tensor, a: Tensor = a) -> Tensor:
            return (a * simulator.run(x, {})).sum()

        for x in _climb(objective, centre, radius, generator):
            value = float((a * (simulator.run(x, {}) - entry.reference)).sum())
            slack = 1e-13 * float(a.abs().sum())
            assert float(low[0]) - slack <= value <= float(high[0]) + slack
            reached = max(reached, value)
            moved = (simulator.run(x, {}) - entry.reference).abs()
            assert bool((moved <= entry.error_bound + 1e-13).all())
        closest = max(closest, reached / float(high[0]))
    assert closest > (0.9 if radius <= 1e-3 else 0.01), "bounds that are far off show little"


def _climb(
    objective: Callable[[Tensor], Tensor],
    centre: Tensor,
    radius: float,
    generator: torch.Generator,
) -> list[Tensor]:
    """Return inputs of the region with a large objective: sign ascent, and random ones."""
    found = []
    for start in range(3):
        x = centre + radius * (2 * torch.rand(centre.shape, generator=generator).double() - 1) * (
            start > 0
        )
        for _ in range(8):
            leaf = x.clone().requires_grad_(True)
            (gradient,) = torch.autograd.grad(objective(leaf), leaf)
            x = centre + radius * torch.sign(gradient)
            found.append(x)
    return found


@pytest.mark.parametrize("radius", [0.0, 1e-4])
def test_training_kernels_get_no_passes_for_what_the_other_hides(
    model: Model, monkeypatch: pytest.MonkeyPatch, radius: float
) -> None:
    monkeypatch.setattr(kernel, "NEGLIGIBLE", 2.0**-40)  # without the other, for any remainder
    factory = ProblemFactory(model, FLOAT32, COARSE, torch.device("cpu"))
    problem, centre = factory.problem("layer_0", TOKENS), factory.centre("layer_0", TOKENS)
    assert centre is not None
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    forms = affine_forms(problem.graph, problem.train, problem.infer, centre, spread)
    alone = affine_run(problem.graph, problem.train, centre, spread, 2.0**-9, side=0)
    made, every = set(forms.train.passes.rows), set(alone.passes.rows)
    if radius:  # errors that both kernels share hide nothing of the drift
        assert made == every
        return
    assert made < every
    known, tight = forms.box(), replace(forms, train=alone).box()
    assert float(known.mag().amax()) <= 1.001 * float(tight.mag().amax())
