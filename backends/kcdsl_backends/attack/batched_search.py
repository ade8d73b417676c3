"""Search with batches of runs, for kernels that round to nearest on regions with a width."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kcdsl_backends.attack.gradient_ascent import Ascent, Symbols, gradient_signs, on_grid
from kcdsl_backends.attack.simulation import Overflowed, Step, Through

Widths = Mapping[str, Tensor]
"""Half the range of each rounded value, by the rounding's name as in `Through`."""


@dataclass(slots=True)
class ValueRanges:
    """Apply roundings unchanged and record the elementwise minimum and maximum of each value.

    The first run must be a single run, not a batch: it fixes the shape of every value.
    """

    least: dict[str, Tensor] = field(default_factory=dict)
    most: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, step: Step, value: Tensor) -> Tensor:
        still = value.detach()
        if name not in self.least:
            self.least[name] = self.most[name] = still
        else:
            runs = still.reshape(-1, *self.least[name].shape)
            self.least[name] = torch.minimum(self.least[name], runs.amin(0))
            self.most[name] = torch.maximum(self.most[name], runs.amax(0))
        return step(value)

    def widths(self) -> Widths:
        """Return half the range of each value."""
        return {name: (self.most[name] - least) / 2 for name, least in self.least.items()}


@dataclass(frozen=True, slots=True)
class SmoothedGradient:
    """Apply roundings with the slope of a secant as gradient.

    `factor`, a scalar or one number for each run of a batch, multiplies all widths. With a wide
    secant the slope depends on distant rounding steps too, with a narrow one on near steps only.
    """

    half: Widths
    factor: Tensor

    def __call__(self, name: str, step: Step, value: Tensor) -> Tensor:
        """Return the rounded value with the secant slope as its gradient."""
        still = value.detach()
        rounded = step(still)
        half = self.half.get(name)
        if half is None:
            return rounded + (value - still)
        width = half * self.factor.reshape(*self.factor.shape, *[1] * half.dim())
        try:
            rise = step(still + width) - step(still - width)
        except Overflowed:
            return rounded + (value - still)
        slope = torch.where(width > 0, rise / (2 * width), torch.ones_like(rise))
        return rounded + torch.nan_to_num(slope, 1.0, 1.0, 1.0) * (value - still)


Target = tuple[int, float]
"""An element of the flattened output and the sign of the drift that is maximised."""
_RECORDED = 16
"""Runs with random signs from which the ranges of values are taken."""
_OBJECTIVES = ("", "")
"""Key of the objectives [n] in a dictionary of gradients."""
_Selection = slice | int
_Evaluation = Callable[[Symbols, _Selection], Symbols]


