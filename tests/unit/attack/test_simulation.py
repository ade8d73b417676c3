"""The simulator without roundings equals the block, and each symbol has its stated effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.presets import resolve
from kcdsl_backends.attack import attack, functional
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.drift.boxes.state import StoredParameters

WEIGHT = torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]])


def simulator(numerics: dict[str, str]) -> Simulator:
    graph = BlockGraph(
        "mlp_0",
        (
            Node("w", "param", (), (2, 3), {"key": "w"}),
            Node("x", "input", (), (1, 3)),
            Node("y", "linear", ("x", "w"), (1, 2)),
        ),
        "y",
        {},
        (1, 3),
    )
    spec = resolve({"preset": "torch-eager"} | numerics)
    return Simulator(graph, spec, StoredParameters({"w": WEIGHT}, {}, spec, torch.device("cpu")))


X = torch.tensor([[1.0, 0.5, -0.25]], dtype=torch.float64)
ZERO = torch.zeros(1, 1, dtype=torch.float64)


def test_simulation_without_symbols_is_exact() -> None:
    torch.testing.assert_close(simulator({}).run(X, {}), X @ WEIGHT.double().T)


def test_cast_symbol_changes_the_result_by_one_unit_roundoff() -> None:
    run = simulator({"compute": "bfloat16"})
    assert set(run.symbol_shapes()) == {"cast x", "cast y", "sum y"}
    exact = run.run(X, {})
    moved = run.run(X, {"cast y": torch.ones(1, 2, dtype=torch.float64)})
    torch.testing.assert_close(moved, exact * (1 + 2.0**-8))


def test_nearest_rounds_to_the_format() -> None:
    run = simulator({"compute": "bfloat16", "casts": "nearest"})
    assert set(run.symbol_shapes()) == {"sum y"}
    value = run.run(X + 1e-4, {})
    torch.testing.assert_close(value, value.bfloat16().double(), rtol=0, atol=0)


def test_attack_finds_the_known_worst_case() -> None:
    """One linear, exact float32 input: each kernel's error is at most A_3,2(Σ|wx|, y) + u|y|."""
    found = attack(simulator({}), simulator({}), "inf", X, ZERO, candidates=2)
    u = 2.0**-24
    total = (X.abs() @ WEIGHT.double().abs().T)[0]
    exact = (X @ WEIGHT.double().T)[0].abs()
    summed = (3 * (total + exact) / 2 + 2 * total) * (u / (1 - 5 * u))
    worst = float((2 * (summed + u * exact)).amax())
    assert 0.99 * worst < found.value <= worst * (1 + 1e-6)


def test_float64_kernels_have_no_rounding_symbols() -> None:
    """The simulation itself rounds to float64, so an additional symbol could exceed the model."""
    exact = simulator({"compute": "float64", "accumulate": "float64"})
    assert exact.symbol_shapes() == {}
    assert attack(exact, exact, "inf", X, ZERO).value == 0.0
    mixed = simulator({"compute": "float32", "accumulate": "float64"})
    assert set(mixed.symbol_shapes()) == {"cast y"}


@pytest.mark.parametrize("ulps", [0.3, 0.6, 1.4, 5.0])
def test_every_input_tried_is_a_float32_inside_the_region(
    ulps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding to float32 may leave a ball with a radius below one unit in the last place."""
    radius = torch.full((1, 1), ulps * 2.0**-24, dtype=torch.float64)
    tried: list[torch.Tensor] = []
    original = Simulator.run

    def run(self: Simulator, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        tried.append(x.detach())
        return original(self, x, *rest)

    monkeypatch.setattr(Simulator, "run", run)
    attack(simulator({}), simulator({"compute": "bfloat16"}), "inf", X, radius)
    assert len(tried) > 4
    for x in tried:
        assert bool(((x - X).abs() <= radius).all())
        assert bool((x == x.float().double()).all())
    assert any(bool((x != X).any()) for x in tried)


def test_functionals_of_a_drift() -> None:
    drift = torch.tensor([[3.0, -4.0], [1.0, 1.0]])
    assert functional(drift, "inf").tolist() == [4.0, 1.0]
    assert functional(drift, "2").tolist()[0] == 5.0
    assert functional(drift, "span").tolist() == [7.0, 0.0]


@pytest.mark.parametrize("scale", ["per_tensor", "per_token"])
def test_uint8_ranges_are_per_group(scale: str) -> None:
    """With scales per row, small numbers keep their own steps beside a row of large ones."""
    x = torch.tensor([[100.0, -50.0, 7.0], [0.1, -0.05, 0.07]], dtype=torch.float64)
    graph = BlockGraph(
        "mlp_0",
        (
            Node("w", "param", (), (3, 3), {"key": "w"}),
            Node("x", "input", (), (2, 3)),
            Node("y", "linear", ("x", "w"), (2, 3)),
        ),
        "y",
        {},
        (2, 3),
    )
    spec = resolve(
        {
            "preset": "torch-eager",
            "casts": "nearest",
            "activations": {"format": "uint8", "scale": scale},
        }
    )
    stored = StoredParameters({"w": torch.eye(3)}, {}, spec, torch.device("cpu"))
    found = Simulator(graph, spec, stored).run(x, {})
    span = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    wide = span if scale == "per_token" else span.amax()
    assert ((found - x).abs() <= 1.001 * wide / 255).all()
    assert bool((found[1].abs() > 0).any()) is (scale == "per_token")


def test_samples_of_a_region_are_tried_and_stay_inside() -> None:
    """With casts to nearest the gradient may vanish; deterministic samples find a drift."""
    kernels = simulator({}), simulator({"compute": "bfloat16", "casts": "nearest"})
    radius = torch.full((1, 1), 2.0**-6, dtype=torch.float64)
    runs = [
        attack(
            *kernels,
            "inf",
            X,
            radius,
            candidates=1,
            rounds=0,
            restarts=0,
            samples=samples,
            batches=0,
        )
        for samples in (0, 40, 40)
    ]
    assert runs[0].value < runs[1].value == runs[2].value
    run = runs[1].run
    assert run is not None
    assert run.x is not None
    assert bool(((run.x - X).abs() <= radius).all())
    assert torch.equal(run.x, run.x.float().double())
