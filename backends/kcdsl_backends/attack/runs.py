"""Concrete runs of both kernels: an input, rounding symbols, orders of sums; and their drift."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kcdsl_backends.attack.simulate import Overflowed, Simulator

SIDES = ("train", "infer")
_ROUNDED = 1 - 2.0**-30
"""More than the roundings of a functional of a drift take off."""


@dataclass(frozen=True, slots=True)
class Run:
    """What fixes a run of both kernels: both simulations follow from it.

    `x` [T, D] holds float32 numbers as float64, None for a block on token ids. `symbols` and
    `orders` stand by kernel ("train", "infer"), then by the names that `Simulator` knows; a symbol
    that is left out is 0.
    """

    x: Tensor | None
    symbols: Mapping[str, Mapping[str, Tensor]]
    orders: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def outputs(self, train: Simulator, infer: Simulator) -> tuple[Tensor, Tensor]:
        """Simulate both kernels. Raises Overflowed where no kernel may run so."""
        one, two = (
            simulator.run(self.x, self.symbols.get(side, {}), self.orders.get(side))
            for side, simulator in zip(SIDES, (train, infer), strict=True)
        )
        return one, two


@dataclass(frozen=True, slots=True)
class Attack:
    """A concrete admissible pair of runs.

    `value` is the functional of its drift, rounded down: a true lower bound of the supremum. `row`
    is where that is attained, `column` the largest element there, and `train_value` and
    `infer_value` what both kernels return in it. `run` is the run itself, `record` the same as
    plain data (recording.py): one of them, or none where nobody will ask for it.
    """

    value: float
    row: tuple[int, ...]
    column: int
    train_value: float
    infer_value: float
    run: Run | None = field(default=None, repr=False, compare=False)
    record: Mapping[str, Any] | None = field(default=None, repr=False)


def functional(drift: Tensor, kind: str) -> Tensor:
    """Return the functional of every row of a drift [..., n] -> [...]."""
    match kind:
        case "inf":
            return drift.abs().amax(-1)
        case "2":
            return drift.square().sum(-1).sqrt()
        case "span":
            return drift.amax(-1) - drift.amin(-1)
        case _:
            raise ValueError(f"unknown functional {kind!r}")


def attack_of(run: Run, train: Simulator, infer: Simulator, kind: str) -> Attack | None:
    """Simulate a run and return what it attains; None where it overflows."""
    with torch.no_grad():
        try:
            outputs = run.outputs(train, infer)
        except Overflowed:
            return None
        return measured(run, *outputs, kind)


def measured(run: Run, out_train: Tensor, out_infer: Tensor, kind: str) -> Attack | None:
    """Return what a run with these outputs attains; None where they are not finite."""
    drift = out_infer - out_train
    rows = functional(drift, kind)
    if not bool(torch.isfinite(rows).all()):
        return None
    flat = int(rows.flatten().argmax())
    row = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), rows.shape))
    column = int(drift[row].abs().argmax())
    return Attack(
        float(rows[row]) * _ROUNDED,
        row,
        column,
        float(out_train[row][column]),
        float(out_infer[row][column]),
        run,
    )
