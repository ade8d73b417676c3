"""No admissible run leaves the boxes: random models, adversarial and random roundings."""

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
from kcdsl.model.numerics import Numerics
from kcdsl.model.presets import resolve
from kcdsl_backends.attack import attack, functional
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.state import State
from kcdsl_backends.drift.functionals import drift_bound
from tests.support.directed import DIRECTED
from tests.support.grids import by_turns

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32, "tie_word_embeddings": True, "attention_bias": True,
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "vocab_size": 32, "max_position_embeddings": 32,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
}  # fmt: skip
TOKENS = (1, 5, 9, 2, 30, 7, 7)
RADII = (0.0, 1e-5, 1e-4, 1e-3, 1e-2)
EAGER = {"preset": "torch-eager"}
NUMERICS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32 fused": {"preset": "torch-sdpa-flash"},
    "bfloat16 any": {"compute": "bfloat16"},
    "bfloat16 nearest": {"compute": "bfloat16", "casts": "nearest"},
    "float16 nearest": {"compute": "float16", "casts": "nearest"},
    "fp8 weights": {"preset": "fp8-weights", "casts": "nearest"},
    "fp8 w8a8": {"preset": "fp8-w8a8-per-channel", "casts": "nearest"},
    "int8 weights": {"preset": "int8-weights"},
    "int8 dynamic": {"preset": "onnxruntime-int8"},
    "vLLM, FP8 per token": {"preset": "vllm-fp8-per-token", "casts": "nearest"},
    "AWQ": {"preset": "awq-int4"},
    "MXFP4": {"preset": "mxfp4"},
    "powers of two": {"preset": "fp8-w8a8-blocks-e8m0"},
    "bytes in pairs": {"preset": "onnxruntime-int8-pairs"},
    "mxfp8": {"preset": "mxfp8"},
    **DIRECTED,
}


@pytest.fixture(scope="module", params=["llama", "bert"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a small model with random weights that are neither tiny nor symmetric."""
    folder: Path = tmp_path_factory.mktemp(str(request.param))
    torch.manual_seed(3)
    config, build = (LLAMA, build_llama) if request.param == "llama" else (BERT, build_bert)
    module = build(config)
    state = {name: torch.randn_like(p) * 0.25 + 0.05 for name, p in module.named_parameters()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    ref = ModelRef("model.safetensors", architecture=str(request.param), tokenizer="bytes")
    return load_model(ref, folder)


def problem_factory(model: Model, infer: str) -> ProblemFactory:
    return ProblemFactory(
        model, resolve(EAGER), resolve(EAGER | NUMERICS[infer]), torch.device("cpu")
    )


def problem_of(model: Model, block: str, infer: str) -> BlockProblem:
    return problem_factory(model, infer).problem(block, TOKENS)


def bound_or_none(
    problem: BlockProblem, centre: torch.Tensor | None, spread: torch.Tensor
) -> State | None:
    """Return the state of the output, or None where a norm has no bound."""
    try:
        return problem.bound(centre, spread).output
    except NoBound as no:
        return None if "norm" in no.node else pytest.fail(str(no))


def forms_or_none(problem: BlockProblem, centre: torch.Tensor | None, spread: torch.Tensor) -> Box:
    """Return the box of the affine forms, unbounded where they have no bound."""
    try:
        return problem.forms(centre, spread).box()
    except NoBound:
        shape = problem.graph.node(problem.graph.output).shape
        return Box.around(torch.full(shape, torch.inf, dtype=torch.float64))


@pytest.mark.sample(1)
@by_turns(
    indirect=["model"],
    infer=sorted(NUMERICS),
    block=["attn_0", "mlp_1", "norm_1", "layer_0"],
    radius=[0.0, 1e-3],
    model=["llama", "bert"],
)
def test_attacks_stay_within_the_bounds(
    model: Model, block: str, infer: str, radius: float
) -> None:
    problem = problem_of(model, block, infer)
    centre = problem_factory(model, infer).centre(block, TOKENS)
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    output = bound_or_none(problem, centre, spread)
    forms = forms_or_none(problem, centre, spread)
    if output is None:
        # Intervals may fail at a second norm after coarse rounding, never on a single block.
        assert block == "layer_0"
        assert radius > 0 or infer not in ("float32", "float32 fused")
    boxes = [forms] if output is None else [forms, output.drift]
    train, infer_run = problem.simulators()
    generator = torch.Generator().manual_seed(0)
    for kind in ("inf", "2" if block in ("attn_0", "norm_1") else "span"):
        batches = 1 if kind == "inf" else 0
        found = attack(
            train, infer_run, kind, centre, spread, candidates=2, rounds=2, batches=batches
        )
        assert all(0 < found.value <= drift_bound(box, kind) for box in boxes)
    for _ in range(6):
        x = centre if centre is None else (centre + spread * _signs(centre.shape, generator))
        outputs = []
        for simulator in (train, infer_run):
            symbols = {
                name: _signs(shape, generator) * float(torch.rand((), generator=generator) < 0.7)
                for name, shape in simulator.symbol_shapes().items()
            }
            outputs.append(simulator.run(x, symbols))
        drift = outputs[1] - outputs[0]
        margin = 1e-12
        for box in boxes:
            assert bool(((box.lo - margin <= drift) & (drift <= box.hi + margin)).all())
            assert float(functional(drift, "span").amax()) <= drift_bound(box, "span")
        if output is None:
            continue
        for box, value in zip((output.train, output.infer), outputs, strict=True):
            assert bool(((box.lo - margin <= value) & (value <= box.hi + margin)).all())


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1


@pytest.mark.full
def test_bound_of_the_whole_model_on_token_ids(model: Model) -> None:
    """Float32 against another float32 kernel: the whole model has a finite bound that holds."""
    factory = problem_factory(model, "float32 fused")
    problem = factory.problem("model", TOKENS)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    drift = problem.bound(None, zero).output.drift
    found = attack(*problem.simulators(), "inf", None, zero, candidates=2, rounds=2)
    assert 0 < found.value <= drift_bound(problem.forms(None, zero).box(), "inf")
    assert found.value <= drift_bound(drift, "inf") < 10.0


@pytest.mark.full
def test_bounds_grow_with_the_region(model: Model) -> None:
    factory = problem_factory(model, "bfloat16 any")
    problem, centre = factory.problem("attn_0", TOKENS), factory.centre("attn_0", TOKENS)
    bounds = [
        drift_bound(problem.bound(centre, spread).output.drift, "inf")
        for spread in (torch.full((1, 1), r, dtype=torch.float64) for r in RADII)
    ]
    assert bounds == sorted(bounds)


@pytest.mark.sample(1)
def test_bound_of_equal_float64_kernels_is_near_roundoff(model: Model) -> None:
    """A float64 kernel against itself: the bound is of the order of its own roundings."""
    exact: Numerics = resolve(EAGER | {"compute": "float64", "accumulate": "float64"})
    factory = ProblemFactory(model, exact, exact, torch.device("cpu"))
    centre = factory.centre("attn_0", TOKENS)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    problem = factory.problem("attn_0", TOKENS)
    assert 0 < drift_bound(problem.bound(centre, zero).output.drift, "inf") < 1e-11
    assert 0 < drift_bound(problem.forms(centre, zero).box(), "inf") < 1e-11
