"""Do the clause results of a certificate show what the contract demands?"""

from __future__ import annotations

from kcdsl_certs.clauses import CertifiedClause, Verdict, check_verdict
from kcdsl_certs.reject import Reject
from kcdsl_certs.requirements import RequiredClause, uncovered
from kcdsl_certs.statement import Predicate
from kcdsl_certs.triple import Triple, numerics_digest


def check_clauses(
    predicate: Predicate,
    stated: Verdict,
    required: tuple[RequiredClause, ...],
    *,
    partial: bool,
) -> tuple[str, tuple[str, ...]]:
    """Return a summary and the clauses outside the scope; raises Reject where the results fail.

    Every result must be admitted by its own numbers, every required clause within the scope (or
    at all, unless `partial`) must be shown on every slice, and nothing else may be stated.
    """
    if not required:
        raise Reject("clause/nothing-required", "the contract names no clause")
    results: dict[tuple[str, str | None], list[CertifiedClause]] = {}
    for clause in predicate.clauses:
        check_verdict(clause)
        _numerics(clause, predicate.triple)
        _implication(clause, predicate.clauses)
        results.setdefault((clause.id, clause.slice), []).append(clause)
    if stated is not predicate.verdict:
        detail = f"{stated} is stated, the clauses say {predicate.verdict}"
        raise Reject("verdict/contradicts-clauses", detail)
    known = {(r.id, r.slice) for r in required}
    for id, slice in results:
        if (id, slice) not in known:
            raise Reject("clause/unknown", f"the contract has no clause {id} on {slice}")
    scope, everything = _scope(predicate, required)
    demanded = [r for r in required if not partial or r.id in scope]
    if not demanded:
        raise Reject("clause/nothing-covered", "the certificate covers no clause of the contract")
    found = [f for r in demanded for f in uncovered(r, tuple(results.get((r.id, r.slice), ())))]
    if found:
        raise Reject(found[0].reason, "; ".join(f.detail for f in found))
    outside = tuple(sorted(everything - scope))
    rest = f"; not covered: {', '.join(outside)}" if outside else ""
    return f"{len(demanded)} of {len(required)} required results hold{rest}", outside


def _scope(predicate: Predicate, required: tuple[RequiredClause, ...]) -> tuple[set[str], set[str]]:
    scope, everything = set(predicate.scope.clauses), {r.id for r in required}
    stray = sorted({c.id for c in predicate.clauses} - scope)
    if stray:
        raise Reject("scope/inconsistent", f"{', '.join(stray)} lies outside the scope it states")
    if scope - everything:
        names = ", ".join(sorted(scope - everything))
        raise Reject("scope/inconsistent", f"the contract has no {names}")
    if predicate.scope.complete and not everything <= scope:
        raise Reject("scope/inconsistent", "it calls itself complete and leaves clauses out")
    return scope, everything


def _numerics(clause: CertifiedClause, triple: Triple) -> None:
    """A proof speaks about the numerics that the two kernels of the triple claim."""
    if clause.numerics is None:
        if clause.proof is not None:
            raise Reject("clause/numerics-missing", f"{clause.label} names no numerics")
        return
    for stated, kernel in zip(clause.numerics, (triple.train, triple.infer), strict=True):
        if stated != numerics_digest(kernel):
            detail = f"{clause.label} is about other numerics than {kernel.name} claims"
            raise Reject("clause/numerics-mismatch", detail)


def _implication(clause: CertifiedClause, clauses: tuple[CertifiedClause, ...]) -> None:
    """An implied result must follow from a proved one in the same certificate."""
    if clause.implied_by is None:
        return
    sources = [c for c in clauses if c.id == clause.implied_by and c.proof is not None]
    if not any(
        c.verdict is Verdict.PASSED and c.evidence.is_at_least(clause.evidence) for c in sources
    ):
        detail = f"{clause.label} follows from {clause.implied_by}, which is not proved here"
        raise Reject("clause/implied-by-unproved", detail)
