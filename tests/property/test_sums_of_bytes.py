"""Pairwise 16-bit sums of byte products, as in `vpmaddubsw`, compared with their bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.diagnostics import Refusal
from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.numerics.weights import linear_weight
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.drift.boxes.sums import pair_loss, saturation_error
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.sums import clipped
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from tests.support import proofs

Codes = NDArray[np.int64]
PAIRS = {"preset": "onnxruntime-int8-pairs"}
KINDS = ("plain", "one sign", "large together", "large apart", "odd")


def saturating(activations: Codes, weights: Codes, order: Codes) -> Codes:
    """Return activations @ weights.T, with products added in pairs in 16 bits, in an order."""
    products = activations[:, None, order] * weights[None][:, :, order]
    if products.shape[-1] % 2:
        products = np.concatenate([products, np.zeros_like(products[..., :1])], -1)
    pairs = products[..., 0::2] + products[..., 1::2]
    return np.asarray(np.clip(pairs, -(2**15), 2**15 - 1).sum(-1))


def weight_of(kind: str, seed: int) -> Tensor:
    """Return a matrix whose codes saturate in one of several ways."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 17 if kind == "odd" else 16, generator=generator)
    match kind:
        case "one sign":
            return w.abs() + 0.5
        case "large together":
            w[:, :4] = 4 * torch.sign(w[:, :1])
        case "large apart":
            w[:, ::4] = 4.0
    return w


def quantised(x: Tensor) -> tuple[Codes, float, int]:
    """Return codes, scale and zero point by DynamicQuantizeLinear."""
    low, high = np.float32(min(float(x.min()), 0)), np.float32(max(float(x.max()), 0))
    step = np.float32((high - low) / np.float32(255))
    zero = int(np.clip(np.rint(-low / step), 0, 255))
    ratio = np.rint(x.numpy().astype(np.float32) / step)
    return np.clip(ratio + zero, 0, 255).astype(np.int64), float(step), zero


def run(weight: Tensor, x: Tensor, scale: str, order: Codes) -> NDArray[np.float64]:
    """Return x @ weight.T by a kernel with such sums, with its scales."""
    activations, step, zero = quantised(x)
    amax = weight.abs().amax(1, keepdim=True) if scale == "per_channel" else weight.abs().amax()
    own = (amax / 127).float()
    codes = torch.round(weight / own).clamp(-127, 127).numpy().astype(np.int64)
    sums = saturating(activations, codes, order) - zero * codes.sum(-1)
    both = (own.double() * step).broadcast_to(weight.shape[0], 1)[:, 0].numpy()
    return np.asarray(sums * both)


def problem(weight: Tensor, shape: tuple[int, int], numerics: dict[str, Any]) -> BlockProblem:
    """Return one linear, against float64."""
    nodes = (
        Node("w", "param", (), tuple(weight.shape), {"key": "w.weight"}),
        Node("x", "input", (), shape),
        Node("y", "linear", ("x", "w"), (shape[0], weight.shape[0])),
    )
    graph = BlockGraph("mlp_0", nodes, "y", {}, shape)
    specs = resolve({"preset": "torch-eager", "compute": "float64"}), resolve(numerics)
    place = torch.device("cpu")
    return BlockProblem(
        graph, *(StoredParameters({"w.weight": weight}, {}, s, place) for s in specs)
    )


