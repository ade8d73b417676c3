"""Benchmarks of other projects: result tables, and our answers on small networks."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import equivalence, neurodiff_splits, peers, peers_blocks, qebverif, qebverif_search
from bench.equivalence_peers import BOX, Answer, Pair, product, vnnlib
from bench.qebverif_bounds import THOROUGH, FixedPointPair
from kcdsl_certs.recheck.linear_bounds.constraints import _exactly

HELD, BROKEN, OPEN = Answer(True), Answer(False), Answer(None, "too slow")
Layers = list[tuple[torch.Tensor, torch.Tensor]]


def layers(*sizes: int, seed: int = 1, lift: float = 0.0) -> Layers:
    """Return random weights with mean `lift`, and biases."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            lift + 0.5 * torch.randn(n, m, generator=generator),
            0.2 * torch.randn(n, generator=generator),
        )
        for m, n in pairwise(sizes)
    ]


# --- ACAS-Xu --------------------------------------------------------------------------------------


def test_row_counts_decisions_and_reasons_of_open_queries() -> None:
    found = {"splits": {"a": HELD, "b": BROKEN}, "marabou": {"a": OPEN, "b": OPEN}}
    ours, theirs = equivalence._rows(found, 20, ["vibecheck"])
    assert (ours.value, theirs.value) == (2, 0)
    assert "1 equivalent, 1 not, of 2" in ours.conditions
    assert "not installed: vibecheck" in ours.conditions
    assert "2 open: too slow" in theirs.conditions


def test_contradictory_answers_are_reported() -> None:
    with pytest.raises(SystemExit, match="contradict"):
        equivalence._rows({"splits": {"a": HELD}, "vnnlib": {"a": BROKEN}}, 20)
    found = {"splits": {"a": HELD, "b": OPEN}, "marabou": {"a": BROKEN, "b": BROKEN}}
    ours, theirs = equivalence._rows(found, 20)
    assert "contradicts" not in ours.conditions
    assert theirs.conditions.endswith("contradicts a confirmed answer: a")


def test_perturbed_copy_is_determined_by_its_seed() -> None:
    original = layers(5, 60, 5)
    first, again, other = (equivalence.perturbed(original, seed) for seed in (1, 1, 2))
    moved = first[0][0] - original[0][0]
    assert torch.equal(first[0][0], again[0][0])
    assert not torch.equal(first[0][0], other[0][0])
    assert 0.0008 < float(moved.std()) < 0.0012
    assert first[1][1].dtype == torch.float32
    assert not torch.equal(first[1][1], original[1][1])


@pytest.mark.full
@pytest.mark.parametrize(("change", "held"), [(0.001, True), (0.5, False)])
def test_our_methods_agree_on_a_small_pair(change: float, held: bool) -> None:
    first = layers(5, 6, 5)
    second = [(w, b.clone()) for w, b in first]
    second[-1][1][3] += change
    networks: Pair = (first, second)
    x = torch.tensor([[float(low) for low, _ in BOX]]).double()
    assert float(product(networks)(x)[0, 3].detach()) == pytest.approx(change, abs=1e-6)
    for found in (equivalence._splits(networks, 20), vnnlib(networks, 20)):
        assert found.equivalent is held, found


# --- NeuroDiff ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bound", "verdict"), [(0.5, "proved"), (1e-6, "counterexample")])
def test_differences_of_images_are_decided(bound: float, verdict: str) -> None:
    first = layers(6, 5, 3)
    second = [((w * 64).round() / 64, b) for w, b in first]
    case = {
        "image": [0, 255, 100, 30, 2, 200],
        "published": {"lower": [-bound, 0.0, 0.0], "upper": [0.0, bound / 2, 0.0]},
    }
    found, _ = neurodiff_splits.decided([first, second], case, 3, Fraction(1))
    assert found == verdict


def test_box_is_clipped_to_the_pixel_range() -> None:
    low, high = neurodiff_splits.ends_of([0, 2, 100, 254], 3)
    assert low == [0, 0, Fraction(97, 255), Fraction(251, 255)]
    assert high == [Fraction(3, 255), Fraction(5, 255), Fraction(103, 255), 1]


# --- QEBVerif -------------------------------------------------------------------------------------

SIZES = (6, 8, 7, 3)
IMAGE = [0, 255, 100, 30, 2, 200]


def in_integers(given: Layers, bits: int, pixels: list[int]) -> list[Fraction]:
    """Run the quantised network by the definition of its paper, in integers."""
    h = [Fraction(p, 256) for p in pixels]
    for number, (weight, bias) in enumerate(given):
        sums = []
        for row, b in zip(weight.tolist(), bias.tolist(), strict=True):
            codes = [stored(v, bits, bits - 1) for v in row]
            total = sum((c * x for c, x in zip(codes, h, strict=True)), Fraction(0))
            sums.append(total + stored(b, bits, bits - 2))
        if number < len(given) - 1:
            scale = 2 ** (bits - 2)
            whole = [int(v * scale + Fraction(1, 2)) if v > 0 else 0 for v in sums]
            sums = [Fraction(min(v, 2**bits - 1), scale) for v in whole]
        h = sums
    return h


