"""From the outcomes of goals, and what they imply, to the results of a certificate."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kcdsl.ir.terms import EvidenceKind, Program
from kcdsl.model.files import Artefacts
from kcdsl.model.presets import resolve
from kcdsl.release.issue import results_for
from kcdsl.release.requirements import required_clauses
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
    by_chance = proof is not None and outcome.evidence.kind is EvidenceKind.PROBABILISTIC
    return results_for(
        required,
        evidence=Evidence.SAMPLE if proof is None else Evidence(outcome.evidence.kind.value),
        method=ATTACK if proof is None else method_of(json.loads(outcome.proof or b"{}")),
        verdict=_word(verdict),
        numerics=numerics,
        bound=None if proof is None else bound,
        low=None if flip or by_chance else outcome.attack,
        alpha=outcome.goal.alpha if by_chance else None,
        value=outcome.attack if proof is None and not flip else None,
        n=len(outcome.cases),
        unit="region",
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
        bounds = {(b.quantity, b.op): b.bound for b in item.bounds if b.decides}
        decided = [
            number
            for number, comparisons in enumerate(wanted.alternatives)
            if all((c.quantity, c.op) in bounds for c in comparisons)
        ]
        if wanted.budget is None and decided:
            found += _implied_results(wanted, decided[0], item, bounds)
    return found


def _implied_results(
    wanted: RequiredClause, number: int, item: Implied, bounds: Mapping[tuple[str, str], float]
) -> list[CertifiedClause]:
    return [
        results_for(
            wanted,
            comparison,
            evidence=Evidence.PROOF,
            method=IMPLIED,
            verdict=Verdict.PASSED,
            bound=bounds[comparison.quantity, comparison.op],
            implied_by=item.by,
            assumptions=item.assumptions,
        )
        for comparison in wanted.alternatives[number]
    ]
