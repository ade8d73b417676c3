"""Attention masks: who sees whom, found by changing one token at a time, and by padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl.diagnostics.model import Refusal
from kcdsl_backends.empirical.diagnoses.distances import mean, total_variation
from kcdsl_backends.empirical.diagnoses.model import (
    POSITIONS,
    SIDES,
    SMALLEST,
    Forward,
    Probe,
    Repair,
)

NAME = "mask_provenance"
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, Refusal)
"""What a kernel may raise on tokens that it cannot take."""
_VISIBLE = 0.1
"""Share of the usual influence of an earlier token, from which on a later one is seen."""
_UNSEEN = 1e-3
"""Share of the influence in the other kernel, below which a token is not seen."""
_PADS = (0, 1, 2)
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


def reach(probe: Probe, kernels: tuple[Forward, Forward], temperature: float) -> Repair:
    """Change single tokens of a request: do both kernels see the change at the same positions?

    A kernel that sees the future changes before the token; one whose mask hides a token, or all
    beyond a window, does not change after it.
    """
    tokens = list(probe.request.tokens[:POSITIONS])
    length = len(tokens)
    if length < 8:
        return Repair(NAME, "no request with eight tokens", None)
    try:
        effects = _effects(tokens, kernels, temperature)
    except FAILURES:
        return Repair(NAME, "a kernel failed on a changed token", None)
    for place, (train, infer) in effects.items():
        natural = _natural(train, infer, place)
        early = [float(e[:place].median()) if place else 0.0 for e in (train, infer)]
        side = int(early[1] > early[0])
        if early[side] > _VISIBLE * natural and early[1 - side] < early[side] / 8:
            where = f"positions 0 to {place - 1}"
            detail = f"{probe.request.key}: {SIDES[side]} sees token {place} at {where} before it"
            return Repair(NAME, detail, 0.0, float(place))
    for place, (train, infer) in effects.items():
        for side, (own, other) in enumerate(((train, infer), (infer, train))):
            after = slice(place + 1, None)
            visible = other[after] > _VISIBLE * max(_natural(train, infer, place), SMALLEST)
            blind = visible & (own[after] < _UNSEEN * other[after])
            if 4 * int(blind.sum()) >= length - place - 1:
                seen = (blind.nonzero()[:, 0] + place + 1).tolist()
                detail = (
                    f"{probe.request.key}: {SIDES[side]} does not see token {place} at positions "
                    f"{seen[0]} to {seen[-1]}"
                )
                return Repair(NAME, detail, 0.0, float(place))
    return Repair(NAME, "both kernels see the same tokens", 1.0)


def _natural(train: Tensor, infer: Tensor, place: int) -> float:
    """Return how far changing a token usually moves the rows after it."""
    return max(float(e[place + 1 :].median()) for e in (train, infer))


def _effects(
    tokens: list[int], kernels: tuple[Forward, Forward], temperature: float
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return, for some places, how far changing the token there moves each row of each kernel."""
    length = len(tokens)
    before = [_run(kernel, tokens) for kernel in kernels]
    found = {}
    for place in sorted({0, length // 4, length // 2, 3 * length // 4}):
        other = next((t for t in tokens if t != tokens[place]), None)
        if other is None:
            continue
        changed = [*tokens[:place], other, *tokens[place + 1 :]]
        moved = [
            total_variation(a, _run(kernel, changed), temperature)
            for a, kernel in zip(before, kernels, strict=True)
        ]
        found[place] = (moved[0], moved[1])
    return found


def visible_padding(probe: Probe, kernels: tuple[Forward, Forward], temperature: float) -> Repair:
    """Would padding in front of one side, seen by its attention, explain the drift?"""
    tokens = list(probe.request.tokens)
    before = float(total_variation(probe.train, probe.infer, temperature).mean())
    best = Repair(NAME, "no padding explains the deviation", 1.0)
    if before <= SMALLEST:
        return best
    for side in (0, 1):
        target = probe.side(1 - side)
        for pad in dict.fromkeys((*_PADS, probe.train.shape[1] - 1)):
            for count in _LENGTHS:
                left = _padded(kernels[side], tokens, [pad] * count, target, temperature) / before
                if best.left is None or left < best.left:
                    detail = (
                        f"{probe.request.key}: {SIDES[side]} behind {count} tokens of padding "
                        f"({pad}) leaves {left:.2g} of the deviation: {SIDES[1 - side]} attends to "
                        f"padding in front, or {SIDES[side]} hides its first tokens"
                    )
                    best = Repair(NAME, detail, left, float(count))
    return best


def _padded(
    kernel: Forward, tokens: Sequence[int], pads: list[int], target: Tensor, temperature: float
) -> float:
    try:
        rows = _run(kernel, [*pads, *tokens])[len(pads) :][: len(target)]
    except FAILURES:
        return float("inf")
    return mean([total_variation(rows, target, temperature)])


def _run(kernel: Forward, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return kernel(tokens).to("cpu", torch.float64)
