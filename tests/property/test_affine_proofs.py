"""Proofs of the backend by affine forms are confirmed; claims that it does not prove are not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kcdsl.model.architecture import Model
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import ProblemFactory, claim_margin
from kcdsl_backends.certifier.statements.proof import Proof, ProofBuilder, box_region, token_region
from kcdsl_backends.drift.affine import error_bounds as prover_passes
from kcdsl_backends.drift.affine.error_bounds import gram_norm
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.functionals import drift_bound, functional_bound
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.affine import reverse_passes as checker_passes
from kcdsl_certs.recheck.affine.reverse_passes import gram_norm as checked_norm
from tests.support.grids import by_turns
from tests.support.random_models import random_model

TOKENS = (1, 5, 2)
CONFIGS = {
    "llama": {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": 16, "max_position_embeddings": 32, "tie_word_embeddings": True,
    },
    "bert": {
        "model_type": "bert", "hidden_size": 8, "intermediate_size": 12,
        "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16,
        "max_position_embeddings": 32,
    },
}  # fmt: skip
EAGER: dict[str, Any] = {"preset": "torch-eager"}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "identical": (EAGER, EAGER),
    "float32 fused": (EAGER, {"preset": "torch-sdpa-flash"}),
    "float32 nearest": ({**EAGER, "casts": "nearest"}, {**EAGER, "casts": "nearest"}),
    "bfloat16 any": (EAGER, {"preset": "torch-sdpa-flash", "compute": "bfloat16"}),
    "bfloat16 nearest": (EAGER, {**EAGER, "compute": "bfloat16", "casts": "nearest"}),
    "float16 twice": (
        {**EAGER, "compute": "float16", "casts": "nearest"},
        {"preset": "torch-sdpa-flash", "compute": "float16", "casts": "nearest"},
    ),
    "fp8 weights": (EAGER, {"preset": "fp8-weights"}),
    "fp8 everywhere": (EAGER, {"preset": "fp8-w8a8-per-tensor", "casts": "nearest"}),
    "mxfp8": (EAGER, {"preset": "mxfp8"}),
    "int8": (EAGER, {"preset": "int8-weights", "casts": "nearest"}),
    "int8 dynamic": (EAGER, {"preset": "onnxruntime-int8"}),
    "float64": (
        {**EAGER, "compute": "float64", "accumulate": "float64"},
        {"preset": "torch-sdpa-flash", "compute": "float64", "accumulate": "float64"},
    ),
    "coarse input": (
        {**EAGER, "compute": "float64", "accumulate": "float64"},
        {
            **EAGER,
            "compute": "float64",
            "accumulate": "float64",
            "results": {"input": "bfloat16", "context": "float16"},
        },
    ),
    "int8 full range, nearest": (EAGER, {"preset": "torchao-int8-dynamic", "casts": "nearest"}),
    "vLLM, FP8 per token": (EAGER, {"preset": "vllm-fp8-per-token", "casts": "nearest"}),
    "limited scales": (
        EAGER,
        {
            "preset": "fp8-w8a8-per-channel",
            "activations": {
                "format": "fp8_e4m3",
                "scale": "per_token",
                "amax_limit": 1.0,
                "least_scale": 0.001,
            },
        },
    ),
    "AWQ": (EAGER, {"preset": "awq-int4"}),
    "NVFP4 weights": (EAGER, {"preset": "nvfp4-weights", "casts": "nearest"}),
    "NVFP4": (EAGER, {"preset": "nvfp4"}),
    "MXFP4": (EAGER, {"preset": "mxfp4", "casts": "nearest"}),
    "powers of two": (EAGER, {"preset": "fp8-w8a8-blocks-e8m0", "casts": "nearest"}),
    "scale of a batch": (
        EAGER,
        {
            "preset": "fp8-w8a8-per-tensor",
            "casts": "nearest",
            "activations": {"format": "fp8_e4m3", "scale": "per_batch", "batch_amax": 100},
        },
    ),
    "some linears plain": (
        EAGER,
        {
            "preset": "fp8-w8a8-per-channel",
            "casts": "nearest",
            "overrides": {
                "*.q*": {"weights": {"format": "bfloat16"}, "activations": {"format": "none"}},
                "*.d*": {"weights": {"format": "int8", "scale": "per_channel"}},
            },
        },
    ),
    "linears of their own": (
        {**EAGER, "overrides": {"*.q*": {"weights": {"format": "bfloat16"}}}},
        {
            "preset": "fp8-weights",
            "overrides": {
                "*.d*": {"activations": {"format": "fp8_e4m3", "scale": "per_tensor"}},
                "*.k*": {"weights": {"format": "bfloat16"}},
            },
        },
    ),
    "four shards": (EAGER, {**EAGER, "compute": "bfloat16", "casts": "nearest", "shards": 4}),
    "TF32": (EAGER, {"preset": "torch-sdpa-flash", "products": "tfloat32"}),
    "bytes in pairs": (EAGER, {"preset": "onnxruntime-int8-pairs"}),
    "uint8, nearest": (EAGER, {"preset": "onnxruntime-int8", "casts": "nearest"}),
    "fp8 static, nearest": (
        EAGER,
        {
            "preset": "fp8-w8a8-per-channel",
            "casts": "nearest",
            "activations": {"format": "fp8_e4m3", "scale": "static", "input_scale": 0.1},
        },
    ),
    "uint8 static": (
        EAGER,
        {
            "preset": "onnxruntime-int8",
            "activations": {
                "format": "uint8",
                "scale": "static",
                "input_scale": 0.2,
                "input_zero_point": 120,
            },
        },
    ),
    "bfloat16 toward zero": (
        {**EAGER, "compute": "bfloat16", "casts": "any_direction"},
        {
            **EAGER,
            "compute": "bfloat16",
            "casts": "toward_zero",
            "weights": {"format": "bfloat16", "rounding": "toward_zero"},
        },
    ),
    "float16 any toward zero": (
        EAGER,
        {"preset": "torch-sdpa-flash", "compute": "float16", "casts": "any_toward_zero"},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the weights of this module."""
    return tmp_path_factory.mktemp("models")


