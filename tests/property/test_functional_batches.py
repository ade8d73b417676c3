"""Bounds do not depend on the number of functionals in a reverse pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine import error_bounds as reaches
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.affine_run import affine_run
from tests.support import proofs
from tests.support.affine_rules import RULES
from tests.support.prover import block, parameters

N = proofs.numerics
PAIRS: list[tuple[Any, Any]] = [
    (N("float32", "any"), N("bfloat16", "any")),
    (N("float32", "any"), N("bfloat16", "nearest")),
]


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("radius", [0.0, 2.0**-9])
@pytest.mark.parametrize("rule", ["context straight from a linear", "context of shared heads"])
def test_bounds_are_independent_of_the_batch_size(
    rule: str, radius: float, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng([len(rule), int(radius * 512)])
    graph = RULES[rule](rng)
    centre = torch.from_numpy(np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10)
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    built = block(graph)
    train, infer = (parameters(graph, record) for record in pair)
    many = affine_forms(built, train, infer, centre, spread).box()
    widest = centre.numel()
    for most in (widest, 2 * widest, 5 * widest, 1):
        monkeypatch.setattr(reaches, "MOST_NUMBERS", most)
        few = affine_forms(built, train, infer, centre, spread).box()
        # sums over rows are formed in float32, scaled by the largest functional of the batch
        noise = 2.0**-40 * (1 + many.mag()) + 2.0**-16 * (many.hi - many.lo)
        assert bool(((few.lo - many.lo).abs() <= noise).all())
        assert bool(((few.hi - many.hi).abs() <= noise).all())


def test_batch_size_is_limited_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = RULES["linear"](np.random.default_rng(1))
    side, zero = parameters(graph, PAIRS[0][0]), torch.zeros(1, 1, dtype=torch.float64)
    run = affine_run(
        block(graph), side, torch.zeros(graph.input_shape, dtype=torch.float64), zero, 0.0
    )
    widest = max(e.reference.numel() for e in run.tape.entries)
    assert reaches.at_once(run.tape) == reaches.BATCH
    for most, expected in ((3 * widest, 3), (3 * widest - 1, 2), (1, 1)):
        monkeypatch.setattr(reaches, "MOST_NUMBERS", most)
        assert reaches.at_once(run.tape) == expected


def test_deviations_of_the_elements_that_are_read_are_those_of_all() -> None:
    """Elements outside of the mask get no pass, and windows end where the mask does."""
    rng = np.random.default_rng(9)
    graph = RULES["context of shared heads"](rng)
    centre = torch.from_numpy(np.rint(rng.standard_normal(graph.input_shape) * 8) / 8)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    tape = affine_run(block(graph), parameters(graph, PAIRS[0][1]), centre, zero, 0.0).tape
    place = next(i for i, e in enumerate(tape.entries) if e.name.endswith("/numerator"))
    (scores, _), *_ = tape.entries[place].vjp(reaches.on_row(*_unit_of(tape.entries[place].shape)))
    p = tape.entries[place + 1].reference
    needed = torch.ones(*p.shape[:-1], 1, dtype=torch.bool)
    every = reaches.deviations(tape, scores, p, needed)
    some = reaches.deviations(tape, scores, p, needed, read=p > 0)
    assert bool((p == 0).any())
    assert torch.allclose(some[p > 0], every[p > 0], rtol=2.0**-40, atol=0)
    assert bool((some[p == 0] >= every[p == 0]).all())


def _unit_of(shape: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return one functional of the last row of a tensor, with its row and the tensor's shape."""
    return torch.ones(1, shape[-1], dtype=torch.float64), tuple(n - 1 for n in shape[:-1]), shape


def test_masked_columns_carry_zero() -> None:
    """Functionals of a row of probabilities before the projection, at masked columns."""
    rng = np.random.default_rng(4)
    graph = RULES["context of shared heads"](rng)
    centre = torch.from_numpy(np.rint(rng.standard_normal(graph.input_shape) * 8) / 8)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    run = affine_run(block(graph), parameters(graph, PAIRS[0][1]), centre, zero, 0.0)
    tape = run.tape
    place = next(i for i, e in enumerate(tape.entries) if e.name.endswith("/numerator"))
    shape = tape.entries[place].shape
    for row, columns, nothing in ((0, (2, 3), True), (0, (0, 3), False), (2, (2, 3), False)):
        values = torch.ones(1, 2, 1, columns[1] - columns[0], dtype=torch.float64)
        a = Adjoint(values, ((0, 2), (row, row + 1), columns), shape)
        size = float(tape.bound(place, a).magnitude(tape.radius))
        assert (size < 2.0**-200) == nothing
    stored = tape.entries[place + 1]
    assert not bool(stored.error_bound[:, 0, 1:].any())
    assert bool((stored.error_bound[:, 2] > 0).all())
