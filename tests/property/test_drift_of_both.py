"""The exact largest drift between two kernels, from their roundings and their weights.

One number passes through one linear, so that the largest drift is known in closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_certs.recheck.affine_walk import pair
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs
from tests.support.prover import block, parameters

Floats = np.ndarray
Said = Callable[[Any, tuple[Any, Any], Floats, float, Path], tuple[Floats, Floats, Floats]]
"""Both ends of the drift's box, and the largest size and drift of the output."""


def rounded(form: str, weights: tuple[str, str] = ("float64", "none")) -> Any:
    """Return a kernel that rounds its input and its output to a format, and is otherwise exact."""
    results = {"input": form, "linear": form}
    return proofs.numerics("float64", "any", accumulate="float64", results=results, weights=weights)


UNITS = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def prover(
    graph: Any, records: tuple[Any, Any], centre: Floats, radius: float, _: Path
) -> tuple[Floats, Floats, Floats]:
    one, other = (parameters(graph, record) for record in records)
    # both kernels read the same tensors
    two = one.under(other.numerics)
    wide = torch.full((1, 1), radius).double()
    forms = affine_forms(block(graph), one, two, torch.from_numpy(centre), wide)
    box, witness = forms.box(), forms.witness()[graph.output]
    length = forms.length((0,))
    assert length >= float(box.mag().amax()) * (1 - 2.0**-30)
    return box.lo.numpy(), box.hi.numpy(), np.array(witness)


def checker(
    graph: Any, records: tuple[Any, Any], centre: Floats, radius: float, folder: Path
) -> tuple[Floats, Floats, Floats]:
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, *records, sha256, centre, radius)))
    with np.errstate(all="ignore"):
        forms = pair(Derivation(proof, read(path).tensors).problem(proof.cases[0]))
    box = forms.output()
    return box.lo, box.hi, np.array(forms.sizes()[graph.output])


def linear(weights: list[float]) -> Any:
    g = proofs.Graph((1, 1))
    w = g.param("w", np.array(weights)[:, None])
    g.add("linear", [g.add("input", [], (1, 1)), w], (1, len(weights)))
    return g


@pytest.mark.parametrize("program", [prover, checker])
@pytest.mark.parametrize("radius", [0.0, 2.0**-40, 2.0**-4])
@pytest.mark.parametrize(
    ("train", "infer"),
    [
        ("float16", "bfloat16"),
        ("bfloat16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float32", "bfloat16"),
    ],
)
def test_roundings_of_both_kernels_add_up(
    tmp_path: Path, program: Said, train: str, infer: str, radius: float
) -> None:
    """x·w(1 + a)(1 + b) in each kernel, with separate a, b: the largest difference is attained."""
    graph, centre = linear([1.5, -1.5]), np.array([[0.75]])
    records = rounded(train), rounded(infer)
    lo, hi, witness = program(graph, records, centre, radius, tmp_path)
    # what is no coarser than float32 keeps its input
    times = [1 if form == "float32" else 2 for form in (train, infer)]
    ends = [
        [(1 + sign * UNITS[form]) ** n for form, n in zip((train, infer), times, strict=True)]
        for sign in (-1, 1)
    ]
    largest = max(
        1.5 * x * max(ends[1][1] - ends[0][0], ends[1][0] - ends[0][1])
        for x in (0.75 - radius, 0.75 + radius)
    )
    for column in range(2):
        for end in (hi[0, column], -lo[0, column]):
            assert end >= largest * (1 - 2.0**-8)  # of u², on the side where it shrinks
    assert max(hi.max(), -lo.min()) >= largest
    assert max(hi.max(), -lo.min()) <= largest * (1 + (2.0**-8 if radius < 2.0**-30 else 2.0**-3))
    size = 1.5 * (0.75 + radius) * ends[1][0]
    assert witness[0] >= size
    assert witness[1] >= largest


@pytest.mark.parametrize("program", [prover, checker])
@pytest.mark.parametrize("radius", [0.0, 2.0**-4])
def test_drift_of_different_weights_on_one_input(
    tmp_path: Path, program: Said, radius: float
) -> None:
    """(w' - w)x for every x of the region, up to a small excess."""
    values = [1.3, -0.7, 0.21]
    graph, centre = linear(values), np.array([[0.75]])
    coarse = ("bfloat16", "none")
    records = rounded("float64"), rounded("float64", coarse)
    lo, hi, witness = program(graph, records, centre, radius, tmp_path)
    stored = graph.tensors["w"].astype(np.float64)[:, 0]
    other = torch.from_numpy(graph.tensors["w"]).to(torch.bfloat16).double().numpy()[:, 0]
    reached = [(other - stored) * x for x in (0.75 - radius, 0.75 + radius)]
    for column, found in product(range(3), reached):
        assert lo[0, column] <= found[column] <= hi[0, column]
    most, least = np.maximum(*reached), np.minimum(*reached)
    slack = 2.0**-40
    assert (hi[0] <= most + slack).all()
    assert (lo[0] >= least - slack).all()
    assert witness[1] >= np.abs(reached).max()
