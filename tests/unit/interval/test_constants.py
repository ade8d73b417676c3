"""Constants of a graph have a relative error where they and their reciprocals are normal; blocks
that a domain has no rule for have no bound."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.linear.paired import PairedLayer, PairedNetwork
from kcdsl_backends.drift.linear_bounds import SlopeEffort
from kcdsl_backends.lirpa.backend import drift_box
from kcdsl_certs.recheck import recheck
from tests.support import proofs
from tests.support.prover import block, parameters


def bounded(graph: proofs.Graph) -> BlockProblem:
    sides = [parameters(graph, proofs.numerics("float32"))] * 2
    return BlockProblem(block(graph), *sides)


def broadcast(op: str) -> proofs.Graph:
    """Return an operation on an input and a view of it with fewer elements."""
    graph = proofs.Graph((2, 4))
    x = graph.add("input", [], (2, 4))
    if op == "matmul":
        left = graph.reshape(x, (2, 2, 2))
        graph.add(op, [left, graph.slice(left, dim=0, start=0, stop=1)], (2, 2, 2))
    else:
        graph.add(op, [x, graph.slice(x, dim=0, start=0, stop=1)], (2, 4))
    return graph


@pytest.mark.parametrize("op", ["add", "sub", "mul", "matmul"])
def test_operands_that_broadcast_have_no_forms(op: str) -> None:
    problem, x = bounded(broadcast(op)), torch.ones(2, 4, dtype=torch.float64)
    wide = torch.full((1, 1), 0.5, dtype=torch.float64)
    assert problem.bound(x, wide)
    with pytest.raises(NoBound, match=rf"^n\d_{op}: {op} of shapes that broadcast"):
        problem.forms(x, wide)
    if op == "matmul":
        with pytest.raises(NoBound, match=rf"^n\d_{op}: {op} of shapes that broadcast"):
            problem.planes(x, wide, SlopeEffort(), lambda _: True)


@pytest.mark.parametrize("alpha", [None, Fraction(1, 100)])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_norm_of_a_region_around_zero_has_no_forms(op: str, alpha: Fraction | None) -> None:
    graph = proofs.Graph((1, 4))
    x = graph.add("input", [], (1, 4))
    graph.add(op, [x, graph.param("w", np.ones(4)), graph.param("b", np.ones(4))], (1, 4), eps=1e-6)
    centre = torch.linspace(-1, 1, 4, dtype=torch.float64)[None]
    with pytest.raises(NoBound, match="the drift reaches the size of the variance"):
        bounded(graph).forms(centre, torch.ones(1, 1, dtype=torch.float64), alpha)


def test_views_in_steps_have_no_module() -> None:
    graph = proofs.Graph((4, 2))
    graph.slice(graph.add("input", [], (4, 2)), dim=0, start=0, stop=4, step=2)
    region = torch.ones(4, 2).double(), torch.zeros(1, 1).double()
    with pytest.raises(NoBound, match="the module has no view in steps"):
        drift_box(bounded(graph), *region, "ibp")
    with pytest.raises(ValueError, match="no method of auto_LiRPA: 'crowns'"):
        drift_box(bounded(graph), *region, "crowns")


def test_block_on_states_has_no_bound_on_token_ids() -> None:
    with pytest.raises(NoBound, match="the region holds token ids"):
        bounded(broadcast("add")).bound(None, torch.zeros(1, 1, dtype=torch.float64))


def test_computed_operand_in_place_of_a_parameter_has_no_bound() -> None:
    problem = bounded(broadcast("add"))
    with pytest.raises(NoBound, match="add stands where a parameter or a constant must"):
        problem.train.plain(problem.graph.node(problem.graph.output))


@pytest.mark.parametrize("value", [math.nan, math.inf, -(2.0**101)])
def test_network_of_huge_parameters_has_no_bound(value: float) -> None:
    layer = PairedLayer.of((torch.full((1, 1), value), torch.zeros(1)))
    with pytest.raises(NoBound, match="layer 0: a parameter is not finite, or above 2"):
        PairedNetwork((layer,))


NAMES = {"scale": "factor", "divide": "divisor", "shift": "offset"}
HELD = [
    *((op, value) for op in NAMES for value in (2.0**-126, -(2.0**126))),
    ("scale", 0.0),
    ("shift", 0.0),
]
REFUSED = [*((op, value) for op in NAMES for value in (2.0**-127, 1.5 * 2.0**126))]


@pytest.mark.parametrize(("op", "value"), [*HELD, *REFUSED, ("divide", 0.0)])
def test_both_programs_bound_constants_alike(tmp_path: Path, op: str, value: float) -> None:
    graph, record = proofs.Graph((2, 3)), proofs.numerics()
    attrs: dict[str, Any] = {NAMES[op]: value}
    graph.add(op, [graph.add("input", [], (2, 3))], (2, 3), **attrs)
    centre = np.ones((2, 3))
    stored, built, x = parameters(graph, record), block(graph), torch.from_numpy(centre)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    outcome = recheck(
        proofs.dump(proofs.document(graph, record, record, sha256, centre, 0.0)), path
    )
    if (op, value) in HELD:
        assert BlockProblem(built, stored, stored).bound(x, zero)
        assert affine_run(built, stored, x, zero, 0.0)
        assert outcome.reason != "graph/field"
        return
    for bounded in (
        lambda: BlockProblem(built, stored, stored).bound(x, zero),
        lambda: affine_run(built, stored, x, zero, 0.0),
    ):
        with pytest.raises(NoBound, match="leaves the range of float32"):
            bounded()
    assert outcome.reason == "graph/field"
