"""`torch._scaled_mm` with static scales calibrated on prompts.

Other prompts stay inside the boxes of both domains; beyond the scales there is no bound.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import KERNEL_NUMERICS
from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm"
EAGER = KernelRef("torch.eager", (("preset", "torch-eager"),))
PROMPTS = [[5, 3, 250, 7, 11], [1, 2, 3], [99, 98, 97, 96, 95, 94, 93, 92]]
POINT = torch.zeros(1, 1, dtype=torch.float64)


@cache
def tiny() -> Model:
    return load_model(ModelRef("model.safetensors", architecture="llama"), EXAMPLE)


@cache
def calibrated() -> dict[str, float]:
    """Return amax/448 of the input of every linear, by its checkpoint key."""
    model = tiny()
    found: dict[str, float] = {}
    handles = []
    for name, part in model.module.named_modules():
        if isinstance(part, nn.Linear):

            def seen(_: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
                found[name] = max(found.get(name, 0.0), float(given[0].abs().amax()))

            handles.append(part.register_forward_pre_hook(seen))
    with torch.no_grad():
        for prompt in PROMPTS:
            model.module(torch.tensor(prompt).unsqueeze(0))
    for handle in handles:
        handle.remove()
    found["model.embed_tokens"] = found["lm_head"]  # one weight, under both of its names
    return {name: amax / 448 for name, amax in found.items()}


def static(
    compute: str, weights: str, wider: float = 32.0, scales: dict[str, Any] | None = None
) -> KernelRef:
    given: dict[str, Any] = {name: value * wider for name, value in calibrated().items()}
    given |= {"*": 1.0} | (scales or {})
    return KernelRef(
        "torch.scaled_mm",
        (
            ("activations", {"format": "fp8_e4m3", "scale": "static", "input_scale": given}),
            ("compute", compute),
            ("weights", {"format": "fp8_e4m3", "scale": weights}),
        ),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("weights", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_kernel_stays_inside_both_boxes(compute: str, weights: str) -> None:
    model, ref = tiny(), static(compute, weights)
    running, plain = load_kernel(ref, model, "cpu"), load_kernel(EAGER, model, "cpu")
    factory = ProblemFactory(model, resolve(EAGER), resolve(ref), torch.device("cpu"))
    for block in ("attn_0", "mlp_0"):
        for prompt in ([7, 11, 5, 3], [250, 1, 99]):
            x = model.block_inputs(prompt, block)
            assert x is not None
            drift = (running.block(block, x).float() - plain.block(block, x)).double()
            assert float(drift.abs().amax()) > 1e-4
            problem = factory.problem(block, tuple(prompt))
            box = problem.bound(x.double(), POINT).output.drift
            assert bool((box.lo <= drift).all() & (drift <= box.hi).all())
            try:
                box = problem.forms(x.double(), POINT).box()
            except NoBound:
                continue
            assert bool((box.lo <= drift).all() & (drift <= box.hi).all())


def test_exceeded_static_scale_has_no_bound() -> None:
    model, ref = tiny(), static("float32", "per_tensor", wider=0.01)
    factory = ProblemFactory(model, resolve(EAGER), resolve(ref), torch.device("cpu"))
    x = model.block_inputs([7, 11, 5, 3], "mlp_0")
    assert x is not None
    with pytest.raises(NoBound, match=r"overflow reachable: element \[\d, \d+\]"):
        factory.problem("mlp_0", (7, 11, 5, 3)).bound(x.double(), POINT)


def test_unsupported_products_are_refused() -> None:
    name = "model.layers.0.mlp.down_proj"
    by_channel = static("float32", "per_tensor", scales={name: [0.5] * 3})
    missing = KernelRef(
        "torch.scaled_mm",
        (
            (
                "activations",
                {"format": "fp8_e4m3", "scale": "static", "input_scale": {name: 0.5}},
            ),
            ("weights", {"format": "fp8_e4m3", "scale": "per_tensor"}),
        ),
    )
    bytes_ = KernelRef(
        "torch.scaled_mm",
        (("activations", {"format": "int8", "scale": "static", "input_scale": 0.5}),),
    )
    for ref, words in (
        (by_channel, "one static scale of the input of model.layers.0.mlp.down_proj"),
        (missing, "one static scale of the input of"),
        (bytes_, "fp8_e4m3 static, not int8 static"),
    ):
        with pytest.raises(Refusal) as refusal:
            load_kernel(ref, tiny(), "cpu")
        (found,) = refusal.value.diagnostics
        assert found.code is KERNEL_NUMERICS
        assert words in found.message
