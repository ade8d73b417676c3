"""Diagnoses of positions: shifts by one, runs that deviate, attention masks, swapped sides."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.model import (
    BEYOND,
    FAILURES,
    POSITIONS,
    SIDES,
    SMALLEST,
    Forward,
    Probe,
    Repair,
    RoundingNoise,
    mean,
    not_applicable,
    outcome,
    row_size,
    total_variation,
)
from kcdsl_backends.empirical.table.evidence import SamplingUnit

SHIFTS = (-1, 0, 1)
_SHORTEST = 4


def token_equality(units: Sequence[SamplingUnit], probes: Sequence[Probe]) -> Precheck:
    """Both kernels must answer for the same tokens: one row of output per token, on both sides."""
    name = "token_equality"
    for p in probes:
        if p.train.shape != p.infer.shape:
            shapes = f"{tuple(p.train.shape)} and {tuple(p.infer.shape)}"
            return outcome(name, False, f"{p.request.key}: outputs of shapes {shapes}")
    if units and not probes:
        return not_applicable(name, "no request could be run")
    tokens = sum(unit.tokens for unit in units)
    return outcome(name, bool(units), f"{tokens} tokens of {len(units)} requests")


def alignment_shift(probes: Sequence[Probe], temperature: float) -> Repair:
    """Compare the policies at the shifts -1, 0 and +1 of the inference output."""
    name = "alignment_shift"
    long = [p for p in probes if p.train.shape[0] >= _SHORTEST]
    if not long:
        return Repair(name, f"no request with {_SHORTEST} tokens", None)
    gaps = {shift: _gap(long, shift, temperature) for shift in SHIFTS}
    unshifted, best = gaps[0], min(gaps, key=lambda shift: gaps[shift])
    shown = ", ".join(f"{shift:+d}: {gap:.3g}" for shift, gap in gaps.items())
    left = gaps[best] / unshifted if best != 0 and unshifted > SMALLEST else 1.0
    return Repair(name, f"mean total variation at shift {shown}", left, float(best))


def _gap(probes: Sequence[Probe], shift: int, temperature: float) -> float:
    """Return the mean distance of row t of train from row t + shift of infer."""
    parts = []
    for p in probes:
        rows = torch.arange(1, p.train.shape[0] - 1)
        parts.append(total_variation(p.train[rows], p.infer[rows + shift], temperature))
    return mean(parts)


# --- one run of positions -------------------------------------------------------------------------

_WIDEST = 0.8
"""Largest share of the positions that a run may cover, unless it ends at the last position: other
weights or formats change the first positions too."""
_SHARE = 0.9
"""Share of the deviation that must lie in the run."""
_CONTRAST = 1000.0
"""Without a reference: smallest ratio of the deviation in the run to that outside."""


def deviating_run(
    probes: Sequence[Probe], noise: RoundingNoise | None, temperature: float
) -> Repair:
    """Find one contiguous run of positions that holds nearly all of the deviation.

    With a reference, a position deviates if the kernels differ by more than `BEYOND` times the
    noise of both claims; without one, if they differ a thousand times as much as elsewhere.
    """
    name = "mask_provenance"
    found, examined = [], 0
    for p in probes:
        gaps = row_size(p.train, p.infer)
        if len(gaps) < _SHORTEST or not bool(torch.isfinite(gaps).all()):
            continue
        examined += 1
        off = _deviating(gaps, noise)
        if bool(off.any()):
            found.append((p, gaps, off))
    if not examined:
        return Repair(name, f"no request with {_SHORTEST} positions of finite differences", None)
    runs = [(p, run) for p, gaps, off in found if (run := _one_run(gaps, off)) is not None]
    if not runs or 2 * len(runs) < len(found):
        return Repair(name, "the deviation is not that of one run of positions", 1.0)
    outside, everywhere = [], []
    for p, (first, last) in runs:
        variation = total_variation(p.train, p.infer, temperature)
        rest = variation.clone()
        rest[first : last + 1] = 0.0
        outside.append(rest)
        everywhere.append(variation)
    whole = mean(everywhere)
    left = mean(outside) / whole if whole > SMALLEST else 1.0
    p, (first, last) = runs[0]
    detail = (
        f"{p.request.key}: positions {first} to {last} of {p.train.shape[0]} hold the deviation "
        f"({len(runs)} of {len(probes)} requests have such a run)"
    )
    return Repair(name, detail, left, float(last - first + 1))


def _deviating(gaps: Tensor, noise: RoundingNoise | None) -> Tensor:
    if noise is not None:
        allowed = (noise.expected[0] ** 2 + noise.expected[1] ** 2) ** 0.5
        return torch.gt(gaps, BEYOND * allowed)
    ordered = gaps.sort().values
    ratio = ordered[1:] / ordered[:-1].clamp_min(SMALLEST)
    jump = int(ratio.argmax())
    if float(ratio[jump]) < _CONTRAST:
        return torch.zeros_like(gaps, dtype=torch.bool)
    return torch.gt(gaps, ordered[jump])


def _one_run(gaps: Tensor, off: Tensor) -> tuple[int, int] | None:
    """Return the first and last position of the run; None if there is no such run."""
    places = off.nonzero()[:, 0]
    first, last = int(places[0]), int(places[-1])
    length = last - first + 1
    whole = last == len(gaps) - 1 and first >= 2
    if length < 2 or 2 * len(places) < length or not (whole or length <= _WIDEST * len(gaps)):
        return None
    inside = float(gaps[first : last + 1].sum())
    return (first, last) if inside >= _SHARE * float(gaps.sum()) else None


# --- attention masks, by changing one token and by padding ----------------------------------------

MASKS = "mask_provenance"
_VISIBLE = 0.1
"""Smallest share of the usual influence of an earlier token at which a later one counts as seen."""
_UNSEEN = 1e-3
"""Share of the influence in the other kernel below which a token counts as not seen."""
_PADS = (0, 1, 2)
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


def visibility(
    probe: Probe,
    kernels: tuple[Forward, Forward],
    temperature: float,
    *,
    claim: tuple[bool, bool] = (True, True),
) -> Repair:
    """Change single tokens of a request and compare the positions at which both kernels change.

    A kernel that sees later tokens changes before the token; one whose mask hides the token, or all
    tokens beyond a window, does not change after it. A kernel that does not `claim` numerics may
    change before the token: it may quantise with scales of whole sequences.
    """
    tokens = list(probe.request.tokens[:POSITIONS])
    length = len(tokens)
    if length < 8:
        return Repair(MASKS, "no request with eight tokens", None)
    try:
        effects = _effects(tokens, kernels, temperature)
    except FAILURES:
        return Repair(MASKS, "a kernel failed on a changed token", None)
    same = "both kernels see the same tokens"
    for place, (train, infer) in effects.items():
        usual = _usual_effect(train, infer, place)
        early = [float(e[:place].median()) if place else 0.0 for e in (train, infer)]
        side = int(early[1] > early[0])
        if early[side] > _VISIBLE * usual and early[1 - side] < early[side] / 8:
            where = f"positions 0 to {place - 1}"
            detail = f"{probe.request.key}: {SIDES[side]} sees token {place} at {where} before it"
            if claim[side]:
                return Repair(MASKS, detail, 0.0, float(place))
            same = f"{detail}, as with scales of whole sequences"
    for place, (train, infer) in effects.items():
        for side, (own, other) in enumerate(((train, infer), (infer, train))):
            after = slice(place + 1, None)
            visible = other[after] > _VISIBLE * max(_usual_effect(train, infer, place), SMALLEST)
            blind = visible & (own[after] < _UNSEEN * other[after])
            if 4 * int(blind.sum()) >= length - place - 1:
                seen = (blind.nonzero()[:, 0] + place + 1).tolist()
                detail = (
                    f"{probe.request.key}: {SIDES[side]} does not see token {place} at positions "
                    f"{seen[0]} to {seen[-1]}"
                )
                return Repair(MASKS, detail, 0.0, float(place))
    return Repair(MASKS, same, 1.0)


def _usual_effect(train: Tensor, infer: Tensor, place: int) -> float:
    """Return the larger median change of the rows after a changed token."""
    return max(float(e[place + 1 :].median()) for e in (train, infer))


def _effects(
    tokens: list[int], kernels: tuple[Forward, Forward], temperature: float
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return, for some positions, the change of each row of each kernel if that token is
    replaced."""
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
    """Compare one side with the other run after padding that its attention sees."""
    tokens = list(probe.request.tokens)
    before = float(total_variation(probe.train, probe.infer, temperature).mean())
    best = Repair(MASKS, "no padding explains the deviation", 1.0)
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
                    best = Repair(MASKS, detail, left, float(count))
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


