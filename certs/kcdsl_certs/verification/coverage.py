"""Coverage: comparison of the clause results of a certificate with the contract.

Results that follow from a proved drift of the logits are derived again by the bound chain.
"""

from __future__ import annotations

from collections.abc import Set
from fractions import Fraction

from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import (
    LOWER,
    UPPER,
    WIDEST,
    CertifiedClause,
    ChainTerms,
    Evidence,
    Predicate,
    Quantity,
    RequiredClause,
    Triple,
    Verdict,
    check_verdict,
    holds,
    numerics_digest,
    states_machine,
    uncovered,
)
from kcdsl_certs.verification.bound_chain import METRICS, implied_bound, span_of_norm

LOGITS_BLOCK = "model"
_NORMS = {"inf": ("logit_linf",), "2": ("logit_linf", "logit_l2", "logit_l2_centered")}
"""Metrics of the logits that are bounded directly by a bound on a norm of their drift."""


def check_implied(
    clause: CertifiedClause, required: RequiredClause, clauses: tuple[CertifiedClause, ...]
) -> None:
    """Refuse an implied result that does not follow from a proved one of the same certificate.

    The proved result must be about the drift of the logits (block `model`), on the slice itself or
    one that contains it, and the bound that the chain gives must be at most the one stated.
    """
    if clause.implied_by is None:
        return
    chain = next((c.chain for p in required.alternatives for c in p if c.is_of(clause)), None)
    if chain is None:
        raise Rejected("clause/not-rederivable", f"{clause.label} is not bounded by the chain")
    bounds = [
        bound
        for source in clauses
        if _proves(source, clause, required) and (bound := _chain_bound(chain, source)) is not None
    ]
    if not bounds:
        detail = f"{clause.label} follows from {clause.implied_by}, which is not proved here"
        raise Rejected("clause/implied-by-unproved", detail)
    best = -min(bounds) if clause.op in LOWER else min(bounds)
    inside = clause.bound is not None and (
        best <= Fraction(clause.bound) if clause.op in UPPER else best >= Fraction(clause.bound)
    )
    if clause.op == "==" or not inside or not holds(best, clause.op, clause.tau):
        detail = f"{clause.label} states {clause.bound!r}, {float(best)!r} follows"
        raise Rejected("clause/implied-bound-not-confirmed", detail)


def _proves(source: CertifiedClause, clause: CertifiedClause, required: RequiredClause) -> bool:
    return (
        source.id == clause.implied_by
        and source.proof is not None
        and source.bound is not None
        and source.verdict is Verdict.PASSED
        and source.op in UPPER
        and source.block == LOGITS_BLOCK
        and (source.region is None or source.region.kind != "rows")  # requests may be longer
        and source.slice in required.inside
        and source.evidence is not Evidence.PROBABILISTIC  # it does not cover all runs
        and source.evidence.is_at_least(clause.evidence)
    )


def _chain_bound(chain: ChainTerms, source: CertifiedClause) -> Fraction | None:
    """Return a bound of the magnitude of the metric; None where the source bounds no norm."""
    drift = source.quantity
    if drift.kind != "norm" or drift.measured or source.bound is None or source.bound < 0:
        return None
    kind = drift.name
    if chain.metric in _NORMS.get(kind, ()):
        return Fraction(source.bound)
    span = span_of_norm(kind, source.bound.hex())
    if chain.metric == "logit_span":
        return span
    if chain.metric not in METRICS:
        return None
    return implied_bound(chain.metric, span, chain.temperature, dict(chain.constants))


def check_clauses(
    predicate: Predicate,
    stated: Verdict,
    required: tuple[RequiredClause, ...],
    *,
    partial: bool,
) -> tuple[str, tuple[str, ...]]:
    """Return a summary and the clauses outside the scope; raises Rejected where the results fail.

    Every verdict must be supported by its numbers, every required clause (with `partial`: within
    the scope) must be shown on every slice, and there may be no other results.
    """
    results = check_stated(predicate, stated, required)
    scope = set(predicate.scope.covers)
    demanded = [r for r in required if not partial or (r.id, r.slice) in scope]
    if not demanded:
        raise Rejected("clause/nothing-covered", "the certificate covers no clause of the contract")
    lacking = [f for r in demanded for f in uncovered(r, tuple(results.get((r.id, r.slice), ())))]
    if lacking:
        raise Rejected(lacking[0].reason, "; ".join(f.detail for f in lacking))
    outside = tuple(r.label for r in required if (r.id, r.slice) not in scope)
    rest = f"; not covered: {', '.join(outside)}" if outside else ""
    around = around_weights(predicate.clauses)
    return f"{len(demanded)} of {len(required)} required results hold{rest}{around}", outside


