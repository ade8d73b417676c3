"""Results of PyTorch lie inside the boxes: unusual weights, unusual inputs, every adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.architectures import bert, llama
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import ProblemFactory, certified_block_drift
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel

LLAMA = {
    "model_type": "llama", "hidden_size": 8, "head_dim": 2, "intermediate_size": 5,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "attention_bias": True,
}  # fmt: skip
BERT = {
    "model_type": "bert", "hidden_size": 8, "intermediate_size": 5, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 5, "max_position_embeddings": 64,
}  # fmt: skip
EAGER = ("torch.eager", "torch-eager")
MATH = ("torch.sdpa.math", "torch-sdpa-math")
FLASH = ("torch.sdpa.flash", "torch-sdpa-flash")
FP8 = {"format": "fp8_e4m3", "scale": "per_channel"}
INT8 = {"format": "int8", "scale": "per_tensor"}
BLOCKS = ("attn_0", "mlp_0", "norm_0", "norm_1", "layer_0")
FLUSHED = 1e-35
"""Some processors flush subnormal bfloat16 numbers, which no numerics admit: smaller drifts are
ignored."""


def kernel(program: tuple[str, str], **numerics: Any) -> KernelRef:
    return KernelRef(program[0], tuple({"preset": program[1], **numerics}.items()))


KERNELS: dict[str, KernelRef] = {
    f"{program[0]} {compute} {casts}": kernel(program, compute=compute, casts=casts)
    for program in (EAGER, MATH, FLASH)
    for compute in ("float32", "bfloat16", "float16", "float64")
    for casts in ("any", "nearest")
} | {
    "fp8 weights": kernel(EAGER, compute="bfloat16", casts="nearest", weights=FP8),
    "mx weights": kernel(FLASH, compute="bfloat16", weights={"format": "fp8_e5m2", "scale": "mx"}),
    "int8 weights": kernel(MATH, compute="float16", weights=INT8),
}


def odd(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return weights of an odd kind."""
    w = torch.randn(shape, generator=generator) * 0.3
    match kind:
        case "outliers":
            return torch.where(torch.rand(shape, generator=generator) < 0.05, w * 3e3, w)
        case "wide":
            return w * torch.exp2(torch.randint(-30, 6, shape, generator=generator).float())
        case "zero rows":
            return w * (torch.rand(shape[0], *[1] * (len(shape) - 1), generator=generator) < 0.6)
        case "constant rows":
            return w[..., :1].expand(shape).contiguous()
        case "exact":
            return torch.round(w * 8) / 2
        case "tiny":
            return w * 1e-20
    return w


WEIGHTS = ("plain", "outliers", "wide", "zero rows", "constant rows", "exact", "tiny")


def loaded(config: Mapping[str, Any], kind: str, folder: Path) -> Model:
    generator = torch.Generator().manual_seed(WEIGHTS.index(kind))
    own = llama if config["model_type"] == "llama" else bert
    module = (llama.build if own is llama else bert.build)(config)
    state = {n: odd(kind, tuple(p.shape), generator) for n, p in module.named_parameters()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(config)))
    architecture = str(config["model_type"])
    return load_model(ModelRef("model.safetensors", architecture=architecture), folder)


def inputs(model: Model, block: str, length: int, generator: torch.Generator) -> list[Tensor]:
    """Return the block inputs of a prompt, and unusual inputs."""
    real = model.block_inputs([1] * (length - 1) + [0], block)
    assert real is not None
    plain = torch.randn(length, 8, generator=generator)
    sizes = torch.exp2(torch.randint(-40, 12, plain.shape, generator=generator).float())
    return [
        real, plain * 30, plain * sizes, plain * 1e-40, plain * 2.0**50, plain * 1e-3 + 1e3,
        torch.full_like(plain, 0.7), plain[:, :1].expand_as(plain).clone(), plain * 0,
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("weights", WEIGHTS)
def test_real_kernels_are_within_their_bounds(weights: str, tmp_path: Path) -> None:
    """Every second kernel against the float32 one, each on another block and length by turns."""
    place = WEIGHTS.index(weights)
    model = loaded((LLAMA, BERT)[place % 2], weights, tmp_path)
    generator = torch.Generator().manual_seed(1)
    train = kernel(EAGER, casts="nearest")
    started, finite, compared = load_kernel(train, model, "cpu"), 0, 0
    for turn, (name, ref) in enumerate(KERNELS.items()):
        if (turn + place // 2) % 2:
            continue
        running = load_kernel(ref, model, "cpu")
        factory = ProblemFactory(model, resolve(train), resolve(ref), torch.device("cpu"))
        block = BLOCKS[(turn + place) % len(BLOCKS)]
        length = (1, 2, 17, 3, 64)[turn % 5]
        for i, x in enumerate(inputs(model, block, length, generator)):
            measured = (running.block(block, x) - started.block(block, x)).abs().numpy()
            found = certified_block_drift(model, block, x, factory.train, factory.infer, factory)
            compared += 1
            if length < 64 and (i + turn) % 3 == 0:
                drift = running.block(block, x) - started.block(block, x)
                _assert_inside_forms(factory, block, x, drift)
            finite += np.isfinite(found.bound_inf)
            inside = (measured <= found.drift_bound + FLUSHED) | np.isinf(found.drift_bound)
            assert bool(inside.all()), (name, block, float(x.abs().max()))
    assert finite > compared / 3, "bounds that are infinite show nothing"


def _assert_inside_forms(factory: ProblemFactory, block: str, x: Tensor, measured: Tensor) -> None:
    """Assert the same for the box of affine forms, where it exists."""
    problem = factory.problem(block, tuple(range(x.shape[0])))
    try:
        box = problem.forms(x.double(), torch.zeros(1, 1, dtype=torch.float64)).box()
    except NoBound:
        return
    drift = measured.double()
    inside = (box.lo - FLUSHED <= drift) & (drift <= box.hi + FLUSHED)
    assert bool(inside.all()), (block, factory.infer, float(x.abs().max()))


@pytest.mark.full
def test_kernel_that_violates_its_claim_is_outside(tmp_path: Path) -> None:
    """The comparison can fail: a drift of 1e-2 in one element is above any float32 bound."""
    model = loaded(LLAMA, "plain", tmp_path)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    numerics = resolve(kernel(EAGER))
    found = certified_block_drift(model, "attn_0", x, numerics, numerics)
    assert 0 < found.bound_inf < 1e-2