# --- swapped sides --------------------------------------------------------------------------------

_DISTINCT = 8.0
"""Smallest ratio of the noises of both claims that distinguishes the sides."""
_MATCH = 4.0
"""Largest ratio of the noise of a kernel to that of the claim it matches."""


def swapped_sides(noise: RoundingNoise | None) -> Repair:
    """Compare the noise of each kernel with both claims; swapped sides turn w = p/q into 1/w.

    `left` is the misfit after the swap as a share of that before: a misfit is the sum over both
    sides of |ln(observed / expected)|.
    """
    name = "swapped_sides"
    if noise is None:
        return Repair(name, "no reference run", None)
    train, infer = noise.expected
    if max(train, infer) < _DISTINCT * min(train, infer):
        return Repair(name, "both kernels claim about the same noise", None)
    if min(noise.observed) == 0:
        return Repair(name, "a kernel makes no rounding error", None)
    now = [abs(math.log(o / e)) for o, e in zip(noise.observed, noise.expected, strict=True)]
    then = [abs(math.log(o / e)) for o, e in zip(noise.observed, (infer, train), strict=True)]
    shown = ", ".join(
        f"{side} errs by {o:.2g} and claims {e:.2g}"
        for side, o, e in zip(("train", "infer"), noise.observed, noise.expected, strict=True)
    )
    fits = max(then) < math.log(_MATCH) and min(now) > math.log(_MATCH)
    left = sum(then) / sum(now) if fits else 1.0
    return Repair(name, shown, left)
