"""GELU by tanh: range, slopes and curvature in both programs, lowered blocks, real kernels."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.presets import resolve
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.drift.linear_bounds import linear_bounds as planes
from kcdsl_backends.drift.ops.activations import (
    GELU_TANH,
)
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.ops.functions import GELU_TANH as THEIRS
from kcdsl_certs.recheck.ops.functions import gelu_tanh_bend, gelu_tanh_second, image, slopes
from tests.support.graphs import run_graph

POINT = torch.zeros(1, 1, dtype=torch.float64)


def exact(x: float, order: int = 0) -> mpmath.mpf:
    """Return x·σ(2√(2/π)(x + 0.044715x³)) or a derivative of it, with forty digits."""
    with mpmath.workdps(40):
        root, cube = mpmath.sqrt(2 / mpmath.pi), mpmath.mpf(0.044715)

        def value(v: mpmath.mpf) -> mpmath.mpf:
            return v / (1 + mpmath.exp(-2 * root * (v + cube * v**3)))

        return mpmath.diff(value, mpmath.mpf(x), order) if order else value(mpmath.mpf(x))


PLACES = [*np.linspace(-9, 9, 181), 0.0, -0.7524614220710163, 1.4185040087908284, -40.0, 50.0, 1e20]


def test_values_slopes_and_curvatures_equal_the_function() -> None:
    for x in map(float, PLACES):
        here = torch.tensor([x], dtype=torch.float64)
        around, theirs = Box.point(here), box.exact(np.array([x]))
        for order, ours, other in (
            (0, GELU_TANH.range(around), image(THEIRS, theirs)),
            (1, GELU_TANH.slopes(around), slopes(THEIRS, theirs)),
        ):
            true = exact(x, order) if abs(x) < 20 else max(x, 0.0) if order == 0 else float(x > 0)
            for found in (ours, other):
                assert float(found.lo[0]) <= true <= float(found.hi[0]), (x, order)
                assert float(found.hi[0] - found.lo[0]) <= 1e-12 * max(1.0, abs(x))
        if abs(x) < 9:
            true = exact(x, 2)
            for value in (GELU_TANH.second(here)[0], gelu_tanh_second(np.array([x]))[0]):
                assert abs(float(value) - true) < 1e-12
        assert math.isfinite(float(GELU_TANH.second(here)[0]))


@pytest.mark.parametrize("width", [0.01, 0.7, 3.0, 40.0])
def test_ranges_on_boxes_enclose_samples(width: float) -> None:
    """Range, slopes and curvature of boxes around every critical point, by dense samples."""
    middles = torch.linspace(-6, 6, 97, dtype=torch.float64)
    around = Box(middles - width / 2, middles + width / 2)
    theirs = box.Box(around.lo.numpy(), around.hi.numpy())
    share = torch.linspace(0, 1, 401, dtype=torch.float64)[:, None]
    inside = around.lo + (around.hi - around.lo) * share
    bends = Box(*GELU_TANH.curvature(around)), gelu_tanh_bend(theirs)
    for function, found in (
        (GELU_TANH.value, (GELU_TANH.range(around), image(THEIRS, theirs))),
        (GELU_TANH.derivative, (GELU_TANH.slopes(around), slopes(THEIRS, theirs))),
        (GELU_TANH.second, bends),
    ):
        values = function(inside)
        for ends in found:
            low, high = torch.as_tensor(ends.lo), torch.as_tensor(ends.hi)
            assert bool((low <= values + 1e-13).all() & (values <= high + 1e-13).all())
            slack = 1e-3 * max(1.0, width)
            assert bool((high <= values.amax(0) + slack).all())
            assert bool((low >= values.amin(0) - slack).all())


def test_bounds_of_second_and_third_derivatives() -> None:
    x = np.linspace(-12, 12, 400_001)
    second = gelu_tanh_second(x)
    assert np.abs(second).max() < 0.7979
    third = np.diff(second) / np.diff(x)
    assert np.abs(third).max() < 0.7788


def graph(rows: int = 5, width: int = 12) -> tuple[BlockGraph, dict[str, Tensor]]:
    """Return linear, GELU by tanh, linear."""
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(24, width, generator=generator)
    second = torch.randn(width, 24, generator=generator) / 5
    nodes = (
        Node("w", "param", (), (24, width), {"key": "w"}),
        Node("v", "param", (), (width, 24), {"key": "v"}),
        Node("x", "input", (), (rows, width)),
        Node("h", "linear", ("x", "w"), (rows, 24)),
        Node("g", "gelu", ("h",), (rows, 24), {"approximate": "tanh"}),
        Node("y", "linear", ("g", "v"), (rows, width)),
    )
    return BlockGraph("mlp_0", nodes, "y", {}, (rows, width)), {"w": first, "v": second}


def test_graph_evaluates_the_named_form_of_gelu() -> None:
    block, tensors = graph()
    x = torch.randn(5, 12, dtype=torch.float64)
    found = run_graph(block, {k: v.double().numpy() for k, v in tensors.items()}, x.numpy())
    inside = F.gelu(x @ tensors["w"].double().T, approximate="tanh").numpy()
    np.testing.assert_allclose(found["y"], inside @ tensors["v"].double().T.numpy(), atol=1e-12)
    simulator = Simulator(
        block,
        resolve({"preset": "torch-eager", "compute": "float64"}),
        StoredParameters(tensors, {}, resolve({"preset": "torch-eager"}), torch.device("cpu")),
    )
    np.testing.assert_allclose(simulator.run(x, {}).numpy(), found["y"], atol=1e-12)


@pytest.mark.sample(11)
@pytest.mark.parametrize("size", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_real_kernels_are_within_every_domain(compute: str, casts: str, size: float) -> None:
    block, tensors = graph()
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(6)) * size
    specs = (
        resolve({"preset": "torch-eager", "compute": "float64"}),
        resolve({"preset": "torch-eager", "compute": compute, "casts": casts}),
    )
    problem = BlockProblem(
        block, *(StoredParameters(tensors, {}, s, torch.device("cpu")) for s in specs)
    )
    form = getattr(torch, compute)
    w, v = tensors["w"].to(form), tensors["v"].to(form)
    out = F.linear(F.gelu(F.linear(x.to(form), w), approximate="tanh"), v).double()
    exactly = F.gelu(x.double() @ tensors["w"].double().T, approximate="tanh")
    drift = out - exactly @ tensors["v"].double().T
    for found in (
        problem.bound(x.double(), POINT).output.drift,
        problem.forms(x.double(), POINT).box(),
        planes(block, problem.kernels(), x.double(), POINT).box,
    ):
        assert bool((found.lo <= drift).all() & (drift <= found.hi).all())


def test_constant_is_rounded_to_float64() -> None:
    """0.044715 is rounded to float64 here, and to the kernel's arithmetic there."""
    assert abs(Fraction(0.044715) - Fraction(44715, 10**6)) < Fraction(1, 2**57)
