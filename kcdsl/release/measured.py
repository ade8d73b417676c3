"""From the rows of a report to the results of a certificate."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from kcdsl.ir.buckets import expand_tables
from kcdsl.ir.obligations import obligations_of
from kcdsl.ir.terms import Program
from kcdsl.model.files import Artefacts
from kcdsl.release.issue import results_for
from kcdsl.release.requirements import comparisons_of, required_clauses, slices_of
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Violated
from kcdsl.verdict.report import Report
from kcdsl.verdict.result import ClauseResult, reason
from kcdsl_certs.clauses import CertifiedClause, Evidence, Verdict, holds
from kcdsl_certs.requirements import Comparison, RequiredClause

_METHODS = {"census": "census/1", "sample": "one-sided-limits/1"}
_RATES = "clopper-pearson/1"


def certified_clauses(
    program: Program, base: Path | Artefacts, report: Report
) -> list[CertifiedClause]:
    """Return the results of an evaluation as a certificate states them.

    Every row names the obligation that it decides. A verdict that the numbers of a certificate
    cannot show again is weakened to INCONCLUSIVE: so is that of several comparisons in one row,
    whose counts are of none of them.
    """
    required = {(r.id, r.slice): r for r in required_clauses(program, base)}
    expanded = expand_tables(program)
    stated = {
        obligation.id: comparisons_of(obligation, expanded)
        for clause in expanded.clauses
        for name in slices_of(clause)
        for obligation in obligations_of(clause, name)
    }
    return [
        result_of(required[row.clause, row.slice], stated[row.obligation], row)
        for row in report.clauses
    ]


def _compound(row: ClauseResult) -> ClauseResult:
    """Return a row of several comparisons without what is of none of them."""
    verdict = row.verdict
    if isinstance(verdict, Held | Violated):
        verdict = Inconclusive("its counts are of several comparisons together")
    return replace(row, verdict=verdict, value=None, low=None, high=None, exceedance=None)


def result_of(
    required: RequiredClause, comparisons: tuple[Comparison, ...], row: ClauseResult
) -> CertifiedClause:
    """Return the result of a row that decides some comparisons of a clause on a slice.

    Raises Refusal for what a certificate cannot state.
    """
    wanted = comparisons[0] if comparisons else None
    if len(comparisons) > 1:
        row = _compound(row)
    usable = not isinstance(row.verdict, InvalidEvidence)
    counted = row.exceedance if row.budget is not None else None
    sampled = row.evidence == "sample" and counted is not None
    limited = row.evidence == "sample" and counted is None and usable
    confident = row.confidence is not None and row.confidence >= 0.95
    return results_for(
        required,
        wanted,
        evidence=Evidence(row.evidence),
        method=_RATES if sampled else _METHODS[row.evidence],
        verdict=_verdict(row),
        value=_as_compared(row, wanted) if usable else None,
        n=(counted.n if counted is not None else row.n) if usable else None,
        exceed=counted.k if counted is not None and usable else None,
        unit=row.counted,
        low=row.low if limited else None,
        high=row.high if limited else None,
        alpha=Fraction(1, 20) if sampled or (limited and confident) else None,
        reason=reason(row.verdict),
    )


def _as_compared(row: ClauseResult, wanted: Comparison | None) -> float | None:
    """Return the value, at most one unit in the last place off, so that it compares with the
    threshold as the exact quotient did: a mean of 19/20 meets 95 %, its nearest double does not."""
    if row.value is None or not isinstance(row.verdict, Held) or wanted is None:
        return row.value
    if holds(Fraction(row.value), wanted.op, wanted.tau):
        return row.value
    good = math.inf if wanted.op in (">=", ">") else -math.inf
    return math.nextafter(row.value, good)


def _verdict(row: ClauseResult) -> Verdict:
    match row.verdict:
        case Held():
            return Verdict.PASSED
        case Violated():
            return Verdict.FAILED
        case _:
            return Verdict.INCONCLUSIVE
