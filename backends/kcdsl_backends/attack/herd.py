"""A herd: many runs side by side, each pushed at a place of the output.

Where both kernels can be simulated so, all members are simulated at once; else one by one. What
they are worth is exact but for last bits, and nothing counts as found before `Ascent` has simulated
it by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.attack.ascent import Ascent, Symbols
from kcdsl_backends.attack.secants import Reaches, Secants, Widths
from kcdsl_backends.attack.simulate import Overflowed, Through

Target = tuple[int, float]
"""An element of the flattened output, and the direction in which it is pushed."""
_RECORDED = 16
"""Runs with random signs that say how far values move."""
_HEIGHT = ("", "")
"""Where heights stand beside slopes."""
_Chosen = slice | int
_Work = Callable[[Symbols, _Chosen], Symbols]


@dataclass(slots=True)
class Herd:
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
    ) -> Herd:
        """Return a herd of these members, at least one."""
        keys = members[0][0]
        symbols = {key: torch.stack([start[key] for start, _ in members]) for key in keys}
        device = next(iter(symbols.values())).device
        heights = torch.full((len(members),), -math.inf, dtype=torch.float64, device=device)
        herd = cls(ascent, widths, symbols, [target for _, target in members], heights)
        herd.keep(symbols)
        return herd

    def slopes(self, symbols: Symbols, factors: Tensor) -> tuple[Symbols, Tensor]:
        """Return the slopes at some symbols of all members, 0 where a run has none, and how high
        these symbols are.

        Args:
            factors: [n], by which the widths of secants are multiplied.
        """

        def work(symbols: Symbols, chosen: _Chosen) -> Symbols:
            leaves = {key: value.clone().requires_grad_(True) for key, value in symbols.items()}
            own = factors[chosen].to(self.heights.device)
            drift = self._drift(leaves, [Secants(half, own) for half in self.widths])
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
    train, infer = Reaches(), Reaches()
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
