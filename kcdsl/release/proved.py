"""From the outcomes of goals, and what they imply, to the results of a certificate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from kcdsl.ir.terms import EvidenceKind, Program
from kcdsl.model.files import Artefacts
from kcdsl.model.presets import resolve
from kcdsl.release.issue import results_for
from kcdsl.release.requirements import quantity_of, required_clauses
from kcdsl.verdict.implied import Implied
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Violated
from kcdsl.verdict.model import Verdict as Found
from kcdsl.verdict.outcome import GoalOutcome
from kcdsl_certs.canonical import canonical_digest
from kcdsl_certs.clauses import IMPLIED, CertifiedClause, Evidence, ProofReference, Verdict
from kcdsl_certs.proofs import SOME_MARGIN, method_of
from kcdsl_certs.requirements import RequiredClause
from kcdsl_certs.verdicts import ATTACK


def proof_reference(clause: str, proof: bytes) -> ProofReference:
    """Return how a certificate names the proof of a clause: by digest, and where to look."""
    return ProofReference(hashlib.sha256(proof).hexdigest(), f"{clause}.proof.json")


def proved_clauses(
    program: Program,
    base: Path | Artefacts,
    outcomes: Sequence[GoalOutcome],
    proofs: Mapping[str, ProofReference],
) -> list[CertifiedClause]:
    """Return the results of goals as a certificate states them.

    `proofs` names the proof object of every clause that has one; a result without one is a sample
    of the runs that were attacked, so it can refute a hard clause and never show it.
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
    flip = outcome.goal.functional == "no_flip"
    bound = SOME_MARGIN if flip else outcome.bound
    reached = None if flip else outcome.attack
    by_chance = proof is not None and outcome.evidence.kind is EvidenceKind.PROBABILISTIC
    return results_for(
        required,
        evidence=Evidence.SAMPLE if proof is None else Evidence(outcome.evidence.kind.value),
        method=ATTACK if proof is None else method_of(json.loads(outcome.proof or b"{}")),
        verdict=_word(verdict),
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


def _word(verdict: Found) -> Verdict:
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
    the bounds decide. A clause with a budget is left to what is measured."""
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
                results_for(
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
