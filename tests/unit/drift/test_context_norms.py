"""Norms of the bilinear remainder of a context product (Rule 4.3).

Errors of probabilities and values stay inside, and one case attains the bound in both programs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine import ellipsoids as prover
from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.ops.attention import _second_order
from kcdsl_backends.drift.ops.bilinear import Heads
from kcdsl_certs.recheck.affine import ellipsoids as checker
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.ops.linear.bilinear import Straight, _norms, context_remainder

Floats = np.ndarray
HEADS, ROWS, KEYS, WIDTH, INPUTS, COUNT = 2, 2, 3, 3, 4, 5
Found = tuple[float, list[Floats]]


def _prover(alpha: Floats, moved: Floats, weight: Floats, reach: Floats, own: Floats) -> Found:
    """Return the norm and the ellipsoids of functionals α [B, heads, 1, d] of row 1."""
    kept, rest, bound = (torch.from_numpy(part) for part in (weight, own, reach))
    part = _second_order(torch.from_numpy(moved), Heads(kept, rest, bound, 0))
    shape = (HEADS, ROWS, WIDTH)
    window = ((0, HEADS), (1, 2), (0, WIDTH))
    functionals = ProverAdjoint(torch.from_numpy(alpha), window, shape)
    assert part.norm is not None
    assert part.around is not None
    around = part.around(functionals)
    return part.norm(functionals), [prover.around_sum([each]).numpy() for each in around]


def _checker(alpha: Floats, moved: Floats, weight: Floats, reach: Floats, own: Floats) -> Found:
    """Return the same values of the checker."""
    rows: list[list[tuple[int, ...]]] = [[(j,) for j in range(KEYS)]] * HEADS
    values = Straight(weight, np.stack([reach] * HEADS), own, "x", rows, {})
    sizes = np.abs(weight) @ reach.T  # [heads, d, keys]
    curve = context_remainder(moved, values, moved @ (sizes.swapaxes(-1, -2) + own))
    functionals = Adjoint(alpha, (0, 1, 0))
    assert curve.length is not None
    assert curve.around is not None
    around = curve.around(functionals)
    return curve.length(functionals), [checker.around_sum([each]) for each in around]


PROGRAMS: dict[str, Callable[..., Found]] = {"prover": _prover, "checker": _checker}


@pytest.fixture(params=[2**40, 1], ids=["few", "many"], autouse=True)
def _least(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the number of products from which on one singular value serves all rows."""
    monkeypatch.setattr("kcdsl_backends.drift.affine.tape.MANY_PRODUCTS", request.param)
    monkeypatch.setattr("kcdsl_certs.recheck.affine.tape._MANY", request.param)


@pytest.mark.parametrize("program", PROGRAMS)
def test_remainders_stay_within_the_norm(program: str) -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        moved, reach = rng.random((HEADS, ROWS, KEYS)), rng.random((KEYS, INPUTS)) ** 4
        weight, own = rng.standard_normal((HEADS, WIDTH, INPUTS)), rng.random((HEADS, KEYS, WIDTH))
        alpha = (
            rng.standard_normal((COUNT, HEADS, 1, WIDTH))
            * np.exp2(rng.uniform(-6, 6, COUNT))[:, None, None, None]
        )
        norm, (shape,) = PROGRAMS[program](alpha, moved, weight, reach, own / 8)
        flat = alpha.reshape(COUNT, -1)
        for _ in range(40):
            e_x = reach * rng.choice([-1.0, 1.0], reach.shape)
            e_v = e_x @ weight.swapaxes(-1, -2) + own / 8 * rng.choice([-1.0, 1.0], own.shape)
            e_p = moved[:, 1] * rng.choice([-1.0, 1.0], (HEADS, KEYS))
            error = flat @ np.einsum("hj,hjd->hd", e_p, e_v).reshape(-1)
            assert np.linalg.norm(error) <= norm
            sizes = np.sqrt(np.diagonal(shape))
            assert (np.abs(error) <= sizes).all()
            inner = np.linalg.solve(shape + 1e-12 * np.trace(shape) * np.eye(COUNT), error)
            assert error @ inner <= 1 + 1e-6


