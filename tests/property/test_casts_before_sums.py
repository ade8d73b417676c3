"""Errors of an early cast are rounded again with the following sum.

All numbers are nearly zero, so that only the subnormals of casts matter: the first cast has an
error of η, the sum's rounding turns it into (1 + u)η, the last cast into (1 + u_c)(1 + u)η + η.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_certs.recheck.affine_walk import pair
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.state import numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from tests.support import proofs
from tests.support.prover import block, parameters
from tests.support.rationals.exact import Rational

UNIT, FAINT = 2.0**-11, 2.0**-25
SUMS = {"bfloat16": 2.0**-8, "tfloat32": 2.0**-11, "float32": 2.0**-24}
TURNS = 2.0**-24


def biased() -> Any:
    g = proofs.Graph((1, 2))
    inputs = [g.add("input", [], (1, 2)), g.param("w", np.full((2, 2), 2.0**-100))]
    g.add("linear", [*inputs, g.param("b", np.zeros(2))], (1, 2))
    return g


def turned() -> Any:
    g = proofs.Graph((1, 2))
    w = g.param("w", np.full((2, 2), 2.0**-100))
    x = g.add("linear", [g.add("input", [], (1, 2)), w], (1, 2))
    tables = (g.constant(name, np.full((1, 2), 0.5, dtype=np.float32)) for name in ("cos", "sin"))
    g.add("rope", [x, *tables], (1, 2))
    return g


def sizes(graph: Any, record: Any, folder: Path) -> dict[str, float]:
    """Return the largest output magnitude, by every domain that supports the block."""
    exact = proofs.numerics("float64", accumulate="float64", weights=("float64", "none"))
    centre, path = np.ones((1, 2)), folder / "model.safetensors"
    problem = BlockProblem(block(graph), parameters(graph, exact), parameters(graph, record))
    x, zero = torch.from_numpy(centre), torch.zeros(1, 1, dtype=torch.float64)
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, exact, record, sha256, centre)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    with np.errstate(all="ignore"):
        states = {node.name: value for node, value in propagate(scene)}
        walked = pair(scene).i
    found = {
        "intervals": float(problem.bound(x, zero).output.infer.mag().min()),
        "forms": float(problem.forms(x, zero).ends[1].size.min()),
        "intervals again": float(numeric(states[graph.output]).i.hi.min()),
        "forms again": float((np.abs(walked.reference) + walked.error_bound).min()),
    }
    if not any(node["op"] == "rope" for node in graph.nodes):
        exactly = Rational(proof, read(path).tensors).derive(proof.cases[0])[1]
        found["exact"] = float(exactly[graph.output][1])
    return found


@pytest.mark.parametrize("accumulate", SUMS)
def test_bias_sum_is_rounded_after_the_cast(tmp_path: Path, accumulate: str) -> None:
    record = proofs.numerics("float16", accumulate=accumulate)
    most = FAINT * (1 + SUMS[accumulate]) * (1 + UNIT) + FAINT
    for domain, size in sizes(biased(), record, tmp_path).items():
        assert most <= size <= most * (1 + 2.0**-5), domain


def test_rotation_sum_is_rounded_after_both_casts(tmp_path: Path) -> None:
    """The rotated values have an error of η already, half of it in either product."""
    most = (FAINT + 2 * FAINT) * (1 + TURNS) * (1 + UNIT) + FAINT
    for domain, size in sizes(turned(), proofs.numerics("float16"), tmp_path).items():
        assert most <= size <= most * (1 + 2.0**-5), domain
