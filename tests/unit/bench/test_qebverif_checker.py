"""Checked bounds of fixed-point networks: arbitrary slopes, and forged proofs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bench.qebverif_bounds import Assumed, FixedPointPair, Functionals, packed
from bench.qebverif_checker import (
    LEAF,
    Bounds,
    Leaves,
    Round,
    SlopeProof,
    recheck_fixed_point,
)
from bench.qebverif_splits import Splitting
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.linear_bounds.constraints import Grid, replay
from kcdsl_certs.recheck.linear_bounds.splits import paired

SIZES = (3, 7, 6, 2)
LOW, HIGH = [Fraction(-1)] * 3, [Fraction(1), Fraction(1, 3), Fraction(1)]
Network = list[tuple[NDArray[np.float64], NDArray[np.float64]]]
Point = list[Fraction]


def networks(seed: int, step: float) -> tuple[Network, Network]:
    """Return a network, and a copy whose numbers are multiples of a step."""
    draw = np.random.default_rng(seed)
    first = [(draw.normal(0, 0.8, (n, m)), draw.normal(0.2, 0.3, n)) for m, n in pairwise(SIZES)]
    second = [(np.round(w / step) * step, np.round(b / step) * step) for w, b in first]
    return first, second


def tensors(network: Network) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.tensor(w), torch.tensor(b)) for w, b in network]


def points(count: int, seed: int = 0) -> list[Point]:
    """Return points of the box: corners and others, all with few bits."""
    draw = np.random.default_rng(seed)
    shares = draw.integers(0, 9, (count, 3))
    shares[::2] = np.where(shares[::2] > 4, 8, 0)
    return [
        [a + (b - a) * Fraction(int(s), 8) for a, b, s in zip(LOW, HIGH, row, strict=True)]
        for row in shares
    ]


def hidden_and_outputs(
    network: Network, point: Point, grid: Grid | None
) -> tuple[list[list[Fraction]], list[Fraction]]:
    """Return the values of every layer before ReLU or rounding, in exact arithmetic."""
    h, sums = point, list[list[Fraction]]()
    for weight, bias in network:
        sums.append(
            [
                sum((Fraction(w) * v for w, v in zip(row, h, strict=True)), Fraction(b))
                for row, b in zip(weight.tolist(), bias.tolist(), strict=True)
            ]
        )
        if grid is None:
            h = [max(v, Fraction(0)) for v in sums[-1]]
        else:
            step = Fraction(grid.step)
            levels = [(v / step + Fraction(1, 2)).__floor__() for v in sums[-1]]
            h = [min(max(level, 0), grid.most) * step for level in levels]
    return sums[:-1], sums[-1]


def assert_inside(
    bounds: Sequence[Any], first: list[list[Fraction]], second: list[list[Fraction]]
) -> None:
    """Assert that hidden values of both networks, and their differences, are within bounds."""
    for ranges, z, other in zip(bounds, first, second, strict=True):
        for (low, high), values in (
            (ranges.z, z),
            (ranges.other, other),
            (ranges.d, [b - a for a, b in zip(z, other, strict=True)]),
        ):
            assert all(a <= v <= b for a, v, b in zip(low, values, high, strict=True))


def levels_of(sums: list[list[Fraction]], grid: Grid) -> list[int]:
    return [grid.level(value) for layer in sums for value in layer]


def apart(limit: Fraction, output: int = 0) -> list[Any]:
    """Return the condition that an output differs by at least a limit."""
    one = [float(k == output) for k in range(SIZES[-1])]
    none, other = [0.0] * 3, [-v for v in one]
    return [[(none, one, other, -limit)], [(none, other, one, -limit)]]


def proved(seed: int, grid: Grid) -> tuple[tuple[Network, Network], float, SlopeProof]:
    """Return networks, a bound of the first output's difference, and its proof."""
    both = networks(seed, grid.step)
    pair = FixedPointPair((tensors(both[0]), tensors(both[1])), grid, LOW, HIGH)
    one = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).double()
    bounds, slopes = pair.bounded(Functionals(-one, one))
    return both, float(bounds.max()), pair.proof(slopes)


