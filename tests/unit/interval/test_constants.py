"""Constants of a graph have a relative error where they and their reciprocals are normal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_certs.recheck import recheck
from tests.support import proofs
from tests.support.prover import block, parameters

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
