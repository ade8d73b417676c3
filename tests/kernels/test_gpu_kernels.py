"""Kernels of a CUDA device inside their numerics; both kernels run there, bounds on the CPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bench import kernels, kernels_inputs
from bench.kernels import Case
from kcdsl.ir.terms import ModelRef
from kcdsl.model import llama
from kcdsl.model.architecture import Model, load_model
from kcdsl_backends.empirical.kernels import load_kernel

pytestmark = pytest.mark.gpu

CONFIG = {
    "model_type": "llama", "hidden_size": 128, "head_dim": 32, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = (1, 2, 31, 32, 33, 65, 129, 300)
UNITS = {8: "ampere_16", 9: "hopper_16", 10: "hopper_16"}
"""The unit of half-precision products by the major number of the compute capability."""
FP8_UNITS = {(8, 9): "ada_fp8", (9, 0): "hopper_fp8", (10, 0): "blackwell_fp8"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a small model whose widths suit every kernel."""
    folder = tmp_path_factory.mktemp("gpu")
    generator = torch.Generator().manual_seed(5)
    module = llama.build(CONFIG)
    state = {
        n: torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[-1])
        for n, p in module.named_parameters()
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return load_model(ModelRef("model.safetensors", architecture="llama"), folder)


def cases() -> Iterator[Case]:
    """Yield kernels of one device; products of half precision are those of its tensor cores."""
    half: dict[str, Any] = {}
    if torch.cuda.is_available():
        half = {"tensor_core": UNITS.get(torch.cuda.get_device_capability()[0], "ampere_16")}
    yield Case("torch.eager", {"compute": "float32"})
    yield Case("torch.sdpa.efficient", {"compute": "float32"})
    for compute in ("float16", "bfloat16"):
        flash = {"preset": "flash-attention-2", "compute": compute, **half}
        yield Case("torch.eager", {"compute": compute, **half})
        yield Case("torch.sdpa.math", {"compute": compute, **half})
        yield Case("torch.sdpa.efficient", {"compute": compute, **half})
        yield Case("torch.sdpa.flash", flash)
        yield Case("torch.sdpa.cudnn", {"compute": compute, **half})
        yield Case("torch.compile", {"compute": compute, **half})


def inputs(width: int) -> Iterator[Tensor]:
    """Yield hidden states of many lengths and sizes."""
    generator = torch.Generator().manual_seed(11)
    for length in LENGTHS:
        x = torch.randn(length, width, generator=generator)
        yield x
        yield x * torch.exp2(torch.randint(-12, 4, x.shape, generator=generator).float())
    yield from kernels_inputs.odd(width)


def measure(model: Model, case: Case, block: str) -> float:
    """Return the largest drift / bound of all inputs; some bounds must be finite."""
    running = load_kernel(case.ref(), model, "cuda")
    started = load_kernel(kernels.TRAIN.ref(), model, "cuda")
    shop, worst, finite = kernels.workshop(model, case), 0.0, 0
    for x in inputs(128):
        drift = (running.block(block, x) - started.block(block, x)).abs()
        bounds = kernels.bound(shop, block, x, affine=len(x) <= 33)
        worst = max(worst, float(kernels.quotients(drift, bounds).max()))
        finite += math.isfinite(float(bounds.max()))
    assert finite > 10
    return worst


@pytest.mark.parametrize("case", list(cases()), ids=lambda c: c.name)
def test_attention_on_the_device(case: Case, model: Model) -> None:
    assert measure(model, case, "attn_0") <= 1


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_feed_forward_on_the_device(compute: str, model: Model) -> None:
    unit = UNITS.get(torch.cuda.get_device_capability()[0], "ampere_16")
    case = Case("torch.eager", {"compute": compute, "tensor_core": unit})
    assert measure(model, case, "mlp_0") <= 1


@pytest.mark.parametrize("preset", ["fp8-w8a8-per-channel", "fp8-w8a8-per-tensor"])
@pytest.mark.parametrize("block", ["attn_0", "mlp_0"])
def test_float8_products_on_the_device(preset: str, block: str, model: Model) -> None:
    unit = FP8_UNITS.get(torch.cuda.get_device_capability())
    assert unit is not None, "no published accumulator of float8 products for this device"
    case = Case("torch.scaled_mm", {"preset": preset, "tensor_core": unit})
    assert measure(model, case, block) <= 1


def test_results_are_kept_for_the_documentation(model: Model, tmp_path: Path) -> None:
    """What docs/real-kernels.md records of a device: one line for each kernel."""
    lines = [f"{c.name}: {measure(model, c, 'attn_0'):.3g}" for c in cases()]
    (tmp_path / "gpu.txt").write_text("\n".join(lines))
    assert len(lines) == 14
    print("\n".join([torch.cuda.get_device_name(0), *lines]))