GRIDS = [Grid(0.25, 7), Grid(2.0**-6, 200), Grid(1.0, 1)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [0.0, 0.5, 30.0])
def test_bounds_enclose_every_run_for_arbitrary_slopes(grid: Grid, seed: int, size: float) -> None:
    both, draw = networks(seed, grid.step), np.random.default_rng(seed)
    ends = [np.array([float(v) for v in end]) for end in (LOW, HIGH)]
    ends[1] = np.nextafter(ends[1], 2)
    bounds = Bounds(paired(both), grid, ends[0], ends[1], [], [])
    behind = 0
    for n in SIZES[1:-1]:
        bounds.grow(size * draw.normal(size=(6 * n, behind, 2)))
        behind += n
    rows = draw.normal(size=(2, 20, SIZES[-1]))
    most = bounds.most(len(SIZES) - 2, (rows[0], rows[1]), size * draw.normal(size=(20, behind, 2)))
    for point in points(40, seed):
        (first, f), (second, g) = (
            hidden_and_outputs(*one) for one in ((both[0], point, None), (both[1], point, grid))
        )
        assert_inside(bounds.ranges, first, second)
        found = rows[0] @ [float(v) for v in f] + rows[1] @ [float(v) for v in g]
        assert bool((found <= most + 1e-9).all())


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("seed", range(3))
def test_checker_derives_the_bound_of_the_search(grid: Grid, seed: int) -> None:
    both, bound, proof = proved(seed, grid)
    largest = max(
        abs(
            hidden_and_outputs(both[1], point, grid)[1][0]
            - hidden_and_outputs(both[0], point, None)[1][0]
        )
        for point in points(200)
    )
    assert largest <= bound
    recheck_fixed_point(both, grid, LOW, HIGH, apart(Fraction(bound * 1.000001)), proof)
    with pytest.raises(Rejected, match="claim/too-small"):
        recheck_fixed_point(both, grid, LOW, HIGH, apart(Fraction(bound * 0.999)), proof)
    with pytest.raises(Rejected, match="claim/too-small"):
        recheck_fixed_point(both, grid, LOW, HIGH, apart(largest), proof)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("seed", range(3))
def test_no_run_leaves_the_bounds_of_its_leaf(grid: Grid, seed: int) -> None:
    both, draw = networks(seed, grid.step), np.random.default_rng(seed)
    ends = [np.array([float(v) for v in end]) for end in (LOW, HIGH)]
    bounds = Bounds(paired(both), grid, ends[0], np.nextafter(ends[1], 2), [], [])
    behind = 0
    for n in SIZES[1:-1]:
        bounds.grow(np.zeros((6 * n, behind, 2)))
        behind += n
    runs = [
        [hidden_and_outputs(*one) for one in ((both[0], point, None), (both[1], point, grid))]
        for point in points(60, seed)
    ]
    seen = [levels_of(second[0], grid) for _, second in runs]
    element = max(range(behind), key=lambda k: len({levels[k] for levels in seen}))
    first, *_, last = sorted({levels[element] for levels in seen})
    assert first < last
    leaves = Leaves.of(np.array([[element, first], LEAF, LEAF]), 1, behind, grid.most)
    size, held = 3.0 * draw.normal(size=(2, behind, 2)), [0, 0]
    row = draw.normal(size=(2, 1, SIZES[-1])).repeat(2, axis=1)
    most = bounds.most(2, (row[0], row[1]), size, None, (leaves.low, leaves.high))
    for ((_, f), (_, g)), levels in zip(runs, seen, strict=True):
        leaf = int(levels[element] > first)
        assert leaves.low[leaf, element] <= levels[element] <= leaves.high[leaf, element]
        found = float(row[0, 0] @ [float(v) for v in f] + row[1, 0] @ [float(v) for v in g])
        assert found <= most[leaf] + 1e-9
        held[leaf] += 1
    assert min(held) > 0


@pytest.mark.full
def test_splits_show_more_than_one_bound() -> None:
    grid = GRIDS[0]
    both = networks(0, grid.step)
    pair = FixedPointPair((tensors(both[0]), tensors(both[1])), grid, LOW, HIGH)
    trees, size = [], 0.0
    for sign in (1.0, -1.0):
        one = torch.tensor([[sign, 0.0]]).double()
        size = max(size, float(pair.bounded(Functionals(-one, one))[0]))
    limit = size * 0.96
    for sign in (1.0, -1.0):
        one = torch.tensor([[sign, 0.0]]).double()
        row = Functionals(-one, one)
        trees.append(Splitting(pair, row, limit * 0.999999).searched(pair.bounded(row)[1], 400))
    first, second = trees
    assert first is not None
    assert second is not None
    slopes = np.concatenate([first.slopes, second.slopes])
    proof = SlopeProof(pair.hidden, slopes, np.array([*first.cuts, *second.cuts]))
    assert len(slopes) > 2
    recheck_fixed_point(both, grid, LOW, HIGH, apart(Fraction(limit)), proof)
    with pytest.raises(Rejected, match="claim/too-small"):
        recheck_fixed_point(both, grid, LOW, HIGH, apart(Fraction(limit * 0.99)), proof)
    joined = replace(proof, outputs=slopes[[0, -1]], cuts=None)
    with pytest.raises(Rejected, match="claim/too-small"):
        recheck_fixed_point(both, grid, LOW, HIGH, apart(Fraction(limit)), joined)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [0.0, 0.5, 3.0])
