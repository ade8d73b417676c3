"""Truncation: is one policy the other, cut off to its likeliest tokens and renormalised?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal

import torch
from torch import Tensor

from kcdsl_backends.empirical.diagnoses.distances import deviation, mean, total_variation
from kcdsl_backends.empirical.diagnoses.model import SIDES, SMALLEST, Probe, Repair

_NOTHING = -80.0
"""ln p below which a probability counts as zero mass."""
_TIES = 4
"""So many tokens more a filter may keep where they have the same logit as its last one."""
_EXCLUDED = -1000.0
"""ln p below which a token is excluded: masks write -inf, the least number of a format, or -1e4."""


def truncation_mass(probes: Sequence[Probe], temperature: float) -> Repair:
    """Does one side give no mass to tokens that the other can draw? Name the filter and its value.

    The value is the mean of -ln of the mass that survives, in nats. Tokens that are excluded are
    seen as such, however little they explain: no rounding excludes a token, and where q does not
    cover p, no drawn token shows it.
    """
    name = "truncation_mass"
    if not probes:
        return Repair(name, "no request could be run", None)
    cut = [_cut(p, side, temperature) for side in (0, 1) for p in probes]
    count = len(probes)
    rows = [int(sum(c.any(-1).sum() for c in cut[s * count : (s + 1) * count])) for s in (0, 1)]
    side = 0 if rows[0] > rows[1] else 1
    if rows[side] == 0:
        return Repair(name, "both kernels give mass to the same tokens", 1.0, 0.0)
    chosen = cut[side * count : (side + 1) * count]
    before = deviation(probes, temperature)
    parts, surviving, shares, kept = [], [], [], []
    for p, gone in zip(probes, chosen, strict=True):
        other = p.side(1 - side)
        filtered = other.masked_fill(gone, -torch.inf)
        parts.append(total_variation(filtered, p.side(side), temperature))
        share = torch.softmax(other / temperature, -1)
        surviving.append(-share.masked_fill(gone, 0.0).sum(-1).clamp_min(1e-300).log())
        shares.append(share)
        kept.append(~gone)
    left = mean(parts) / before if before > SMALLEST else 1.0
    seen = any(_excluded(p, side, gone) for p, gone in zip(probes, chosen, strict=True))
    lost = mean(surviving)
    detail = (
        f"{_filter(torch.cat(shares), torch.cat(kept))} on the side of {SIDES[side]}: {rows[side]} "
        f"of {sum(len(s) for s in shares)} positions lose {lost:.3g} nats on average"
    )
    return Repair(name, detail, left, lost, seen)


def _cut(probe: Probe, side: int, temperature: float) -> Tensor:
    """Return [T, V]: tokens without mass on one side that have mass on the other."""
    own = torch.log_softmax(probe.side(side) / temperature, -1)
    other = torch.log_softmax(probe.side(1 - side) / temperature, -1)
    return (own < _NOTHING) & (other > _NOTHING)


def _excluded(probe: Probe, side: int, gone: Tensor) -> bool:
    """Say whether a token that was cut off [T, V] has a logit of -inf, or as good as that."""
    own = torch.log_softmax(probe.side(side), -1)
    return bool(((own < _EXCLUDED) & gone).any())


def _filter(shares: Tensor, kept: Tensor) -> str:
    """Name the filter that keeps these tokens [N, V] of policies [N, V]."""
    counts = kept.sum(-1)
    ordered = shares.sort(-1, descending=True).values
    masses = ordered.cumsum(-1)
    smallest = shares.masked_fill(~kept, torch.inf).amin(-1)
    largest = shares.masked_fill(kept, -torch.inf).amax(-1)
    gone, passed = (~kept).any(0), (kept & (shares > math.exp(_NOTHING))).any(0)
    if not bool((gone & passed).any()):  # cut off at one position, at all of them
        return f"a mask of {int(gone.sum())} token ids"
    if int(counts.min()) == int(counts.max()):
        return f"top-k {int(counts[0])}"
    if bool((smallest < largest * (1 - 1e-3)).any()):
        few = int(counts.max() - counts.min()) <= _TIES
        return f"about top-k {int(counts.min())}" if few else "a filter of its own"
    at = (counts - 1).clamp_min(0)[:, None]
    reached = masses.gather(-1, at)[:, 0]
    short = torch.where(counts > 1, masses.gather(-1, (at - 1).clamp_min(0))[:, 0], 0.0)
    if float(short.max()) < float(reached.min()) + 1e-6:
        return f"top-p {_simplest(float(short.max()), float(reached.min()))}"
    top = ordered[:, 0]
    low, high = float((largest / top).max()), float((smallest / top).min())
    return f"min-p {_simplest(low, high)}" if low <= high else "a filter of its own"


def _simplest(low: float, high: float) -> str:
    """Return the shortest decimal between two numbers."""
    for digits in range(1, 9):
        middle = round((low + high) / 2, digits)
        if low <= middle <= high:
            return f"{Decimal(str(middle)).normalize():f}"
    return f"{(low + high) / 2:.6g}"
