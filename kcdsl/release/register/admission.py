"""Admission of entries: signatures and content of a bundle, and the evidence of a decision."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime

from sqlalchemy import Connection, insert, select

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NOT_RECORDED, PROMOTION_EVIDENCE
from kcdsl.release.register import queries
from kcdsl.release.register.chain import Chain
from kcdsl.release.register.events import EventKind
from kcdsl.release.register.records import (
    NEEDS_CERTIFICATE,
    Certificate,
    CertificateStatus,
    Promotion,
    PromotionState,
    Run,
    Slot,
    StatementKind,
)
from kcdsl.release.register.schema import bundles, certificates
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import time_text
from kcdsl_certs.signatures import TrustPolicy
from kcdsl_certs.statement import (
    PREDICATE_TYPE,
    TRANSFER_TYPE,
    Predicate,
    Transfer,
    Triple,
    Verdict,
    certificate_id,
)
from kcdsl_certs.verification.admission import read_statement
from kcdsl_certs.verification.authentication import authentic, meets_threshold


@dataclass(frozen=True, slots=True)
class Read:
    """A bundle and the entries to record for it."""

    bundle: bytes
    certificate: Certificate
    triple: Triple
    run: Run | None = None
    """The run that wrote the certificate's report."""


def read_bundle(bundle: bytes, trusted: TrustPolicy, moment: datetime) -> Read:
    """Return the entries for a bundle; raises Rejected.

    Signatures are verified as in a check, with keys that may sign the type and the stage. The
    content must be consistent and not from the future. It may be expired, and it may state that a
    contract is violated.
    """
    signed = authentic(bundle, trusted, moment, (PREDICATE_TYPE, TRANSFER_TYPE))
    body = read_statement(signed.payload)
    able = tuple(k for k in signed.signers if k.stages is None or body.stage in k.stages)
    meets_threshold(able, trusted.threshold, "stage/key-not-allowed")
    if body.valid_until <= body.issued_at:
        raise Rejected("validity/empty", "it ends before it begins")
    if moment < body.issued_at:
        detail = f"issued at {time_text(body.issued_at)}, the clock says {time_text(moment)}"
        raise Rejected("validity/not-yet", detail)
    fingerprints = tuple(sorted({k.key.fingerprint for k in able}))
    entry = entry_of(bundle, signed.payload, body, fingerprints, trusted.threshold)
    return Read(bundle, entry, body.triple, run_of(body))


def run_of(body: Predicate | Transfer) -> Run | None:
    """Return the evaluation of measured results; None for proofs, which have no report."""
    files = {} if isinstance(body, Transfer) else {f.role: f.sha256 for f in body.evidence}
    if "report" not in files:
        return None
    digests = (body.triple.digest, body.stage, files["report"], files.get("trace"))
    return Run("evaluate", *digests)


def entry_of(
    bundle: bytes,
    payload: bytes,
    body: Predicate | Transfer,
    signers: tuple[str, ...],
    threshold: int,
) -> Certificate:
    """Return the certificate entry of a bundle, from its payload and its signers."""
    of_a_certificate = isinstance(body, Predicate)
    return Certificate(
        identity=certificate_id(payload),
        kind=StatementKind.CERTIFICATE if of_a_certificate else StatementKind.TRANSFER,
        bundle=hashlib.sha256(bundle).hexdigest(),
        triple=body.triple.digest,
        stage=body.stage,
        sequence=body.sequence,
        verdict=body.verdict if isinstance(body, Predicate) else Verdict.PASSED,
        issued_at=body.issued_at,
        valid_until=body.valid_until,
        complete=isinstance(body, Predicate) and body.scope.complete,
        signers=signers,
        threshold=threshold,
        supersedes=body.supersedes if isinstance(body, Predicate) else None,
        base=None if isinstance(body, Predicate) else body.base,
    )


