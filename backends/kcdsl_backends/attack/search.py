"""Sign iteration on the rounding symbols, and on the input inside its box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.attack.simulate import Simulator

MARGIN = 2.0**-33
"""What is taken off a found drift, relative to the output, for float64 errors of the simulation."""


@dataclass(frozen=True, slots=True)
class Attack:
    """A concrete admissible pair of runs.

    `value` is the functional of its drift, less a margin for the float64 error of the simulation:
    a true lower bound of the supremum. `row` and `column` say where the drift is largest.
    """

    value: float
    row: tuple[int, ...]
    column: int
    train_value: float
    infer_value: float


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


def attack(
    train: Simulator,
    infer: Simulator,
    kind: str,
    centre: Tensor | None,
    radius: Tensor,
    *,
    candidates: int = 3,
    rounds: int = 4,
    seed: int = 0,
    places: Sequence[int] = (),
) -> Attack:
    """Search for admissible runs of both kernels whose drift is large.

    For a few output rows and columns: start from the signs of the gradient of the drift there, and
    repeat until it stops growing. Every run tried counts, in every row.

    Args:
        centre, radius: the region, [T, D] and broadcastable; centre None for a block on token ids.
        candidates: how many places of the output to push at.
        places: places to push at before those, as indices of the flattened output: where a bound
            is largest, for instance.
        rounds: sign iterations per place and direction.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    moves_x = centre is not None and bool((radius > 0).any())
    state = _Search(train, infer, kind, centre, radius, moves_x, [], [])
    start = state.symbols(generator)
    drift = state.try_run(start)
    if not state.names:
        return state.best()
    flat = drift.abs().flatten()
    order = flat.topk(min(candidates, flat.numel())).indices.tolist()
    for position in dict.fromkeys([*places, *order]):
        for sign in (1.0, -1.0):
            symbols, best = state.zero_symbols(), -torch.inf
            for _ in range(rounds):
                symbols = state.climb(symbols, position, sign)
                value = float(functional(state.try_run(symbols), kind).amax())
                if value <= best * (1 + 1e-9):
                    break
                best = value
    return state.best()


def _float32_inside(x: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """Return the nearest float32 values, or the centre where rounding would leave the region.

    Gradients pass through unchanged.
    """
    with torch.no_grad():
        rounded = x.float().double()
        inside = (rounded - centre).abs() <= radius
        shift = torch.where(inside, rounded, centre) - x
    return x + shift


@dataclass(slots=True)
class _Search:
    train: Simulator
    infer: Simulator
    kind: str
    centre: Tensor | None
    radius: Tensor
    moves_x: bool
    names: list[tuple[str, str]]
    found: list[Attack]

    def __post_init__(self) -> None:
        self.names = [("train", n) for n in self.train.symbol_shapes()]
        self.names += [("infer", n) for n in self.infer.symbol_shapes()]
        if self.moves_x:
            self.names.append(("x", "x"))

    def _shape(self, side: str, name: str) -> tuple[int, ...]:
        if side == "x":
            assert self.centre is not None
            return tuple(self.centre.shape)
        return (self.train if side == "train" else self.infer).symbol_shapes()[name]

    def zero_symbols(self) -> dict[tuple[str, str], Tensor]:
        device = self.train.parameters.device
        return {
            key: torch.zeros(self._shape(*key), dtype=torch.float64, device=device)
            for key in self.names
        }

    def symbols(self, generator: torch.Generator) -> dict[tuple[str, str], Tensor]:
        device = self.train.parameters.device
        return {
            key: torch.randint(0, 2, self._shape(*key), generator=generator).to(device).double() * 2
            - 1
            for key in self.names
        }

    def outputs(self, symbols: dict[tuple[str, str], Tensor]) -> tuple[Tensor, Tensor]:
        x = self.centre
        if x is not None and self.moves_x:
            moved = x + self.radius * (1 - 2.0**-20) * symbols["x", "x"]
            x = _float32_inside(moved, x, self.radius)
        per_side = {
            side: {name: value for (s, name), value in symbols.items() if s == side}
            for side in ("train", "infer")
        }
        return self.train.run(x, per_side["train"]), self.infer.run(x, per_side["infer"])

    def try_run(self, symbols: dict[tuple[str, str], Tensor]) -> Tensor:
        """Run once, keep the result as a candidate, return the drift."""
        with torch.no_grad():
            out_train, out_infer = self.outputs(symbols)
            drift = out_infer - out_train
            rows = functional(drift, self.kind)
            flat = int(rows.flatten().argmax())
            row = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), rows.shape))
            column = int(drift[row].abs().argmax())
            margin = MARGIN * float(torch.maximum(out_train.abs(), out_infer.abs()).amax())
            value = max(0.0, float(rows[row]) * (1 - 1e-9) - margin)
            self.found.append(
                Attack(
                    value, row, column, float(out_train[row][column]), float(out_infer[row][column])
                )
            )
        return drift

    def climb(
        self, symbols: dict[tuple[str, str], Tensor], position: int, sign: float
    ) -> dict[tuple[str, str], Tensor]:
        """Set every symbol to the sign of the gradient of one output's drift."""
        leaves = {key: value.clone().requires_grad_(True) for key, value in symbols.items()}
        out_train, out_infer = self.outputs(leaves)
        objective = sign * self._objective(out_infer - out_train, position)
        gradients = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
        return {
            key: torch.zeros_like(value) if gradient is None else torch.sign(gradient)
            for (key, value), gradient in zip(leaves.items(), gradients, strict=True)
        }

    def _objective(self, drift: Tensor, position: int) -> Tensor:
        if self.kind == "inf":
            return drift.flatten()[position]
        row = drift.reshape(-1, drift.shape[-1])[position // drift.shape[-1]]
        if self.kind == "2":
            return (
                row.square().sum() + 1e-3 * row.detach().abs().amax() * row[position % row.numel()]
            )
        return row[position % row.numel()] - row[row.detach().argmin()]

    def best(self) -> Attack:
        return max(self.found, key=lambda a: a.value)
