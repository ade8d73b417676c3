"""Results that follow from a proved drift of the logits, re-derived by the bound chain."""

from __future__ import annotations

from fractions import Fraction

from kcdsl_certs.chain import METRICS, implied_bound, span_of_norm
from kcdsl_certs.clauses import LOWER, UPPER, CertifiedClause, Evidence, Verdict, holds
from kcdsl_certs.rejected import Rejected
from kcdsl_certs.requirements import Chain, RequiredClause

LOGITS_BLOCK = "model"
_NORMS = {"inf": ("logit_linf",), "2": ("logit_linf", "logit_l2", "logit_l2_centered")}
"""Metrics of the logits themselves that a bound on a norm of their drift bounds as it is."""


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
        and (source.region is None or source.region.kind != "rows")  # some requests are longer
        and source.slice in required.inside
        and source.evidence is not Evidence.PROBABILISTIC  # of some runs it says nothing
        and source.evidence.is_at_least(clause.evidence)
    )


def _chain_bound(chain: Chain, source: CertifiedClause) -> Fraction | None:
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
