"""Functionals of one row of scores pass the rotation and the linear of the keys in one step.

The shortcut is equivalent to the step-by-step computation: both give equal bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.ops.bilinear import KeyRow, RowRotation
from tests.support import proofs
from tests.support.affine_rules import RULES
from tests.support.prover import block, parameters

N = proofs.numerics
KERNELS: dict[str, Any] = {
    "any order": N("float32", "any"),
    "free casts": N("bfloat16", "any"),
    "casts to nearest": N("bfloat16", "nearest"),
    "casts toward zero": N("float16", "any_toward_zero"),
    "only rotations cast": N("float32", "nearest", results={"rope": "bfloat16"}),
}
TURNED = ("scores of turned keys", "scores of turned and shared keys")
WINDOWS = [((0, 2), (0, 3)), ((1, 2), (0, 3)), ((0, 2), (1, 3)), ((0, 1), (2, 3))]
"""Heads and columns."""


def runs(rule: str) -> list[KernelRun]:
    rng = np.random.default_rng(5)
    found = []
    for record in KERNELS.values():
        for radius in (0.0, 2.0**-8):
            graph = RULES[rule](rng)
            centre = torch.from_numpy(np.rint(rng.standard_normal(graph.input_shape) * 8) / 8)
            spread = torch.full((1, 1), radius, dtype=torch.float64)
            found.append(
                affine_run(block(graph), parameters(graph, record), centre, spread, 2.0**-60)
            )
    return found


def quotients(run: KernelRun) -> list[float]:
    """Return ratios shortcut / step-by-step of bounds of functionals of one row of the scores."""
    place = max(run.computed.values())
    entry, tape, found = run.tape.entries[place], run.tape, []
    assert entry.one_row is not None
    generator = torch.Generator().manual_seed(3)
    for heads, columns in WINDOWS:
        for row in range(3):
            size = (16, heads[1] - heads[0], 1, columns[1] - columns[0])
            values = torch.randn(size, generator=generator, dtype=torch.float64)
            a = Adjoint(values, (heads, (row, row + 1), columns), entry.shape)
            tape.entries[place] = entry
            short = tape.bound(place, a).magnitude(tape.radius)
            tape.entries[place] = replace(entry, one_row=None)
            long = tape.bound(place, a).magnitude(tape.radius)
            tape.entries[place] = entry
            found += (short / long).tolist()
    return found


@pytest.mark.full
@pytest.mark.parametrize("rule", [*TURNED, "scores straight from linears"])
def test_shortcut_and_step_by_step_bounds_agree(rule: str) -> None:
    short = 0
    for run in runs(rule):
        if run.tape.entries[max(run.computed.values())].one_row is not None:
            found = quotients(run)
            assert (
                max(abs(q - 1) for q in found) <= 2.0**-18
            )  # sums over rows are formed in float32
            short += 1
    assert short >= 6


@pytest.mark.sample(3)
@pytest.mark.parametrize("rule", TURNED)
@pytest.mark.parametrize("broken", ["no rotation", "rotated the other way", "nothing added"])
def test_planted_error_in_the_shortcut_is_detected(
    rule: str, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = RowRotation.back

    def wrong(self: RowRotation, vectors: torch.Tensor, rows: slice) -> torch.Tensor:
        if broken == "no rotation":
            return vectors.expand(-1, self.cos[rows].shape[0], -1)
        return back(replace(self, sin=-self.sin), vectors, rows)

    def nothing(self: KeyRow, each: torch.Tensor, *_: Any) -> torch.Tensor:
        return each.new_zeros(len(each))

    changes: dict[str, tuple[type, str, Callable[..., torch.Tensor]]] = {
        "no rotation": (RowRotation, "back", wrong),
        "rotated the other way": (RowRotation, "back", wrong),
        "nothing added": (KeyRow, "own", nothing),
    }
    monkeypatch.setattr(*changes[broken])
    assert max(abs(q - 1) for q in quotients(runs(rule)[2])) > 2.0**-20
