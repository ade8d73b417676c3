"""The interface of a stage: the float64 sum of centre and drift, with its rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.boxes import Box
from kcdsl_backends.drift.boxes.state import Entering, InterfaceEllipsoids
from kcdsl_certs.recheck.affine.form import Form
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.box import Box as CheckerBox
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs
from tests.support.prover import block, parameters

ROWS, WIDTH = 4, 6
KERNEL = proofs.numerics("bfloat16", "any")


@pytest.mark.parametrize("held", [False, True], ids=["box", "ellipsoids"])
@pytest.mark.parametrize("seed", range(3))
def test_inputs_of_a_stage_are_within_the_error_bound(
    seed: int, held: bool, tmp_path: Path
) -> None:
    """The drift is narrower than the rounding of the sum, and negative as often as positive."""
    rng = np.random.default_rng([41, seed])
    graph = proofs.Graph((ROWS, WIDTH))
    x = graph.add("input", [], (ROWS, WIDTH))
    graph.add("neg", [x], (ROWS, WIDTH))
    centre = rng.standard_normal((ROWS, WIDTH)) * 2.0 ** rng.integers(0, 9, (ROWS, WIDTH))
    low = rng.standard_normal((ROWS, WIDTH)) * 2.0**-12
    high = low + 2.0**-60 * rng.random((ROWS, WIDTH))
    high[0] = low[0] + 2.0**-20
    # What is known by ellipsoids is near one end of the box, and small beside it.
    middle = low + 0.9 * (high - low)
    shapes = np.stack([2.0**-120 * np.eye(WIDTH)] * ROWS)
    shapes[0] = 2.0**-44 * np.eye(WIDTH)
    held_at = middle.copy()
    held_at[0, 1] -= 2.0**-23

    drift = Box(torch.from_numpy(low), torch.from_numpy(high))
    known = (
        InterfaceEllipsoids(torch.from_numpy(middle), torch.from_numpy(shapes)) if held else None
    )
    zero = torch.zeros(1, 1, dtype=torch.float64)
    stored = parameters(graph, KERNEL)
    entering = Entering(drift, known)
    run = affine_run(block(graph), stored, torch.from_numpy(centre), zero, 0.0, entering)
    entry = run.tape.entries[run.computed[x]]
    _holds(entry.reference.numpy(), entry.error_bound.numpy(), centre, low, high)
    own = run.tape.entries[1].error_bound if held else entry.radius
    assert own is not None
    _holds(entry.reference.numpy(), own.numpy(), centre, low, high)
    around = {row: shape.numpy() for row, shape in run.tape.entries[1].ellipsoids.items()}
    assert len(around) == (ROWS if held else 0)
    _around(around, entry.reference.numpy(), centre, held_at)

    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, KERNEL, KERNEL, sha256, centre, 0.0)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    pair = (middle, shapes) if held else None
    scene = replace(scene, drift=CheckerBox(low, high), held=pair)
    derived = walk(scene, scene.infer, moved=True)
    form = derived.forms[x]
    assert isinstance(form, Form)
    _holds(form.reference, form.error_bound, centre, low, high)
    entered = derived.tape.entries[1]
    radius = entered.error_bound if held else entered.radius
    assert radius is not None
    _holds(form.reference, radius, centre, low, high)
    assert len(entered.ellipsoids) == (ROWS if held else 0)
    _around(entered.ellipsoids, form.reference, centre, held_at)


def _around(
    ellipsoids: Mapping[tuple[int, ...], np.ndarray],
    reference: np.ndarray,
    centre: np.ndarray,
    drift: np.ndarray,
) -> None:
    """Assert that the exact centre + drift lies in the ellipsoid of its row: e·P⁻¹e <= 1."""
    for (row,), shape in ellipsoids.items():
        parts = zip(centre[row], drift[row], reference[row], strict=True)
        error = np.array([float(Fraction(c) + Fraction(d) - Fraction(r)) for c, d, r in parts])
        scale = float(np.abs(error).max())
        error, inner = error / scale, shape / scale / scale
        assert error @ np.linalg.solve(inner, error) <= 1 + 2.0**-20, row


def _holds(
    reference: np.ndarray, reach: np.ndarray, centre: np.ndarray, low: np.ndarray, high: np.ndarray
) -> None:
    """Assert that every exact centre + drift is within the error bound of the reference."""
    for at in np.ndindex(*centre.shape):
        middle, around = Fraction(float(reference[at])), Fraction(float(reach[at]))
        for end in (low, high):
            exact = Fraction(float(centre[at])) + Fraction(float(end[at]))
            assert abs(exact - middle) <= around, at
