"""From the rows of a report to the results of a certificate."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from kcdsl.ir.obligations import obligations_of, slices_of
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Program
from kcdsl.model.files import Artefacts
from kcdsl.release.issue import results_for
from kcdsl.release.requirements import required_clauses, stated_alternatives
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Violated
from kcdsl.verdict.report import Report
from kcdsl.verdict.result import ClauseResult, reason
from kcdsl_certs.clauses import CertifiedClause, Evidence, Verdict
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
        obligation.id: stated_alternatives(obligation, expanded)
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
    return replace(row, verdict=verdict, exact_value=None, low=None, high=None, exceedance=None)


def result_of(
    required: RequiredClause, alternatives: tuple[tuple[Comparison, ...], ...], row: ClauseResult
) -> CertifiedClause:
    """Return the result of a row that decides an obligation of a clause on a slice.

    Raises Refusal for what a certificate cannot state.
    """
    comparisons = [comparison for choice in alternatives for comparison in choice]
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
        value=row.exact_value if usable else None,
        n=(counted.n if counted is not None else row.n) if usable else None,
        exceed=counted.k if counted is not None and usable else None,
        counted=row.counted,
        low=row.low if limited else None,
        high=row.high if limited else None,
        alpha=Fraction(1, 20) if sampled or (limited and confident) else None,
        reason=reason(row.verdict),
    )


def _verdict(row: ClauseResult) -> Verdict:
    match row.verdict:
        case Held():
            return Verdict.PASSED
        case Violated():
            return Verdict.FAILED
        case _:
            return Verdict.INCONCLUSIVE
