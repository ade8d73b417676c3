"""Zeros of a float64 kernel: both programs account for their own underflow consistently."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_certs.recheck import recheck
from tests.support import proofs
from tests.support.prover import block, parameters

MARGIN = 4.0
"""The margin of claims against a float64 kernel."""


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_witnesses_of_zeros_are_confirmed_unless_lowered(tmp_path: Path, share: float) -> None:
    graph = proofs.Graph((2, 4))
    x = graph.add("input", [], (2, 4))
    k = graph.add("linear", [x, graph.param("w", np.zeros((4, 4)))], (2, 4))
    table = graph.constant("table", np.full((2, 4), 0.5, dtype=np.float32))
    k = graph.add("rope", [k, table, table], (2, 4))
    graph.add("linear", [k, graph.param("v", np.ones((4, 4)))], (2, 4))
    pair = proofs.numerics("float64", accumulate="float64"), proofs.numerics("bfloat16")
    sides = (parameters(graph, record) for record in pair)
    centre = np.ones((2, 4))
    zero = torch.zeros(1, 1, dtype=torch.float64)
    found = BlockProblem(block(graph), *sides).bound(torch.from_numpy(centre), zero)
    path = tmp_path / "model.safetensors"
    document = proofs.document(
        graph, *pair, proofs.write_safetensors(path, graph.tensors), centre, 0.0
    )
    (case,) = document["cases"]
    document["claim"] = case["claim"] = (drift_bound(found.output.drift, "inf") * MARGIN).hex()
    case["witness"] = [
        {"node": node, "value": (value * MARGIN).hex(), "drift": (drift * MARGIN * share).hex()}
        for node, (value, drift) in found.witness.items()
    ]
    assert max(value for node, (value, _) in found.witness.items() if "rope" in node) < 2.0**-1000
    outcome = recheck(proofs.dump(document), path)
    assert outcome.ok == (share == 1.0), (outcome.reason, outcome.detail)
    assert share == 1.0 or outcome.reason == "witness/too-small"
