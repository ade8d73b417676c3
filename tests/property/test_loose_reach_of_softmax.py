"""Adjoints of a softmax round in the size of what its projection may carry (section 6), however
little its probabilities can move: that is what passes for norms count a share of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kcdsl_certs.recheck.affine.form import Form
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


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("radius", [0.0, 0.25])
def test_the_reach_holds_what_the_projection_carries(
    tmp_path: Path, name: str, radius: float
) -> None:
    rng = np.random.default_rng(4)
    graph, record = proofs.attention(rng), KERNELS[name]
    x = np.rint(rng.standard_normal((5, 8)) * 2**6) / 2**6
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(
        proofs.dump(proofs.document(graph, N("float32", "any"), record, sha256, x, radius))
    )
    with np.errstate(all="ignore"):
        scene = Derivation(proof, read(path).tensors).scene(proof.cases[0])
        found = walk(scene, scene.infer)
    softmax = next(node["name"] for node in graph.nodes if node["op"] == "softmax")
    form = found.forms[softmax]
    assert isinstance(form, Form)
    assert form.place is not None
    entry = found.tape.entries[form.place]
    numerator = found.tape.entries[form.place - 1].reach
    p = form.reference
    carried = numerator + p * numerator.sum(axis=-1, keepdims=True)
    moves = p > 0
    if entry.kept is not None:
        moves = moves & entry.kept
    assert moves.any()
    assert (entry.reach >= carried * (1 - 2.0**-40))[moves].all()
    assert (entry.nearest <= entry.reach).all()
    assert (numerator <= 1 + 2.0**-40).all()
    assert (entry.nearest < 0.9 * carried)[moves].any()  # what is known of probabilities is less
