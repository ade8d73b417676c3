"""Prover and checker implement the same page independently: their bounds must agree."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.architectures.bert import build as build_bert
from kcdsl.model.architectures.llama import build as build_llama
from kcdsl.model.graph import BlockGraph
from kcdsl.model.loader import load_model
from kcdsl.model.lowering import block_graph
from kcdsl.model.numerics import Numerics
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import BlockProblem, claim_margin
from kcdsl_backends.certifier.statements.proof import Proof, ProofBuilder, box_region, token_region
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_certs.recheck import recheck
from tests.support.grids import by_turns

TOKENS = (1, 5, 9, 2, 30, 7)
CONFIGS = {
    "llama": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 64, "max_position_embeddings": 32, "tie_word_embeddings": True,
    },
    "bert": {
        "model_type": "bert", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
        "max_position_embeddings": 32,
    },
}  # fmt: skip
NUMERICS: dict[str, dict[str, object]] = {
    "float32": {"preset": "torch-eager"},
    "float32 fused": {"preset": "torch-sdpa-flash"},
    "bfloat16": {"preset": "torch-sdpa-flash", "compute": "bfloat16"},
    "bfloat16 nearest": {"preset": "torch-eager", "compute": "bfloat16", "casts": "nearest"},
    "float16 nearest": {"preset": "torch-sdpa-flash", "compute": "float16", "casts": "nearest"},
    "bfloat16 toward zero": {
        "preset": "torch-eager",
        "compute": "bfloat16",
        "casts": "toward_zero",
        "weights": {"format": "bfloat16", "rounding": "toward_zero"},
    },
    "bfloat16 any toward zero": {
        "preset": "torch-sdpa-flash",
        "compute": "bfloat16",
        "casts": "any_toward_zero",
    },
    "float16 any direction": {
        "preset": "torch-sdpa-flash",
        "compute": "float16",
        "casts": "any_direction",
    },
    "fp8 results toward zero": {
        "preset": "torch-eager",
        "casts": "toward_zero",
        "results": {"context": "fp8_e4m3", "input": "bfloat16"},
    },
    "coarse accumulator": {"preset": "torch-eager", "compute": "bfloat16", "accumulate": "float16"},
    "fp8 weights": {"preset": "fp8-weights"},
    "fp8 everywhere": {"preset": "fp8-w8a8-per-tensor", "casts": "nearest"},
    "fp8 per token": {"preset": "fp8-w8a8-per-channel", "casts": "nearest"},
    "mxfp8": {"preset": "mxfp8"},
    "mxfp8 nearest": {"preset": "mxfp8", "casts": "nearest"},
    "matrix unit": {"preset": "fp8-w8a8-per-channel", "tensor_core": "hopper_fp8"},
    "own results": {
        "preset": "torch-eager",
        "compute": "float64",
        "results": {"input": "bfloat16", "context": "bfloat16", "add": "float16"},
    },
    "int8": {"preset": "int8-weights", "casts": "nearest"},
    "int8 dynamic": {"preset": "onnxruntime-int8"},
    "int8 dynamic nearest": {"preset": "onnxruntime-int8", "casts": "nearest"},
    "vLLM, FP8 per token": {"preset": "vllm-fp8-per-token"},
    "vLLM, FP8 per token nearest": {"preset": "vllm-fp8-per-token", "casts": "nearest"},
    "limited scales nearest": {
        "preset": "fp8-w8a8-per-channel",
        "casts": "nearest",
        "activations": {
            "format": "fp8_e4m3",
            "scale": "per_token",
            "amax_limit": 1.0,
            "least_scale": 0.001,
        },
    },
    "AWQ": {"preset": "awq-int4", "casts": "nearest"},
    "NVFP4 weights": {"preset": "nvfp4-weights"},
    "NVFP4 weights, FP8 inputs": {
        "preset": "nvfp4-weights",
        "activations": {"format": "fp8_e4m3", "scale": "per_token"},
    },
    "NVFP4": {"preset": "nvfp4"},
    "NVFP4 nearest, calibrated": {
        "preset": "nvfp4",
        "casts": "nearest",
        "activations": {"format": "fp4_e2m1", "scale": "nvfp4", "input_scale": 0.001},
    },
    "MXFP4": {"preset": "mxfp4"},
    "MXFP6 nearest": {
        "preset": "mxfp8",
        "casts": "nearest",
        "weights": {"format": "fp6_e3m2", "scale": "mx"},
        "activations": {"format": "fp6_e2m3", "scale": "mx"},
    },
    "powers of two": {"preset": "fp8-w8a8-blocks-e8m0", "tensor_core": "hopper_fp8_promoted"},
    "fnuz nearest": {
        "preset": "fp8-w8a8-per-tensor",
        "casts": "nearest",
        "weights": {"format": "fp8_e4m3fnuz", "scale": "per_tensor"},
        "activations": {"format": "fp8_e4m3fnuz", "scale": "per_tensor"},
    },
    "scale of a batch": {
        "preset": "fp8-w8a8-per-tensor",
        "activations": {"format": "fp8_e4m3", "scale": "per_batch", "batch_amax": 400},
    },
    "some linears plain": {
        "preset": "fp8-w8a8-per-channel",
        "overrides": {
            "*.q*": {"weights": {"format": "bfloat16"}, "activations": {"format": "none"}},
            "*.d*": {"weights": {"format": "int8", "scale": "per_channel"}},
        },
    },
    "linears of their own nearest": {
        "preset": "fp8-weights",
        "casts": "nearest",
        "overrides": {
            "*.k*": {"weights": {"format": "bfloat16"}},
            "*.v*": {"weights": {"format": "bfloat16"}},
            "*.d*": {"activations": {"format": "fp8_e4m3", "scale": "per_tensor"}},
        },
    },
    "two shards": {"preset": "torch-sdpa-flash", "compute": "float16", "shards": 2},
    "eight shards": {
        "preset": "torch-eager",
        "compute": "bfloat16",
        "casts": "nearest",
        "shards": 8,
    },
    "TF32": {"preset": "torch-eager", "products": "tfloat32", "casts": "nearest"},
    "TF32 in a unit": {
        "preset": "torch-eager",
        "products": "tfloat32",
        "tensor_core": {
            key: {"fraction_bits": 24, "chunk": 4, "result_bits": 23}
            for key in ("linears", "others")
        },
    },
    "bytes in pairs nearest": {"preset": "onnxruntime-int8-pairs", "casts": "nearest"},
    "int8 full nearest": {"preset": "torchao-int8-dynamic", "casts": "nearest"},
    "fp8 static": {
        "preset": "fp8-w8a8-per-channel",
        "casts": "nearest",
        "activations": {"format": "fp8_e4m3", "scale": "static", "input_scale": 0.5},
    },
    "uint8 static": {
        "preset": "onnxruntime-int8",
        "activations": {
            "format": "uint8",
            "scale": "static",
            "input_scale": 1.5,
            "input_zero_point": 127,
        },
    },
}


@cache
def model(kind: str, folder: Path) -> Model:
    torch.manual_seed(11)
    module = (build_llama if kind == "llama" else build_bert)(CONFIGS[kind])
    state = {
        name: torch.randn_like(p) * 0.2 + (1.0 if "orm" in name and name.endswith("weight") else 0)
        for name, p in module.named_parameters()
    }
    save_file(state, folder / f"{kind}.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    ref = ModelRef(f"{kind}.safetensors", architecture=kind, tokenizer="bytes")
    return load_model(ref, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the weights of this module."""
    return tmp_path_factory.mktemp("models")


