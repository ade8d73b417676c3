"""Bounds as small as the programs' own roundings or underflow are confirmed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.model.presets import resolve
from kcdsl.route.goals import goals
from kcdsl_backends.certifier.bounds import bound_case
from kcdsl_backends.certifier.statements.cases import Case
from kcdsl_backends.certifier.statements.problems import LEAST_CLAIM, Claims, ProblemFactory
from kcdsl_backends.certifier.worker import RunSettings, WorkerContext
from kcdsl_certs.recheck import recheck
from tests.support.chains import PAIRS, chained, small
from tests.support.small_models import write_contract

EXACT: dict[str, Any] = PAIRS["float64"][0]
FP8: dict[str, dict[str, Any]] = {
    "rope": {"results": {"rope": "fp8_e4m3"}},
    "mul": {"results": {"mul": "fp8_e4m3"}, "casts": "nearest"},
    "input": {"results": {"input": "fp8_e4m3"}, "casts": "nearest"},
}
"""Kernels in float64 with one coarse result."""


def changed(folder: Path, kind: str, change: str) -> None:
    """Write a random model with zero norms, zero weights, or embeddings before large weights."""
    small(folder, kind)
    file = folder / f"{kind}-17" / "own.safetensors"
    state = load_file(file)
    for key, value in state.items():
        if change == "nothing" or (change == "no norms" and "orm" in key):
            value.zero_()
        elif change == "no input":
            value.mul_(0.0 if "embed" in key else 3000.0)
    save_file(state, file)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "change", "clause"),
    [
        ("bert", "nothing", 0),
        ("bert", "nothing", 1),
        ("bert", "no norms", 3),
        ("llama", "nothing", 0),
        ("llama", "no norms", 0),
        ("llama", "no input", 0),
        ("plain", "nothing", 0),
    ],
)
def test_links_with_zero_states_are_confirmed(
    kind: str, change: str, clause: int, tmp_path: Path
) -> None:
    """The programs' underflow differs; the states between are all zero."""
    changed(tmp_path, kind, change)
    found = chained(tmp_path, kind, "float64", clause)
    bound = found.found.bounded.outcome.bound
    assert 0 < bound < 2.0**-100
    outcome = recheck(found.document, found.checkpoint)
    assert outcome.ok, outcome
    assert float.fromhex(outcome.bound) <= bound


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "coarse", "tokens", "clause"),
    [
        ("llama", "rope", (1,), "points(all): span(drift(layer_0, x))"),
        ("llama", "mul", (1, 5, 2), "points(all): norm_inf(drift(layer_0, x))"),
        ("bert", "input", (1, 5, 2), "points(all): norm_inf(drift(layer_0, x))"),
    ],
)
def test_results_that_round_to_one_number_are_confirmed(
    kind: str, coarse: str, tokens: tuple[int, ...], clause: str, tmp_path: Path
) -> None:
    """A rotation by zero is exact, and so are values that both kernels round to one number.

    The remaining errors are roundings to float64, as large as those of either program.
    """
    model, _ = small(tmp_path, kind)
    program = write_contract(tmp_path / f"{kind}-17", f"forall x in {clause} <= 0.000000000000001")
    kernel = resolve({**EXACT, **FP8[coarse]})
    factory = ProblemFactory(model, kernel, kernel, torch.device("cpu"))
    context = WorkerContext(
        RunSettings(program, tmp_path, "cpu", 1, model.checkpoint.sha256, "test", None), factory
    )
    (goal,) = goals(program)
    radius = torch.full((1, 1), float(goal.region.radius), dtype=torch.float64)
    builder = context.builder(goal)
    case = Case("case", tokens, factory.centre(goal.block, tokens), radius)
    bounded = bound_case(factory, goal, case, builder)
    assert 0 < bounded.outcome.bound < 1e-7
    outcome = recheck(builder.document(), model.checkpoint.path)
    assert outcome.ok, outcome
    assert float.fromhex(outcome.bound) > bounded.outcome.bound / 5


def test_margins_of_claims_are_small() -> None:
    coarse, fine = Claims(1 + 2.0**-10, 4.0), Claims(1 + 2.0**-10, 1 + 2.0**-10)
    witness = {"a": (2.0, 1.0), "b": (8.0, 0.0)}
    assert coarse.claim(0.5, witness) == pytest.approx(0.5 * (1 + 2.0**-10), rel=1e-8)
    assert coarse.claim(1e-14, witness) == 4e-14
    assert fine.claim(1e-14, witness) == 1e-14 * (1 + 2.0**-10)
    assert fine.claim(0.0, witness) == 0.0
    assert fine.claim(5e-324, witness) == LEAST_CLAIM
    assert coarse.claim(math.inf, witness) == math.inf
