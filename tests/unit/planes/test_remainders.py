"""Remainders of whole operations: sound, and tight up to a factor.

A share of each bound is attained, so that a bound that is too small is detected.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.drift.linear.tape import Functional
from kcdsl_backends.drift.linear_bounds import linear_walk
from kcdsl_backends.drift.ops.activations import GELU, GELU_TANH, SILU, TANH, Smooth, _curvature
from kcdsl_backends.drift.ops.norms import _at, _away
from kcdsl_backends.drift.ops.softmax import _from_box, _from_point

TRUST = torch.full((1, 1), 2.0**-50, dtype=torch.float64)


def rows(rng: np.random.Generator, n: int, size: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return probabilities, and two changes of scores with mean zero: [200, n]."""
    q = torch.softmax(torch.from_numpy(rng.standard_normal((200, n)) * 2), -1)
    w = torch.from_numpy(rng.choice([-1.0, 0.0, 1.0], (200, n))) * size
    d = torch.from_numpy(rng.choice([-1.0, 1.0], (200, n)))
    return q, w - (q * w).sum(-1, keepdim=True), d - (q * d).sum(-1, keepdim=True)


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_softmax_remainder_between_two_points(n: int, size: float) -> None:
    q, w, d = rows(np.random.default_rng(n), n, size)
    found = _from_box(q, d.abs(), w.abs(), TRUST)
    p = q * torch.exp(w)
    p = p / p.sum(-1, keepdim=True)
    true = p * (d - (p * d).sum(-1, keepdim=True)) - q * d
    assert bool((true.abs() <= found + 1e-15).all())
    assert float((true.abs() / (found + 1e-9)).max()) > 0.9


@pytest.mark.parametrize("size", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_softmax_remainder_at_a_point(n: int, size: float) -> None:
    p, t, _ = rows(np.random.default_rng(n), n, size)
    centre, radius = _from_point(p, Box.around(t.abs()), TRUST)
    grown = torch.exp(t)
    true = p * (grown / (p * grown).sum(-1, keepdim=True) - 1 - t)
    assert bool(((true - centre).abs() <= radius + 1e-15).all())
    assert float(((true - centre).abs() / (radius + 1e-12)).max()) > 0.4


@pytest.mark.parametrize("radius", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("function", [GELU, GELU_TANH, SILU, TANH])
def test_second_derivatives_are_within_their_bounds(function: Smooth, radius: float) -> None:
    middle = torch.linspace(-6, 6, 2001, dtype=torch.float64)
    most, wide = _curvature(function, middle, torch.full_like(middle, radius))
    steps = torch.linspace(-radius, radius, 41, dtype=torch.float64)
    values = function.second(middle[:, None] + steps)
    assert bool((values.abs().amax(-1) <= most).all())
    assert bool((values.amax(-1) - values.amin(-1) <= wide).all())
    x = middle.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(function.derivative(x).sum(), x)
    assert torch.allclose(slope, function.second(middle), atol=1e-10)
    assert float((values.abs().amax(-1) / most).max()) > 0.99


@pytest.mark.parametrize("part", ["root", "direction", "both"])
@pytest.mark.parametrize("centred", [False, True])
def test_norm_slope_between_two_points(part: str, centred: bool) -> None:
    rng, reached = np.random.default_rng(1), 0.0
    m = torch.from_numpy(rng.standard_normal((500, 3)))
    r_m, y_m = _at(m, 1e-2, centred=centred)
    x = m * 1.2 if part == "root" else m + 0.2 * torch.from_numpy(rng.standard_normal((500, 3)))
    r, y = _at(x, 1e-2, centred=centred)
    if part == "direction":
        r = r_m
    for _ in range(50):
        delta = torch.from_numpy(rng.choice([-1.0, 1.0], (500, 3)))
        along = (y_m * delta).mean(-1, keepdim=True)
        at_m = r_m * (delta - y_m * along)
        true = r * (delta - y * (y * delta).mean(-1, keepdim=True)) - at_m
        found = _away(y_m, (r - r_m).abs(), (y - y_m).abs(), r, y.abs(), delta.abs(), along.abs())
        assert bool((true.abs() <= found + 1e-14).all())
        reached = max(reached, float((true.abs() / (found + 1e-9)).max()))
    assert reached > 0.9


EXACT = {"preset": "torch-eager", "compute": "float64", "accumulate": "float64"}
AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda y: torch.nn.functional.layer_norm(y, y.shape[-1:], eps=1e-2),
    "rms_norm": lambda y: y / (y.square().mean(-1, keepdim=True) + 1e-2).sqrt(),
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu by tanh": lambda y: torch.nn.functional.gelu(y, approximate="tanh"),
    "softmax": lambda y: torch.softmax(y, -1),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("op", AFTER)
def test_remainders_hold_on_wide_boxes_and_large_drifts(op: str, seed: int) -> None:
    """Two different linears, then one operation: random inputs of a wide box, any functional."""
    rng, n = np.random.default_rng(seed), 3
    weights = [torch.from_numpy(rng.standard_normal((n, n)).astype(np.float32))]
    weights.append(
        weights[0] + torch.from_numpy(rng.standard_normal((n, n)).astype(np.float32)) / 5
    )
    attrs: dict[str, object] = {"eps": 1e-2} if op.endswith("norm") else {}
    if op == "gelu by tanh":
        attrs = {"approximate": "tanh"}
    nodes = (
        Node("x", "input", (), (1, n)),
        Node("w", "param", (), (n, n), {"key": "w"}),
        Node("y", "linear", ("x", "w"), (1, n)),
        Node("z", op.partition(" ")[0], ("y",), (1, n), attrs),
    )
    graph = BlockGraph("block", nodes, "z", {}, (1, n))
    cpu, exact = torch.device("cpu"), resolve(EXACT)
    sides = [StoredParameters({"w": w}, {}, exact, cpu) for w in weights]
    centre = torch.from_numpy(rng.standard_normal((1, n)) * 2)
    spread = torch.full((1, 1), 0.1, dtype=torch.float64)
    run = linear_walk(graph, BlockProblem(graph, *sides).kernels(), centre, spread)
    x = centre + spread * torch.from_numpy(rng.uniform(-1, 1, (4000, n)))
    signs = torch.tensor(list(product([-1.0, 1.0], repeat=n)), dtype=torch.float64)
    x = torch.cat([x, centre + spread * signs])
    train, infer = (AFTER[op](x @ w.double().T) for w in weights)
    index = run.index["z"]
    e, moved = train - run.tape.entries[index].reference, infer - train
    values = torch.cat([torch.eye(n), torch.from_numpy(rng.standard_normal((8, n))).float()])
    part = Adjoint.full(values.double()[:, None])
    for functional, true in ((Functional(part, None), e), (Functional(None, part), moved)):
        low, high = run.tape.bound(index, functional)
        seen = true @ values.double().T
        assert bool((seen <= high + 1e-12).all())
        assert bool((seen >= low - 1e-12).all())
