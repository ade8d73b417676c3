"""The check step of the register: is the certificate recorded and in force?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from kcdsl.release.register.records import (
    Certificate,
    CertificateStatus,
    Promotion,
    PromotionState,
    Revoked,
    Standing,
)
from kcdsl.release.register.store import Register
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.signatures import TrustPolicy
from kcdsl_certs.statement import PREDICATE_TYPE, TRANSFER_TYPE
from kcdsl_certs.verification.authentication import authentic, meets_threshold
from kcdsl_certs.verification.report import EARLIER_FAILED, Check, Log, NotRun, Report

STEP = "register"


def with_register(
    report: Report, bundle: bytes, register: Register, trusted: TrustPolicy, moment: datetime
) -> Report:
    """Return a report with the additional required step of the register.

    Reasons: `register/unknown`, `register/revoked`, `register/key-revoked`, `register/superseded`,
    `register/outside-validity`, `register/rolled-back`. Raises Refusal where the register cannot be
    read.
    """
    check = register_check(report.certificate, bundle, register, trusted, moment)
    steps = (*report.steps, STEP)
    return replace(report, checks=(*report.checks, check), steps=steps)


def register_check(
    identity: str | None,
    bundle: bytes,
    register: Register,
    trusted: TrustPolicy | None,
    moment: datetime,
) -> Check:
    """Return the step of the register about a certificate; without a policy its signatures are not
    compared with revoked keys. Raises Refusal where the register cannot be read."""
    log = Log()
    log.run(STEP, _step(identity, bundle, register, trusted, moment))
    (check,) = log.checks
    return check


def _step(
    identity: str | None,
    bundle: bytes,
    register: Register,
    trusted: TrustPolicy | None,
    moment: datetime,
) -> Callable[[], str]:
    """Query the register now, so that an unreadable register raises Refusal and is no failed
    step."""
    if identity is None:

        def earlier() -> str:
            raise NotRun(EARLIER_FAILED, "")

        return earlier
    status, head = register.status_of(identity, moment), register.head()
    decided: tuple[Promotion, ...] = ()
    if status.certificate is not None:
        register.refuse_changed(status.certificate.triple)
        decided = register.promotions(candidate=status.certificate.triple)
    revoked = revoked_keys(register)

    def step() -> str:
        refuse_standing(status)
        assert status.certificate is not None
        refuse_rolled_back(status.certificate, decided)
        if trusted is not None:
            refuse_keys(bundle, trusted, revoked, status.certificate.stage, moment)
        return f"event {status.certificate.number} of {head.number}, in force"

    return step


def revoked_keys(register: Register) -> frozenset[str]:
    """Return the fingerprints of the revoked keys."""
    return frozenset(r.subject for r in register.revocations() if r.kind is Revoked.KEY)


def refuse_standing(status: CertificateStatus) -> None:
    """Raise Rejected for a certificate that is not in force."""
    match status.standing:
        case Standing.IN_FORCE:
            return
        case Standing.UNKNOWN:
            reason = "register/unknown"
        case Standing.REVOKED if status.by_key:
            reason = "register/key-revoked"
        case Standing.REVOKED:
            reason = "register/revoked"
        case Standing.SUPERSEDED:
            reason = "register/superseded"
        case Standing.OUTSIDE_VALIDITY:
            reason = "register/outside-validity"
    by = "" if status.by is None else f" (sha256:{status.by})"
    raise Rejected(reason, f"{status.detail}{by}")


def refuse_rolled_back(certificate: Certificate, decided: Sequence[Promotion]) -> None:
    """Raise Rejected for a certificate whose triple was rolled back, in any slot, after it was
    recorded: the triple needs new certificates."""
    for each in decided:
        if each.state is PromotionState.ROLLED_BACK and each.number > certificate.number:
            detail = f"its triple was rolled back in {each.slot} by event {each.number}"
            raise Rejected("register/rolled-back", detail)


def refuse_keys(
    bundle: bytes, trusted: TrustPolicy, revoked: frozenset[str], stage: str, moment: datetime
) -> None:
    """Raise Rejected for a bundle with too few signatures by keys that are not revoked."""
    if not revoked:
        return
    rules = replace(trusted, revoked_keys=trusted.revoked_keys | revoked)
    try:
        signers = authentic(bundle, rules, moment, (PREDICATE_TYPE, TRANSFER_TYPE)).signers
        able = tuple(k for k in signers if k.stages is None or stage in k.stages)
        meets_threshold(able, rules.threshold, "signature/threshold")
    except Rejected as error:
        raise Rejected("register/key-revoked", error.detail) from None
