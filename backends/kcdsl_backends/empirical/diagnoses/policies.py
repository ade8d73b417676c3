"""Diagnoses of policies: another temperature, truncation, and the support of sampled ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal

import numpy as np
import torch
from torch import Tensor

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.model import (
    SIDES,
    SMALLEST,
    Probe,
    Repair,
    deviation,
    mean,
    not_applicable,
    outcome,
    total_variation,
)
from kcdsl_backends.empirical.metrics.policies import kl
from kcdsl_backends.empirical.table.evidence import Array

WIDEST = 1.5
"""Largest |ln T| that is tried."""
_LEAST = 1e-3


def temperature_fit(probes: Sequence[Probe], temperature: float) -> Repair:
    """Fit one temperature on the training logits to the inference policies.

    The best T is that of the least KL(softmax(train / T) || infer).
    """
    name = "temperature_fit"
    if not probes:
        return Repair(name, "no request could be run", None)
    train = torch.cat([p.train for p in probes])
    target = torch.log_softmax(torch.cat([p.infer for p in probes]) / temperature, -1)

    def loss(log_t: float) -> float:
        scaled = torch.log_softmax(train / (temperature * math.exp(log_t)), -1)
        return float(kl(scaled, target).mean())

    here = loss(0.0)
    if not math.isfinite(here):
        return Repair(name, "the drift is not finite", None)
    best = minimise(loss, -WIDEST, WIDEST)
    fitted, before = math.exp(best), deviation(probes, temperature)
    after = mean([total_variation(p.train / fitted, p.infer, temperature) for p in probes])
    left = after / before if before > SMALLEST and abs(best) > _LEAST else 1.0
    detail = f"T = {fitted:.3f} leaves {loss(best):.3g} of {here:.3g} nats"
    return Repair(name, detail, left, fitted)


def minimise(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimiser of a unimodal function on [low, high] by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(32):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2


# --- truncation -----------------------------------------------------------------------------------

_NOTHING = -80.0
"""ln p below which a token has no mass."""
_TIES = 4
"""Largest number of additional tokens that a filter keeps since they tie with its last one."""
_EXCLUDED = -1000.0
"""ln p below which a token is excluded: masks set -inf, the least number of a format, or -1e4."""


def truncation_mass(probes: Sequence[Probe], temperature: float) -> Repair:
    """Find tokens that one side excludes and the other can draw; name the filter and its value.

    The value is the mean of -ln of the remaining mass, in nats. Excluded tokens count as `seen`,
    however little they explain: rounding excludes no token, and drawn tokens do not show that q
    does not cover p.
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
    for p, removed in zip(probes, chosen, strict=True):
        other = p.side(1 - side)
        filtered = other.masked_fill(removed, -torch.inf)
        parts.append(total_variation(filtered, p.side(side), temperature))
        share = torch.softmax(other / temperature, -1)
        surviving.append(-share.masked_fill(removed, 0.0).sum(-1).clamp_min(1e-300).log())
        shares.append(share)
        kept.append(~removed)
    left = mean(parts) / before if before > SMALLEST else 1.0
    seen = any(_excluded(p, side, removed) for p, removed in zip(probes, chosen, strict=True))
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


def _excluded(probe: Probe, side: int, removed: Tensor) -> bool:
    """Return whether a removed token [T, V] has a logit of -inf or far below all others."""
    own = torch.log_softmax(probe.side(side), -1)
    return bool(((own < _EXCLUDED) & removed).any())


def _filter(shares: Tensor, kept: Tensor) -> str:
    """Name the filter that keeps these tokens [N, V] of policies [N, V]."""
    counts = kept.sum(-1)
    ordered = shares.sort(-1, descending=True).values
    masses = ordered.cumsum(-1)
    smallest = shares.masked_fill(~kept, torch.inf).amin(-1)
    largest = shares.masked_fill(kept, -torch.inf).amax(-1)
    removed, passed = (~kept).any(0), (kept & (shares > math.exp(_NOTHING))).any(0)
    if not bool((removed & passed).any()):  # the same tokens at all positions
        return f"a mask of {int(removed.sum())} token ids"
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


# --- sampled ratios -------------------------------------------------------------------------------

_ERRORS = 5
"""Standard errors beyond which a mean is not 1. With no more tokens than its square, no mean can
lie so far, by the Cauchy-Schwarz inequality."""

_SQUARED = 1e100
"""Ratios above this are scaled down before they are squared."""


def support_check(ratios: Sequence[Array]) -> Precheck:
    """Check that sampled ratios average to 1; else q lacks mass of p, or the sides are swapped.

    The tolerance is `_ERRORS` standard errors: over requests or over tokens, whichever is larger.
    Each token is drawn from a policy under which E w = 1, so the squares of w - 1 estimate its
    variance, also with too few requests for an estimate by requests.
    """
    name = "support_check"
    tokens = sum(r.size for r in ratios)
    if not tokens:
        return not_applicable(name, "no clause reads sampled tokens")
    largest = float(np.max([r.max() for r in ratios if r.size]))
    if not math.isfinite(largest):
        said = "beyond float64" if largest == math.inf else f"{largest:g}"
        return outcome(name, False, f"the largest w is {said}", largest)
    scale = largest if largest > _SQUARED else 1.0
    scaled = [r / scale for r in ratios]
    sums = np.array([math.fsum(r) for r in scaled])
    sizes = np.array([float(r.size) for r in ratios])
    mean = math.fsum(sums) / tokens
    residual = sums - mean * sizes
    squares = math.fsum(float(((r - 1 / scale) ** 2).sum()) for r in scaled)
    error = math.sqrt(max(math.fsum(residual**2), squares)) / tokens
    good = abs(mean - 1 / scale) <= _ERRORS * error + 1e-6 / scale
    mean, error = mean * scale, error * scale
    if good and tokens <= _ERRORS**2:
        return not_applicable(name, f"{tokens} tokens are too few to show that a mean is not 1")
    detail = f"mean w = {mean:.9g}, standard error {error:.2g}"
    if not good:
        detail += (
            "; it is 1 for tokens that infer drew, each with its own ln-probabilities: look for a "
            "filter, wrong columns or a wrong mask"
        )
    return outcome(name, good, detail, mean)