@dataclass(slots=True)
class Batch:
    """n candidates: symbols [n, ...], targets and objectives [n] (-inf on overflow).

    `widths` are those of rounded values in the training and in the inference kernel.
    """

    ascent: Ascent
    widths: tuple[Widths, Widths]
    symbols: Symbols
    targets: list[Target]
    objectives: Tensor

    @classmethod
    def of(
        cls,
        ascent: Ascent,
        widths: tuple[Widths, Widths],
        members: Sequence[tuple[Symbols, Target]],
    ) -> Batch:
        keys = members[0][0]
        symbols = {key: torch.stack([start[key] for start, _ in members]) for key in keys}
        device = next(iter(symbols.values())).device
        objectives = torch.full((len(members),), -math.inf, dtype=torch.float64, device=device)
        batch = cls(ascent, widths, symbols, [target for _, target in members], objectives)
        batch.try_move(symbols)
        return batch

    def gradients(self, symbols: Symbols, factors: Tensor) -> tuple[Symbols, Tensor]:
        """Return the gradients at symbols [n, ...] (0 if a run has none) and their objectives.

        Args:
            factors: [n], multipliers of the secant widths.
        """

        def work(symbols: Symbols, chosen: _Selection) -> Symbols:
            leaves = {key: value.clone().requires_grad_(True) for key, value in symbols.items()}
            own = factors[chosen].to(self.objectives.device)
            drift = self._drift(leaves, [SmoothedGradient(half, own) for half in self.widths])
            objectives = self._objectives(drift, chosen)
            found = torch.autograd.grad(objectives.sum(), list(leaves.values()), allow_unused=True)
            gradients = {
                key: torch.zeros_like(leaf) if part is None else torch.nan_to_num(part)
                for (key, leaf), part in zip(leaves.items(), found, strict=True)
            }
            return gradients | {_OBJECTIVES: objectives.detach()}

        none = {key: torch.zeros_like(value) for key, value in symbols.items()}
        gradients = self._evaluated(symbols, work, none)
        objectives = gradients.pop(_OBJECTIVES)
        return gradients, objectives

    def try_move(self, moved: Symbols) -> None:
        """Accept a member's move unless its objective decreases."""

        def work(symbols: Symbols, chosen: _Selection) -> Symbols:
            with torch.no_grad():
                return {_OBJECTIVES: self._objectives(self._drift(symbols, [None, None]), chosen)}

        self.accept(moved, self._evaluated(moved, work, {})[_OBJECTIVES])

    def accept(self, moved: Symbols, objectives: Tensor) -> None:
        """Accept moves whose given objectives are at least the now ones."""
        better = objectives >= self.objectives
        self.symbols = {
            key: torch.where(better.reshape(-1, *[1] * (value.dim() - 1)), moved[key], value)
            for key, value in self.symbols.items()
        }
        self.objectives = torch.where(better, objectives, self.objectives)

    def select(self) -> Tensor:
        """Replace the worse half of the members by copies of the better half.

        Return the source index of each member. Members that stay keep their index.
        """
        order = self.objectives.argsort(descending=True, stable=True)
        half = len(order) // 2
        source = torch.arange(len(order), device=order.device)
        source[order[len(order) - half :]] = order[:half]
        self.symbols = {key: value[source] for key, value in self.symbols.items()}
        self.objectives = self.objectives[source]
        self.targets = [self.targets[index] for index in source.tolist()]
        return source

    def best(self, count: int) -> Iterator[tuple[Symbols, Target]]:
        """Yield up to `count` members without overflow, largest objective first."""
        for index in self.objectives.argsort(descending=True, stable=True)[:count].tolist():
            if self.objectives[index] > -math.inf:
                symbols = {key: value[index] for key, value in self.symbols.items()}
                yield symbols, self.targets[index]

    def _objectives(self, drift: Tensor, chosen: _Selection) -> Tensor:
        """Return the objective of one member, or of all members, shape [n]."""
        if isinstance(chosen, int):
            return self.ascent.objective(drift, *self.targets[chosen])
        pairs = zip(drift, self.targets[chosen], strict=True)
        return torch.stack([self.ascent.objective(one, *target) for one, target in pairs])

    def _drift(self, symbols: Symbols, through: Sequence[Through | None]) -> Tensor:
        return _drift(self.ascent, symbols, through)

    def _evaluated(self, symbols: Symbols, work: _Evaluation, otherwise: Symbols) -> Symbols:
        """Evaluate all members in one batch; one by one if the kernels cannot be batched or a
        member overflows. That member gets objective -inf and its entries of `otherwise`."""
        ascent = self.ascent
        if ascent.train.batchable and ascent.infer.batchable:
            with suppress(Overflowed):
                return _finite(work(symbols, slice(None)))
        lost = torch.full_like(self.objectives, -math.inf)
        parts: list[Symbols] = []
        for index in range(len(self.targets)):
            try:
                alone = {key: value[index] for key, value in symbols.items()}
                parts.append(work(alone, index))
            except Overflowed:
                without = otherwise | {_OBJECTIVES: lost}
                parts.append({key: value[index] for key, value in without.items()})
        return _finite({key: torch.stack([part[key] for part in parts]) for key in parts[0]})


