"""Whole small blocks by linear bounds: attacks stay inside, also with intervals intersected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.architectures.bert import build as build_bert
from kcdsl.model.architectures.llama import build as build_llama
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_backends.attack import attack
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_backends.drift.linear_bounds import linear_bounds
from tests.support.directed import DIRECTED
from tests.support.grids import LATER

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "attention_bias": True,
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 32,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip
TOKENS = (1, 5, 9, 2)
EAGER: dict[str, Any] = {"preset": "torch-eager"}
NUMERICS: dict[str, dict[str, Any]] = {
    "float32 fused": {"preset": "torch-sdpa-flash"},
    "bfloat16 nearest": {"compute": "bfloat16", "casts": "nearest"},
    "float8 weights": {"weights": {"format": "fp8_e4m3", "scale": "per_channel"}},
    "float8 weights and activations": {"preset": "fp8-w8a8-per-channel", "casts": "nearest"},
    **DIRECTED,
}


@pytest.fixture(scope="module", params=["llama", "bert"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a small model with random weights that are neither tiny nor symmetric."""
    folder: Path = tmp_path_factory.mktemp(str(request.param))
    torch.manual_seed(3)
    config, build = (LLAMA, build_llama) if request.param == "llama" else (BERT, build_bert)
    state = {
        name: torch.randn_like(p) * 0.25 + 0.05 for name, p in build(config).named_parameters()
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    ref = ModelRef("model.safetensors", architecture=str(request.param), tokenizer="bytes")
    return load_model(ref, folder)


def bounds(problem: BlockProblem, centre: torch.Tensor, spread: torch.Tensor) -> tuple[Box, Box]:
    """Return the boxes of linear bounds and of the interval domain."""
    return (
        linear_bounds(problem.graph, problem.kernels(), centre, spread).box,
        problem.bound(centre, spread).output.drift,
    )


# Each kernel on parts of a layer in one of the models, by turns; the other cases are slow.
CASES = [
    pytest.param(
        kind,
        block,
        infer,
        marks=LATER if block == "layer_0" or (place + turn) % 2 else (),
    )
    for kind in ("llama", "bert")
    for turn, block in enumerate(("attn_0", "mlp_0", "layer_0"), start=kind == "bert")
    for place, infer in enumerate(NUMERICS)
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("model", "block", "infer"), CASES, indirect=["model"])
def test_attacks_stay_within_the_linear_bounds(model: Model, block: str, infer: str) -> None:
    numerics = resolve(EAGER | NUMERICS[infer])
    factory = ProblemFactory(model, resolve(EAGER), numerics, torch.device("cpu"))
    problem, centre = factory.problem(block, TOKENS), factory.centre(block, TOKENS)
    assert centre is not None
    bounded = 0
    for radius in (0.0, 1e-3):
        spread = torch.full((1, 1), radius, dtype=torch.float64)
        try:
            planes, apart = bounds(problem, centre, spread)
        except NoBound:
            if block != "layer_0":  # a second norm after coarse rounding may have no bound
                raise
            continue
        bounded += 1
        assert bool((planes.lo >= apart.lo).all())
        assert bool((planes.hi <= apart.hi).all())
        found = attack(*problem.simulators(), "inf", centre, spread, candidates=2, rounds=2)
        assert 0 < found.value <= drift_bound(planes, "inf")
    assert bounded > 0 or infer != "float32 fused"


@pytest.mark.full
def test_error_of_second_order_in_the_box_cancels(model: Model) -> None:
    """Drifts much smaller than the box: single-kernel bounds have its square as error."""
    fused = resolve(EAGER | NUMERICS["float32 fused"])
    factory = ProblemFactory(model, resolve(EAGER), fused, torch.device("cpu"))
    problem, centre = factory.problem("attn_0", TOKENS), factory.centre("attn_0", TOKENS)
    assert centre is not None
    spread = torch.full((1, 1), 1e-2, dtype=torch.float64)
    planes, apart = bounds(problem, centre, spread)
    forms = problem.forms(centre, spread).box()
    assert drift_bound(planes, "inf") <= drift_bound(apart, "inf")
    assert drift_bound(planes, "inf") < 0.1 * drift_bound(forms, "inf")
