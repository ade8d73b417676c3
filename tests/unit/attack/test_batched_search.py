"""Batched ascent with casts to nearest; smoothed gradients by secants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.numerics.formats import FORMATS
from kcdsl.model.presets import resolve
from kcdsl_backends.attack import attack, batched_search
from kcdsl_backends.attack.batched_search import Batch, SmoothedGradient, ValueRanges, widths_of
from kcdsl_backends.attack.gradient_ascent import Ascent
from kcdsl_backends.attack.operations import straight_through
from kcdsl_backends.attack.runs import Attack, attack_of, record_run, run_of
from kcdsl_backends.attack.simulation import Overflowed, Simulator
from kcdsl_backends.drift.boxes.state import StoredParameters

FP8: dict[str, Any] = {"casts": "nearest", "activations": {"format": "fp8_e4m3", "scale": "none"}}
SUMS: dict[str, Any] = {"accumulate": "float64"}
WIDTH = 24


def simulator(weight: Tensor, rows: int = 1, **numerics: Any) -> Simulator:
    out, width = weight.shape
    graph = BlockGraph(
        "mlp_0",
        (
            Node("w", "param", (), (out, width), {"key": "w"}),
            Node("x", "input", (), (rows, width)),
            Node("y", "linear", ("x", "w"), (rows, out)),
        ),
        "y",
        {},
        (rows, width),
    )
    spec = resolve({"preset": "torch-eager"} | numerics)
    return Simulator(graph, spec, StoredParameters({"w": weight}, {}, spec, torch.device("cpu")))


def narrow(radius: float) -> Tensor:
    return torch.full((1, 1), radius, dtype=torch.float64)


def steps_problem() -> tuple[tuple[Simulator, Simulator], Tensor, Tensor, float]:
    """Return a linear with fp8 against exact input, and its largest possible drift.

    Every number lies below a boundary between two codes, by less than the radius.
    """
    generator = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, (1, WIDTH), generator=generator).double() * 2 - 1
    edges = (1 + (torch.randint(0, 8, (1, WIDTH), generator=generator) + 0.5) / 8).double()
    centre = (signs * (edges - 2.0**-8)).float().double()
    weight = torch.sign(torch.randn(1, WIDTH, generator=generator))
    radius = narrow(2.0**-7)
    form = FORMATS["fp8_e4m3"]
    grid = torch.linspace(-1, 1, 4097, dtype=torch.float64).reshape(-1, 1)
    x = centre + radius * grid
    off = (straight_through(x, form.nearest) - x) * weight.double()
    best = float(torch.maximum(off.amax(0).sum(), -off.amin(0).sum()))
    kernels = simulator(weight, **SUMS), simulator(weight, **SUMS, **FP8)
    return kernels, centre, radius, best


def test_batches_find_the_optimum_where_gradients_vanish() -> None:
    """Each number must cross to its own side of a boundary: one optimum among 2^24."""
    kernels, centre, radius, best = steps_problem()
    alone = attack(*kernels, "inf", centre, radius, batches=0)
    found = attack(*kernels, "inf", centre, radius, batches=1)
    assert alone.value < 0.9 * best
    assert 0.95 * best < found.value <= best * (1 + 1e-6)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["inf", "2", "span"])
def test_result_of_a_batch_is_reproduced_bitwise(kind: str) -> None:
    kernels, centre, radius, _ = steps_problem()
    one, two = kernels
    found = attack(one, two, kind, centre, radius, seed=4)
    assert found == attack(one, two, kind, centre, radius, seed=4)
    assert found.run is not None
    again = run_of(record_run(found.run), {"train": one, "infer": two})
    assert attack_of(again, one, two, kind) == found


QUANTISED = {"format": "fp8_e4m3", "scale": "per_tensor"}
UNIT: dict[str, Any] = {"compute": "bfloat16", "casts": "nearest", "tensor_core": "ampere_16"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("ulps", "numerics"),
    [*((ulps, {"casts": "nearest", "activations": QUANTISED}) for ulps in (0.3, 1.4)), (300, UNIT)],
)
def test_every_input_of_a_batch_is_a_float32_inside_the_region(
    ulps: float, numerics: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    centre = torch.tensor([[1.0, 0.5, -0.25], [1.5, 0.0, 3.0]], dtype=torch.float64)
    radius = torch.tensor([[ulps], [0.0]], dtype=torch.float64) * 2.0**-24
    weight = torch.tensor([[1.0, -2.0, 0.5]])
    kernels = simulator(weight, 2), simulator(weight, 2, **numerics)
    tried: list[Tensor] = []
    original = Simulator.run

    def run(self: Simulator, x: Tensor, *rest: Any) -> Tensor:
        tried.append(x.detach())
        return original(self, x, *rest)

    monkeypatch.setattr(Simulator, "run", run)
    attack(*kernels, "inf", centre, radius, candidates=1, rounds=1, restarts=0, batches=0)
    alone = len(tried)
    attack(*kernels, "inf", centre, radius, candidates=1, rounds=1, restarts=0)
    assert len(tried) > 2 * alone + 10
    assert any(x.dim() == 3 for x in tried) is kernels[1].batchable
    assert kernels[1].batchable is (numerics is not UNIT)
    for x in tried:
        assert bool(((x - centre).abs() <= radius).all())
        assert bool((x == x.float().double()).all())
    assert any(bool((x != centre).any()) for x in tried)


def test_points_and_kernels_without_steps_use_no_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels, centre, radius, _ = steps_problem()
    called: list[int] = []

    def counted(*arguments: Any) -> None:
        called.append(arguments[2])

    monkeypatch.setattr("kcdsl_backends.attack.batched_ascent", counted)
    attack(*kernels, "inf", centre, radius, batches=3)
    assert called == [3]
    attack(*kernels, "inf", centre, torch.zeros_like(radius))
    free = simulator(torch.ones(1, WIDTH), compute="bfloat16")
    assert not free.steps
    attack(free, free, "inf", centre, radius)
    assert called == [3]


@pytest.mark.parametrize("batches", [0, 1])
def test_region_without_float32_numbers_has_no_attack(batches: int) -> None:
    kernels, centre, radius, _ = steps_problem()
    nothing = torch.full_like(centre, math.nan)
    with pytest.raises(Overflowed):
        attack(*kernels, "inf", nothing, radius, batches=batches)


@pytest.mark.parametrize("radius", [-1.0, math.nan])
def test_only_the_centre_of_a_point_region_is_tried(radius: float) -> None:
    kernels, centre, _, _ = steps_problem()
    found = attack(*kernels, "inf", centre, narrow(radius))
    assert found.run is not None
    assert found.run.x is not None
    assert torch.equal(found.run.x, centre)


@pytest.mark.full
def test_overflowing_members_are_dropped_and_others_kept() -> None:
    """65504 is the largest float16 number; a part of the region overflows."""
    centre = torch.tensor([[65500.0, 1.0, 2.0]], dtype=torch.float64)
    weight = torch.tensor([[0.125, -1.0, 0.5]])
    kernels = simulator(weight), simulator(weight, compute="float16", casts="nearest")
    ascent = Ascent(*kernels, "inf", centre, narrow(100.0))
    ascent.drift_of(ascent.zero())
    generator = torch.Generator().manual_seed(0)
    inside, outside = ascent.zero(), ascent.zero()
    outside["x", "x"][0, 0] = 1.0
    members = [(start, (0, 1.0)) for start in (inside, outside, inside)]
    batch = Batch.of(ascent, widths_of(ascent, generator), members)
    assert batch.objectives.isinf().tolist() == [False, True, False]
    gradients, objectives = batch.gradients(batch.symbols, torch.ones(3, dtype=torch.float64))
    assert torch.equal(objectives, batch.objectives)
    assert bool((gradients["x", "x"][1] == 0).all())
    assert bool((gradients["x", "x"][0] != 0).any())
    assert len(list(batch.best(3))) == 2
    found = attack(*kernels, "inf", centre, narrow(100.0))
    assert found.run is not None
    assert found.run.x is not None
    assert float(found.run.x.amax()) < 65520


def test_selection_replaces_the_worse_half() -> None:
    kernels, centre, radius, _ = steps_problem()
    ascent = Ascent(kernels[0], kernels[1], "inf", centre, radius)
    starts = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        start = ascent.zero()
        start["x", "x"] += value
        starts.append((start, (0, 1.0)))
    batch = Batch.of(ascent, widths_of(ascent, torch.Generator()), starts)
    batch.objectives = torch.tensor([3.0, 1.0, 5.0, -math.inf, 4.0], dtype=torch.float64)
    batch.targets = [(index, 1.0) for index in range(5)]
    assert batch.select().tolist() == [0, 2, 2, 4, 4]
    assert batch.objectives.tolist() == [3.0, 5.0, 5.0, 4.0, 4.0]
    assert [target[0] for target in batch.targets] == [0, 2, 2, 4, 4]
    assert batch.symbols["x", "x"][:, 0, 0].tolist() == [0.0, 0.5, 0.5, 1.0, 1.0]


def test_member_rejects_a_worse_step() -> None:
    kernels, centre, radius, _ = steps_problem()
    ascent = Ascent(kernels[0], kernels[1], "inf", centre, radius)
    members = [(ascent.zero(), (0, 1.0)), (ascent.zero(), (0, -1.0))]
    batch = Batch.of(ascent, widths_of(ascent, torch.Generator()), members)
    before = batch.objectives.clone()
    moved = {**batch.symbols, ("x", "x"): torch.ones_like(batch.symbols["x", "x"])}
    batch.try_move(moved)
    gained = batch.objectives > before
    assert gained.tolist().count(True) == 1, "what one direction gains the other loses"
    assert bool((batch.symbols["x", "x"][gained] == 1).all())
    assert bool((batch.symbols["x", "x"][~gained] == 0).all())


def test_large_blocks_have_few_members() -> None:
    centre = torch.zeros(1, WIDTH, dtype=torch.float64)
    kernel = simulator(torch.ones(1, WIDTH), compute="bfloat16", casts="nearest")
    ascent = Ascent(kernel, kernel, "inf", centre, narrow(1.0))
    assert batched_search._batch_size(ascent) == batched_search._MEMBERS
    ascent.shapes["x", "x"] = (2**12, 2**12)
    assert batched_search._batch_size(ascent) == 2
    alone = simulator(torch.ones(1, WIDTH), **UNIT)
    assert (
        batched_search._batch_size(Ascent(kernel, alone, "inf", centre, narrow(1.0)))
        == batched_search._ALONE
    )


def rounded(value: Tensor) -> Tensor:
    return torch.round(value)


def test_secant_slope_is_large_only_near_a_step() -> None:
    value = torch.tensor([0.2, 0.45, 0.45, 0.3], dtype=torch.float64, requires_grad=True)
    half = {"a": torch.tensor([0.1, 0.1, 0.0, 3.2], dtype=torch.float64)}
    found = SmoothedGradient(half, torch.tensor(1.0, dtype=torch.float64))("a", rounded, value)
    assert found.tolist() == [0.0, 0.0, 0.0, 0.0]
    (slope,) = torch.autograd.grad(found.sum(), value)
    torch.testing.assert_close(slope, torch.tensor([0.0, 5.0, 1.0, 7 / 6.4]).double())


def test_secant_width_is_per_run() -> None:
    value = torch.tensor([[0.4], [0.4]], dtype=torch.float64, requires_grad=True)
    half = {"a": torch.tensor([1.0], dtype=torch.float64)}
    factor = torch.tensor([0.05, 0.2], dtype=torch.float64)
    (slope,) = torch.autograd.grad(SmoothedGradient(half, factor)("a", rounded, value).sum(), value)
    torch.testing.assert_close(slope, torch.tensor([[0.0], [2.5]]).double())


def test_secant_falls_back_to_slope_one() -> None:
    def limited(value: Tensor) -> Tensor:
        if bool((value > 1).any()):
            raise Overflowed("above 1")
        return torch.round(value)

    value = torch.tensor([0.75], dtype=torch.float64, requires_grad=True)
    factor = torch.tensor(1.0, dtype=torch.float64)
    for half in ({}, {"a": torch.tensor([0.5], dtype=torch.float64)}):
        found = SmoothedGradient(half, factor)("a", limited, value)
        assert found.tolist() == [1.0]
        assert torch.autograd.grad(found.sum(), value)[0].tolist() == [1.0]


def test_recorded_ranges_equal_the_observed_values() -> None:
    reaches = ValueRanges()
    for value in ([1.0, 2.0], [0.0, 5.0]):
        assert reaches("a", rounded, torch.tensor(value)).tolist() == value
    reaches("a", rounded, torch.tensor([[4.0, 2.0], [-2.0, 3.0]]))
    assert reaches.widths()["a"].tolist() == [3.0, 1.5]


def test_batch_runs_after_the_unbatched_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch runs last, so the results of the unbatched search are included."""
    kernels, centre, radius, _ = steps_problem()
    order: list[str] = []
    original = Ascent.drift_of

    def drift_of(self: Ascent, symbols: Any) -> Tensor:
        order.append("alone")
        return original(self, symbols)

    def batch(*arguments: Any) -> None:
        order.append("batch")

    monkeypatch.setattr(Ascent, "drift_of", drift_of)
    monkeypatch.setattr("kcdsl_backends.attack.batched_ascent", batch)
    found: Attack = attack(*kernels, "inf", centre, radius, samples=3)
    assert order.index("batch") == len(order) - 1 > 20
    assert found == attack(*kernels, "inf", centre, radius, samples=3, batches=0)


def test_index_of_the_best_run() -> None:
    _, centre, _, _ = steps_problem()
    weight = torch.stack([torch.zeros(WIDTH), torch.ones(WIDTH), -torch.ones(WIDTH)])
    x = torch.cat([centre.abs() * 0.01, centre.abs()])
    kernels = simulator(weight, 2, **SUMS), simulator(weight, 2, **SUMS, **FP8)
    ascent = Ascent(*kernels, "inf", x, narrow(0.0))
    drift = ascent.drift_of(ascent.zero())
    position, sign = ascent.place()
    assert position == int(drift.abs().argmax()) >= 3
    assert sign * float(drift.flatten()[position]) == float(drift.abs().amax())
    assert ascent.best().row == (1,)
