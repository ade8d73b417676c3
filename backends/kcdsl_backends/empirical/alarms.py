"""All clauses together: the error of one look, and violations that share it.

Passes are not corrected: a contract holds only if all its clauses do, and whichever of them is
false is accepted with at most its own error. A violation is reported if any clause is violated, so
the chance of a false one grows with their number; Holm's method keeps it below the error. What is
violated by itself and not among so many is inconclusive, never a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from kcdsl.ir.obligations import Obligation
from kcdsl.ir.terms import Program
from kcdsl.verdict.model import Violated
from kcdsl.verdict.report import Statistics
from kcdsl.verdict.result import ClauseResult
from kcdsl_backends.empirical import statistics
from kcdsl_backends.empirical.measured import SliceData
from kcdsl_backends.empirical.results import decide_clause
from kcdsl_backends.empirical.statistics import ONE_LOOK


@dataclass(frozen=True, slots=True)
class Case:
    """An obligation with what was measured on its slice; `blocked` says why no evidence about it
    may be trusted."""

    obligation: Obligation
    data: SliceData
    blocked: str | None = None


def decide_all(
    cases: Sequence[Case], program: Program, seed: int, looks: int | None = 1
) -> tuple[tuple[ClauseResult, ...], Statistics]:
    """Decide every case, and say how the error was shared."""
    confidence = statistics.confidence_over(looks)

    def decide(case: Case, alarm: Fraction | None = None) -> ClauseResult:
        row = decide_clause(
            case.obligation.part,
            program,
            case.data,
            seed=seed,
            confidence=confidence,
            alarm=alarm,
            blocked=case.blocked,
        )
        comparison = case.obligation.comparison
        limit = None if comparison is None else comparison.threshold
        return replace(row, obligation=case.obligation.id, exact_threshold=limit)

    rows = [decide(case) for case in cases]
    sampled = [i for i, row in enumerate(rows) if row.evidence == "sample"]
    violated = [i for i in sampled if isinstance(rows[i].verdict, Violated)]
    found, level = statistics.holm(
        len(sampled),
        confidence.error,
        violated,
        lambda i, alarm: isinstance(decide(cases[i], alarm).verdict, Violated),
    )
    for i in violated:
        if i not in found:
            rows[i] = decide(cases[i], level)
    return tuple(rows), Statistics(
        error=float(ONE_LOOK.error),
        looks=looks,
        limit_error=float(confidence.error),
        sampled=len(sampled),
        violation_error=float(level),
    )
