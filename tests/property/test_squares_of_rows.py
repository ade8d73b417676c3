"""Weighted squares on an ellipsoid (Rule 3.9), ellipsoids around one direction; both programs.

No member exceeds the bound, and exact cases are attained.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine import ellipsoids as prover
from kcdsl_backends.drift.affine import row_ellipsoids, tape
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.ellipsoids import RankOne, around_sum
from kcdsl_certs.recheck.affine import ellipsoids as checker
from kcdsl_certs.recheck.affine import remainders
from kcdsl_certs.recheck.affine.adjoint import Adjoint as RowAdjoint

N, SEEDS = 12, range(8)
Floats = np.ndarray


def drawn(seed: int) -> tuple[Floats, Floats]:
    """Return an ellipsoid with axes of very different lengths, and weights [5, n]."""
    rng = np.random.default_rng(seed)
    turned, _ = np.linalg.qr(rng.standard_normal((N, N)))
    axes = np.exp(2 * rng.standard_normal(N))
    shape = (turned * axes) @ turned.T
    weights = np.abs(rng.standard_normal((5, N))) ** (1 + seed % 4)
    weights[-1, 3:] = 0.0
    return (shape + shape.T) / 2, weights


def roots(shape: Floats, weights: Floats, length: float = np.inf) -> tuple[Floats, Floats]:
    """Return the bounds of both programs."""
    one = prover.WeightedSquares.of(torch.from_numpy(shape), length).root(torch.from_numpy(weights))
    return one.numpy(), checker.RowSquares.of(shape, length).root(weights)


@pytest.mark.parametrize("seed", SEEDS)
def test_members_are_within_the_bound_of_squares(seed: int) -> None:
    shape, weights = drawn(seed)
    found, again = roots(shape, weights)
    np.testing.assert_allclose(found, again, rtol=1e-4)
    for weight, bound in zip(weights, found, strict=True):
        sized = np.sqrt(weight)[:, None] * shape * np.sqrt(weight)
        largest = float(np.linalg.eigvalsh(sized)[-1]) ** 0.5
        assert largest <= bound <= 3 * largest


@pytest.mark.parametrize("seed", SEEDS)
def test_known_norms_tighten_the_bound_of_squares(seed: int) -> None:
    shape, _ = drawn(seed)
    most = float(np.linalg.eigvalsh(shape)[-1]) ** 0.5
    for share in (0.25, 1.0, 4.0):
        for found in roots(shape, np.full((1, N), 2.25), share * most):
            assert found[0] == pytest.approx(1.5 * min(share, 1.0) * most, rel=1e-3)


def test_squares_of_long_and_short_rows_agree() -> None:
    rng, n = np.random.default_rng(5), 300  # more than one block of the product in both programs
    half = rng.standard_normal((n, 40))
    shape, weights = half @ half.T, np.abs(rng.standard_normal((7, n)))
    weights[0], weights[1, 3:] = 1.0, 0.0
    squares, sums = shape**2, weights @ (shape**2).sum(axis=-1)
    both, total = np.einsum("bi,ij,bj->b", weights, squares, weights), squares.sum()
    most = float(np.linalg.eigvalsh(shape)[-1])
    prices = np.linspace(0.0, float(weights.max()), 4001)[:, None]
    norms = np.maximum(both - 2 * prices * sums + prices**2 * total, 0.0)
    best = np.sqrt((prices * most + np.sqrt(norms)).min(axis=0))
    for found in roots(shape, weights):
        np.testing.assert_allclose(found, best, rtol=1e-3)


@pytest.mark.parametrize(("size", "weight"), [(1e-90, 1e-90), (1e-150, 1.0), (1e-170, 1e40)])
def test_underflowing_squares_are_covered(size: float, weight: float) -> None:
    shape, weights = drawn(2)
    for found in roots(shape * size, weights * weight):
        for each, bound in zip(weights, found, strict=True):
            sized = np.sqrt(each)[:, None] * shape * np.sqrt(each)
            assert bound >= (float(np.linalg.eigvalsh(sized)[-1]) * size * weight) ** 0.5


def test_squares_of_one_axis_and_one_element_are_exact() -> None:
    rng = np.random.default_rng(1)
    axis, weights = rng.standard_normal(N), np.abs(rng.standard_normal((3, N)))
    for found in roots(np.outer(axis, axis), weights):
        np.testing.assert_allclose(found, np.sqrt(weights @ axis**2), rtol=1e-2)
    shape, only = drawn(2)[0], np.zeros((1, N))
    only[0, 4] = 9.0
    for found in roots(shape, only):
        assert found[0] == pytest.approx(3 * shape[4, 4] ** 0.5, rel=1e-3)


def test_factors_and_errors_of_a_function_are_included() -> None:
    shape, weights = drawn(3)
    factor, own = np.linspace(0.5, 2.0, N)[None], np.linspace(0.1, 0.9, N)[None]
    plain, _ = roots(shape, weights * factor[0] ** 2)
    expected = plain + np.sqrt(weights @ own[0] ** 2)
    weighted_squares = prover.WeightedSquares.of(torch.from_numpy(shape), np.inf)
    one = prover.RowSquares(
        {(0,): weighted_squares}, torch.from_numpy(factor), torch.from_numpy(own)
    )
    two = checker.Squares({(0,): checker.RowSquares.of(shape, np.inf)}, factor, own)
    np.testing.assert_allclose(one.root((0,), torch.from_numpy(weights)), expected, rtol=1e-6)
    np.testing.assert_allclose(two.root((0,), weights), expected, rtol=1e-6)
    assert not np.isfinite(two.root((1,), weights)).any()
    assert not torch.isfinite(one.root((1,), torch.from_numpy(weights))).any()


@pytest.mark.parametrize("lost", [0.0, 1e-3, 10.0])
def test_ellipsoids_contain_multiples_of_a_vector_and_its_rounding(lost: float) -> None:
    rng = np.random.default_rng(5)
    ends = rng.standard_normal(N)
    line, segment = RankOne.near(torch.from_numpy(ends), lost), checker.RankOne.near(ends, lost)
    whole = around_sum([line]).numpy(), checker.around_sum([segment])
    shapes = (
        *whole,
        *((np.outer(ends, ends) * x.scale + np.eye(N) * x.rest) for x in (line, segment)),
    )
    for one in (line, segment):
        assert np.linalg.eigvalsh(shapes[0])[-1] == pytest.approx(one.largest, rel=1e-6)
    for shape in shapes:
        for trial in range(64):
            functional, off = rng.standard_normal((2, N))
            if trial % 2:  # where they add up
                functional, off = ends, ends
            off = off / np.linalg.norm(off) * lost
            assert abs(functional @ (ends + off)) <= (functional @ shape @ functional) ** 0.5


def images(
    weight: Floats, length: float, own: Floats
) -> tuple[row_ellipsoids.LinearImage, checker.LinearImage]:
    """Return the images of both programs, of one row."""
    lengths, rest = np.array([[length]]), own[None]
    maps = prover.Maps.of(torch.from_numpy(weight))
    one = row_ellipsoids.LinearImage(maps, torch.from_numpy(lengths), torch.from_numpy(rest))
    return one, checker.LinearImage(checker.WeightNorms.of(weight), lengths, rest)


def test_images_of_rows_of_bounded_norm_are_contained() -> None:
    rng = np.random.default_rng(7)
    weight, own, length = rng.standard_normal((N, 5)), np.linspace(0.0, 0.4, N), 1.5
    mine, other = images(weight, length, own)
    weighted, squares = mine.ball((0,)), other.row((0,))
    elements, norm = mine.elements.numpy()[0], float(mine.lengths[0, 0])
    np.testing.assert_allclose(elements, other.elements[0], rtol=1e-6)
    np.testing.assert_allclose(weighted.rows.numpy(), squares.sums, rtol=1e-6)
    assert norm == pytest.approx(float(other.totals[0, 0]), rel=1e-3)
    assert weighted.largest == pytest.approx(squares.whole, rel=1e-3)
    assert mine.smaller((0,), torch.eye(N, dtype=torch.float64) * 1e6)
    assert not mine.smaller((0,), torch.eye(N, dtype=torch.float64))
    weights = np.abs(rng.standard_normal((40, N))) ** 2
    bounds = weighted.root(torch.from_numpy(weights)).numpy(), squares.root(weights)
    np.testing.assert_allclose(*bounds, rtol=1e-2)
    for k in range(64):
        inner = weight[k % N] if k < N else rng.standard_normal(5)
        off = own * rng.choice([-1.0, 1.0], N)
        error = weight @ (inner / np.linalg.norm(inner) * length) + off
        assert (np.abs(error) <= elements).all()
        assert error @ error <= min(norm**2, weighted.largest)
        for bound in bounds:
            assert (np.sqrt(weights @ error**2) <= bound).all()
    exact = 1.5 * np.linalg.norm(weight, 2) + np.linalg.norm(own)
    assert norm == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_worst_members_of_an_image_are_within_its_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight, nothing = rng.standard_normal((N, 1 + 2 * seed)), np.zeros(N)
    weights = np.abs(rng.standard_normal((9, N))) ** (1 + seed % 4)
    weights[0], weights[1, 1:] = 1.0, 0.0
    mine, other = images(weight, 0.5, nothing)
    found = mine.ball((0,)).root(torch.from_numpy(weights)).numpy(), other.row((0,)).root(weights)
    worst = np.array([0.5 * np.linalg.norm(np.sqrt(w)[:, None] * weight, 2) for w in weights])
    for bound in found:
        assert (worst <= bound).all()
        assert (bound <= 5 * worst).all()
        assert bound[0] == pytest.approx(worst[0], rel=1e-3)


def test_images_of_numbers_whose_squares_underflow_are_covered() -> None:
    weights = drawn(3)[1]
    for size in (1e-90, 1e-170):
        for error in (size * np.eye(N)[0], size * np.ones(N) / N):
            one, two = images(np.eye(N), size, np.zeros(N))
            for scale in (1.0, 1e-100, 1e40):
                sized = weights * scale
                mine = one.ball((0,)).root(torch.from_numpy(sized)).numpy()
                for bound in (mine, two.row((0,)).root(sized)):
                    assert (np.sqrt(sized) @ np.abs(error) / N**0.5 <= bound).all()


def test_bounds_of_functionals_read_again_are_kept() -> None:
    n, asked = 4, list[int]()

    def sums(row: Any, weights: Any) -> Any:
        asked.append(len(weights))
        return weights.sum(-1)

    ends, values = np.ones((2, n)), np.eye(n)[:, None]
    one = remainders.Remainder(-ends, ends, 9 * ends[:, :1], sums)
    low, high, total = (torch.from_numpy(x) for x in (-ends, ends, 9 * ends[:, :1]))
    two = tape.Remainder(low, high, total, sums)
    for row in (0, 1, 1):
        window = ((row, row + 1), (0, n))
        one.nonlinear.between(RowAdjoint(values, (row, 0)))
        two.nonlinear().between(Adjoint(torch.from_numpy(values), window, (2, n)))
    one.nonlinear.between(RowAdjoint(-values, (1, 0)))  # other ends may be read
    two.nonlinear().between(Adjoint(torch.from_numpy(-values), ((1, 2), (0, n)), (2, n)))
    assert asked == [n] * 6
