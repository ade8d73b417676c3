"""The block swap locates a fault planted in one block, with its first operation."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.verdict.studies.attribution import Layers
from kcdsl_backends.empirical.attribution.blocks import NoSwap, swap_layers
from kcdsl_backends.empirical.attribution.measurement import AttributedMetric
from kcdsl_backends.empirical.sources.kernels import Kernel, MeasurementPlan
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.requests import Request
from tests.support.attributions import (
    EAGER,
    fixed_requests,
    pair_of,
    ref,
    small_model,
    subject_of,
    with_module,
)

REQUESTS = fixed_requests(3)
BLOCKS = ("norm_0", "attn_0", "norm_1", "mlp_0", "norm_2", "attn_1", "norm_3", "mlp_1", "norm_4")


def swapped(
    infer: KernelRef,
    planted: Callable[[KernelRef, TorchKernel], Kernel] = lambda r, k: k,
    model: Model | None = None,
    train: KernelRef = EAGER,
) -> Layers:
    pair = pair_of(model or small_model(), train, infer, planted)
    subject = subject_of(pair, REQUESTS)
    return swap_layers(subject)


def coarse(part: str) -> Callable[[KernelRef, TorchKernel], Kernel]:
    """Store the linears of one part of the inference kernel with 3 bits."""

    def change(module: nn.Module) -> None:
        for linear in module.get_submodule(part).modules():
            if isinstance(linear, nn.Linear):
                scale = linear.weight.abs().max() / 4
                weight = torch.round(linear.weight / scale) * scale
                linear.weight = nn.Parameter(weight, requires_grad=False)

    return lambda wanted, kernel: kernel if wanted == EAGER else with_module(kernel, change)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("part", "block", "operation"),
    [
        ("model.layers.1.mlp", "mlp_1", "gate_proj"),
        ("model.layers.0.self_attn.o_proj", "attn_0", "o_proj"),
        ("model.layers.1.mlp.down_proj", "mlp_1", "down_proj"),
    ],
)
def test_only_coarse_block_is_found(part: str, block: str, operation: str) -> None:
    found = swapped(ref("torch.eager", casts="nearest"), coarse(part))
    assert [row.block for row in found.rows] == [*BLOCKS, "head"]
    assert found.first_block == block
    first = found.first_mismatch
    assert first is not None
    assert (first.block, first.operation, first.layer) == (block, operation, int(block[-1]))
    assert first.train != first.infer
    for row in found.rows:
        assert (row.drift > 0) == (row.block == block)
        assert (row.gain == 0) == (row.block != block)
    only = next(row for row in found.rows if row.block == block)
    assert only.logits == only.gain == pytest.approx(found.total, rel=1e-9)
    assert found.outside == pytest.approx(0.0, abs=1e-12 * found.total)


def test_mismatch_inside_attention_is_located_between_its_linears() -> None:
    found = swapped(ref("torch.sdpa.math"), lambda r, k: k)
    assert found.first_mismatch is not None
    assert found.first_mismatch.block == "attn_0"
    assert found.first_mismatch.operation == "between rotary and o_proj"


def test_first_differing_element_is_reported() -> None:
    def planted(wanted: KernelRef, kernel: TorchKernel) -> Kernel:
        if wanted == EAGER:
            return kernel

        def shift(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            changed = output.clone()
            if output.dim() == 2 and output.shape[0] > 2:
                changed[2, 5] += 0.25
            return changed

        changed = with_module(kernel, lambda module: None)
        changed.module.get_submodule("model.layers.0.mlp").register_forward_hook(shift)
        return changed

    found = swapped(ref("torch.eager", casts="nearest"), planted)
    first = found.first_mismatch
    assert first is not None
    assert (first.block, first.request, first.token, first.index) == ("mlp_0", "f:0", 2, 5)
    assert first.infer - first.train == pytest.approx(0.25, abs=1e-6)


def test_gains_sum_to_the_drift_of_the_blocks() -> None:
    found = swapped(ref("torch.sdpa.math", "bfloat16"))
    assert math.fsum(r.gain for r in found.rows) == pytest.approx(found.rows[-1].cumulative)
    assert found.total == pytest.approx(found.rows[-1].cumulative + found.outside)
    assert found.total > 0
    assert all(row.drift > row.floor for row in found.rows)


def test_equal_kernels_have_no_first_block() -> None:
    found = swapped(EAGER)
    assert found.first_block is None
    assert found.first_mismatch is None
    assert found.total == 0.0
    assert all(row.drift == row.gain == row.differing == 0 for row in found.rows)


@pytest.mark.full
def test_drift_below_the_noise_floor_names_no_first_block() -> None:
    """The training kernel drifts more by batching than the inference kernel does alone."""

    def planted(wanted: KernelRef, kernel: TorchKernel) -> Kernel:
        size = 1e-2 if wanted == EAGER else 1e-4

        def noise(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
            if (output.dim() == 3) == (wanted == EAGER):
                return output + size * torch.sin(100 * output)
            return None

        changed = with_module(kernel, lambda module: None)
        changed.module.get_submodule("model.layers.0.mlp").register_forward_hook(noise)
        return changed

    found = swapped(ref("torch.eager", casts="nearest"), planted)
    row = next(r for r in found.rows if r.block == "mlp_0")
    assert 0 < row.drift < row.floor
    assert found.first_block is None
    assert found.first_mismatch is not None
    assert found.first_mismatch.block == "mlp_0"


NETWORK = """
import torch
from torch import nn
from torch.nn import functional as F


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        q = self.linear(x)[None, None]
        return x + F.scaled_dot_product_attention(q, q, q, is_causal=True)[0, 0]