def stored(value: float, bits: int, after: int) -> Fraction:
    scaled = Fraction(value) * 2**after
    whole = int(abs(scaled) + Fraction(1, 2)) * (1 if scaled >= 0 else -1)
    return Fraction(min(max(whole, -(2 ** (bits - 1))), 2 ** (bits - 1) - 1), 2**after)


def images(count: int) -> list[list[int]]:
    draw = random.Random(3)
    low, high = qebverif_search.whole_ends(IMAGE)
    return [[draw.randint(a, b) for a, b in zip(low, high, strict=True)] for _ in range(count)]


@pytest.mark.parametrize("bits", [4, 6, 10])
def test_quantised_run_equals_the_integer_run(bits: int) -> None:
    given = layers(*SIZES, lift=0.5)  # some hidden values are clipped, some weights too
    served = qebverif_search.quantised(given, bits)
    (_, other), grid = qebverif.fixed_point(given, bits)
    shown = [[(weight.numpy(), bias.numpy()) for weight, bias in other]] * 2
    for pixels in images(10):
        found = qebverif_search.quantised_run(served, bits, torch.tensor([pixels]).double())
        expected = in_integers(given, bits, pixels)
        assert [Fraction(v) for v in found[0].tolist()] == expected
        assert _exactly(shown[1], grid, [Fraction(p, 255) for p in pixels]) == expected


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("lift", [0.0, 0.5])
def test_quantised_runs_stay_in_their_interval(bits: int, lift: float) -> None:
    given = layers(*SIZES, lift=lift)
    networks, grid = qebverif.fixed_point(given, bits)
    pair = FixedPointPair(networks, grid, *neurodiff_splits.ends_of(IMAGE, 3))
    top = grid.step * grid.most
    assert bool((pair.ranges[-1].other[1] > top).any()) is (lift > 0)
    served = qebverif_search.quantised(given, bits)
    errors = [
        qebverif_search.difference(given, served, bits, torch.tensor([pixels]).double())[0]
        for pixels in images(40)
    ]
    ends = zip(*qebverif_search.whole_ends(IMAGE), strict=True)
    for label in range(SIZES[-1]):
        low, high = qebverif.bounded(pair, label)[0]
        largest, pixels, _ = searched(given, bits, label, qebverif_search.Effort(4, 20, 1))
        assert max(-low, high) >= largest
        assert all(low <= float(error[label]) <= high for error in errors)
        assert all(a <= x <= b for x, (a, b) in zip(pixels, ends, strict=False))


def searched(
    given: Layers, bits: int, label: int, effort: qebverif_search.Effort
) -> tuple[float, list[int], float]:
    search = qebverif_search.Search.of(given, bits, IMAGE, label, effort)
    return search.attacked((1.0, -1.0), math.inf)


def test_each_step_of_the_search_raises_the_difference() -> None:
    given, efforts = layers(*SIZES), ((12, 0, 0), (12, 100, 0), (12, 100, 2))
    random_images, annealed, climbed = (
        sum(searched(given, 4, k, qebverif_search.Effort(*one))[0] for k in range(SIZES[-1]))
        for one in efforts
    )
    assert random_images < annealed < climbed


@pytest.mark.parametrize("bits", [4, 8])
def test_the_softened_rounding_becomes_the_rounding(bits: int) -> None:
    step, most = qebverif_search.hidden_format(bits)
    levels = torch.linspace(-2, most / step + 2, 997, dtype=torch.float64)
    middles = levels[((levels % 1) - 0.5).abs() > 0.1] * step
    soft = qebverif_search.softened(middles, bits, 0.005)
    assert bool(((soft - qebverif_search.hidden_values(middles, bits)).abs() < 1e-6 * step).all())
    jump = torch.tensor([1.5 - 1e-9, 1.5 + 1e-9]).double() * step
    assert float(qebverif_search.softened(jump, bits, 0.2).diff()) < 1e-6 * step


