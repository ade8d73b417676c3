"""ONNX Runtime's SiLU violates a relative error bound and satisfies the claimed absolute one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.empirical.sources.kernels.onnx_runtime import Sessions
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel

GRAPH = BlockGraph(
    "mlp_0",
    (Node("x", "input", (), (1, 64)), Node("y", "silu", ("x",), (1, 64))),
    "y",
    {},
    (1, 64),
)
TRAIN = {"preset": "torch-eager", "casts": "nearest"}


def bounds(x: Tensor, **more: str) -> list[Tensor]:
    """Return the bounds of both domains of ONNX Runtime's drift of silu(x)."""
    cpu = torch.device("cpu")
    train = resolve(TRAIN)
    infer = resolve({"preset": "onnxruntime-float32", **more})
    problem = BlockProblem(
        GRAPH, StoredParameters({}, {}, train, cpu), StoredParameters({}, {}, infer, cpu)
    )
    zero = torch.zeros(1, 1, dtype=torch.float64)
    interval = problem.bound(x.double(), zero).output.drift.mag()
    return [interval, problem.forms(x.double(), zero).box().mag()]


@pytest.mark.full
def test_silu_error_at_large_negative_inputs_is_absolute() -> None:
    """At -17.6 the error of ONNX Runtime's silu is nearly six times its value."""
    silu = Sessions("onnxruntime.float32", resolve({"preset": "onnxruntime-float32"}), (), None)
    x = torch.cat([torch.linspace(-19, -15, 32), torch.linspace(-90, 90, 32)])[None]
    drift = (silu("silu", torch.nn.SiLU())(x) - torch.nn.functional.silu(x)).double().abs()
    for bound in bounds(x):
        assert bool((drift <= bound).all())
    for bound in bounds(x, sigmoid="relative"):
        assert float((drift / bound).max()) > 10


def test_relative_error_claim_is_refused(repository: Path) -> None:
    model = load_model(
        ModelRef("model.safetensors", architecture="llama"), repository / "examples" / "tiny_lm"
    )
    ref = KernelRef("onnxruntime.float32", (("sigmoid", "relative"),))

    def matches(refusal: Refusal) -> bool:
        (found,) = refusal.diagnostics
        return found.code is codes.KERNEL_NUMERICS and "sigmoid" in found.message

    with pytest.RaisesExc(Refusal, check=matches):
        load_kernel(ref, model, "cpu")


@pytest.mark.parametrize("preset", ["onnxruntime-float32", "onnxruntime-int8"])
def test_numerics_record_states_the_absolute_error(preset: str) -> None:
    record: dict[str, Any] = resolve({"preset": preset}).to_json()
    assert record["sigmoid"] == "absolute"
    assert "sigmoid" not in resolve(TRAIN).to_json()
    assert resolve(record).sigmoid == "absolute"
