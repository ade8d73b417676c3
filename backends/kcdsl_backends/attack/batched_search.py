"""Search with many runs at once, for regions with a width where a kernel rounds to nearest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kcdsl_backends.attack.gradient_ascent import Ascent, Symbols, ends_of, in_parts
from kcdsl_backends.attack.simulation import Overflowed, Step, Through

Widths = Mapping[str, Tensor]
"""For every rounding, by the names of `Through`: half of the width in which values move."""


@dataclass(slots=True)
class ValueRanges:
    """Carries values through roundings as they are, and keeps the least and the largest of each.

    The first run must stand alone, so that the shape of every value is known.
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
        """Return half of how far apart values were."""
        return {name: (self.most[name] - least) / 2 for name, least in self.least.items()}


@dataclass(frozen=True, slots=True)
class SmoothedGradient:
    """Carries values through roundings; the gradient is the slope of secants.

    `factor`, a number for each of many runs or one for a run alone, multiplies all widths: wide
    secants see edges that are far away, narrow ones see which are near.
    """

    half: Widths
    factor: Tensor

    def __call__(self, name: str, step: Step, value: Tensor) -> Tensor:
        """Return the rounded value, with another gradient."""
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
"""An element of the flattened output, and the direction in which it is pushed."""
_RECORDED = 16
"""Runs with random signs that say how far values move."""
_HEIGHT = ("", "")
"""Where heights stand beside slopes."""
_Chosen = slice | int
_Work = Callable[[Symbols, _Chosen], Symbols]


@dataclass(slots=True)
class Batch:
    """Members: symbols [n, ...], what each pushes at, and how high each is (-inf: overflow).

    `widths` says how far rounded values move in the training and in the inference kernel.
    """

    ascent: Ascent
    widths: tuple[Widths, Widths]
    symbols: Symbols
    targets: list[Target]
    heights: Tensor

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
        heights = torch.full((len(members),), -math.inf, dtype=torch.float64, device=device)
        batch = cls(ascent, widths, symbols, [target for _, target in members], heights)
        batch.keep(symbols)
        return batch

    def slopes(self, symbols: Symbols, factors: Tensor) -> tuple[Symbols, Tensor]:
        """Return the slopes at some symbols of all members, 0 where a run has none, and how high
        these symbols are.

        Args:
            factors: [n], by which the widths of secants are multiplied.
        """

        def work(symbols: Symbols, chosen: _Chosen) -> Symbols:
            leaves = {key: value.clone().requires_grad_(True) for key, value in symbols.items()}
            own = factors[chosen].to(self.heights.device)
            drift = self._drift(leaves, [SmoothedGradient(half, own) for half in self.widths])
            high = self._objectives(drift, chosen)
            found = torch.autograd.grad(high.sum(), list(leaves.values()), allow_unused=True)
            slopes = {
                key: torch.zeros_like(leaf) if part is None else torch.nan_to_num(part)
                for (key, leaf), part in zip(leaves.items(), found, strict=True)
            }
            return slopes | {_HEIGHT: high.detach()}

        none = {key: torch.zeros_like(value) for key, value in symbols.items()}
        slopes = self._together(symbols, work, none)
        heights = slopes.pop(_HEIGHT)
        return slopes, heights

    def keep(self, moved: Symbols) -> None:
        """Let members go where they do not lose."""

        def work(symbols: Symbols, chosen: _Chosen) -> Symbols:
            with torch.no_grad():
                return {_HEIGHT: self._objectives(self._drift(symbols, [None, None]), chosen)}

        self.replace(moved, self._together(moved, work, {})[_HEIGHT])

    def replace(self, moved: Symbols, heights: Tensor) -> None:
        """Let members go where they are as high as before, or higher."""
        better = heights >= self.heights
        self.symbols = {
            key: torch.where(better.reshape(-1, *[1] * (value.dim() - 1)), moved[key], value)
            for key, value in self.symbols.items()
        }
        self.heights = torch.where(better, heights, self.heights)

    def select(self) -> Tensor:
        """Put the better half of the members in the place of the others; return whence each came.

        The order of members that stay does not change.
        """
        order = self.heights.argsort(descending=True, stable=True)
        half = len(order) // 2
        source = torch.arange(len(order), device=order.device)
        source[order[len(order) - half :]] = order[:half]
        self.symbols = {key: value[source] for key, value in self.symbols.items()}
        self.heights = self.heights[source]
        self.targets = [self.targets[index] for index in source.tolist()]
        return source

    def best(self, count: int) -> Iterator[tuple[Symbols, Target]]:
        """Yield the highest members that do not overflow, the highest first."""
        for index in self.heights.argsort(descending=True, stable=True)[:count].tolist():
            if self.heights[index] > -math.inf:
                symbols = {key: value[index] for key, value in self.symbols.items()}
                yield symbols, self.targets[index]

    def _objectives(self, drift: Tensor, chosen: _Chosen) -> Tensor:
        """Return how high one member is, or all of them [n]."""
        if isinstance(chosen, int):
            return self.ascent.objective(drift, *self.targets[chosen])
        pairs = zip(drift, self.targets[chosen], strict=True)
        return torch.stack([self.ascent.objective(one, *target) for one, target in pairs])

    def _drift(self, symbols: Symbols, through: Sequence[Through | None]) -> Tensor:
        return _drift(self.ascent, symbols, through)

    def _together(self, symbols: Symbols, work: _Work, otherwise: Symbols) -> Symbols:
        """Do some work on all members at once; or one by one where they cannot stand beside each
        other, or one of them overflows: then that one is at -inf and has what is in `otherwise`."""
        ascent = self.ascent
        if ascent.train.beside and ascent.infer.beside:
            with suppress(Overflowed):
                return _finite(work(symbols, slice(None)))
        lost = torch.full_like(self.heights, -math.inf)
        parts: list[Symbols] = []
        for index in range(len(self.targets)):
            try:
                alone = {key: value[index] for key, value in symbols.items()}
                parts.append(work(alone, index))
            except Overflowed:
                without = otherwise | {_HEIGHT: lost}
                parts.append({key: value[index] for key, value in without.items()})
        return _finite({key: torch.stack([part[key] for part in parts]) for key in parts[0]})