@cache
def exported(kind: str, block: str, folder: Path) -> BlockGraph:
    tokens = TOKENS if block == "model" else None
    return block_graph(model(kind, folder), block, len(TOKENS), tokens)


def compare(
    kind: str, block: str, train: Numerics, infer: Numerics, radius: float, folder: Path
) -> float:
    """Return checker's bound / prover's bound; fail unless the checker confirms the proof."""
    loaded, graph = model(kind, folder), exported(kind, block, folder)
    sides = (
        StoredParameters(loaded.checkpoint.tensors, graph.constants, n, torch.device("cpu"))
        for n in (train, infer)
    )
    problem = BlockProblem(graph, *sides)
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    inputs = loaded.block_inputs(list(TOKENS), block)
    centre = None if inputs is None else inputs.double()
    bounds = problem.bound(centre, spread)
    found = drift_bound(bounds.output.drift, "inf")
    builder = ProofBuilder(loaded, block, train, infer, "inf", 1)
    region = (
        token_region(TOKENS)
        if centre is None
        else box_region("ball" if radius else "points", centre, spread)
    )
    builder.add("a", graph, region, found * claim_margin(train, infer), Proof(bounds.witness))
    outcome = recheck(builder.document(), loaded.checkpoint.path)
    assert outcome.ok, (outcome.reason, outcome.detail)
    return float.fromhex(outcome.bound) / found


@pytest.mark.sample(4)
@by_turns(name=sorted(NUMERICS), block=["attn_0", "mlp_0", "norm_1"], kind=["llama", "bert"])
def test_both_programs_find_the_same_bound(kind: str, block: str, name: str, folder: Path) -> None:
    train, infer = resolve({"preset": "torch-eager"}), resolve(NUMERICS[name])
    for radius in (0.0, 1e-3):
        assert compare(kind, block, train, infer, radius, folder) == pytest.approx(1, rel=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", ["attn_0", "layer_0", "layer_1", "model"])
def test_float64_kernels_are_confirmed_within_the_margin(block: str, folder: Path) -> None:
    """The roundings of both programs are as large as the bounds there."""
    train = resolve({"preset": "torch-eager", "compute": "float64", "accumulate": "float64"})
    infer = resolve({"preset": "torch-sdpa-flash", "compute": "float64", "accumulate": "float64"})
    assert 0.2 < compare("llama", block, train, infer, 0.0, folder) < 4
