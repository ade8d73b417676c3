"""Ascent of one functional of the drift, over rounding symbols and over the input in its box.

A step linearises both simulations at the current symbols. Its candidates move all symbols to the
signs of the gradient, then those with the largest predicted gain, then all of them part of the way.
The first candidate with a gain is accepted. The ascent ends if no candidate gains or no gain is
predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kcdsl_backends.attack.runs import SIDES, STEPS, Attack, RunPair, functional, measured
from kcdsl_backends.attack.simulation import WITHIN, Overflowed, Simulator

Key = tuple[str, str]
"""A kernel and the name of one of its symbols; ("x", "x") for the input."""
Symbols = dict[Key, Tensor]
_SHARES = (0.5, 0.25, 0.0625)
"""Shares of the predicted gain that the changed symbols of a candidate step make up."""
_REDRAWN = 0.03
"""Share of the elements of an input that a random-walk step draws again."""
_LEAST_GAIN = 1e-6
"""Relative gain below which an ascent ends."""


@dataclass(slots=True)
class Ascent:
    """The search space of one block and region, and the best run found in it.

    `seen` is the largest magnitude of the drift of every output element over all runs, `leader`
    holds the symbols of the best run.
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
        """Return whether the region is more than a point, so that the input may vary."""
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
        """Return the flat index and the sign of the largest drift of the best run."""
        best = self.best()
        row = 0
        for index, size in zip(best.row, self.seen.shape, strict=False):
            row = row * size + index
        sign = 1.0 if best.infer_value >= best.train_value else -1.0
        return row * self.seen.shape[-1] + best.column, sign

    def drift_of(self, symbols: Symbols) -> Tensor:
        """Return the drift of a run (0 on overflow) and record the run if it is the best so far."""
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

    def linear_estimate(self, samples: int, generator: torch.Generator) -> Tensor:
        """Return a first-order estimate of the largest drift of every output element.

        It is |drift| + ‖gradient‖₁ without roundings. The norm is estimated for all elements at
        once: the product of a gradient with independent standard Cauchy numbers is Cauchy with the
        1-norm as scale, and the scale is the median of its magnitude.
        """
        leaves = {key: value.requires_grad_(True) for key, value in self.zero().items()}
        try:
            out_train, out_infer = self.run_of(leaves).outputs(self.train, self.infer)
        except Overflowed:
            return self.seen
        at = torch.zeros_like(out_infer, requires_grad=True)
        # Jᵀ·at as a function of `at`: its derivative in a direction d is J·d
        adjoint = torch.autograd.grad(
            out_infer - out_train, list(leaves.values()), at, create_graph=True, allow_unused=True
        )
        used = [part for part in adjoint if part is not None and part.requires_grad]
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
        """Maximise sign·drift of the output element `position`; return the objective reached."""
        _, objective_value = ascend(
            symbols,
            lambda at: float(self.objective(self.drift_of(at), position, sign)),
            lambda at: self._gradient(at, position, sign),
            rounds,
        )
        return objective_value

    def sample(self, count: int, generator: torch.Generator) -> None:
        """Measure inputs of the region with all rounding symbols at 0.

        `count` inputs are drawn uniformly and a quarter as many at corners. A random walk of
        `count` steps then starts from the best and sets some elements to the ends of their range.
        """
        if not self.moves:
            return
        shape, device = self.shapes["x", "x"], self.train.parameters.device
        best, objective_value = self.zero(), -torch.inf
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
            if reached >= objective_value:
                best, objective_value = symbols, reached

    def sign_start(self, symbols: Symbols, position: int, sign: float) -> Symbols:
        """Return the gradient signs as a start, whether or not they increase the objective."""
        gradient = self._gradient(symbols, position, sign)
        if gradient is None:
            return symbols
        return gradient_signs(symbols, gradient)

    def run_of(self, symbols: Mapping[Key, Tensor]) -> RunPair:
        """Return the run of these symbols, or a batch of runs if they have a leading dimension."""
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
        return leaf_gradients(self.objective(out_infer - out_train, position, sign), leaves)

    def objective(self, drift: Tensor, position: int, sign: float) -> Tensor:
        """Return the objective of an ascent at an output element, a differentiable scalar."""
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
    objective_of: Callable[[Symbols], float],
    gradient_of: Callable[[Symbols], Symbols | None],
    rounds: int,
) -> tuple[Symbols, float]:
    """Run an ascent as the module docstring describes; return the last symbols and objective."""
    objective_value = objective_of(symbols)
    for _ in range(rounds):
        gradient = gradient_of(symbols)
        if gradient is None:
            break
        for moved in _steps(symbols, gradient, objective_value):
            reached = objective_of(moved)
            if reached > objective_value + _LEAST_GAIN * abs(objective_value):
                symbols, objective_value = moved, reached
                break
        else:
            break
    return symbols, objective_value


def leaf_gradients(objective: Tensor, leaves: Symbols) -> Symbols:
    """Return the gradient of an objective; 0 for leaves that it does not depend on."""
    found = torch.autograd.grad(objective, list(leaves.values()), allow_unused=True)
    return {
        key: torch.zeros_like(leaf) if part is None else torch.nan_to_num(part)
        for (key, leaf), part in zip(leaves.items(), found, strict=True)
    }


def input_at(centre: Tensor | None, radius: Tensor, symbols: Mapping[Key, Tensor]) -> Tensor | None:
    """Return the input that symbols denote in a region, with float32 values."""
    if centre is None or ("x", "x") not in symbols:
        return centre
    return _float32_inside(centre + radius * WITHIN * symbols["x", "x"], centre, radius)


def _steps(symbols: Symbols, gradient: Symbols, objective_value: float) -> Iterator[Symbols]:
    """Yield candidate steps, largest first; none if the linearisation predicts no gain."""
    ends = gradient_signs(symbols, gradient)
    gains = {key: (ends[key] - symbols[key]) * gradient[key] for key in ends}
    ordered = torch.cat([gain.flatten() for gain in gains.values()]).sort(descending=True).values
    reached = ordered.cumsum(0)
    predicted = float(reached[-1])
    if not predicted > _LEAST_GAIN * abs(objective_value):
        return
    yield ends
    for share in _SHARES:
        place = int((reached < share * predicted).sum())
        least = ordered[min(place, ordered.numel() - 1)]
        yield {key: torch.where(gains[key] >= least, ends[key], symbols[key]) for key in ends}
        yield {key: on_grid(symbols[key] + (ends[key] - symbols[key]) * share / 2) for key in ends}


def gradient_signs(symbols: Symbols, gradient: Symbols) -> Symbols:
    """Return the signs of a gradient; symbols stay where it is 0."""
    return {
        key: torch.where(slope == 0, symbols[key], torch.sign(slope))
        for key, slope in gradient.items()
    }


def on_grid(value: Tensor) -> Tensor:
    """Round symbols to multiples of 1/STEPS, which a record stores in one byte."""
    return torch.round(value * STEPS) / STEPS


def _float32_inside(x: Tensor, centre: Tensor, radius: Tensor) -> Tensor:
    """Round to float32; take the centre for elements that rounding would move out of the region.

    Gradients pass through unchanged.
    """
    still = x.detach()
    rounded = still.float().double()
    inside = (rounded - centre).abs() <= radius
    return x + (torch.where(inside, rounded, centre) - still)
