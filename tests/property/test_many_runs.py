"""Batched runs of real blocks, and batched attacks compared with the unbatched search."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from kcdsl_backends.attack.gradient_ascent import Ascent
from kcdsl_backends.attack.runs import attack_of, record_run, run_of
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from tests.support.directed import DIRECTED

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
KERNELS: Mapping[str, dict[str, Any]] = {
    "float32 fused": {"preset": "torch-sdpa-flash"},
    "bfloat16 any": {"preset": "torch-eager", "compute": "bfloat16"},
    "bfloat16 nearest": {"preset": "torch-eager", "compute": "bfloat16", "casts": "nearest"},
    "fp8 w8a8": {"preset": "fp8-w8a8-per-channel", "casts": "nearest"},
    "fp8 w8a8 any": {"preset": "fp8-w8a8-per-channel"},
    "mxfp8": {"preset": "mxfp8", "casts": "nearest"},
    "fp8 per tensor": {"preset": "fp8-w8a8-per-tensor", "casts": "nearest"},
    "uint8": {"preset": "onnxruntime-int8", "casts": "nearest"},
    **DIRECTED,
}


@pytest.fixture(scope="module", params=["llama", "bert"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(str(request.param))
    torch.manual_seed(8)
    config, build = (LLAMA, build_llama) if request.param == "llama" else (BERT, build_bert)
    state = {n: torch.randn_like(p) * 0.25 + 0.05 for n, p in build(config).named_parameters()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    ref = ModelRef("model.safetensors", architecture=str(request.param), tokenizer="bytes")
    return load_model(ref, folder)


def problem_of(model: Model, block: str, kernel: str) -> tuple[BlockProblem, torch.Tensor]:
    train, infer = resolve({"preset": "torch-eager"}), resolve(KERNELS[kernel])
    factory = ProblemFactory(model, train, infer, torch.device("cpu"))
    centre = factory.centre(block, TOKENS)
    assert centre is not None
    return factory.problem(block, TOKENS), centre


@pytest.mark.sample(1)
@pytest.mark.parametrize("kernel", KERNELS)
def test_batched_runs_equal_single_runs(model: Model, kernel: str) -> None:
    """Last bits may differ and change a rounding: by one step at most, and rarely."""
    generator = torch.Generator().manual_seed(2)
    problem, centre = problem_of(model, "layer_0", kernel)
    radius = torch.full((1, 1), 1e-2, dtype=torch.float64)
    for simulator in problem.simulators():
        assert simulator.batchable
        ascent = Ascent(simulator, simulator, "inf", centre, radius)
        starts = [ascent.signs(generator) for _ in range(5)]
        many = ascent.run_of({key: torch.stack([s[key] for s in starts]) for key in starts[0]})
        together = simulator.run(many.x, many.symbols["train"])
        apart = 0
        for start, found in zip(starts, together, strict=True):
            run = ascent.run_of(start)
            alone = simulator.run(run.x, run.symbols["train"])
            apart += not torch.allclose(found, alone, rtol=1e-9, atol=1e-12)
        assert apart <= 1


def test_tensor_cores_are_simulated_unbatched(model: Model) -> None:
    unit = {"preset": "torch-eager", "compute": "bfloat16", "tensor_core": "ampere_16"}
    factory = ProblemFactory(model, resolve(KERNELS["mxfp8"]), resolve(unit), torch.device("cpu"))
    problem = factory.problem("mlp_0", TOKENS)
    assert [simulator.batchable for simulator in problem.simulators()] == [True, False]


@pytest.mark.full
@pytest.mark.parametrize(("block", "kernel"), [
    ("attn_0", "fp8 w8a8"), ("mlp_0", "bfloat16 nearest"), ("attn_0", "mxfp8"),
    ("mlp_0", "fp8 per tensor"), ("mlp_0", "uint8"),
])  # fmt: skip
def test_batch_never_worsens_an_attack_and_its_result_replays(
    model: Model, block: str, kernel: str
) -> None:
    problem, centre = problem_of(model, block, kernel)
    train, infer = problem.simulators()
    radius = torch.full((1, 1), 1e-2, dtype=torch.float64)
    alone, found = (
        attack(train, infer, "inf", centre, radius, candidates=2, rounds=4, seed=3, batches=batches)
        for batches in (0, 1)
    )
    assert found.value > alone.value
    assert found.run is not None
    assert found.run.x is not None
    assert bool(((found.run.x - centre).abs() <= radius).all())
    simulators: dict[str, Simulator] = {"train": train, "infer": infer}
    record = json.loads(json.dumps(record_run(found.run)))
    assert attack_of(run_of(record, simulators), train, infer, "inf") == found
    bound = float(problem.bound(centre, radius).output.drift.mag().amax())
    assert found.value <= bound
