"""A search of whole herds, for regions with a width where a kernel rounds to nearest.

Rounding to nearest leaves an ascent without slopes: most moves of an input change no code, and what
changes one is lost in the next rounding. Here many runs of a herd climb by the slopes of secants.
First they *stride*: they follow the mean of the slopes whether they gain or not, by secants that
become narrow. Then they *move*: a random part of the numbers goes all or part of the way that
slopes of secants of a random width say, and stays there if that does not lose. From time to time
the better half takes the place of the other, so that effort goes to the places of the output that
pay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl_backends.attack.ascent import Ascent, Symbols, ends_of, in_parts
from kcdsl_backends.attack.herd import Herd, Target, widths_of

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
"""Slopes that a herd moves by; so many for each of the others in the last herd."""
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
"""At most so many there are while a herd moves: the last one keeps its members for longer."""
_KEPT = 2
"""Members of every herd that are in the last one."""
_POLISHED = 3
"""Members of a herd that climb by themselves in the end, the best first."""


def climb_together(
    ascent: Ascent,
    targets: Sequence[Target],
    herds: int,
    rounds: int,
    generator: torch.Generator,
) -> None:
    """Climb at some places of the output at once; `ascent` keeps what is found.

    Members start without roundings and from random signs, in turn. The first herd pushes at all
    targets, every other one at half as many as the one before: those where that got highest. The
    best members of all, and the best run of before, make a last herd. Nothing is done where
    `ascent` has no run.

    Args:
        ascent: the search space.
        targets: where to push, the most promising first.
        herds: how many there are before the last; of a single one there is no last.
        rounds: steps of the ascents in the end.
        generator: of all random numbers, on the CPU wherever the runs are.
    """
    if ascent.leader is None or not targets:
        return
    widths, count = widths_of(ascent, generator), _members(ascent)
    chosen, best = list(targets), [(ascent.leader, ascent.place())]
    for _ in range(herds):
        starts = (
            ascent.signs(generator) if index // len(chosen) % 2 else ascent.zero()
            for index in range(count)
        )
        members = [(start, chosen[index % len(chosen)]) for index, start in enumerate(starts)]
        herd = Herd.of(ascent, widths, members)
        _stride(herd)
        _move(herd, _MOVES, generator)
        _polish(herd, rounds)
        best += herd.best(_KEPT)
        chosen = _paying(herd, chosen)
    if herds > 1:
        herd = Herd.of(ascent, widths, [best[index % len(best)] for index in range(count)])
        _move(herd, herds * _MOVES, generator)
        _polish(herd, rounds)


def _paying(herd: Herd, targets: Sequence[Target]) -> list[Target]:
    """Return half of the targets, and the highest member's first: selection leaves what pays."""
    found = [target for _, target in herd.best(len(herd.targets))]
    return list(dict.fromkeys([*found, *targets]))[: max(1, len(targets) // 2)]


def _stride(herd: Herd) -> None:
    """Let members run along the mean of their slopes; each keeps the best place where it was."""
    now = herd.symbols
    mean = {key: torch.zeros_like(value) for key, value in now.items()}
    square = mean
    for stride in range(_STRIDES):
        share = stride / _STRIDES
        factors = torch.full((len(herd.targets),), _FIRST * (_LAST / _FIRST) ** share)
        at = {key: in_parts(value) for key, value in now.items()}
        slopes, heights = herd.slopes(at, factors.double())
        herd.replace(at, heights)
        mean = _mixed(mean, slopes, _MOMENTUM)
        square = _mixed(square, {key: slope.square() for key, slope in slopes.items()}, _MEMORY)
        pace = _PACE * 0.1**share / (1 - _MOMENTUM ** (stride + 1))
        size = 1 - _MEMORY ** (stride + 1)
        now = {
            key: _ahead(value, pace * mean[key], square[key] / size) for key, value in now.items()
        }
        if (stride + 1) % _SELECTED == 0:
            source = herd.select()
            now, mean, square = (
                {key: value[source] for key, value in kept.items()} for kept in (now, mean, square)
            )


def _mixed(past: Symbols, new: Symbols, share: float) -> Symbols:
    return {key: share * value + (1 - share) * new[key] for key, value in past.items()}


def _ahead(value: Tensor, by: Tensor, square: Tensor) -> Tensor:
    """Go on by slopes in units of their size; where there never was a slope, stay."""
    unit = torch.where(square > 0, by / square.sqrt(), torch.zeros_like(by))
    return (value + torch.nan_to_num(unit, 0.0, 0.0, 0.0)).clamp(-1, 1)


def _move(herd: Herd, slopes: int, generator: torch.Generator) -> None:
    """Let members move where they do not lose, `_TRIES` times for each of their slopes."""
    pause = max(_SELECTED, slopes // _SELECTIONS)
    for index in range(1, slopes + 1):
        drawn = torch.rand(len(herd.targets), generator=generator, dtype=torch.float64) * 2 - 1
        found, _ = herd.slopes(herd.symbols, torch.exp(drawn * math.log(_WIDEST)))
        for _ in range(_TRIES):
            herd.keep(_moved(herd.symbols, found, generator))
        if index % pause == 0:
            herd.select()


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


def _polish(herd: Herd, rounds: int) -> None:
    for symbols, (position, sign) in herd.best(_POLISHED):
        herd.ascent.climb(symbols, position, sign, rounds)


def _members(ascent: Ascent) -> int:
    each = sum(math.prod(shape) for shape in ascent.shapes.values())
    most = _MEMBERS if ascent.train.beside and ascent.infer.beside else _ALONE
    return max(2, min(most, _ELEMENTS // max(1, each)))
