"""Errors after free casts, bounded by row sums: compared with every vertex."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.boxes import Box
from tests.support import proofs
from tests.support.prover import block, parameters

U = 2.0**-8
TURN = np.array([[1.0, 1.0], [1.0, -1.0]])
"""A weight under which the errors of both results cannot be maximal at once."""


def graph(bias: tuple[float, float] | None) -> Any:
    g = proofs.Graph((1, 2))
    inputs = [g.add("input", [], (1, 2)), g.param("w", TURN)]
    if bias is not None:
        inputs.append(g.param("b", np.array(bias)))
    y = g.add("linear", inputs, (1, 2))
    g.add("linear", [y, g.param("v", np.ones((1, 2)))], (1, 1))
    return g


def kernel(centre: np.ndarray, bias: tuple[float, float] | None) -> KernelRun:
    built = graph(bias)
    record = proofs.numerics("bfloat16", "any")
    zero = torch.zeros(1, 1, dtype=torch.float64)
    return affine_run(block(built), parameters(built, record), torch.from_numpy(centre), zero, 0.0)


def vertices(centre: np.ndarray, bias: tuple[float, float] | None, signs: np.ndarray) -> float:
    """Return the largest a·(y - ỹ), a = ±1, over every vertex of the casts of bfloat16."""
    shift = np.zeros(2) if bias is None else np.array(bias)
    exact, worst = TURN @ centre[0] + shift, 0.0
    for moves in product((-U, U), repeat=4 if bias is None else 6):
        x, last, early = (
            (np.array(moves[i : i + 2]) for i in (0, 2, 4))
            if bias
            else (
                *(np.array(moves[i : i + 2]) for i in (0, 2)),
                np.zeros(2),
            )
        )
        y = ((TURN @ (centre[0] * (1 + x))) * (1 + early) + shift) * (1 + last)
        worst = max(worst, float(signs @ (y - exact)))
    return worst


@pytest.mark.parametrize("signs", [(1.0, 1.0), (1.0, -1.0)])
@pytest.mark.parametrize("bias", [None, (0.0, 0.0), (-0.5, 0.25)])
@pytest.mark.parametrize("centre", [(1.0, 1.0), (1.0, -0.75), (0.5, 1.0)])
def test_every_vertex_is_within_the_bound(
    centre: tuple[float, float], bias: tuple[float, float] | None, signs: tuple[float, float]
) -> None:
    x = np.array([centre])
    run = kernel(x, bias)
    place = run.computed["n2_linear" if bias is None else "n3_linear"]
    entry = run.tape.entries[place]
    assert entry.apart is not None
    a = Adjoint(torch.tensor([[signs]], dtype=torch.float64), ((0, 1), (0, 2)), (1, 2))
    _, high = run.tape.bound(place, a).with_region(run.tape.radius)
    found = vertices(x, bias, np.array(signs))
    assert found <= float(high)
    assert float(high) - found < 12 * U**2  # a run attains the term of first order


def test_bound_is_tighter_than_element_by_element() -> None:
    run = kernel(np.array([[1.0, 1.0]]), None)
    entry = run.tape.entries[run.computed["n2_linear"]]
    assert entry.apart is not None
    assert entry.radius is not None
    a = Adjoint(torch.ones(1, 1, 2, dtype=torch.float64), ((0, 1), (0, 2)), (1, 2))
    rest = Box(*entry.apart.rest.between(a)).mag()
    whole = a.magnitude(entry.radius) - a.magnitude(entry.apart.radius)
    assert float(rest) == pytest.approx(float(whole) / 2**0.5, rel=1e-2)


@pytest.mark.parametrize("signs", [(1.0, 1.0), (1.0, -1.0)])
def test_large_linears_whose_rows_have_a_bound_are_not_split(
    monkeypatch: pytest.MonkeyPatch, signs: tuple[float, float]
) -> None:
    monkeypatch.setattr("kcdsl_backends.drift.affine.tape.MANY_PRODUCTS", 1)
    x = np.array([[1.0, -0.75]])
    run = kernel(x, None)
    entry = run.tape.entries[run.computed["n2_linear"]]
    assert entry.weighed is not None
    assert entry.apart is None
    a = Adjoint(torch.tensor([[signs]], dtype=torch.float64), ((0, 1), (0, 2)), (1, 2))
    _, high = run.tape.bound(run.computed["n2_linear"], a).with_region(run.tape.radius)
    assert vertices(x, None, np.array(signs)) <= float(high)
