"""Optimisations for long rows are as sound as the full computations.

The prover searches prices of remainders among a subset of elements, caches sums with equal weights,
trims zero ends of windows, and bounds eigenvalues in few steps.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine import adjoint as prover
from kcdsl_backends.drift.affine import tape
from kcdsl_certs.recheck.affine import adjoint as reader
from kcdsl_certs.recheck.affine import ellipsoids, remainders
from kcdsl_certs.recheck.interval.box import Floats


def dearest(weights: Floats, caps: Floats, total: float) -> float:
    """Return the largest Σ w·t over 0 <= t <= caps with a sum of at most `total`."""
    order = np.argsort(-weights)
    room = np.clip(total - np.concatenate([[0.0], np.cumsum(caps[order])[:-1]]), 0.0, None)
    return float(weights[order] @ np.minimum(caps[order], room))


@pytest.mark.parametrize("share", [1e-4, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("n", [300, 1800])  # all elements are sorted, every ninth one
def test_prices_bound_the_largest_weighted_sum(share: float, even: bool, n: int) -> None:
    rng = np.random.default_rng(11)
    values = rng.standard_normal((3, 1, n)) * np.exp(rng.standard_normal(n))
    low, high = -rng.random((1, n)), rng.random((1, n))
    low = -high if even else low
    total = np.array([[share * high.sum()]])
    mine = tape.Remainder(torch.from_numpy(low), torch.from_numpy(high), torch.from_numpy(total))
    adjoint = prover.Adjoint(torch.from_numpy(values), ((0, 1), (0, n)), (1, n))
    one = [end.numpy() for end in mine.nonlinear().between(adjoint)]
    two = remainders.Remainder(low, high, total).nonlinear.between(reader.Adjoint(values, (0, 0)))
    for k, functional in enumerate(values[:, 0]):
        for sign, place in ((-1.0, 0), (1.0, 1)):
            caps = np.where(sign * functional > 0, high[0], -low[0])
            most = dearest(np.abs(functional), caps, float(total[0, 0]))
            assert most <= sign * two[place][k]
            assert sign * two[place][k] == pytest.approx(sign * one[place][k], rel=1e-9)
            assert n > 300 or sign * two[place][k] <= most * (1 + 1e-9)


def test_cached_bounds_are_keyed_by_functionals_and_row() -> None:
    rng, asked = np.random.default_rng(3), list[tuple[int, ...]]()
    high, total = np.ones((2, 8)), np.full((2, 1), 100.0)
    scale = np.array([0.25, 0.5])

    def summed(row: tuple[int, ...], weights: Floats) -> Floats:
        asked.append(row)
        return np.asarray(weights.sum(axis=-1) * scale[row[0]])

    mine = tape.Remainder(
        torch.from_numpy(-high),
        torch.from_numpy(high),
        torch.from_numpy(total),
        lambda row, weights: torch.from_numpy(summed(row, weights.numpy())),
    )
    other = remainders.Remainder(-high, high, total, summed)
    first = rng.standard_normal((2, 1, 8))
    second = first.copy()
    second[1, 0, 3] += 2.0**-40
    for _ in range(2):
        for row in (0, 1):
            for values in (first, second, -first):
                wanted = np.abs(values[:, 0]).sum(axis=-1) * scale[row]
                window = ((row, row + 1), (0, 8))
                adjoint = prover.Adjoint(torch.from_numpy(values), window, (2, 8))
                one = mine.nonlinear().between(adjoint)[1].numpy()
                two = other.nonlinear.between(reader.Adjoint(values, (row, 0)))[1]
                np.testing.assert_array_equal(one, wanted)
                np.testing.assert_array_equal(two, wanted)
    assert len(asked) == 12, "two rows and three kinds of functionals in two programs"


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_trimmed_windows_give_equal_results(axis: int) -> None:
    values = np.random.default_rng(2).standard_normal((4, 3, 5, 6))
    where = [slice(None)] * 4
    for ends in (slice(0, 1), slice(2, None) if axis == 0 else slice(-2, None)):
        where[axis + 1] = ends
        values[tuple(where)] = 0.0
    window = ((2, 5), (1, 6), (3, 9))
    whole = prover.Adjoint(torch.from_numpy(values), window, (7, 8, 9))
    short = whole.narrowed(axis)
    assert short.window[axis][1] - short.window[axis][0] < values.shape[axis + 1]
    assert torch.equal(short.dense().values, whole.dense().values)
    assert torch.equal(whole.narrowed(axis - 3).values, short.values)
    wide = reader.Adjoint(values, (2, 1, 3))
    less = reader.shortened(wide, axis)
    assert less.extent == tuple(short.values.shape[1:])
    again = reader.embedded(less, wide.start, wide.extent)
    np.testing.assert_array_equal(again.values, values)
    for nothing in (whole.times(0.0), whole.times(0.0).narrowed(axis)):
        assert nothing.values.shape == whole.values.shape


@pytest.mark.parametrize("kind", ["one far above", "all alike", "slowly falling", "two alike"])
def test_eigenvalue_bounds_of_few_steps_are_sound(kind: str) -> None:
    n = 224
    rng = np.random.default_rng(5)
    basis = np.linalg.qr(rng.standard_normal((n, n)))[0]
    values = {
        "one far above": np.concatenate([[1e3], rng.random(n - 1)]),
        "all alike": 1.0 + 1e-9 * rng.random(n),
        "slowly falling": 1.0 - np.arange(n) / (4.0 * n),
        "two alike": np.concatenate([[5.0, 5.0 - 1e-7], rng.random(n - 2)]),
    }[kind]
    gram = basis * values @ basis.T
    most, trace = float(values.max()), float(values.sum())
    for found in (
        prover.largest_eigenvalue(torch.from_numpy(gram), trace),
        ellipsoids.largest_eigenvalue(gram, trace),
    ):
        assert most <= found <= most * (1 + 1e-3)


def test_batched_eigenvalue_bounds_are_sound() -> None:
    rng, scales = np.random.default_rng(7), np.zeros((20, 48))
    matrix = rng.standard_normal((12, 48))
    scales[1:] = rng.random((19, 48)) ** 6 * 2.0 ** rng.integers(-300, 300, (19, 1))
    scales[1, 1:] = 0.0  # a matrix of rank one, and one of zeros
    exact = np.array([np.linalg.norm(matrix * row, 2) for row in scales])
    scaled = torch.from_numpy(matrix * scales[:, None])
    grams = scaled @ scaled.mT
    traces = grams.diagonal(dim1=1, dim2=2).sum(-1) * (1 + 2.0**-40)
    for some in (slice(1, None), slice(None)):
        mine = prover.largest_eigenvalues(grams[some], traces[some]).sqrt().numpy()
        other = ellipsoids.norms_of(matrix, scales[some], 1.0)
        for found in (mine, other):
            assert (found >= exact[some]).all()
            assert (found <= exact[some] * (1 + 1e-3) + 1e-100).all()