def widths_of(ascent: Ascent, generator: torch.Generator) -> tuple[Widths, Widths]:
    """Return how far rounded values move in both kernels, as runs with random signs show."""
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
    """Return heights that are no numbers as -inf."""
    heights = found[_HEIGHT]
    known = torch.where(torch.isfinite(heights), heights, torch.full_like(heights, -math.inf))
    return found | {_HEIGHT: known}


_MEMBERS = 16
_ALONE = 4
"""Members where each is simulated alone, which takes longer."""
_ELEMENTS = 2**21
"""Symbols that all members have together, at most; but two members there are in any case."""
_STRIDES = 24
_FIRST, _LAST = 2.0, 0.3
"""Factors of the widths of secants, at the first stride and after the last."""
_PACE = 1.0
"""How far numbers go in the first stride, about; a tenth of that in the last."""
_MOMENTUM, _MEMORY = 0.8, 0.95
"""Shares of the past in the mean of slopes, and in that of their squares."""
_MOVES = 24
"""Slopes that a batch moves by; so many for each of the others in the last batch."""
_TRIES = 2
"""Moves for each slope."""
_WIDEST = 8.0
"""Secants of moves are up to so many times wider, or narrower, than values were seen to move."""
_SHARES = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)
"""Shares of all numbers that a move may change."""
_WHOLE = 0.3
"""Share of the moves that go all of the way."""
_SELECTED = 6
"""Strides, or slopes of moves, from one selection to the next."""
_SELECTIONS = 6
"""At most so many there are while a batch moves: the last one keeps its members for longer."""
_KEPT = 2
"""Members of every batch that are in the last one."""
_POLISHED = 3
"""Members of a batch that climb by themselves in the end, the best first."""


def batched_ascent(
    ascent: Ascent, targets: Sequence[Target], batches: int, rounds: int, generator: torch.Generator
) -> None:
    """Climb at some places of the output at once; `ascent` keeps what is found.

    Members start without roundings and from random signs, in turn. The first batch pushes at all
    targets, every other one at half as many as the one before: those where that got highest. The
    best members of all, and the best run of before, make a last batch. Nothing is done where
    `ascent` has no run.

    Args:
        ascent: the search space.
        targets: where to push, the most promising first.
        batches: how many there are before the last; of a single one there is no last.
        rounds: steps of the ascents in the end.
        generator: of all random numbers, on the CPU wherever the runs are.
    """
    if ascent.leader is None or not targets:
        return
    widths, count = widths_of(ascent, generator), _members(ascent)
    chosen, best = list(targets), [(ascent.leader, ascent.place())]
    for _ in range(batches):
        starts = (
            ascent.signs(generator) if index // len(chosen) % 2 else ascent.zero()
            for index in range(count)
        )
        members = [(start, chosen[index % len(chosen)]) for index, start in enumerate(starts)]
        batch = Batch.of(ascent, widths, members)
        _stride(batch)
        _move(batch, _MOVES, generator)
        _polish(batch, rounds)
        best += batch.best(_KEPT)
        chosen = _paying(batch, chosen)
    if batches > 1:
        batch = Batch.of(ascent, widths, [best[index % len(best)] for index in range(count)])
        _move(batch, batches * _MOVES, generator)
        _polish(batch, rounds)


