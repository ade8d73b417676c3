"""Tensor cores in coarse formats may flush subnormal numbers: bounds cover this."""

from __future__ import annotations

import pytest
import torch

from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.presets import resolve
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes.state import StoredParameters


@pytest.mark.parametrize("casts", ["any", "nearest"])
def test_linear_of_subnormal_inputs_may_be_flushed(casts: str) -> None:
    """Inputs of 1e-39 times weights of 1e30: 1.6e-7 exactly, 0 where inputs are flushed."""
    weight = torch.full((16, 16), 1e30)
    graph = BlockGraph(
        "mlp_0",
        (
            Node("w", "param", (), (16, 16), {"key": "w"}),
            Node("x", "input", (), (17, 16)),
            Node("y", "linear", ("x", "w"), (17, 16)),
        ),
        "y",
        {},
        (17, 16),
    )
    train = resolve({"preset": "torch-eager"})
    infer = resolve({"preset": "torch-eager", "compute": "bfloat16", "casts": casts})
    cpu = torch.device("cpu")
    problem = BlockProblem(
        graph,
        StoredParameters({"w": weight}, {}, train, cpu),
        StoredParameters({"w": weight}, {}, infer, cpu),
    )
    x = torch.full((17, 16), 1e-39)
    output = problem.bound(x.double(), torch.zeros(1, 1, dtype=torch.float64)).output
    exact = x.double() @ weight.double().T
    for run in (torch.zeros_like(exact), (x.bfloat16() @ weight.bfloat16().T).double()):
        drift = run - (x @ weight.T).double()
        assert bool(((output.drift.lo <= drift) & (drift <= output.drift.hi)).all())
        assert bool(((output.infer.lo <= run) & (run <= output.infer.hi)).all())