def test_runs_that_meet_a_constraint_stay_in_its_bounds(grid: Grid, seed: int, size: float) -> None:
    both, draw = networks(seed, grid.step), np.random.default_rng(seed)
    ends = [np.array([float(v) for v in end]) for end in (LOW, HIGH)]
    bounds = Bounds(paired(both), grid, ends[0], np.nextafter(ends[1], 2), [], [])
    behind, hidden, shares = 0, [], []
    for n in SIZES[1:-1]:
        bounds.grow(np.zeros((6 * n, behind, 2)))
        hidden.append(size * draw.normal(size=(6 * n, behind, 2)))
        shares.append(2 * size * draw.random(6 * n))
        behind += n
    row = draw.normal(size=(3, 1, SIZES[-1]))
    direct = draw.normal(size=(1, 3))
    runs = []
    for point in points(60, seed):
        (first, f), (second, g) = (
            hidden_and_outputs(*one) for one in ((both[0], point, None), (both[1], point, grid))
        )
        value = row[0, 0] @ [float(v) for v in f] + row[1, 0] @ [float(v) for v in g]
        runs.append((float(value + direct[0] @ [float(v) for v in point]), first, second))
    limit = sorted(value for value, _, _ in runs)[-8] - 1e-9
    rounds = [Round(size * draw.normal(size=(behind, 2)), shares, hidden)] * 2
    narrowed = bounds.narrowed(rounds, (row[0], row[1], direct), limit)
    assert narrowed is not None
    for _, first, second in (run for run in runs if run[0] >= limit):
        assert_inside(narrowed.ranges, first, second)


def in_rounds() -> tuple[tuple[Network, Network], Fraction, SlopeProof]:
    """Return networks, a limit below the bound of the first output, and its proof with rounds."""
    grid = GRIDS[0]
    both = networks(0, grid.step)
    pair = FixedPointPair((tensors(both[0]), tensors(both[1])), grid, LOW, HIGH)
    rows = []
    for sign in (1.0, -1.0):
        one = torch.tensor([[sign, 0.0]]).double()
        rows.append((Functionals(-one, one), pair.bounded(Functionals(-one, one))))
    limit = 0.96 * max(float(bound) for _, (bound, _) in rows)
    leaves, rounds = [], []
    for row, (bound, slopes) in rows:
        found = Assumed(slopes, float(bound), [])
        pair.copied().assume(row, found, limit * 0.999999, 12)
        assert found.bound < limit
        leaves.append(packed(found.slopes, 0))
        rounds.append(found.rounds)
    proof = SlopeProof(pair.hidden, np.concatenate(leaves), None, rounds)
    return both, Fraction(limit), proof


def _round(**changes: Any) -> Callable[[SlopeProof], SlopeProof]:
    """Return an edit of the first round of the proof."""

    def changed(proof: SlopeProof) -> SlopeProof:
        assert proof.rounds is not None
        rounds = [list(own) for own in proof.rounds]
        place = next(k for k, own in enumerate(rounds) if own)
        one = rounds[place][0]
        rounds[place][0] = replace(one, **{k: edit(getattr(one, k)) for k, edit in changes.items()})
        return replace(proof, rounds=rounds)

    return changed


