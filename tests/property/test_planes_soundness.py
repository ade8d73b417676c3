"""No admitted pair of runs leaves the linear bounds: any node, any functional, rule by rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.linear import LinearRun
from kcdsl_backends.drift.linear.tape import Functional
from kcdsl_backends.drift.linear_bounds import linear_walk
from tests.support import proofs
from tests.support.affine_rules import RULES
from tests.support.grids import by_turns
from tests.support.prover import block, parameters

N = proofs.numerics
PAIRS: dict[str, tuple[Any, Any]] = {
    "float64": (N("float64", accumulate="float64"), N("float64", accumulate="float64")),
    "float32": (N("float32"), N("float32", style="fused")),
    "bfloat16 any": (N("float32"), N("bfloat16")),
    "bfloat16 nearest": (N("float32"), N("bfloat16", "nearest", scores="float32")),
    "float8 weights": (N("float32"), N("float32", weights=("fp8_e4m3", "per_channel"))),
    "int8, uint8": (
        N("bfloat16"),
        N("float32", weights=("int8", "per_channel"), activations=("uint8", "per_tensor")),
    ),
    "bfloat16 toward zero": (N("bfloat16", "any_direction"), N("bfloat16", "toward_zero")),
    "bfloat16 any toward zero": (N("float32"), N("bfloat16", "any_toward_zero")),
}
RADII = (0.0, 2.0**-5)
RUNS = 6


def runs(
    problem: BlockProblem, names: list[str], centre: Tensor, radius: float, seed: int
) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """Return the values of both kernels at these nodes for admitted pairs of runs."""
    generator = torch.Generator().manual_seed(seed)

    def signs(shape: Any) -> Tensor:
        return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1

    found = []
    for trial in range(RUNS):
        share = 1.0 if trial % 3 else float(torch.rand((), generator=generator))
        x = (centre + radius * share * signs(tuple(centre.shape))).float().double()
        x = torch.where((x - centre).abs() <= radius, x, centre)
        values: dict[str, list[Tensor]] = {name: [] for name in names}
        for simulator in problem.simulators():
            symbols = {
                name: signs(shape) * float(trial > 0)
                for name, shape in simulator.symbol_shapes().items()
            }
            for name in names:
                graph = replace(simulator.graph, output=name)
                partial = Simulator(graph, simulator.numerics, simulator.parameters)
                values[name].append(partial.run(x, symbols))
        found.append({name: (one, two) for name, (one, two) in values.items()})
    return found


def check(
    run: LinearRun, seen: list[dict[str, tuple[Tensor, Tensor]]], rng: np.random.Generator
) -> int:
    """Compare boxes, elements and random functionals of every node with the runs."""
    compared = 0
    for name, index in run.index.items():
        entry = run.tape.entries[index]
        if name not in seen[0]:
            continue
        values = torch.from_numpy(rng.standard_normal((6, *entry.shape)))
        other = torch.from_numpy(rng.standard_normal((6, *entry.shape)))
        bounded = {
            "e": Functional(Adjoint.full(values), None),
            "D": Functional(None, Adjoint.full(values)),
            "both": Functional(Adjoint.full(other * 1e-3), Adjoint.full(values)),
        }
        limits = {kind: run.tape.bound(index, f) for kind, f in bounded.items()}
        for pair in seen:
            train, infer = pair[name]
            e, moved = train - entry.reference, infer - train
            slack = 2.0**-46 * (1 + float(train.abs().max()))
            assert bool((entry.deviation.lo - slack <= e).all()), name
            assert bool((e <= entry.deviation.hi + slack).all()), name
            assert bool((entry.drift.lo - slack <= moved).all()), name
            assert bool((moved <= entry.drift.hi + slack).all()), name
            for kind, f in bounded.items():
                value, (low, high) = f.against(e, moved), limits[kind]
                room = slack * float(f.magnitude(torch.ones_like(e), torch.ones_like(e)).max())
                assert bool((low - room <= value).all()), (name, kind)
                assert bool((value <= high + room).all()), (name, kind)
        compared += 1
    return compared


@pytest.mark.sample(9)
@by_turns(rule=RULES, numerics=PAIRS, radius=RADII)
def test_runs_are_within_the_linear_bounds(rule: str, numerics: str, radius: float) -> None:
    seed = [list(RULES).index(rule), list(PAIRS).index(numerics), int(radius * 1024)]
    rng = np.random.default_rng(seed)
    graph = RULES[rule](rng)
    train, infer = (parameters(graph, record) for record in PAIRS[numerics])
    problem = BlockProblem(block(graph), train, infer)
    centre = torch.from_numpy(np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10)
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    run = linear_walk(problem.graph, problem.kernels(), centre, spread)
    computed = [n.name for n in problem.graph.nodes if n.op not in ("param", "constant")]
    seen = runs(problem, computed, centre, radius, seed[0])
    assert check(run, seen, rng) == len(computed)
