"""Stored parameters of two kernels share one copy where they are equal."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from kcdsl.model.graph import Node
from kcdsl.model.numerics.preset_table import PRESETS
from kcdsl.model.presets import resolve
from kcdsl_backends.drift.boxes.state import Kernels, StoredParameters

WEIGHT = Node("w", "param", (), (128, 256), {"key": "w.weight"})
SPECS: list[dict[str, Any]] = [
    *({"preset": name} for name in PRESETS if "static" not in str(PRESETS[name])),
    {"compute": "float64", "accumulate": "float64"},
    {"compute": "bfloat16", "casts": "any"},
    {"compute": "float16"},
    {"weights": {"format": "bfloat16"}},
    {"weights": {"format": "bfloat16", "rounding": "toward_zero"}},
    {"weights": {"format": "int8", "scale": "per_tensor"}},
    {"weights": {"format": "fp8_e4m3", "scale": "block_128"}},
    {"weights": {"format": "fp8_e5m2", "scale": "mx"}, "compute": "bfloat16"},
]

FULL = {"compute": "float32"}


def stored(tensors: dict[str, torch.Tensor], spec: dict[str, Any]) -> StoredParameters:
    return StoredParameters(
        tensors, {}, resolve({"preset": "torch-eager", **spec}), torch.device("cpu")
    )


@pytest.mark.full
def test_kernel_with_other_storage_has_its_own_copy() -> None:
    tensors = {"w.weight": torch.randn(128, 256, generator=torch.Generator().manual_seed(5))}
    shared = 0
    for one, two in product(SPECS, SPECS):
        first, alone = stored(tensors, one), stored(tensors, two)
        held = first.plain(WEIGHT), first.linear(WEIGHT)
        other = first.under(alone.numerics)
        assert torch.equal(other.plain(WEIGHT), alone.plain(WEIGHT)), (one, two)
        assert torch.equal(other.linear(WEIGHT), alone.linear(WEIGHT)), (one, two)
        assert first.plain(WEIGHT) is held[0]
        assert first.linear(WEIGHT) is held[1]
        shared += other.linear(WEIGHT) is held[1]
    assert len(SPECS) < shared < len(SPECS) ** 2


@pytest.mark.parametrize("apart", [0.0, 2.0**-24])
def test_equal_weights_are_shared(apart: float) -> None:
    tensors = {"w.weight": torch.full((128, 256), 0.5)}, {"w.weight": torch.full((128, 256), 0.5)}
    tensors[1]["w.weight"][-1, -1] += apart
    between = (tensors[1]["w.weight"] - tensors[0]["w.weight"]).double()
    kernels = Kernels.of(*(stored(each, FULL) for each in tensors))
    for held in (kernels.linear(WEIGHT), kernels.plain(WEIGHT)):
        found = held.difference
        assert bool(((found.lo <= between) & (between <= found.hi)).all())
        assert held.alike == (apart == 0.0)
        assert held.alike == (not found.mag().any())


def test_zeros_of_either_sign_are_equal() -> None:
    zero = torch.zeros(2, 2)
    for other, alike in ((-zero, True), (torch.full_like(zero, torch.nan), False)):
        kernels = Kernels.of(*(stored({"w.weight": each}, FULL) for each in (zero, other)))
        assert kernels.plain(WEIGHT).alike is alike
        assert kernels.linear(WEIGHT).alike is alike


def test_kernel_is_compared_with_its_base_kernel() -> None:
    train = stored({"w.weight": torch.full((2, 2), 1 + 2.0**-20)}, FULL)
    infer = train.under(stored(dict(train.tensors), {"compute": "bfloat16"}).numerics)
    for _ in range(2):
        assert not Kernels.of(train, infer).linear(WEIGHT).alike
        assert Kernels.of(train, train.under(train.numerics)).linear(WEIGHT).alike