FORGED_ROUNDS: dict[str, tuple[Callable[[SlopeProof], SlopeProof], str]] = {
    "none": (lambda proof: replace(proof, rounds=None), "claim/too-small"),
    "of one constraint": (
        lambda proof: replace(proof, rounds=(proof.rounds or [])[:1]),
        "document/splits",
    ),
    "of other constraints": (
        lambda proof: replace(proof, rounds=(proof.rounds or [])[::-1]),
        "claim/too-small",
    ),
    "negative multipliers": (
        _round(shares=lambda all_: [-np.abs(one) - 1 for one in all_]),
        "bound/not-finite",
    ),
    "no number": (_round(shares=lambda all_: [one * np.nan for one in all_]), "bound/not-finite"),
    "no number in slopes": (_round(outputs=lambda one: one * np.nan), "bound/not-finite"),
    "one multiplier": (_round(shares=lambda all_: [one[:1] for one in all_]), "document/splits"),
    "few slopes": (_round(outputs=lambda one: one[1:]), "document/splits"),
    "few hidden slopes": (
        _round(hidden=lambda all_: [one[1:] for one in all_]),
        "document/splits",
    ),
    "a layer less of slopes": (_round(hidden=lambda all_: all_[:-1]), "document/splits"),
    "a layer more": (
        _round(hidden=lambda all_: [*all_, all_[0]], shares=lambda all_: [*all_, all_[0]]),
        "document/splits",
    ),
}


def test_rounds_show_more_than_one_bound() -> None:
    both, limit, proof = in_rounds()
    recheck_fixed_point(both, GRIDS[0], LOW, HIGH, apart(limit), proof)
    with pytest.raises(Rejected, match="claim/too-small"):
        recheck_fixed_point(both, GRIDS[0], LOW, HIGH, apart(limit * Fraction(4, 5)), proof)


@pytest.mark.parametrize("name", FORGED_ROUNDS)
def test_forged_rounds_are_rejected(name: str) -> None:
    both, limit, proof = in_rounds()
    edit, reason = FORGED_ROUNDS[name]
    with pytest.raises(Rejected, match=reason):
        recheck_fixed_point(both, GRIDS[0], LOW, HIGH, apart(limit), edit(proof))


def test_proof_for_a_grid_is_rejected_for_a_coarser_one() -> None:
    both, bound, proof = proved(0, GRIDS[1])
    with pytest.raises(Rejected, match="claim/too-small"):
        recheck_fixed_point(both, Grid(0.5, 7), LOW, HIGH, apart(Fraction(bound * 1.01)), proof)


def test_searched_slopes_give_smaller_bounds_than_default_slopes() -> None:
    grid = GRIDS[0]
    both = networks(0, grid.step)
    pair = FixedPointPair((tensors(both[0]), tensors(both[1])), grid, LOW, HIGH)
    one = torch.tensor([[1.0, 0.0]]).double()
    first = pair._started(2, Functionals(-one, one))[0]
    assert float(pair.bounded(Functionals(-one, one))[0]) < 0.999 * float(first)


def test_most_is_the_largest_value_at_the_points() -> None:
    first, second = networks(0, 0.25)
    pair = FixedPointPair((tensors(first), tensors(second)), GRIDS[0], LOW, HIGH)
    n = SIZES[1]
    p, q, a, b = torch.randn(4, 20, n, generator=torch.Generator().manual_seed(0)).double()
    p[0], q[0], a[0], b[0] = 0.0, 0.0, 0.0, 0.0  # all points attain the largest value
    for points in (
        pair.points[0],
        pair.ranges[0].points(pair.grid, torch.ones(20, n).double(), torch.full((20, n), 3.0)),
    ):
        value, high, low, z, other = points.table
        heights = p * value - a * z - b * other
        largest = (heights + torch.maximum(q * high, q * low)).amax(0)
        assert torch.allclose(points.most(p, q, a, b), largest, rtol=0, atol=1e-12)


def _with_slope(value: float) -> Callable[[SlopeProof], SlopeProof]:
    def changed(proof: SlopeProof) -> SlopeProof:
        outputs = proof.outputs.copy()
        outputs[0, 3, 1] = value
        return replace(proof, outputs=outputs)

    return changed


def _with_hidden_slope(value: float) -> Callable[[SlopeProof], SlopeProof]:
    def changed(proof: SlopeProof) -> SlopeProof:
        hidden = [part.copy() for part in proof.hidden]
        hidden[1][0, 0, 0] = value
        return replace(proof, hidden=hidden)

    return changed


def _cut(proof: SlopeProof, nodes: list[list[int]]) -> SlopeProof:
    return replace(proof, cuts=np.array(nodes, dtype=np.int64).reshape(-1, 2))