def _paying(batch: Batch, targets: Sequence[Target]) -> list[Target]:
    """Return half of the targets, and the highest member's first: selection leaves what pays."""
    found = [target for _, target in batch.best(len(batch.targets))]
    return list(dict.fromkeys([*found, *targets]))[: max(1, len(targets) // 2)]


def _stride(batch: Batch) -> None:
    """Let members run along the mean of their slopes; each keeps the best place where it was."""
    now = batch.symbols
    mean = {key: torch.zeros_like(value) for key, value in now.items()}
    square = mean
    for stride in range(_STRIDES):
        share = stride / _STRIDES
        factors = torch.full((len(batch.targets),), _FIRST * (_LAST / _FIRST) ** share)
        at = {key: in_parts(value) for key, value in now.items()}
        slopes, heights = batch.slopes(at, factors.double())
        batch.replace(at, heights)
        mean = _mixed(mean, slopes, _MOMENTUM)
        square = _mixed(square, {key: slope.square() for key, slope in slopes.items()}, _MEMORY)
        pace = _PACE * 0.1**share / (1 - _MOMENTUM ** (stride + 1))
        size = 1 - _MEMORY ** (stride + 1)
        now = {
            key: _ahead(value, pace * mean[key], square[key] / size) for key, value in now.items()
        }
        if (stride + 1) % _SELECTED == 0:
            source = batch.select()
            now, mean, square = (
                {key: value[source] for key, value in kept.items()} for kept in (now, mean, square)
            )


def _mixed(past: Symbols, new: Symbols, share: float) -> Symbols:
    return {key: share * value + (1 - share) * new[key] for key, value in past.items()}


def _ahead(value: Tensor, by: Tensor, square: Tensor) -> Tensor:
    """Go on by slopes in units of their size; where there never was a slope, stay."""
    unit = torch.where(square > 0, by / square.sqrt(), torch.zeros_like(by))
    return (value + torch.nan_to_num(unit, 0.0, 0.0, 0.0)).clamp(-1, 1)


def _move(batch: Batch, slopes: int, generator: torch.Generator) -> None:
    """Let members move where they do not lose, `_TRIES` times for each of their slopes."""
    pause = max(_SELECTED, slopes // _SELECTIONS)
    for index in range(1, slopes + 1):
        drawn = torch.rand(len(batch.targets), generator=generator, dtype=torch.float64) * 2 - 1
        found, _ = batch.slopes(batch.symbols, torch.exp(drawn * math.log(_WIDEST)))
        for _ in range(_TRIES):
            batch.keep(_moved(batch.symbols, found, generator))
        if index % pause == 0:
            batch.select()


def _moved(symbols: Symbols, slopes: Symbols, generator: torch.Generator) -> Symbols:
    """Return where members go: a random share of their numbers, some part of their way."""
    count = len(next(iter(symbols.values())))
    chosen = torch.randint(0, len(_SHARES), (count,), generator=generator)
    shares = torch.tensor(_SHARES, dtype=torch.float64)[chosen]
    parts = torch.rand(count, generator=generator, dtype=torch.float64)
    whole = torch.rand(count, generator=generator) < _WHOLE
    parts = torch.where(whole, torch.ones_like(parts), parts)
    ends, moved = ends_of(symbols, slopes), {}
    for key, start in symbols.items():
        wide = [count, *[1] * (start.dim() - 1)]
        drawn = torch.rand(start.shape, generator=generator, dtype=torch.float64)
        some = (drawn < shares.reshape(wide)).to(start.device)
        part = parts.reshape(wide).to(start.device)
        moved[key] = torch.where(some, in_parts(start + (ends[key] - start) * part), start)
    return moved


def _polish(batch: Batch, rounds: int) -> None:
    for symbols, (position, sign) in batch.best(_POLISHED):
        batch.ascent.climb(symbols, position, sign, rounds)


def _members(ascent: Ascent) -> int:
    each = sum(math.prod(shape) for shape in ascent.shapes.values())
    most = _MEMBERS if ascent.train.beside and ascent.infer.beside else _ALONE
    return max(2, min(most, _ELEMENTS // max(1, each)))
