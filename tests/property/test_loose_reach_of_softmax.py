"""Rounding of softmax adjoints is relative to the projection's input (section 6).

This holds however little the probabilities can change; passes for norms count a share of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.recheck.affine.form import Form, Walk
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs

N = proofs.numerics
KERNELS = {
    "one reading": N("bfloat16", "any", style="fused"),
    "several readings": N("bfloat16", "any"),
    "by steps": N("bfloat16", "nearest", scores="float32"),
}


def walked(folder: Path, graph: Any, train: Any, record: Any, x: np.ndarray, radius: float) -> Walk:
    """Return the walk of the second kernel."""
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, train, record, sha256, x, radius)))
    with np.errstate(all="ignore"):
        scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
        return walk(scene, scene.infer)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("radius", [0.0, 0.25])
def test_error_bound_covers_the_input_of_the_projection(
    tmp_path: Path, name: str, radius: float
) -> None:
    rng = np.random.default_rng(4)
    graph, record = proofs.attention(rng), KERNELS[name]
    x = np.rint(rng.standard_normal((5, 8)) * 2**6) / 2**6
    found = walked(tmp_path, graph, N("float32", "any"), record, x, radius)
    softmax = next(node["name"] for node in graph.nodes if node["op"] == "softmax")
    form = found.forms[softmax]
    assert isinstance(form, Form)
    assert form.place is not None
    entry = found.tape.entries[form.place]
    numerator = found.tape.entries[form.place - 1].error_bound
    p = form.reference
    carried = numerator + p * numerator.sum(axis=-1, keepdims=True)
    moves = p > 0
    if entry.kept is not None:
        moves = moves & entry.kept
    assert moves.any()
    assert (entry.error_bound >= carried * (1 - 2.0**-40))[moves].all()
    assert (entry.nearest <= entry.error_bound).all()
    assert (numerator <= 1 + 2.0**-40).all()
    assert (entry.nearest < 0.9 * carried)[moves].any()  # the bound of probabilities is smaller


def test_share_covers_scores_with_a_common_shift(tmp_path: Path) -> None:
    """All scores of a row change by one large number, which the projection removes.

    Only the rounding of its own sums of adjoints remains.
    """
    rng = np.random.default_rng(0)
    rows, size, columns = 2, 4, 48
    graph = proofs.Graph((rows, size))
    x = graph.add("input", [], (rows, size))
    weight = graph.param("q", rng.standard_normal((size, size)))
    q = graph.add("linear", [x, weight], (rows, size))
    k = graph.constant("k", np.full((size, columns), 2.0**34, dtype=np.float32))
    scores = graph.add("matmul", [q, k], (rows, columns), role="scores")
    p = graph.add("softmax", [scores], (rows, columns), role="probabilities")
    v = graph.constant("v", rng.standard_normal((columns, size)).astype(np.float32))
    graph.add("matmul", [p, v], (rows, size), role="context")
    train = N("float64", "any", accumulate="float64")
    record = N("float64", "any", accumulate="float64", style="fused")
    found = walked(tmp_path, graph, train, record, np.zeros((rows, size)), 0.5)
    form, moved = found.forms[p], found.forms[scores]
    assert isinstance(form, Form)
    assert isinstance(moved, Form)
    assert form.place is not None
    assert moved.error_bound.min() > 2.0**34
    share = 2.0**-36 * found.tape.entries[form.place].error_bound
    usual = (form.reference * moved.error_bound).sum(axis=-1, keepdims=True)
    rounded = (columns + 3) * 2.0**-53 * form.reference * (moved.error_bound + usual)
    assert (share >= rounded * (1 - 2.0**-20)).all()
