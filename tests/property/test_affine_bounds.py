"""Bounds behind norms and remainders, in both programs: prices, norms, eigenvalues."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine.adjoint import largest_eigenvalue, whole
from kcdsl_backends.drift.affine.error_bounds import gram_norm, norms, weighted_norms
from kcdsl_backends.drift.affine.tape import VJP as ProverPull
from kcdsl_backends.drift.affine.tape import Remainder as ProverRemainder
from kcdsl_backends.drift.affine.tape import Tape as ProverTape
from kcdsl_backends.drift.affine.tape import TapeEntry as ProverEntry
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.ellipsoids import largest_eigenvalue as checked_eigenvalue
from kcdsl_certs.recheck.affine.remainders import Remainder
from kcdsl_certs.recheck.affine.reverse_passes import gram_norm as checked_norm
from kcdsl_certs.recheck.affine.reverse_passes import surrounded
from kcdsl_certs.recheck.affine.tape import VJP, Share, Tape, TapeEntry

Floats = np.ndarray


def prover_remainder(low: Floats, high: Floats, total: Floats) -> ProverRemainder:
    parts = [torch.from_numpy(part.copy()) for part in (low, high, total)]
    return ProverRemainder(parts[0], parts[1], parts[2])


def prover_adjoint(values: Floats) -> ProverAdjoint:
    return ProverAdjoint.full(torch.from_numpy(values.copy()))


def remainders(rng: np.random.Generator, kind: str) -> tuple[Floats, Floats, Floats]:
    """Return low, high, total [1, n]: the total short, ample or zero, or caps with many zeros."""
    n = int(rng.integers(1, 12))
    low, high = -rng.random((1, n)), rng.random((1, n))
    if kind == "ties":
        low, high = -np.ones((1, n)), np.ones((1, n))
    if kind == "one side":
        low = np.zeros((1, n))
    whole_sum = np.maximum(-low, high).sum(axis=-1, keepdims=True)
    share = {"ample": 2.0, "zero": 0.0}.get(kind, float(rng.random()))
    return low, high, share * whole_sum


def greatest(alpha: Floats, low: Floats, high: Floats, total: float) -> float:
    """Return the largest Σ α o over low <= o <= high, Σ|o| <= total: o = plus - minus."""
    n = alpha.size
    bounds = [*((0, h) for h in high), *((0, -k) for k in low)]
    found = linprog(
        np.concatenate([-alpha, alpha]), A_ub=np.ones((1, 2 * n)), b_ub=[total], bounds=bounds
    )
    assert found.status == 0
    return -float(found.fun)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["short", "ample", "zero", "ties", "one side"])
def test_price_equals_the_linear_program(kind: str) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        low, high, total = remainders(rng, kind)
        alpha = rng.standard_normal((3, *low.shape))
        alpha[2] = np.sign(alpha[2])
        if seed % 4 == 0:
            alpha[1, :, ::2] = 0.0
        a, b = prover_remainder(low, high, total).nonlinear().between(prover_adjoint(alpha))
        c, d = Remainder(low, high, total).nonlinear.between(Adjoint(alpha, (0, 0)))
        for k in range(3):
            most = greatest(alpha[k, 0], low[0], high[0], float(total[0, 0]))
            least = -greatest(-alpha[k, 0], low[0], high[0], float(total[0, 0]))
            for lower, upper in ((float(a[k]), float(b[k])), (c[k], d[k])):
                assert most - 1e-9 <= upper <= most + 1e-9
                assert least - 1e-9 <= lower <= least + 1e-9


def inside(rng: np.random.Generator, low: Floats, high: Floats, total: Floats) -> Floats:
    """Return a maximal admitted remainder, filled in a random order."""
    o, left = np.zeros(low.shape), float(total[0, 0])
    for k in rng.permutation(low.shape[-1]):
        end = (low if rng.random() < 0.5 else high)[0, k]
        o[0, k] = np.sign(end) * min(abs(end), left)
        left -= abs(o[0, k])
    return o


@pytest.mark.parametrize("kind", ["short", "ample", "zero", "ties", "one side"])
def test_norms_of_remainders_are_sound(kind: str) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        low, high, total = remainders(rng, kind)
        alpha = rng.standard_normal((5, *low.shape)) * rng.choice([1e-3, 1, 1e3], low.shape)
        one = prover_remainder(low, high, total).nonlinear().together(prover_adjoint(alpha))
        two = Remainder(low, high, total).nonlinear.together(Adjoint(alpha, (0, 0)))
        for _ in range(100):
            o = inside(rng, low, high, total)
            seen = float(np.linalg.norm((alpha * o).sum(axis=(1, 2))))
            assert seen <= one * (1 + 1e-12)
            assert seen <= two * (1 + 1e-12)


def norms_of_remainder(alpha: Floats, cap: Floats, total: Floats) -> tuple[float, float]:
    """Return the norm of functionals of a remainder of at most `cap`, from both programs."""
    prover = prover_remainder(-cap, cap, total).nonlinear().together(prover_adjoint(alpha))
    return prover, Remainder(-cap, cap, total).nonlinear.together(Adjoint(alpha, (0, 0)))


def test_rows_outside_the_window_do_not_count() -> None:
    """The programs use windows of different sizes where a mask forbids columns of a row."""
    cap, total, few = np.ones((4, 6)), np.array([[1e-3], [3.0], [2.0], [50.0]]), [1, 2]
    alpha = np.zeros((12, 4, 6))
    alpha[:, few] = np.linalg.qr(np.random.default_rng(7).standard_normal((12, 12)))[0].reshape(
        12, 2, 6
    )
    wide = norms_of_remainder(alpha, cap, total)
    assert wide == pytest.approx(norms_of_remainder(alpha[:, few], cap[few], total[few]), rel=1e-3)
    o = np.zeros((4, 6))
    o[1, :3] = o[2, :2] = 1.0  # as large as both rows may be
    farthest = float(np.linalg.norm((alpha * o).sum(axis=(1, 2))))
    for found in wide:
        assert farthest <= found * (1 + 1e-12)
        assert found <= farthest * 1.001
    alpha[:, 3] = 1.0  # now the row with the large total is used, and all of it may be at its cap
    assert min(norms_of_remainder(alpha, cap, total)) > 6 * 12**0.5


def matrices() -> dict[str, Floats]:
    rng = np.random.default_rng(4)
    square = rng.standard_normal((40, 40))
    orthogonal = np.linalg.qr(square)[0]
    column = rng.standard_normal((40, 1))
    clustered = orthogonal * (1 - 1e-9 * np.arange(40)) @ orthogonal.T
    last = np.diag([*np.full(200, 1.0), 1.0 + 1e-6])
    alternating = np.outer((-1.0) ** np.arange(40), (-1.0) ** np.arange(40))
    # rows sum to zero: a start from row sums sees only the smaller eigenvalue
    hidden = 5 * alternating / 40 + np.outer(np.ones(40), np.ones(40)) / 40
    return {
        "rank one": column @ column.T,
        "alternating": alternating,
        "hidden": hidden,
        "diagonal": np.diag(rng.random(40)),
        "zero": np.zeros((6, 6)),
        "one": np.ones((1, 1)),
        "unit": np.eye(300),
        "clustered": (clustered + clustered.T) / 2,
        "a little above": last,
        "random": square @ square.T,
        "large": (lambda a: a @ a.T)(rng.standard_normal((240, 300))),
        "graded": np.diag(10.0 ** -np.arange(40.0)),
    }


@pytest.mark.parametrize("scale", [1.0, 1e-140, 1e-290, 1e140, 1e290])
@pytest.mark.parametrize("name", matrices())
def test_eigenvalue_bounds_are_sound(name: str, scale: float) -> None:
    gram = matrices()[name]
    truth, trace = float(np.linalg.eigvalsh(gram)[-1]) * scale, float(np.trace(gram)) * scale
    one = largest_eigenvalue(torch.from_numpy(gram * scale), trace)
    two = checked_eigenvalue(gram * scale, trace)
    for found in (one, two):
        assert truth * (1 - 1e-13) <= found <= trace * (1 + 1e-12)
    assert two <= max(truth * 1.001, 0.0)
    assert one <= max(truth * 1.001, 0.0)
    assert two <= one * (1 + 1e-12), "a reader finds no more than a writer"


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_non_finite_matrices_have_no_finite_bound(bad: float) -> None:
    gram = np.eye(3)
    gram[1, 1] = bad
    assert not np.isfinite(checked_eigenvalue(gram, bad))
    assert not np.isfinite(largest_eigenvalue(torch.from_numpy(gram), bad))


@pytest.mark.parametrize("n", [3, 200])
def test_underflowing_products_are_bounded_by_their_trace(n: int) -> None:
    """Products may all underflow where the sum of squares, computed elsewhere, does not."""
    gram, trace = np.zeros((n, n)), 2.0**-1070
    assert checked_eigenvalue(gram, trace) == trace
    assert largest_eigenvalue(torch.from_numpy(gram), trace) == trace


def chain(rng: np.random.Generator, sizes: list[int]) -> tuple[ProverTape, Tape, list[Floats]]:
    """Return both tapes of e_k = W_k e_(k-1) + o_k, and the data for running it."""
    region = rng.random((1, sizes[0]))
    one, two = ProverTape(torch.from_numpy(region)), Tape(region)
    reach = region
    two.add(TapeEntry(region))
    none: ProverPull = lambda _: []  # noqa: E731
    one.add(ProverEntry("x", torch.zeros_like(one.radius), one.radius, none))
    parts = [region]
    for place, (before, after) in enumerate(pairwise(sizes)):
        weight = rng.standard_normal((after, before))
        radius = rng.random((1, after)) * rng.choice([1e-3, 1.0])
        centre = rng.standard_normal((1, after)) * 0.1
        reach = (reach @ np.abs(weight).T + radius + np.abs(centre)) * (1 + 1e-9)
        prover_pull, pull = through(weight, place)
        one.add(
            ProverEntry(
                "y",
                torch.zeros(1, after, dtype=torch.float64),
                torch.from_numpy(reach),
                prover_pull,
                torch.from_numpy(centre),
                torch.from_numpy(radius),
            )
        )
        two.add(TapeEntry(reach, ((place, pull),), radius, centre))
        parts += [weight, radius, centre]
    return one, two, parts


def through(weight: Floats, place: int) -> tuple[ProverPull, VJP]:
    turned = torch.from_numpy(weight)
    shape = (1, weight.shape[1])

    def prover(a: ProverAdjoint) -> list[tuple[int, ProverAdjoint]]:
        return [(place, ProverAdjoint(a.values @ turned, whole(shape), shape))]

    return prover, lambda a: Adjoint(a.values @ weight, (0, 0))


@pytest.mark.parametrize("sizes", [[4], [3, 5], [12, 4, 9], [2, 16, 3], [6, 6, 6, 6]])
def test_symbols_are_within_the_norm(sizes: list[int]) -> None:
    """Signs of symbols are flipped one by one towards a larger norm."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        one, two, parts = chain(rng, sizes)
        place = len(sizes) - 1
        rows = int(rng.integers(1, 2 * sizes[-1] + 2))
        a = rng.standard_normal((rows, 1, sizes[-1]))
        mine, other = prover_adjoint(a), Adjoint(a, (0, 0))
        bounds = gram_norm(one, place, mine), checked_norm(two, place, other)
        matrix, offset = symbols(a[:, 0], parts)
        best = climbed(matrix, offset, rng)
        for found in bounds:
            assert best <= found * (1 + 1e-12)
            assert found <= 3 * best, "a bound that is far off shows little"
        assert bounds[1] <= bounds[0] * (1 + 2.0**-20)


