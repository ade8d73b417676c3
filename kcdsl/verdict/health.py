"""Health score and recommended action of decided clauses.

Every clause with an event adds 1 + v to E, where v is its `deviation` on its worst slice. An event
is a violation, missing valid evidence, or an undecided hard clause. The highest level of a
violation, or of missing valid evidence, selects the range of D:

    L3                        D = eta_2 + E
    L2                        D = eta_1 + (eta_2 - eta_1) E / (1 + E)    in [eta_1, eta_2)
    L1, or undecided alone    D = eta_1 E / (1 + E)                      in [0, eta_1)

so that D >= eta_1 exactly on an event of L2 or L3, and D >= eta_2 exactly on one of L3: many failed
clauses of one level never reach the range of the next level. Health is exp(-D). The action of the
score is log below eta_1, guard below eta_2, and fallback from eta_2 on. The contract sets both
thresholds in `escalation.health`.

The recommended action is the most severe of the action of the violated clauses, that of the
undecided hard ones, and that of the score: the score raises an action and never lowers it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kcdsl.ir.escalation import severity
from kcdsl.ir.terms import Escalation, Level
from kcdsl.verdict.model import Inconclusive, InvalidEvidence, Violated
from kcdsl.verdict.records import Record
from kcdsl.verdict.result import ClauseResult


@dataclass(frozen=True, slots=True)
class Health(Record):
    """D >= 0 (infinite: unbounded), the action that it selects, and both thresholds of D."""

    derived: ClassVar[tuple[str, ...]] = ("score",)

    deviation: float
    action: str
    guard_from: float
    fallback_from: float

    @property
    def score(self) -> float:
        """Return exp(-D)."""
        return math.exp(-self.deviation)


def deviation(value: float, threshold: float, better: str) -> float:
    """Return v_c >= 0 for `better` "lower" or "higher"; infinite for NaN, and off tau = 0."""
    if not (math.isfinite(value) and math.isfinite(threshold)):
        return math.inf
    excess = value - threshold if better == "lower" else threshold - value
    if excess <= 0:
        return 0.0
    return excess / abs(threshold) if threshold != 0 else math.inf


def over_budget(rate: float, budget: float) -> float:
    """Return v_c of a soft clause in [0, 1]: (rate - budget) / (1 - budget).

    A rate of 75 % deviates by 0.747 from a budget of 1 %, not by 74. Infinite for NaN.
    """
    if not 0 <= rate <= 1 or not 0 <= budget < 1:
        return math.inf
    return max(0.0, rate - budget) / (1 - budget)


def is_broken(row: ClauseResult) -> bool:
    """Return whether a result is a violation or has no valid evidence."""
    return isinstance(row.verdict, Violated | InvalidEvidence)


def is_open(row: ClauseResult) -> bool:
    """Return whether a result leaves a hard clause undecided."""
    return isinstance(row.verdict, Inconclusive) and row.budget is None


def assess(rows: Iterable[ClauseResult], escalation: Escalation) -> Health:
    """Return the health of decided clauses; the worst slice of each clause counts."""
    worst: dict[str, float] = {}
    highest: Level | None = None
    for row in rows:
        if not (is_broken(row) or is_open(row)):
            continue
        v = row.deviation if row.deviation >= 0 else math.inf  # NaN too
        worst[row.clause] = max(worst.get(row.clause, 0.0), v)
        if is_broken(row):
            level = Level(row.level)
            highest = level if highest is None else max(highest, level)
    guard, fallback = float(escalation.guard_from), float(escalation.fallback_from)
    total = sum(1 + v for v in worst.values())
    match highest:
        case Level.L3:
            found = fallback + total
        case Level.L2:
            found = _within(guard, fallback, total)
        case _:
            found = _within(0.0, guard, total)
    action = "log" if found < guard else "guard" if found < fallback else "fallback"
    return Health(found, action, guard, fallback)


def _within(low: float, high: float, total: float) -> float:
    """Return a number that grows with `total` from low, and stays below high."""
    share = total / (1 + total) if math.isfinite(total) else 1.0
    return min(low + (high - low) * share, math.nextafter(high, -math.inf))


def recommend(rows: Sequence[ClauseResult], health: Health) -> str:
    """Return the most severe action selected by violated clauses, undecided clauses or the score.

    Among violated clauses, the highest level decides, then the most severe action of that level.
    """
    order = tuple(Level)
    broken = [(order.index(Level(r.level)), r.action) for r in rows if is_broken(r) and r.action]
    ranked = sorted(broken, key=lambda c: (c[0], severity(c[1])))
    asked = [ranked[-1][1]] if ranked else []
    asked += [row.action for row in rows if is_open(row) and row.action]
    return max([*asked, health.action, "log"], key=severity)
