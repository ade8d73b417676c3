"""Ascent of one functional of the drift, over rounding symbols and over the input in its box.

Every step linearises both simulations at the current symbols and moves towards the signs of the
gradient: all of them, then those that promise most, then half of the way. The first that
gains is taken. Where nothing gains, or the linearisation promises nothing, the ascent ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kcdsl_backends.attack.runs import SIDES, STEPS, Attack, RunPair, functional, measured
from kcdsl_backends.attack.simulation import WITHIN, Overflowed, Simulator

Key = tuple[str, str]
"""A kernel with the name of one of its symbols; ("x", "x") for the input."""
Symbols = dict[Key, Tensor]
_SHARES = (0.5, 0.25, 0.0625)
"""Shares of the promised gain that the signs to be changed make up, where all are too many."""
_REDRAWN = 0.03
"""Share of the numbers of an input that a walk draws again at a time."""
_WORTH = 1e-6
"""Relative gain below which an ascent ends."""


@dataclass(slots=True)
class Ascent:
    """The search space of one block and region, and the best run found in it.

    `seen` is the largest magnitude of the drift of every output element over all runs, `leader` the
    symbols of the best run.
    """

    train: Simulator
    infer: Simulator
    kind: str
    centre: Tensor | None
    radius: Tensor
    shapes: dict[Key, tuple[int, ...]] = field(default_factory=dict)
    seen: Tensor = field(init=False)
    leader: Symbols | None = None
    _best: Attack | None = None

    def __post_init__(self) -> None:
        self.seen = torch.zeros((), device=self.train.parameters.device)
        for side, simulator in zip(SIDES, (self.train, self.infer), strict=True):
            self.shapes |= {(side, n): shape for n, shape in simulator.symbol_shapes().items()}
        if self.centre is not None and bool((self.radius > 0).any()):
            self.shapes["x", "x"] = tuple(self.centre.shape)

    @property
    def moves(self) -> bool:
        """Say whether the input may move: whether the region is more than a point."""
        return ("x", "x") in self.shapes

    def zero(self) -> Symbols:
        """Return symbols without any rounding, at the centre of the region."""
        device = self.train.parameters.device
        return {
            key: torch.zeros(shape, dtype=torch.float64, device=device)
            for key, shape in self.shapes.items()
        }

    def signs(self, generator: torch.Generator) -> Symbols:
        device = self.train.parameters.device
        return {
            key: torch.randint(0, 2, shape, generator=generator).to(device).double() * 2 - 1
            for key, shape in self.shapes.items()
        }

    def best(self) -> Attack:
        if self._best is None:
            raise Overflowed("no run that was tried stays inside of its formats")
        return self._best

    def place(self) -> tuple[int, float]:
        """Return where the best run has its largest drift, and in which direction."""
        best = self.best()
        row = 0
        for index, size in zip(best.row, self.seen.shape, strict=False):
            row = row * size + index
        sign = 1.0 if best.infer_value >= best.train_value else -1.0
        return row * self.seen.shape[-1] + best.column, sign

    def drift_of(self, symbols: Symbols) -> Tensor:
        """Simulate, keep the run if it is the best so far, return the drift; 0 on overflow."""
        run = self.run_of(symbols)
        with torch.no_grad():
            try:
                outputs = run.outputs(self.train, self.infer)
            except Overflowed:
                return torch.zeros_like(self.seen)
            found = measured(run, *outputs, self.kind)
            drift = outputs[1] - outputs[0]
        if found is None:
            return torch.zeros_like(drift)
        if self._best is None or found.value > self._best.value:
            self._best, self.leader = found, symbols
        self.seen = torch.maximum(drift.abs(), self.seen.expand_as(drift))
        return drift

    def promise(self, samples: int, generator: torch.Generator) -> Tensor:
        """Return for every output element about how far its drift may go, to first order.

        That is |drift| + Σ|slopes|, from the origin. The sum is estimated for all elements at once:
        a sum of slopes times independent Cauchy numbers is Cauchy with that scale, which is the
        median of its magnitude.
        """
        leaves = {key: value.requires_grad_(True) for key, value in self.zero().items()}
        try:
            out_train, out_infer = self.run_of(leaves).outputs(self.train, self.infer)
        except Overflowed:
            return self.seen
        at = torch.zeros_like(out_infer, requires_grad=True)
        # Jᵀ·at, as a function of `at` whose derivative in a direction is J times that direction
        pulled = torch.autograd.grad(
            out_infer - out_train, list(leaves.values()), at, create_graph=True, allow_unused=True
        )
        used = [part for part in pulled if part is not None and part.requires_grad]
        found = []
        for _ in range(samples if used else 0):
            directions = [
                torch.empty(part.shape, dtype=torch.float64).cauchy_(generator=generator)
                for part in used
            ]
            onto = [direction.to(at.device) for direction in directions]
            (slope,) = torch.autograd.grad(used, at, onto, retain_graph=True)
            found.append(slope.abs())
        if not found:
            return self.seen
        return torch.nan_to_num(torch.stack(found).median(0).values) + self.seen

    def climb(self, symbols: Symbols, position: int, sign: float, rounds: int) -> float:
        """Push the drift of the output element `position` in one direction; return how far."""
        _, height = ascend(
            symbols,
            lambda at: float(self.objective(self.drift_of(at), position, sign)),
            lambda at: self._gradient(at, position, sign),
            rounds,
        )
        return height

    def sample(self, count: int, generator: torch.Generator) -> None:
        """Try inputs of the region, without roundings but those that are sure.

        `count` drawn evenly, a quarter as many at corners; then as many as at first on a walk from
        the best, which moves some numbers of the input to other ends at a time.
        """
        if not self.moves:
            return
        shape, device = self.shapes["x", "x"], self.train.parameters.device
        best, height = self.zero(), -torch.inf
        for tried in range(2 * count + count // 4):
            if tried < count:
                drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
            else:
                drawn = torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
            drawn = drawn.to(device)
            if tried >= count + count // 4:
                some = (torch.rand(shape, generator=generator) < _REDRAWN).to(device)
                drawn = torch.where(some, drawn, best["x", "x"])
            symbols = {**self.zero(), ("x", "x"): drawn}
            reached = float(functional(self.drift_of(symbols), self.kind).amax())
            if reached >= height:
                best, height = symbols, reached

    def jump(self, symbols: Symbols, position: int, sign: float) -> Symbols:
        """Return the signs of the slopes, wherever they lead: a start on the other side of what
        would not gain at once."""
        gradient = self._gradient(symbols, position, sign)
        if gradient is None:
            return symbols
        return ends_of(symbols, gradient)

    def run_of(self, symbols: Mapping[Key, Tensor]) -> RunPair:
        """Return the run of these symbols; with one more dimension in front, of many runs."""
        x = input_at(self.centre, self.radius, symbols)
        per_side = {
            side: {name: value for (s, name), value in symbols.items() if s == side}
            for side in SIDES
        }
        return RunPair(x, per_side)

    def _gradient(self, symbols: Symbols, position: int, sign: float) -> Symbols | None:
        leaves = {key: value.clone().requires_grad_(True) for key, value in symbols.items()}
        try:
            out_train, out_infer = self.run_of(leaves).outputs(self.train, self.infer)
        except Overflowed:
            return None
        return slopes_of(self.objective(out_infer - out_train, position, sign), leaves)

    def objective(self, drift: Tensor, position: int, sign: float) -> Tensor:
        """Return what an ascent at this place makes large."""
        if self.kind == "inf":
            return sign * drift.flatten()[position]
        row = drift.reshape(-1, drift.shape[-1])[position // drift.shape[-1]]
        element = sign * row[position % row.numel()]
        if self.kind == "2":
            return row.square().sum() + 1e-3 * row.detach().abs().amax() * element
        other = (sign * row).detach().argmin()
        return element - sign * row[other]


def ascend(
    symbols: Symbols,
    height_of: Callable[[Symbols], float],
    gradient_of: Callable[[Symbols], Symbols | None],
    rounds: int,
) -> tuple[Symbols, float]:
    """Climb from some symbols as the head of this module says; return where that ends, and how high
    it is there."""
    height = height_of(symbols)
    for _ in range(rounds):
        gradient = gradient_of(symbols)
        if gradient is None:
            break
        for moved in _steps(symbols, gradient, height):
            reached = height_of(moved)
            if reached > height + _WORTH * abs(height):
                symbols, height = moved, reached
                break
        else:
            break
    return symbols, height


def slopes_of(objective: Tensor, leaves: Symbols) -> Symbols:
    """Return the gradient of an objective; 0 where it has none."""
    found = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
    return {
        key: torch.zeros_like(leaf) if part is None else torch.nan_to_num(part)
        for (key, leaf), part in zip(leaves.items(), found, strict=True)
    }


def input_at(centre: Tensor | None, radius: Tensor, symbols: Mapping[Key, Tensor]) -> Tensor | None:
    """Return the input of a region that symbols stand for, in float32."""
    if centre is None or ("x", "x") not in symbols:
        return centre
    return _float32_inside(centre + radius * WITHIN * symbols["x", "x"], centre, radius)


def _steps(symbols: Symbols, gradient: Symbols, height: float) -> Iterator[Symbols]:
    """Yield where to go from here, the boldest first; nothing where nothing is promised."""
    ends = ends_of(symbols, gradient)
    gains = {key: (ends[key] - symbols[key]) * gradient[key] for key in ends}
    ordered = torch.cat([gain.flatten() for gain in gains.values()]).sort(descending=True).values
    reached = ordered.cumsum(0)
    promised = float(reached[-1])
    if not promised > _WORTH * abs(height):
        return
    yield ends
    for share in _SHARES:
        place = int((reached < share * promised).sum())
        least = ordered[min(place, ordered.numel() - 1)]
        yield {key: torch.where(gains[key] >= least, ends[key], symbols[key]) for key in ends}
        yield {key: in_parts(symbols[key] + (ends[key] - symbols[key]) * share / 2) for key in ends}


def ends_of(symbols: Symbols, gradient: Symbols) -> Symbols:
    """Return the signs of the slopes; what has none stays."""
    return {
        key: torch.where(slope == 0, symbols[key], torch.sign(slope))
        for key, slope in gradient.items()
    }


def in_parts(value: Tensor) -> Tensor:
    """Return symbols in whole parts of 1, which a record keeps in one byte."""
    return torch.round(value * STEPS) / STEPS


def _float32_inside(x: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """Return the nearest float32 values, or the centre where rounding would leave the region.

    Gradients pass through unchanged.
    """
    still = x.detach()
    rounded = still.float().double()
    inside = (rounded - centre).abs() <= radius
    return x + (torch.where(inside, rounded, centre) - still)