class Network(nn.Module):
    limits = (16, 64)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first, self.second = Mixer(), Mixer()
        self.last = nn.Linear(8, 16)

    def forward(self, ids):
        return self.last(self.second(self.first(self.embedding(ids))))

    def blocks(self):
        return {"first": self.first, "second": self.second}


def build(config):
    return Network()
"""


@pytest.fixture
def own_model(tmp_path: Path) -> Model:
    from safetensors.torch import save_file

    (tmp_path / "swap_network.py").write_text(NETWORK)
    namespace: dict[str, Any] = {}
    exec(NETWORK, namespace)
    torch.manual_seed(4)
    state = {name: t.detach().clone() for name, t in namespace["build"]({}).named_parameters()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    where = ModelRef("model.safetensors", module="swap_network:build", config="config.json")
    return load_model(where, tmp_path)


@pytest.mark.full
def test_blocks_of_a_user_module_are_swapped(own_model: Model) -> None:
    """Its attention is exchanged by interception; both kernels use their own."""
    requests = (Request("f:0", "0", (1, 2, 3, 4, 5), {}, 1),)
    pair = pair_of(own_model, EAGER, ref("torch.sdpa.math", "bfloat16"))
    plan = MeasurementPlan(frozenset({"kl"}), 1.0, 0, encoder=False)
    found = swap_layers(AttributedMetric(pair, requests, plan, "kl", "lower", None))
    assert [row.block for row in found.rows] == ["first", "second"]
    assert all(row.drift > 0 for row in found.rows)
    assert found.outside != 0.0  # the embedding and the last linear are bfloat16 too
    assert found.first_mismatch is not None
    assert found.first_mismatch.operation == "before linear"  # its input is rounded


def test_encoder_is_swapped_by_its_states(tmp_path: Path) -> None:
    import json

    from safetensors.torch import save_file

    from kcdsl.model.architectures.bert import build

    config = {
        "model_type": "bert", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32,
        "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    }  # fmt: skip
    torch.manual_seed(2)
    state = {n: t.detach().clone() for n, t in build(config).named_parameters()}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(
        ModelRef("model.safetensors", architecture="bert", config="config.json"), tmp_path
    )
    requests = (Request("f:0", "0", (1, 2, 3, 4, 5), {}, 1),)
    pair = pair_of(model, EAGER, ref("torch.eager", "bfloat16"))
    plan = MeasurementPlan(frozenset({"hidden_l2"}), 1.0, 0, encoder=True)
    found = swap_layers(AttributedMetric(pair, requests, plan, "hidden_l2", "lower", None))
    names = [row.block for row in found.rows]
    assert {"attn_0", "mlp_0", "attn_1", "mlp_1"} <= set(names)
    assert all(row.drift > 0 for row in found.rows)
    assert found.total > 0
    assert abs(found.outside) < 0.6 * found.total


def test_metric_of_states_and_logits_has_no_blocks() -> None:
    """A user metric that needs both has no blocks; this is reported without an error."""
    model = small_model()
    pair = pair_of(model, EAGER, ref("torch.eager", "bfloat16"))
    plan = MeasurementPlan(frozenset({"kl", "hidden_l2"}), 1.0, 0, encoder=False)
    subject = AttributedMetric(pair, REQUESTS, plan, "kl", "lower", None)
    with pytest.raises(NoSwap, match="states and logits"):
        swap_layers(subject)


def test_compiled_kernel_has_no_blocks() -> None:
    with pytest.raises(NoSwap, match="one program"):
        swapped(EAGER, train=ref("onnxruntime.float32"))