def test_answers_are_confirmed_by_the_checker(monkeypatch: pytest.MonkeyPatch) -> None:
    given = layers(*SIZES)
    networks, grid = qebverif.fixed_point(given, 4)
    pair = FixedPointPair(networks, grid, *neurodiff_splits.ends_of(IMAGE, 3))
    (low, high), proof = qebverif.bounded(pair, 0)
    above = int(max(-low, high)) + 1
    assert qebverif.decided(given, 4, IMAGE, 0, [0, above])[1] == {0: False, above: True}
    monkeypatch.setattr(qebverif, "replay", lambda *_: False)
    monkeypatch.setattr(qebverif, "bounded", lambda *_: ((-1e-9, 1e-9), proof))
    found = qebverif.decided(given, 4, IMAGE, 0, [0, 1])[1]
    assert found == {0: None, 1: None}


@pytest.mark.full
def test_splits_decide_what_one_bound_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    given = layers(6, 30, 3)
    networks, grid = qebverif.fixed_point(given, 4)
    pair = FixedPointPair(networks, grid, *neurodiff_splits.ends_of(IMAGE, 3), THOROUGH)
    size = max(map(abs, qebverif.bounded(pair, 0)[0]))
    limit: Any = Fraction(size - (size - searched(given, 4, 0, qebverif_search.LONG)[0]) / 5)
    monkeypatch.setattr(qebverif, "SPLITS", {1: qebverif.Splits(0.5, 0, 0.5, 5000)})
    assert qebverif.decided(given, 4, IMAGE, 0, [limit])[1] == {limit: True}
    monkeypatch.setattr(qebverif, "SPLITS", {1: qebverif.Splits(0.5, 0, 0.5, 2)})
    assert qebverif.decided(given, 4, IMAGE, 0, [limit])[1] == {limit: None}


def test_published_table_is_parsed(tmp_path: Path) -> None:
    text = (
        " ,P1: 784_100_10,Q bit: 4\n ,Sample ID, ,3236, , ,5656, \n ,,Interval,Result,Time,,,\n"
        'Error=1,DRA,NA,NA,NA," [-3.5e-01, 0.6].\n",Unknown,1.3\n'
        ' ,DRA+MILP,NA,NA,Timeout," [-0.35, 0.6].\n"," True\n"," 2\n"\n'
        " ,DRA+MILP+Diff(sym),NA,NA,Timeout,NA,NA,Timeout\n \n"
        'Error=2,DRA," [-2.5, 0.6].\n",Unknown,1.3,NA,NA,NA\n'
        ' ,DRA+MILP," [-2.5, 0.6].\n"," False\n"," 2\n",NA,NA,Timeout\n'
    )
    (tmp_path / "table.csv").write_text(text)
    first, second = qebverif.published(tmp_path / "table.csv")
    assert (first.network, first.bits, first.image) == ("P1: 784_100_10", 4, 3236)
    assert (first.interval, first.solved) == ((-2.5, 0.6), {1: None, 2: False})
    assert (second.interval, second.solved) == ((-0.35, 0.6), {1: True, 2: None})


# --- blocks ---------------------------------------------------------------------------------------

CASE = peers_blocks.Case("tiny LM", "norm_0", "bfloat16, casts any", 6)


def measured(**values: float) -> dict[str, peers_blocks.Measured]:
    return {name: peers_blocks.Measured(value) for name, value in values.items()}


def test_own_bound_below_a_run_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="affine"):
        list(peers_blocks._figures(CASE, measured(attack=2.0, interval=3.0, affine=1.9)))


def test_peer_bound_below_a_run_is_reported() -> None:
    found = measured(attack=2.0, interval=3.0, affine=2.5, crown=1.9)
    found["z3"] = peers_blocks.Measured(float("inf"), "too large")
    attack, *rows = peers_blocks._figures(CASE, found)
    assert "crown: below the run, unsound" in attack.conditions
    assert "z3: too large" in attack.conditions
    assert [row.value for row in rows] == [1.5, 1.25, 0.95]


@pytest.mark.full
def test_bounds_of_a_norm_of_the_tiny_model_are_above_its_run() -> None:
    """Each in this process, without the limits that a benchmark sets."""
    factory = peers_blocks.FACTORIES[CASE.model](peers_blocks.KERNELS[CASE.kernel])
    tokens = tuple(b"A cat ")
    problem, centre = factory.problem(CASE.block, tokens), factory.centre(CASE.block, tokens)
    radius = torch.zeros(1, 1, dtype=torch.float64)
    found = {
        method: peers_blocks._work(problem, centre, radius, method)()
        for method in ("attack", "interval", "affine", "ibp", "crown")
    }
    assert 0 < found["attack"] <= min(found["affine"], found["ibp"], found["crown"])
    assert found["crown"] <= found["ibp"]


# --- one table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "/nonexistent"])
def test_section_without_data_is_omitted(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KCDSL_ACAS", folder)
    monkeypatch.setattr("sys.argv", ["peers", "--only", "acas"])
    assert peers.main() == 2
    shown = capsys.readouterr()
    assert "acas is left out: set KCDSL_ACAS" in shown.err
    assert shown.out == ""