FORGED: dict[str, tuple[Callable[[SlopeProof], SlopeProof], str]] = {
    "no number": (_with_slope(float("nan")), "bound/not-finite"),
    "infinite": (_with_slope(float("inf")), "bound/not-finite"),
    "infinite downward": (_with_slope(-float("inf")), "bound/not-finite"),
    "huge": (_with_slope(3e38), "claim/too-small"),
    "no number in a hidden layer": (_with_hidden_slope(float("nan")), "bound/not-finite"),
    "huge in a hidden layer": (_with_hidden_slope(3e38), "bound/not-finite"),
    "none": (lambda proof: replace(proof, outputs=proof.outputs[:0]), "document/splits"),
    "one row": (lambda proof: replace(proof, outputs=proof.outputs[:1]), "document/splits"),
    "few": (lambda proof: replace(proof, outputs=proof.outputs[:, 1:]), "document/splits"),
    "flat": (lambda proof: replace(proof, outputs=proof.outputs[..., 0]), "document/splits"),
    "a layer less": (lambda proof: replace(proof, hidden=proof.hidden[:1]), "document/splits"),
    "a layer more": (
        lambda proof: replace(proof, hidden=[*proof.hidden, proof.hidden[1]]),
        "document/splits",
    ),
    "other layers": (lambda proof: replace(proof, hidden=proof.hidden[::-1]), "document/splits"),
    "no splits": (lambda proof: _cut(proof, []), "document/splits"),
    "one tree": (lambda proof: _cut(proof, [LEAF]), "document/splits"),
    "three trees": (lambda proof: _cut(proof, [LEAF] * 3), "document/splits"),
    "a tree without its end": (lambda proof: _cut(proof, [LEAF, [0, 0], LEAF]), "document/splits"),
    "a split without slopes": (
        lambda proof: _cut(proof, [LEAF, [0, 0], LEAF, LEAF]),
        "document/splits",
    ),
    "no such element": (lambda proof: _cut(proof, [[13, 0], *[LEAF] * 3]), "document/splits"),
    "a negative element": (lambda proof: _cut(proof, [[-1, 0], *[LEAF] * 3]), "document/splits"),
    "a level below": (lambda proof: _cut(proof, [[0, -1], *[LEAF] * 3]), "document/splits"),
    "the last level": (lambda proof: _cut(proof, [[0, 7], *[LEAF] * 3]), "document/splits"),
    "twice": (lambda proof: _cut(proof, [[0, 0], [0, 0], *[LEAF] * 4]), "document/splits"),
    "half a level": (
        lambda proof: replace(proof, cuts=np.array([[0, 0.5], *[LEAF] * 3])),
        "document/splits",
    ),
    "flat splits": (lambda proof: replace(proof, cuts=np.array(LEAF * 2)), "document/splits"),
    "other signs": (lambda proof: replace(proof, outputs=-proof.outputs), "claim/too-small"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_slopes_are_rejected(name: str) -> None:
    grid = GRIDS[0]
    both, bound, proof = proved(1, grid)
    claim = apart(Fraction(bound * 1.000001))
    recheck_fixed_point(both, grid, LOW, HIGH, claim, proof)
    edit, reason = FORGED[name]
    with pytest.raises(Rejected, match=reason):
        recheck_fixed_point(both, grid, LOW, HIGH, claim, edit(proof))


@pytest.mark.parametrize(
    ("step", "most"), [(0.3, 4), (0.0, 4), (-0.5, 4), (float("nan"), 4), (0.5, 0), (0.5, 2**17)]
)
def test_grid_must_be_a_power_of_two_with_few_levels(step: float, most: int) -> None:
    with pytest.raises(Rejected, match="document/splits"):
        Grid(step, most)


def test_equal_networks_have_no_difference() -> None:
    grid = GRIDS[0]
    both, bound, proof = proved(0, grid)
    with pytest.raises(Rejected, match="document/splits"):
        recheck_fixed_point(both[:1], grid, LOW, HIGH, apart(Fraction(bound * 2)), proof)


@pytest.mark.parametrize("grid", GRIDS)
def test_replayed_run_rounds_hidden_values(grid: Grid) -> None:
    both = networks(2, grid.step)
    for point in points(20):
        f = hidden_and_outputs(both[0], point, None)[1][0]
        error = abs(hidden_and_outputs(both[1], point, grid)[1][0] - f)
        above = error + Fraction(1, 10**9)
        assert replay(both, LOW, HIGH, apart(error), point, grid)
        assert not replay(both, LOW, HIGH, apart(above), point, grid)


@pytest.mark.parametrize(
    ("value", "level"),
    [(Fraction(1, 8), 1), (Fraction(1, 8) - Fraction(1, 10**30), 0), (-5, 0), (99, 7)],
)
def test_halves_are_rounded_upward(value: Fraction, level: int) -> None:
    assert Grid(0.25, 7).level(Fraction(value)) == level
