"""Results of a certificate from the rows of a report and the outcomes of goals."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from kcdsl.ir.obligations import obligations_of, slices_of
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import EvidenceKind, Program
from kcdsl.model.files import Artefacts
from kcdsl.model.presets import resolve
from kcdsl.release.issue import result_for
from kcdsl.release.requirements import quantity_of, required_clauses, stated_alternatives
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Violated
from kcdsl.verdict.model import Verdict as Found
from kcdsl.verdict.outcome import GoalOutcome, Implied
from kcdsl.verdict.report import Report
from kcdsl.verdict.result import ClauseResult, reason
from kcdsl_certs.encoding.strict import canonical_digest
from kcdsl_certs.statement import (
    ATTACK,
    IMPLIED,
    CertifiedClause,
    Comparison,
    Evidence,
    ProofReference,
    RequiredClause,
    Verdict,
)
from kcdsl_certs.verification.proofs import SOME_MARGIN, method_of

# --- measured -------------------------------------------------------------------------------------


_METHODS = {"census": "census/1", "sample": "one-sided-limits/1"}
_RATES = "clopper-pearson/1"


def certified_clauses(
    program: Program, base: Path | Artefacts, report: Report
) -> list[CertifiedClause]:
    """Return the results of an evaluation in the form of a certificate.

    Every row names the obligation that it decides. A verdict that the numbers of a certificate
    cannot reproduce is weakened to INCONCLUSIVE; so is a row with several comparisons, whose counts
    belong to no single one.
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
    """Return a row of several comparisons without the fields that belong to no single one."""
    verdict = row.verdict
    if isinstance(verdict, Held | Violated):
        verdict = Inconclusive("its counts are of several comparisons together")
    return replace(row, verdict=verdict, exact_value=None, low=None, high=None, exceedance=None)


def result_of(
    required: RequiredClause, alternatives: tuple[tuple[Comparison, ...], ...], row: ClauseResult
) -> CertifiedClause:
    """Return the result of a row that decides an obligation of a clause on a slice.

    Raises Refusal for a row that a certificate cannot state.
    """
    comparisons = [comparison for choice in alternatives for comparison in choice]
    wanted = comparisons[0] if comparisons and required.alternatives else None
    if len(comparisons) > 1:
        row = _compound(row)
    usable = not isinstance(row.verdict, InvalidEvidence)
    counted = row.exceedance if row.budget is not None else None
    sampled = row.evidence == "sample" and counted is not None
    limited = row.evidence == "sample" and counted is None and row.exact_value is not None
    limited = limited and usable
    confident = row.confidence is not None and row.confidence >= 0.95
    return result_for(
        required,
        wanted,
        evidence=Evidence(row.evidence),
        method=_RATES if sampled else _METHODS[row.evidence],
        verdict=_verdict_of(row.verdict),
        value=row.exact_value if usable else None,
        n=(counted.n if counted is not None else row.n) if usable else None,
        exceed=counted.k if counted is not None and usable else None,
        counted=row.counted,
        low=row.low if limited else None,
        high=row.high if limited else None,
        alpha=Fraction(1, 20) if sampled or (limited and confident) else None,
        reason=reason(row.verdict),
    )


# --- proved ---------------------------------------------------------------------------------------


def proof_reference(clause: str, proof: bytes) -> ProofReference:
    """Return the reference to the proof of a clause: its digest and its file."""
    return ProofReference(hashlib.sha256(proof).hexdigest(), f"{clause}.proof.json")


def proved_clauses(
    program: Program,
    base: Path | Artefacts,
    outcomes: Sequence[GoalOutcome],
    proofs: Mapping[str, ProofReference],
) -> list[CertifiedClause]:
    """Return the results of goals in the form of a certificate.

    `proofs` names the proof object of every clause that has one. A result without one is a sample
    of attacked runs, so it can refute a hard clause but never show it. A verdict of held without a
    proof object, as in real arithmetic, becomes inconclusive.
    """
    required = {r.id: r for r in required_clauses(program, base)}
    train, infer = (canonical_digest(resolve(k).to_json()) for k in (program.train, program.infer))
    return [
        _result(required[outcome.goal.clause.id], outcome, (train, infer), proofs)
        for outcome in outcomes
    ]


def _result(
    required: RequiredClause,
    outcome: GoalOutcome,
    numerics: tuple[str, str],
    proofs: Mapping[str, ProofReference],
) -> CertifiedClause:
    verdict, proof = outcome.verdict, proofs.get(required.id)
    if isinstance(verdict, Held) and proof is None:
        verdict = Inconclusive(
            f"{outcome.evidence.kind} evidence of the backend {outcome.backend} has no proof object"
        )
    flip = outcome.goal.functional == "no_flip"
    bound = SOME_MARGIN if flip else outcome.bound
    reached = None if flip else outcome.attack
    by_chance = proof is not None and outcome.evidence.kind is EvidenceKind.PROBABILISTIC
    return result_for(
        required,
        evidence=Evidence.SAMPLE if proof is None else Evidence(outcome.evidence.kind.value),
        method=ATTACK if proof is None else method_of(json.loads(outcome.proof or b"{}")),
        verdict=_verdict_of(verdict),
        numerics=numerics,
        bound=None if proof is None else bound,
        low=None if by_chance else reached,
        alpha=outcome.goal.alpha if by_chance else None,
        value=None
        if proof is not None or flip or outcome.attack is None
        else Fraction(outcome.attack),
        n=len(outcome.cases),
        counted="region",
        proof=proof,
        assumptions=outcome.evidence.assumptions,
        reason=verdict.reason if isinstance(verdict, Inconclusive | InvalidEvidence) else None,
        weights=(outcome.goal.weights or None) if proof is not None else None,
    )


def _verdict_of(verdict: Found) -> Verdict:
    match verdict:
        case Held():
            return Verdict.PASSED
        case Violated():
            return Verdict.FAILED
        case Inconclusive() | InvalidEvidence():
            return Verdict.INCONCLUSIVE


def implied_clauses(
    program: Program, base: Path | Artefacts, implied: Sequence[Implied]
) -> list[CertifiedClause]:
    """Return the implied hard clauses as results, one for each comparison of the alternative that
    the bounds decide. Clauses with a budget are decided by measurement instead."""
    required = {(r.id, r.slice): r for r in required_clauses(program, base)}
    found: list[CertifiedClause] = []
    for item in implied:
        wanted = required[item.clause_id, item.slice]
        bounds = {
            (quantity_of(b.comparison.quantity), b.comparison.op, b.comparison.threshold): b.bound
            for b in item.bounds
            if b.decides
        }
        decided = [
            choice
            for choice in wanted.alternatives
            if all((c.quantity, c.op, c.tau) in bounds for c in choice)
        ]
        if wanted.budget is None and decided:
            found += [
                result_for(
                    wanted,
                    comparison,
                    evidence=Evidence.PROOF,
                    method=IMPLIED,
                    verdict=Verdict.PASSED,
                    bound=bounds[comparison.quantity, comparison.op, comparison.tau],
                    implied_by=item.by,
                    assumptions=item.assumptions,
                )
                for comparison in decided[0]
            ]
    return found