@pytest.mark.parametrize("program", PROGRAMS)
def test_norm_is_attained(program: str) -> None:
    rng = np.random.default_rng(1)
    moved = rng.random((HEADS, ROWS, KEYS))
    reach, own = np.full((KEYS, INPUTS), 0.25), np.zeros((HEADS, KEYS, WIDTH))
    ways = rng.standard_normal((HEADS, WIDTH))
    signs = rng.choice([-1.0, 1.0], (HEADS, INPUTS))
    weight = ways[..., None] * signs[:, None]
    norm, _ = PROGRAMS[program](ways[None, :, None], moved, weight, reach, own)
    # every key has its largest error along the signs of a head: one head after the other
    most = [moved[h, 1].sum() * 0.25 * INPUTS * float(ways[h] @ ways[h]) for h in range(HEADS)]
    assert norm <= sum(most) * (1 + 1e-6)
    one = most[0] + abs(float(signs[0] @ signs[1])) / INPUTS * most[1]
    assert norm >= one * (1 - 1e-9)


def test_both_programs_compute_equal_norms() -> None:
    rng = np.random.default_rng(2)
    moved, reach = rng.random((HEADS, ROWS, KEYS)), rng.random((KEYS, INPUTS))
    weight = rng.standard_normal((HEADS, WIDTH, INPUTS))
    own = rng.random((HEADS, KEYS, WIDTH)) / 8
    alpha = rng.standard_normal((COUNT, HEADS, 1, WIDTH))
    one, two = (program(alpha, moved, weight, reach, own) for program in PROGRAMS.values())
    assert two[0] == pytest.approx(one[0], rel=2.0**-12)
    np.testing.assert_allclose(two[1][0], one[1][0], rtol=2.0**-12)


def test_norms_of_many_rows_are_attained_where_errors_are_alike() -> None:
    rng = np.random.default_rng(3)
    rows: list[list[tuple[int, ...]]] = [[(j,) for j in range(KEYS)]]
    for scale in (1.0, 1e-60, 1e60):
        sizes, times = rng.random(INPUTS) ** 4 + 1e-3, scale * rng.random(KEYS) ** 4
        times[0] = 0.0
        reach, own = np.outer(times, sizes), np.zeros((1, KEYS, 2))
        weight = np.stack([rng.choice([-1.0, 1.0], INPUTS) / sizes, np.zeros(INPUTS)])[None]
        kept, rest, bound = (torch.from_numpy(part) for part in (weight, own, reach))
        prover = Heads(kept, rest, bound, 0).lengths[0].numpy()
        checker = _norms(Straight(weight, reach[None], own, "x", rows, {}), 0)
        exact = times * INPUTS  # of the errors with the signs of the weight
        for found in (prover, checker):
            assert (found >= exact).all()
            assert (found <= exact * (1 + 1e-3) + max(scale, 1e-30) * 1e-100).all()


def test_norms_of_many_rows_hold_where_errors_differ() -> None:
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((1, WIDTH, INPUTS))
    reach, own = rng.random((KEYS, INPUTS)) ** 6, np.zeros((1, KEYS, WIDTH))
    reach[1] = 0.0
    reach[:, 2] = (1.0, 0.0, 1e-30)
    rows: list[list[tuple[int, ...]]] = [[(j,) for j in range(KEYS)]]
    kept, rest, bound = (torch.from_numpy(part) for part in (weight, own, reach))
    for found in (
        Heads(kept, rest, bound, 0).lengths[0].numpy(),
        _norms(Straight(weight, reach[None], own, "x", rows, {}), 0),
    ):
        for signs in product((-1.0, 1.0), repeat=INPUTS):
            assert (np.linalg.norm(weight[0] @ (reach * signs).T, axis=0) <= found).all()