def check_stated(
    predicate: Predicate, stated: Verdict, required: tuple[RequiredClause, ...]
) -> dict[tuple[str, str | None], list[CertifiedClause]]:
    """Return the results by clause and slice; raises Rejected where one is not about this contract,
    or where results or scope are inconsistent."""
    if not required:
        raise Rejected("clause/nothing-required", "the contract names no clause")
    results = check_results(predicate, stated)
    demands = {(r.id, r.slice): r for r in required}
    for key, found in results.items():
        if key not in demands:
            raise Rejected("clause/unknown", f"the contract has no clause {key[0]} on {key[1]}")
        for clause in found:
            check_implied(clause, demands[key], predicate.clauses)
    _check_scope(predicate, demands.keys())
    return results


def check_results(
    predicate: Predicate, stated: Verdict
) -> dict[tuple[str, str | None], list[CertifiedClause]]:
    """Return the results by clause and slice; raises Rejected where they are inconsistent.

    These checks do not need the contract.
    """
    results: dict[tuple[str, str | None], list[CertifiedClause]] = {}
    for clause in predicate.clauses:
        check_verdict(clause)
        _numerics(clause, predicate.triple)
        _weights(clause)
        _machine(clause, predicate.triple)
        known = results.setdefault((clause.id, clause.slice), [])
        if any(_comparison(other) == _comparison(clause) for other in known):
            raise Rejected("clause/duplicate", f"{clause.label} {clause.quantity} is stated twice")
        known.append(clause)
    if stated is not predicate.verdict:
        detail = f"{stated} is stated, the clauses say {predicate.verdict}"
        raise Rejected("verdict/contradicts-clauses", detail)
    return results


def refuse_stray(predicate: Predicate) -> None:
    """Raise Rejected for a result outside the scope that the certificate states."""
    scope = set(predicate.scope.covers)
    if len(scope) != len(predicate.scope.covers):
        raise Rejected("scope/inconsistent", "it names a clause and a slice twice")
    stray = sorted(c.label for c in predicate.clauses if (c.id, c.slice) not in scope)
    if stray:
        raise Rejected("scope/inconsistent", f"{', '.join(stray)} lies outside the scope it states")


def around_weights(clauses: tuple[CertifiedClause, ...]) -> str:
    """Return the results with weight balls, as the end of a sentence."""
    named: dict[Fraction, list[str]] = {}
    for clause in clauses:
        if clause.weights is not None and clause.verdict is Verdict.PASSED:
            named.setdefault(clause.weights, []).append(clause.label)
    return "".join(
        f"; {', '.join(dict.fromkeys(named[rho]))} for all weights within {real_text(rho)} of each"
        for rho in sorted(named)
    )


def _comparison(clause: CertifiedClause) -> tuple[str, Quantity, str, Fraction]:
    return clause.obligation, clause.quantity, clause.op, clause.tau


def _machine(clause: CertifiedClause, triple: Triple) -> None:
    """Refuse a passed machine-dependent result if the inference kernel names no machine."""
    if clause.verdict is not Verdict.PASSED or not clause.quantity.is_of_a_machine:
        return
    if not states_machine(triple.infer):
        detail = (
            f"{clause.label}: {clause.quantity} holds of the machine that measured it, which "
            "the fingerprint of the inference kernel does not name"
        )
        raise Rejected("clause/machine-unnamed", detail)


def _weights(clause: CertifiedClause) -> None:
    """Refuse a weight ball without a proof, or with an invalid radius."""
    if clause.weights is None:
        return
    if clause.proof is None or not clause.evidence.is_proof:
        raise Rejected("clause/weights", f"{clause.label} is about other weights without a proof")
    if not 0 < clause.weights <= WIDEST:
        raise Rejected(
            "clause/weights",
            f"{clause.label}: a weight ball of {real_text(clause.weights)}, which must be above 0"
            f" and at most {WIDEST}",
        )


def _check_scope(predicate: Predicate, known: Set[tuple[str, str | None]]) -> None:
    refuse_stray(predicate)
    scope = set(predicate.scope.covers)
    if not scope <= known:
        names = ", ".join(sorted(id for id, _ in scope - known))
        raise Rejected("scope/inconsistent", f"the contract has no {names} there")
    if predicate.scope.complete and scope != known:
        raise Rejected("scope/inconsistent", "it calls itself complete and leaves clauses out")


def _numerics(clause: CertifiedClause, triple: Triple) -> None:
    """Refuse a proof about numerics other than those of the triple's kernels."""
    if clause.numerics is None:
        if clause.proof is not None:
            raise Rejected("clause/numerics-missing", f"{clause.label} names no numerics")
        return
    for stated, kernel in zip(clause.numerics, (triple.train, triple.infer), strict=True):
        if stated != numerics_digest(kernel):
            detail = f"{clause.label} is about other numerics than {kernel.name} claims"
            raise Rejected("clause/numerics-mismatch", detail)