def symbols(a: Floats, parts: list[Floats]) -> tuple[Floats, Floats]:
    """Return M and m: the functionals are M ξ + m for |ξ| <= 1."""
    region, rest = parts[0], parts[1:]
    columns, offset = [], np.zeros(len(a))
    for k in range(len(rest) - 3, -1, -3):
        weight, radius, centre = rest[k : k + 3]
        columns.append(a * radius)
        offset = offset + a @ centre[0]
        a = a @ weight
    return np.concatenate([*columns, a * region], axis=1), offset


def climbed(matrix: Floats, offset: Floats, rng: np.random.Generator) -> float:
    best = 0.0
    for _ in range(20):
        signs = rng.choice([-1.0, 1.0], matrix.shape[1])
        for _ in range(20):
            best = max(best, float(np.linalg.norm(matrix @ signs + offset)))
            signs = np.where(matrix.T @ (matrix @ signs + offset) >= 0, 1.0, -1.0)
    return best


@pytest.mark.parametrize("rows", [1, 3, 4, 6])
def test_norm_of_a_row_covers_all_its_elements(rows: int) -> None:
    """For any number of rows: functionals of all rows are not weights of single elements."""
    rng = np.random.default_rng(rows)
    region, weights = (torch.from_numpy(rng.random((rows, 4))) for _ in range(2))
    tape = ProverTape(region)
    tape.add(ProverEntry("x", torch.zeros_like(region), region, lambda _: []))
    needed = torch.ones(rows, 1, dtype=torch.bool)
    unit = torch.eye(4, dtype=torch.float64)
    for found, size in (
        (norms(tape, 0, unit, needed), region),
        (weighted_norms(tape, 0, weights, needed), weights * region),
    ):
        assert (found >= size.norm(dim=-1, keepdim=True)).all()
        assert (found <= size.norm(dim=-1, keepdim=True) * 2).all()


@pytest.mark.parametrize("rows", [1, 2])
def test_additions_of_norms_count_where_a_pass_stops(rows: int) -> None:
    """A norm adds shares of its inputs, also in passes that stop at these inputs."""
    shape, n = (rows, 4), 4
    ones = np.ones(shape)
    tape = Tape(None)
    tape.add(TapeEntry(0 * ones))
    tape.add(TapeEntry(ones, radius=ones))
    share = Share(np.ones((rows, 1)), ones)
    tape.add(TapeEntry(2 * ones, ((1, lambda a: a),), share=share))
    functionals = Adjoint(np.eye(rows * n).reshape(-1, *shape), (0, 0))
    found = surrounded(tape, 2, functionals, floor=1)
    # every element may have an error of 1, and as much again that the norm adds
    assert (found.each >= 2).all()
    assert found.norm >= 2 * np.sqrt(n)