def widths_of(ascent: Ascent, generator: torch.Generator) -> tuple[Widths, Widths]:
    """Return the widths of rounded values in both kernels over runs with random signs."""
    train, infer = ValueRanges(), ValueRanges()
    for symbols in (ascent.zero(), *(ascent.signs(generator) for _ in range(_RECORDED))):
        with torch.no_grad(), suppress(Overflowed):
            _drift(ascent, symbols, (train, infer))
    return train.widths(), infer.widths()


def _drift(ascent: Ascent, symbols: Symbols, through: Sequence[Through | None]) -> Tensor:
    run = ascent.run_of(symbols)
    train = ascent.train.run(run.x, run.symbols["train"], None, through[0])
    return ascent.infer.run(run.x, run.symbols["infer"], None, through[1]) - train


def _finite(found: Symbols) -> Symbols:
    """Replace objectives that are not finite by -inf."""
    values = found[_OBJECTIVES]
    known = torch.where(torch.isfinite(values), values, torch.full_like(values, -math.inf))
    return found | {_OBJECTIVES: known}


_MEMBERS = 16
_ALONE = 4
"""Members of a batch if each is simulated alone, which takes longer."""
_ELEMENTS = 2**21
"""Limit of the symbols of all members together; there are at least two members."""
_SMOOTHED_STEPS = 24
_WIDE, _NARROW = 2.0, 0.3
"""Factors of the secant widths at the first step and after the last."""
_STEP_SIZE = 1.0
"""Approximate size of the first step; it falls to a tenth at the last."""
_MOMENTUM, _MEMORY = 0.8, 0.95
"""Decay rates of the running means of gradients and of squared gradients."""
_GRADIENTS = 24
"""Gradient evaluations of a batch in the random search; the last batch has as many per batch."""
_TRIES = 2
"""Random moves for each gradient."""
_WIDEST = 8.0
"""Largest factor by which secant widths of random moves differ from the recorded ones."""
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)
"""Shares of the symbols that a random move changes."""
_FULL_MOVES = 0.3
"""Probability that a random move goes all the way to the gradient signs."""
_SELECTION_PERIOD = 6
"""Least number of gradient evaluations between selections."""
_SELECTIONS = 6
"""Largest number of selections in a random search."""
_KEPT = 2
"""Members of every batch that start the last one."""
_REFINED = 3
"""Best members of a batch from which single ascents start at the end."""


def batched_ascent(
    ascent: Ascent, targets: Sequence[Target], batches: int, rounds: int, generator: torch.Generator
) -> None:
    """Maximise several targets in batches of runs; `ascent` records the best run.

    Members start alternately without roundings and from random signs. The first batch has all
    targets, each later one the better half of those of the batch before. The best members of all
    batches and the best earlier run form a last batch. Do nothing if `ascent` has no run.

    Args:
        ascent: the search space.
        targets: output elements and signs, the most promising first.
        batches: number of batches before the last; with one batch there is no last.
        rounds: largest number of steps of the single ascents at the end.
        generator: source of all random numbers, on the CPU whatever the device of the runs.
    """
    if ascent.leader is None or not targets:
        return
    widths, count = widths_of(ascent, generator), _batch_size(ascent)
    chosen, best = list(targets), [(ascent.leader, ascent.place())]
    for _ in range(batches):
        starts = (
            ascent.signs(generator) if index // len(chosen) % 2 else ascent.zero()
            for index in range(count)
        )
        members = [(start, chosen[index % len(chosen)]) for index, start in enumerate(starts)]
        batch = Batch.of(ascent, widths, members)
        _smoothed_ascent(batch)
        _random_search(batch, _GRADIENTS, generator)
        _refine(batch, rounds)
        best += batch.best(_KEPT)
        chosen = _best_targets(batch, chosen)
    if batches > 1:
        batch = Batch.of(ascent, widths, [best[index % len(best)] for index in range(count)])
        _random_search(batch, batches * _GRADIENTS, generator)
        _refine(batch, rounds)