@cache
def model(kind: str, folder: Path) -> Model:
    return random_model(CONFIGS[kind], folder, 17)


@cache
def problem_factory(kind: str, pair: str, folder: Path) -> ProblemFactory:
    train, infer = (resolve(settings) for settings in PAIRS[pair])
    return ProblemFactory(model(kind, folder), train, infer, torch.device("cpu"))


def region(kind: str, centre: Tensor | None) -> Tensor:
    """Return the radius of a region: a point, a ball, or a hull that is wide in some elements."""
    if centre is None:
        return torch.zeros(1, 1, dtype=torch.float64)
    if kind == "hull":
        return torch.linspace(0, 2.0**-9, centre.numel(), dtype=torch.float64).reshape(centre.shape)
    return torch.full((1, 1), 2.0**-10 if kind == "ball" else 0.0, dtype=torch.float64)


def prove(
    factory: ProblemFactory, block: str, kind: str, functional: str, factor: float = 1.0
) -> bytes | None:
    """Return a proof with its claim times `factor`; None without a bound."""
    problem, centre = factory.problem(block, TOKENS), factory.centre(block, TOKENS)
    radius = region(kind, centre)
    try:
        forms = problem.forms(centre, radius)
    except NoBound:
        return None
    box = forms.box()
    try:
        box = box.meet(problem.bound(centre, radius).output.drift)
    except NoBound:
        assert block not in BLOCKS
    found = functional_bound(forms, box, functional, lambda bound: False)
    margin = claim_margin(factory.train, factory.infer, problem.graph)
    assert (margin == 4) is (factory.train.compute == "float64" and not factory.infer.results)
    builder = ProofBuilder(factory.model, block, factory.train, factory.infer, functional, 1)
    where = token_region(TOKENS) if centre is None else box_region(kind, centre, radius)
    claim = found * margin * factor
    builder.add("a", problem.graph, where, claim, Proof(forms.witness(), "affine", forms.passes))
    return builder.document()


