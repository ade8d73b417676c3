"""The obligations of a contract that a checked certificate decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kcdsl.release.promotion.evidence import (
    DocumentKind,
    EvidenceDocument,
    ObligationResult,
    printable,
)
from kcdsl.release.promotion.stages import DemandedObligation
from kcdsl.verdict.studies.convergence import refutes
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.statement import CertifiedClause, Evidence, Expectation, Verdict
from kcdsl_certs.verification.proofs import StepOutcome
from kcdsl_certs.verification.report import Report

_NOT_PASSED = "clause/not-passed"


def states_failure(report: Report) -> bool:
    """Return whether a certificate is valid except for clauses that did not pass."""
    failed = [c.name for c in report.checks if c.outcome is StepOutcome.FAILED]
    return failed == ["clauses"] and report.reasons == (_NOT_PASSED,)


def document_of(
    name: str, report: Report, demands: Sequence[DemandedObligation], expected: Expectation
) -> EvidenceDocument:
    """Return the evidence of a certificate that is valid or states a failure."""
    predicate, identity = report.predicate, report.certificate
    assert predicate is not None
    assert identity is not None
    required = {(one.id, one.slice): one for one in expected.clauses}
    results: dict[str, ObligationResult] = {}
    for demand in demands:
        key = (demand.clause, demand.slice)
        own = tuple(c for c in predicate.clauses if (c.id, c.slice) == key)
        if own and key in required:
            violated = refutes(required[key], own)
            results[demand.obligation] = _result(demand, own, report.accepted, violated)
    data: Mapping[str, str] = expected.inputs
    return EvidenceDocument(
        DocumentKind.CERTIFICATE,
        printable(name),
        identity,
        frozenset(),
        results,
        requests_of=frozenset(i.sha256 for i in predicate.inputs if i.name in data),
        valid_until=predicate.valid_until,
        valid=report.accepted,
    )


def _result(
    demand: DemandedObligation, own: Sequence[CertifiedClause], accepted: bool, violated: bool
) -> ObligationResult:
    """Return the result of an obligation from the results of its clause on its slice, with the
    weakest of their kinds of evidence."""
    order = list(Evidence)
    kind = max((one.evidence for one in own), key=order.index)
    counted = [c for c in own if c.obligation == demand.obligation and c.exceed is not None]
    k, n = (counted[0].exceed, counted[0].n) if len(counted) == 1 else (None, None)
    if violated:
        failed = [c for c in own if c.verdict is Verdict.FAILED]
        return ObligationResult("violated", kind.value, k, n, "; ".join(map(_far, failed)))
    if accepted:
        return ObligationResult("held", kind.value, k, n)
    reasons = dict.fromkeys(c.reason for c in own if c.reason)
    return ObligationResult(
        "inconclusive", kind.value, k, n, "; ".join(reasons) or "it did not pass"
    )


def _far(clause: CertifiedClause) -> str:
    if clause.budget and clause.exceed is not None:
        allowed = real_text(100 * clause.budget)
        return f"{clause.exceed} of {clause.n} are beyond, {allowed} % may be"
    known = (clause.value, clause.low, clause.high)
    reached = next((value for value in known if value is not None), None)
    if reached is None:
        return f"{clause.quantity} does not hold"
    limit = f"{clause.op} {float(clause.tau):.6g}"
    return f"{clause.quantity} is {float(reached):.6g} instead of {limit}"
