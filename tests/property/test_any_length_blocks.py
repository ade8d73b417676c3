"""Exported blocks at any length: attacks at several lengths, and the checker on the whole proof."""

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
from kcdsl_backends.certifier.statements.problems import ProblemFactory, claim_margin
from kcdsl_backends.certifier.statements.proof import Proof, ProofBuilder, rows_region
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_certs.recheck import recheck
from tests.support.directed import DIRECTED
from tests.support.grids import LATER

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "attention_bias": True,
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 1, "vocab_size": 32, "max_position_embeddings": 32,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip
TOKENS = (1, 5, 9, 2, 30, 7)
LENGTHS = (1, 2, 20)
LONGEST = 24
NUMERICS: dict[str, dict[str, Any]] = {
    "float32 fused": {"preset": "torch-sdpa-flash"},
    "bfloat16 nearest": {"preset": "torch-eager", "compute": "bfloat16", "casts": "nearest"},
    "fp8 weights": {"preset": "fp8-weights", "casts": "nearest"},
    "matrix unit": {"preset": "fp8-w8a8-per-channel", "tensor_core": "hopper_fp8"},
    "int8 dynamic": {"preset": "onnxruntime-int8"},
    **DIRECTED,
}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a small model with random weights: one key head for all, or one head."""
    folder: Path = tmp_path_factory.mktemp(str(request.param))
    torch.manual_seed(6)
    config, build = (LLAMA, build_llama) if request.param == "llama" else (BERT, build_bert)
    state = {n: torch.randn_like(p) * 0.3 + 0.05 for n, p in build(config).named_parameters()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    ref = ModelRef("model.safetensors", architecture=str(request.param), tokenizer="bytes")
    return load_model(ref, folder)


# Each kernel of attention in both models, of the blocks without it by turns; the other cases are
# slow. A layer has a norm behind attention, which a coarse kernel leaves without a bound.
CASES = [
    pytest.param(
        kind,
        block,
        name,
        marks=() if block == "attn_0" or (place + turn) % 2 == 0 else LATER,
    )
    for turn, kind in enumerate(("llama", "bert"))
    for block in ("attn_0", "mlp_0", "norm_0")
    for place, name in enumerate(NUMERICS)
]
LAYERS = [(kind, "layer_0", "float32 fused") for kind in ("llama", "bert")]


@pytest.mark.full
@pytest.mark.parametrize(("model", "block", "name"), [*CASES, *LAYERS], indirect=["model"])
def test_attacks_of_every_length_are_within_the_bounds(model: Model, block: str, name: str) -> None:
    train, infer = resolve({"preset": "torch-eager"}), resolve(NUMERICS[name])
    factory = ProblemFactory(model, train, infer, torch.device("cpu"))
    states = factory.centre(block, TOKENS)
    assert states is not None
    wide = 0.0 if block == "layer_0" else 2.0**-6
    centre, radius = states[2:3], torch.full((1, 1), wide).double()
    problem = factory.sequences(block, LONGEST)
    bounds = problem.bound(centre, radius)
    found = drift_bound(bounds.output.drift, "inf")
    for rows in LENGTHS:
        exact = factory.problem(block, tuple(range(rows)))
        shape = (rows, centre.shape[-1])
        one = attack(
            *exact.simulators(),
            "inf",
            centre.expand(shape).contiguous(),
            radius,
            candidates=2,
            rounds=3,
            restarts=1,
            batches=1 if rows == 2 else 0,
        )
        assert 0 < one.value <= found, rows
    builder = ProofBuilder(model, block, train, infer, "inf", 1)
    region = rows_region(centre, radius, LONGEST, problem.tables)
    claim = found * claim_margin(train, infer)
    builder.add("rows", problem.graph, region, claim, Proof(bounds.witness))
    outcome = recheck(builder.document(), model.checkpoint.path)
    assert outcome.ok, (outcome.reason, outcome.detail)
    assert float.fromhex(outcome.bound) == pytest.approx(found, rel=2.0**-10)
