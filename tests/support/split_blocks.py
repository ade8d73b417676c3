"""ReLU blocks for proofs by splits: the prover's layers, and documents with split trees."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.relu_networks import ReluNetwork
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.state import DriftProblem
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.split_walk import walk
from tests.support import proofs
from tests.support.prover import block, parameters

Floats = np.ndarray
Pair = tuple[Any, Any]
"""The numerics records of the training and the inference kernel."""
LEAF = b"\xff\xff"


def problem(graph: Any, pair: Pair) -> BlockProblem:
    train, infer = (parameters(graph, record) for record in pair)
    return BlockProblem(block(graph), train, infer)


def prover(graph: Any, pair: Pair, centre: Floats, radius: float) -> ReluNetwork:
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    return problem(graph, pair).layers(torch.from_numpy(centre), spread)


def stated(
    folder: Path,
    graph: Any,
    pair: Pair,
    centre: Floats,
    radius: float,
    claim: float,
    trees: Sequence[bytes],
) -> tuple[Any, Path]:
    """Return a proof of a block by trees, with derived witnesses, and its checkpoint."""
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    document = proofs.document(graph, *pair, sha256, centre, radius)
    case = document["cases"][0]
    case |= {"domain": "splits", "splits": [base64.b64encode(tree).decode() for tree in trees]}
    case["claim"] = document["claim"] = claim.hex()
    _, sizes = walk(scene_of(document, path))
    case["witness"] = [
        {"node": n, "value": v.hex(), "drift": d.hex()} for n, (v, d) in sizes.items()
    ]
    return document, path


def scene_of(document: Any, path: Path) -> DriftProblem:
    """Return what the checker reads for the first case of a proof."""
    proof = parse(proofs.dump(document))
    return Derivation(proof, read(path).tensors).problem(proof.cases[0])