def _best_targets(batch: Batch, targets: Sequence[Target]) -> list[Target]:
    """Return half of the targets, those of the best members first."""
    found = [target for _, target in batch.best(len(batch.targets))]
    return list(dict.fromkeys([*found, *targets]))[: max(1, len(targets) // 2)]


def _smoothed_ascent(batch: Batch) -> None:
    """Follow smoothed gradients with momentum (Adam); each member keeps its best symbols."""
    now = batch.symbols
    mean = {key: torch.zeros_like(value) for key, value in now.items()}
    square = mean
    for step in range(_SMOOTHED_STEPS):
        share = step / _SMOOTHED_STEPS
        factors = torch.full((len(batch.targets),), _WIDE * (_NARROW / _WIDE) ** share)
        at = {key: on_grid(value) for key, value in now.items()}
        gradients, objectives = batch.gradients(at, factors.double())
        batch.accept(at, objectives)
        mean = _average(mean, gradients, _MOMENTUM)
        square = _average(
            square, {key: slope.square() for key, slope in gradients.items()}, _MEMORY
        )
        pace = _STEP_SIZE * 0.1**share / (1 - _MOMENTUM ** (step + 1))
        size = 1 - _MEMORY ** (step + 1)
        now = {
            key: _scaled_step(value, pace * mean[key], square[key] / size)
            for key, value in now.items()
        }
        if (step + 1) % _SELECTION_PERIOD == 0:
            source = batch.select()
            now, mean, square = (
                {key: value[source] for key, value in kept.items()} for kept in (now, mean, square)
            )


def _average(past: Symbols, new: Symbols, share: float) -> Symbols:
    return {key: share * value + (1 - share) * new[key] for key, value in past.items()}


def _scaled_step(value: Tensor, by: Tensor, square: Tensor) -> Tensor:
    """Step by a gradient over its root mean square; stay where that is 0."""
    unit = torch.where(square > 0, by / square.sqrt(), torch.zeros_like(by))
    return (value + torch.nan_to_num(unit, 0.0, 0.0, 0.0)).clamp(-1, 1)


def _random_search(batch: Batch, count: int, generator: torch.Generator) -> None:
    """Try `_TRIES` random moves towards the gradient signs for each of `count` gradients."""
    pause = max(_SELECTION_PERIOD, count // _SELECTIONS)
    for index in range(1, count + 1):
        drawn = torch.rand(len(batch.targets), generator=generator, dtype=torch.float64) * 2 - 1
        found, _ = batch.gradients(batch.symbols, torch.exp(drawn * math.log(_WIDEST)))
        for _ in range(_TRIES):
            batch.try_move(_random_move(batch.symbols, found, generator))
        if index % pause == 0:
            batch.select()


def _random_move(symbols: Symbols, gradients: Symbols, generator: torch.Generator) -> Symbols:
    """Return members with a random share of their symbols moved towards the gradient signs."""
    count = len(next(iter(symbols.values())))
    chosen = torch.randint(0, len(_SHARES), (count,), generator=generator)
    shares = torch.tensor(_SHARES, dtype=torch.float64)[chosen]
    parts = torch.rand(count, generator=generator, dtype=torch.float64)
    whole = torch.rand(count, generator=generator) < _FULL_MOVES
    parts = torch.where(whole, torch.ones_like(parts), parts)
    ends, moved = gradient_signs(symbols, gradients), {}
    for key, start in symbols.items():
        wide = [count, *[1] * (start.dim() - 1)]
        drawn = torch.rand(start.shape, generator=generator, dtype=torch.float64)
        some = (drawn < shares.reshape(wide)).to(start.device)
        part = parts.reshape(wide).to(start.device)
        moved[key] = torch.where(some, on_grid(start + (ends[key] - start) * part), start)
    return moved


def _refine(batch: Batch, rounds: int) -> None:
    for symbols, (position, sign) in batch.best(_REFINED):
        batch.ascent.climb(symbols, position, sign, rounds)


def _batch_size(ascent: Ascent) -> int:
    each = sum(math.prod(shape) for shape in ascent.shapes.values())
    most = _MEMBERS if ascent.train.batchable and ascent.infer.batchable else _ALONE
    return max(2, min(most, _ELEMENTS // max(1, each)))
