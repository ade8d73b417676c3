"""Data movement transposes functionals: Σ a·f(x) = Σ (fᵀa)·x, in both programs.

All entries and functionals are distinct numbers, so that confused elements, dimensions or copies
are detected.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.model.graph import View
from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.form import Form
from kcdsl_certs.recheck.affine_walk import walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import proofs
from tests.support.prover import block, parameters

KERNEL = proofs.numerics("float32", "any")
Shape = tuple[int, ...]


def _view(view: View) -> tuple[str, Shape, Any]:
    return "view", view.shape, view.attrs


MOVES: dict[str, tuple[Shape, tuple[str, Shape, Any]]] = {
    "a dimension in front": ((3, 4), _view(View.expanded((3, 4), (2, 3, 4)))),
    "in front and a row": ((1, 4), _view(View.expanded((1, 4), (2, 3, 4)))),
    "in front and a column": ((3, 1), _view(View.expanded((3, 1), (2, 3, 4)))),
    "in front and both": ((1, 1), _view(View.expanded((1, 1), (3, 2, 4)))),
    "two in front, and the middle": (
        (2, 1, 2),
        _view(View.expanded((2, 1, 2), (3, 2, 2, 2, 2))),
    ),
    "two in front, and the first": ((1, 2, 2), _view(View.expanded((1, 2, 2), (3, 2, 2, 2, 2)))),
    "the first of equal sizes": ((1, 3, 3), _view(View.expanded((1, 3, 3), (3, 3, 3)))),
    "reshape": ((2, 6), _view(View.reshaped((3, 2, 2)))),
    "permute": ((2, 3, 4), _view(View.permuted((2, 3, 4), (2, 0, 1)))),
    "slice": ((5, 4), _view(View.sliced((5, 4), 0, 1, 4))),
    "slice from behind": ((3, 2, 5), _view(View.sliced((3, 2, 5), -1, 2, 5))),
    "every second": ((3, 7), _view(View.sliced((3, 7), 1, 1, 7, 2))),
    "every third row": ((7, 3), _view(View.sliced((7, 3), -2, 0, 7, 3))),
    "heads": (
        (3, 8),
        _view(replace(View.permuted((3, 2, 4), (1, 0, 2)), shape=(2, 12))),
    ),
    "copies of heads": (
        (3, 8),
        _view(replace(View.expanded((3, 2, 1, 4), (3, 2, 3, 4)), shape=(3, 24))),
    ),
    "some of every head, turned and copied": (
        (5, 12),
        _view(
            View(
                (5, 3, 4),
                ((1, 5, 2), (0, 3, 1), (1, 2, 1)),
                (2, 0, 1),
                (2, 2, 3),
                (4, 3),
            )
        ),
    ),
    "neg": ((3, 4), ("neg", (3, 4), {})),
    "joined": ((3, 4), ("concat", (6, 4), {"dim": 0})),
    "joined from behind": ((2, 3, 4), ("concat", (2, 3, 8), {"dim": -1})),
}


@pytest.mark.parametrize("name", MOVES)
def test_functionals_are_transposed_by_data_movement(name: str, tmp_path: Path) -> None:
    before, (op, after, attrs) = MOVES[name]
    rng = np.random.default_rng(list(MOVES).index(name))
    rows = (before[0], int(np.prod(before[1:])))
    graph = proofs.Graph(rows)
    x = graph.add("input", [], rows)
    if len(before) != 2:
        x = graph.reshape(x, before)
    y = graph.add(op, [x] * (2 if op == "concat" else 1), after, **attrs)
    centre = rng.standard_normal(rows)

    zero = torch.full((1, 1), 2.0**-20, dtype=torch.float64)
    run = affine_run(block(graph), parameters(graph, KERNEL), torch.from_numpy(centre), zero, 0.0)
    entries = run.tape.entries
    index = run.computed[y]
    for window in _windows(after):
        values = rng.standard_normal((2, *(stop - start for start, stop in window)))
        adjoint = ProverAdjoint(torch.from_numpy(values), window, after)
        found = np.zeros(2)
        for source, part in entries[index].vjp(adjoint):
            found += part.against(entries[source].reference).numpy()
        _close(found, values, entries[index].reference.numpy(), window)

    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, KERNEL, KERNEL, sha256, centre, 2.0**-20)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    derived = walk(scene, scene.infer)
    read_by, form = derived.forms[x], derived.forms[y]
    assert isinstance(form, Form)
    assert isinstance(read_by, Form)
    assert form.place is not None
    for window in _windows(after):
        values = rng.standard_normal((2, *(stop - start for start, stop in window)))
        moved = Adjoint(values, tuple(start for start, _ in window))
        found = np.zeros(2)
        for place, pull in derived.tape.entries[form.place].operands:
            assert place == read_by.place
            back = pull(moved)
            found += 0.0 if back is None else back.sums(read_by.reference)
        _close(found, values, form.reference, window)


def _windows(shape: Shape) -> list[tuple[tuple[int, int], ...]]:
    """Return the whole, every row, and a part of it in every dimension."""
    everything = tuple((0, size) for size in shape)
    single = [(*((at, at + 1) for at in row), (0, shape[-1])) for row in np.ndindex(*shape[:-1])]
    parts = [
        (*everything[:d], (size // 2, size), *everything[d + 1 :]) for d, size in enumerate(shape)
    ]
    return [everything, *single, *parts]


def _close(
    found: np.ndarray,
    values: np.ndarray,
    reference: np.ndarray,
    window: tuple[tuple[int, int], ...],
) -> None:
    part = reference[tuple(slice(*ends) for ends in window)]
    wanted = (values * part).reshape(2, -1).sum(axis=-1)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