@pytest.mark.sample(6)
@pytest.mark.parametrize("casts", ["nearest", "any"])
@pytest.mark.parametrize("scale", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("kind", KINDS)
def test_saturating_runs_are_within_both_boxes(kind: str, scale: str, casts: str) -> None:
    """For any pairing: in order, at random, and largest with largest."""
    weight = weight_of(kind, 1)
    numerics = {**PAIRS, "casts": casts, "weights": {"format": "int8", "scale": scale}}
    left = False
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, weight.shape[1], generator=generator)
        x = torch.where(weight[seed % 6] > 0, 3.0, -1.0) + 0.1 * x
        point = torch.zeros(1, 1, dtype=torch.float64)
        exact = x.double().numpy() @ weight.double().T.numpy()
        orders = (
            np.arange(weight.shape[1]),
            np.random.default_rng(seed).permutation(weight.shape[1]),
            np.argsort(-weight[seed % 6].numpy()),
        )
        own = problem(weight, (5, weight.shape[1]), numerics)
        wide = problem(weight, (5, weight.shape[1]), {**numerics, "byte_sums": "wide"})
        found = [torch.from_numpy(run(weight, x, scale, order) - exact) for order in orders]
        for bounded in (
            own.bound(x.double(), point).output.drift,
            own.forms(x.double(), point).box(),
        ):
            for drift in found:
                assert bool((bounded.lo <= drift).all() & (drift <= bounded.hi).all())
        box_of_exact = wide.bound(x.double(), point).output.drift
        left = left or any(bool((d.abs() > box_of_exact.mag()).any()) for d in found)
    assert left, "no run of this kind leaves the bound of exact sums"


@given(st.lists(st.integers(-127, 127), min_size=1, max_size=9), st.integers(0, 99))
def test_every_pairing_is_within_the_rule(row: list[int], seed: int) -> None:
    """Extreme codes in random pairs: the loss in units of both scales."""
    codes = np.array([[*row, 127]], dtype=np.int64)
    generator = np.random.default_rng(seed)
    activations = generator.choice([0, 1, 128, 254, 255], (40, codes.shape[1]))
    order = generator.permutation(codes.shape[1])
    lost = np.abs(saturating(activations, codes, order) - activations @ codes.T).max()
    granted = float(pair_loss(torch.from_numpy(codes / 127.0), resolve(PAIRS))[0]) * 127
    assert lost <= granted
    best = np.where(codes > 0, 255, 0), np.where(codes < 0, 255, 0)
    falling = np.argsort(-codes[0]), np.argsort(codes[0])
    worst = max(
        float(np.abs(saturating(a, codes, o) - a @ codes.T).max())
        for a, o in zip(best, falling, strict=True)
    )
    assert granted <= worst * (1 + 2.0**-10) + 1, "the loss is attained"


@pytest.mark.parametrize("scale", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("format", ["int8", "int8_full"])
def test_both_programs_agree_on_saturation(format: str, scale: str) -> None:
    numerics = resolve({**PAIRS, "weights": {"format": format, "scale": scale}})
    kernel = parse_kernel(numerics.to_json(), "kernel")
    for kind in KINDS:
        weight = linear_weight(weight_of(kind, 2), numerics).double()
        lo = torch.randn(3, weight.shape[1], dtype=torch.float64).float().double()
        x = Box(lo, lo + 0.25)
        ours = saturation_error(x, weight, Rounding(numerics), "n", "w.weight")
        own = box.Box(x.lo.numpy(), x.hi.numpy())
        theirs = clipped(kernel, own, box.exact(weight.numpy()), "w.weight")
        assert isinstance(ours, Tensor)
        assert float(ours.max()) > 0
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-300)


def test_saturating_sums_require_bytes_and_constant_weights() -> None:
    for wrong in (
        {"weights": {"format": "int8", "scale": "group_128"}},
        {"weights": {"format": "fp8_e4m3", "scale": "per_tensor"}},
        {"activations": {"format": "int8", "scale": "per_tensor"}},
    ):
        with pytest.raises(Refusal, match="byte_sums is 'int16_pairs'"):
            resolve({**PAIRS, **wrong})
        record = proofs.numerics("float32", weights=("int8", "per_tensor"))
        record |= resolve({"preset": "onnxruntime-int8", **wrong}).to_json()
        record["byte_sums"] = "int16_pairs"
        with pytest.raises(Exception, match="sums of bytes"):
            parse_kernel(record, "kernel")
    x = Box.point(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(NoBound, match="weights that are not known"):
        saturation_error(x, Box(x.lo, x.lo + 1), Rounding(resolve(PAIRS)), "n", "w.weight")
