"""Rank stability: which positions cannot change their top-1 class or top-k set.

All tests are independent of the temperature and strict: at equality the kernel's tie-breaking
decides, so nothing is certified. Sums of floats are rounded against the claim.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from kcdsl.chain.rounding import ChainDomainError, require_finite, require_nonnegative


def stable_under_intervals(
    logits: Sequence[float], intervals: Sequence[tuple[float, float]], k: int = 1
) -> bool:
    """Say whether no drift dz_i in [lo_i, hi_i] changes the top-k set of the training logits [V].

    The least perturbed logit inside the set must stay above the largest outside it. Raises
    ChainDomainError for NaN, infinite or misaligned input and for k outside 1..V.
    """
    z = require_finite(logits, "the logits", at_least=2)
    low = require_finite((lo for lo, _ in intervals), "the lower ends", at_least=2)
    high = require_finite((hi for _, hi in intervals), "the upper ends", at_least=2)
    if not len(z) == len(low) == len(high):
        raise ChainDomainError(f"{len(z)} logits, {len(low)} intervals")
    if any(lo > hi for lo, hi in zip(low, high, strict=True)):
        raise ChainDomainError("an interval is empty")
    _require_k(k, len(z))
    if k == len(z):
        return True
    inside = set(heapq.nlargest(k, range(len(z)), key=z.__getitem__))
    least = min(_sum_down(z[i], low[i]) for i in inside)
    largest = max(_sum_up(z[i], high[i]) for i in range(len(z)) if i not in inside)
    return least > largest


def stable_under_span(logits: Sequence[float], drift_span: float, k: int = 1) -> bool:
    """Say whether no drift with max dz - min dz <= drift_span changes the top-k set."""
    limit = require_nonnegative(drift_span, "the span of the drift", finite=False)
    gap = margin(logits, k)
    return gap > limit


def stable_under_linf(logits: Sequence[float], drift_linf: float, k: int = 1) -> bool:
    """Say whether no drift with |dz_i| <= drift_linf changes the top-k set: margin > 2 linf."""
    limit = require_nonnegative(drift_linf, "the l_inf norm of the drift", finite=False)
    return stable_under_span(logits, 2.0 * limit, k)


def margin(logits: Sequence[float], k: int = 1) -> float:
    """Return z_(k) - z_(k+1), rounded down; +inf for k = V, where the set cannot change."""
    z = require_finite(logits, "the logits", at_least=2)
    _require_k(k, len(z))
    if k == len(z):
        return math.inf
    best = heapq.nlargest(k + 1, z)
    return _sum_down(best[k - 1], -best[k]) if best[k - 1] > best[k] else 0.0


def certified_stable_fraction(stable: Iterable[bool]) -> float:
    """Return the share of positions whose set cannot change, rounded down; no position raises."""
    flags = [bool(flag) for flag in stable]
    if not flags:
        raise ChainDomainError("no positions: a share of nothing is not evidence")
    if all(flags):
        return 1.0
    return math.nextafter(sum(flags) / len(flags), -math.inf) if any(flags) else 0.0


def _require_k(k: int, classes: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= classes:
        raise ChainDomainError(f"k is {k!r}; it must be an integer from 1 to {classes}")


def _sum_down(left: float, right: float) -> float:
    return math.nextafter(left + right, -math.inf)


def _sum_up(left: float, right: float) -> float:
    return math.nextafter(left + right, math.inf)
