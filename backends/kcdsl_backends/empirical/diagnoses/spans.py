"""Is the deviation that of one run of positions, such as a prompt, a tool's answer or padding?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl_backends.empirical.diagnoses.distances import mean, row_size, total_variation
from kcdsl_backends.empirical.diagnoses.model import BEYOND, SMALLEST, Probe, Repair
from kcdsl_backends.empirical.diagnoses.noise import Noise

_SHORTEST = 4
_WIDEST = 0.8
"""Largest share of the positions that a run may cover, unless it goes on to the end: other weights
or formats move the first positions too."""
_SHARE = 0.9
"""Share of the deviation that must lie in the run."""
_CONTRAST = 1000.0
"""Without a reference: how many times the size of the rest the size of the run must be."""


def deviating_run(probes: Sequence[Probe], noise: Noise | None, temperature: float) -> Repair:
    """Find one contiguous run of positions that holds nearly all of the deviation.

    With a reference, a position deviates where the kernels differ by more than `BEYOND` times what
    both claims explain; without one, where they differ a thousand times as much as elsewhere.
    """
    name = "mask_provenance"
    found, looked = [], 0
    for p in probes:
        gaps = row_size(p.train, p.infer)
        if len(gaps) < _SHORTEST or not bool(torch.isfinite(gaps).all()):
            continue
        looked += 1
        off = _deviating(gaps, noise)
        if bool(off.any()):
            found.append((p, gaps, off))
    if not looked:
        return Repair(name, f"no request with {_SHORTEST} positions of finite differences", None)
    runs = [(p, run) for p, gaps, off in found if (run := _run(gaps, off)) is not None]
    if not runs or 2 * len(runs) < len(found):
        return Repair(name, "the deviation is not that of one run of positions", 1.0)
    outside, all_over = [], []
    for p, (first, last) in runs:
        variation = total_variation(p.train, p.infer, temperature)
        rest = variation.clone()
        rest[first : last + 1] = 0.0
        outside.append(rest)
        all_over.append(variation)
    whole = mean(all_over)
    left = mean(outside) / whole if whole > SMALLEST else 1.0
    p, (first, last) = runs[0]
    detail = (
        f"{p.request.key}: positions {first} to {last} of {p.train.shape[0]} hold the deviation "
        f"({len(runs)} of {len(probes)} requests have such a run)"
    )
    return Repair(name, detail, left, float(last - first + 1))


def _deviating(gaps: Tensor, noise: Noise | None) -> Tensor:
    if noise is not None:
        allowed = (noise.expected[0] ** 2 + noise.expected[1] ** 2) ** 0.5
        return torch.gt(gaps, BEYOND * allowed)
    ordered = gaps.sort().values
    ratio = ordered[1:] / ordered[:-1].clamp_min(SMALLEST)
    jump = int(ratio.argmax())
    if float(ratio[jump]) < _CONTRAST:
        return torch.zeros_like(gaps, dtype=torch.bool)
    return torch.gt(gaps, ordered[jump])


def _run(gaps: Tensor, off: Tensor) -> tuple[int, int] | None:
    """Return the first and last position of the run; None where there is no such run."""
    places = off.nonzero()[:, 0]
    first, last = int(places[0]), int(places[-1])
    length = last - first + 1
    whole = last == len(gaps) - 1 and first >= 2
    if length < 2 or 2 * len(places) < length or not (whole or length <= _WIDEST * len(gaps)):
        return None
    inside = float(gaps[first : last + 1].sum())
    return (first, last) if inside >= _SHARE * float(gaps.sum()) else None
