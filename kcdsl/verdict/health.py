"""Health score and recommended action.

v_c = max(0, m - tau)/tau (mirrored where a larger value is better), D = sum v_c >= 0, and
health = exp(-D). One clause counts once, with its worst slice. Off tau = 0 a deviation is infinite:
such a clause asks for equality. A clause that could not be measured deviates infinitely.

The action of the score is log for D < 1, guard for D < 3, fallback beyond. The recommended action
is the more severe of that and the action of the clauses: the score raises an action, never lowers
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kcdsl.check.escalation import severity
from kcdsl.ir.terms import Level

ETA_GUARD = 1.0
"""D from which on the score asks for the guarded route."""
ETA_FALLBACK = 3.0
"""D from which on the score asks for the fallback kernel."""


@dataclass(frozen=True, slots=True)
class Health:
    """D >= 0 (infinite: not measurable), the score exp(-D), and the action that it asks for."""

    deviation: float
    action: str

    @property
    def score(self) -> float:
        """Return exp(-D)."""
        return math.exp(-self.deviation)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        finite = math.isfinite(self.deviation)
        return {
            "deviation": self.deviation if finite else None,
            "score": self.score,
            "action": self.action,
            "guard_from": ETA_GUARD,
            "fallback_from": ETA_FALLBACK,
        }


def deviation(value: float, threshold: float, better: str) -> float:
    """Return v_c >= 0 for `better` "lower" or "higher"; infinite for NaN, and off tau = 0."""
    if not (math.isfinite(value) and math.isfinite(threshold)):
        return math.inf
    excess = value - threshold if better == "lower" else threshold - value
    if excess <= 0:
        return 0.0
    return excess / abs(threshold) if threshold != 0 else math.inf


def assess(deviations: Mapping[str, Iterable[float]]) -> Health:
    """Combine the deviations of each clause (one per slice) to the score."""
    worst = [max(values, default=0.0) for values in deviations.values()]
    if any(math.isnan(v) or v < 0 for v in worst):
        return Health(math.inf, "fallback")
    total = math.fsum(worst) if all(map(math.isfinite, worst)) else math.inf
    return Health(total, score_action(total))


def score_action(total: float) -> str:
    """Return the action that D asks for; NaN asks for the fallback."""
    if total < ETA_GUARD:
        return "log"
    return "guard" if total < ETA_FALLBACK else "fallback"


def recommend(called: Iterable[tuple[Level, str]], health: Health) -> str:
    """Return the more severe of the clauses' action and the score's.

    `called` holds level and action of each clause that is violated or not measurable; the most
    severe is that of the highest level, then of the most severe action. Without any it is "log".
    """
    order = tuple(Level)
    ranked = sorted(called, key=lambda c: (order.index(c[0]), severity(c[1])))
    chosen = ranked[-1][1] if ranked else "log"
    return health.action if severity(health.action) > severity(chosen) else chosen