BLOCKS = ("attn_0", "mlp_0", "norm_1")
# Behind several consecutive norms the coarse kernels have no bound.
DEEP = ("identical", "float32 fused", "float16 twice", "float64")


@pytest.mark.sample(1)
@by_turns(pair=PAIRS, block=BLOCKS, kind=["llama", "bert"])
def test_proofs_of_parts_are_confirmed(kind: str, block: str, pair: str, folder: Path) -> None:
    factory = problem_factory(kind, pair, folder)
    for where, functional in (("points", "inf"), ("ball", "2"), ("hull", "span")):
        assert confirmed(factory, block, where, functional)


@pytest.mark.full
@pytest.mark.parametrize("pair", DEEP)
@pytest.mark.parametrize("block", ["layer_0", "model"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_proofs_of_models_are_confirmed(kind: str, block: str, pair: str, folder: Path) -> None:
    factory = problem_factory(kind, pair, folder)
    found = confirmed(factory, block, "points", "inf")
    assert found or pair == "float16 twice"


def confirmed(factory: ProblemFactory, block: str, where: str, functional: str) -> bool:
    """Return whether there is a bound, which must then be confirmed."""
    proof = prove(factory, block, where, functional)
    if proof is None:
        return False
    outcome = recheck(proof, factory.model.checkpoint.path)
    assert outcome.ok, (where, functional, outcome.reason, outcome.detail)
    return True


# Blocks, pairs and radii whose errors are so large that norms of them matter.
LARGE = [
    ("norm_1", "bfloat16 any", 2.0**-7),
    ("mlp_0", "bfloat16 any", 2.0**-6),
    ("layer_0", "float32 fused", 2.0**-9),
    ("layer_0", "float64", 2.0**-9),
    ("layer_0", "bfloat16 any", 2.0**-12),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("block", "pair", "radius"), LARGE)
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_large_errors_are_bounded_by_norms(
    kind: str,
    block: str,
    pair: str,
    radius: float,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both programs take norms of many functionals; they agree, and runs stay inside."""
    calls = {"prover": 0, "checker": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(f"{prover_passes.__name__}.gram_norm", counted("prover", gram_norm))
    monkeypatch.setattr(f"{checker_passes.__name__}.gram_norm", counted("checker", checked_norm))
    factory = problem_factory(kind, pair, folder)
    problem, centre = factory.problem(block, TOKENS), factory.centre(block, TOKENS)
    assert centre is not None
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    forms = problem.forms(centre, spread)
    found = forms.box()
    claim = drift_bound(found, "inf") * claim_margin(factory.train, factory.infer)
    builder = ProofBuilder(factory.model, block, factory.train, factory.infer, "inf", 1)
    where = box_region("ball", centre, spread)
    builder.add("a", problem.graph, where, claim, Proof(forms.witness(), "affine", forms.passes))
    outcome = recheck(builder.document(), factory.model.checkpoint.path)
    assert outcome.ok, (outcome.reason, outcome.detail)
    assert calls["prover"] > 0
    assert calls["checker"] > 0
    train, infer = problem.simulators()
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        signs = torch.randint(0, 2, centre.shape, generator=generator).double() * 2 - 1
        moved = infer.run(centre + radius * signs, {}) - train.run(centre + radius * signs, {})
        assert bool((found.lo - 1e-13 <= moved).all())
        assert bool((moved <= found.hi + 1e-13).all())


@pytest.mark.sample(1)
@pytest.mark.parametrize("pair", ["float32 fused", "bfloat16 any", "bfloat16 nearest", "int8"])
@pytest.mark.parametrize("block", ["attn_0", "mlp_0", "norm_1"])
def test_lower_claims_are_rejected(block: str, pair: str, folder: Path, follows: Any) -> None:
    factory = problem_factory("bert", pair, folder)
    for where in ("points", "ball", "hull"):
        proof = prove(factory, block, where, "2", 0.995)
        assert proof is not None
        follows(json.loads(proof))
        outcome = recheck(proof, factory.model.checkpoint.path)
        assert (outcome.ok, outcome.reason) == (False, "claim/too-small")