def record(connection: Connection, chain: Chain, read: Read) -> Certificate:
    """Append a certificate, and its triple if it is new; raises Refusal."""
    found = queries.certificate_in(connection, read.certificate.identity)
    if found is not None:
        return found
    new = read.certificate
    taken = select(certificates.c.identity).where(
        certificates.c.triple == new.triple,
        certificates.c.stage == new.stage,
        certificates.c.sequence == new.sequence,
    )
    other = connection.execute(taken).scalar_one_or_none()
    if other is not None:
        raise refuse(
            NOT_RECORDED,
            f"sequence {new.sequence} of this triple and stage is that of sha256:{other}",
            help="issue the certificate again: its sequence is the time of issue in seconds",
        )
    record_triple(connection, chain, read.triple)
    held = select(bundles.c.digest).where(bundles.c.digest == new.bundle)
    if connection.execute(held).first() is None:
        connection.execute(insert(bundles).values(digest=new.bundle, content=read.bundle))
    event = chain.append(EventKind.CERTIFICATE, new.to_json())
    if read.run is not None:
        record_run(connection, chain, read.run)
    return replace(new, number=event.number)


def record_run(connection: Connection, chain: Chain, run: Run) -> Run:
    """Append a run unless it is recorded already."""
    found = queries.run_in(connection, run.identity)
    if found is not None:
        return found
    return replace(run, number=chain.append(EventKind.RUN, run.to_json()).number)


def record_triple(connection: Connection, chain: Chain, triple: Triple) -> None:
    """Append a triple unless it is recorded already."""
    if queries.triple_in(connection, triple.digest) is None:
        chain.append(EventKind.TRIPLE, triple.to_json())


def refuse_unfounded(
    connection: Connection, decided: Promotion, before: Slot, moment: datetime
) -> None:
    """Refuse a decision without valid certificates, or about triples that are not recorded."""
    for digest in filter(None, (decided.candidate, decided.incumbent)):
        triple = queries.triple_in(connection, digest)
        if triple is None:
            raise refuse(
                NOT_RECORDED,
                f"the register has no triple sha256:{digest}",
                help="`kcdsl register add CERT` records a certificate with its triple",
            )
        if digest == decided.candidate and triple.contract.digest != decided.contract:
            raise refuse(
                NOT_RECORDED,
                "the decision names another contract than the candidate's",
                help="promote the candidate by the contract of its certificates, or add "
                "certificates of this contract",
            )
    if decided.state in NEEDS_CERTIFICATE:
        if not decided.certificates:
            raise refuse(
                NOT_RECORDED,
                f"a candidate is not {decided.state} without a certificate",
                help="`kcdsl promote` names the certificates of the stage: give it one",
            )
        for identity in decided.certificates:
            _refuse_weak(queries.status_in(connection, identity, moment), decided.candidate)
    if decided.state is PromotionState.ROLLED_BACK and decided.incumbent != before.triple:
        _refuse_never_live(connection, decided)


def refuse_counted(
    connection: Connection, slot: str, candidate: str, traffic: Iterable[str]
) -> None:
    """Refuse evidence, by digest, that was used for another candidate or in another slot."""
    given = frozenset(traffic)
    if not given:
        return
    for place, other, counted in queries.evidence_elsewhere(connection, slot, candidate):
        if given & counted:
            raise refuse(
                PROMOTION_EVIDENCE,
                f"the traffic sha256:{min(given & counted)[:12]} was counted for sha256:"
                f"{other[:12]} in {place}",
                help="give the traffic of this candidate in this slot, each request with an id of "
                "its own; it counts once",
            )


def _refuse_weak(status: CertificateStatus, candidate: str) -> None:
    found = status.certificate
    if not status.in_force or found is None:
        detail = f"is {status.standing}: {status.detail}"
    elif found.triple != candidate:
        detail = "is of another triple than the candidate"
    elif found.verdict is not Verdict.PASSED:
        detail = f"is {found.verdict}"
    else:
        return
    raise refuse(
        NOT_RECORDED,
        f"the certificate sha256:{status.identity} {detail}",
        help="give a certificate of the candidate that passed and is in force; `kcdsl register"
        " show` has the standing of each",
    )


def _refuse_never_live(connection: Connection, decided: Promotion) -> None:
    if decided.incumbent is None:
        return
    earlier = queries.promotions_in(connection, decided.slot, decided.incumbent)
    if not any(each.state is PromotionState.PROMOTED for each in earlier):
        raise refuse(
            NOT_RECORDED,
            f"sha256:{decided.incumbent} was never live in {decided.slot}",
            help="a rollback goes back to a triple that was promoted there before",
        )
