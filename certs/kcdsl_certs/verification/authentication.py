"""Authentication of a statement: the steps of a verification before its content is read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import strict_load
from kcdsl_certs.signatures import TrustedKey, TrustPolicy, unique_keys
from kcdsl_certs.signatures import envelope as dsse
from kcdsl_certs.statement import (
    LARGEST_PAYLOAD,
    REGISTER_HEAD_TYPE,
    STATEMENT_TYPE,
    Statement,
    certificate_id,
    parse_statement,
)
from kcdsl_certs.verification.report import Log, Stop

if TYPE_CHECKING:
    from kcdsl_certs.statement import RegisterHead


@dataclass(slots=True)
class Signed:
    """The state of the first steps, in order; a step reads only results of earlier ones."""

    raw: dsse.RawEnvelope | None = None
    envelope: dsse.Envelope | None = None
    signed_by: tuple[TrustedKey, ...] = ()
    statement: Statement | None = None


@dataclass(frozen=True, slots=True)
class Authentic:
    """A statement that enough trusted keys signed, each of which may sign its type."""

    payload: bytes
    statement: Statement
    signers: tuple[TrustedKey, ...]


def authentic(
    bundle: bytes, trusted: TrustPolicy, moment: datetime, kinds: Collection[str]
) -> Authentic:
    """Return the statement in a bundle; raises Rejected unless trusted keys signed it.

    Its predicate type must be one of `kinds`. The content of the predicate is not read.
    """
    log, signed = Log(), Signed()
    try:
        authenticate(log, signed, bundle, trusted, moment)
    except Stop:
        failed = log.checks[-1]
        raise Rejected(failed.reason, failed.detail) from None
    assert signed.envelope is not None
    assert signed.statement is not None
    refuse_other_type(signed.statement)
    kind = signed.statement.predicate_type
    if kind not in kinds:
        raise Rejected("statement/predicate-type", f"predicateType is {kind!r}")
    signers = allowed(signed.signed_by, kind, trusted.threshold)
    return Authentic(signed.envelope.payload, signed.statement, signers)


def authenticate(
    log: Log, state: Signed, bundle: bytes, trusted: TrustPolicy, moment: datetime
) -> None:
    """Run steps 1 to 6; the payload is read only after its signature is verified."""

    def parse() -> str:
        state.raw = dsse.parse_bundle(bundle)
        return f"{len(bundle)} bytes"

    def decode() -> str:
        assert state.raw is not None
        state.envelope = dsse.decode(state.raw)
        return f"{len(state.envelope.signatures)} signature(s)"

    def signatures() -> str:
        assert state.envelope is not None
        state.signed_by = _signed_by(state.envelope, trusted, moment)
        return "signed by " + ", ".join(k.name for k in state.signed_by)

    def threshold() -> str:
        return meets_threshold(state.signed_by, trusted.threshold, "signature/threshold")

    def payload_type() -> str:
        assert state.envelope is not None
        if state.envelope.payload_type != dsse.PAYLOAD_TYPE:
            raise Rejected("payload/type", f"{state.envelope.payload_type!r}")
        return state.envelope.payload_type

    def payload() -> str:
        assert state.envelope is not None
        state.statement = parse_statement(strict_load(state.envelope.payload, LARGEST_PAYLOAD))
        return certificate_id(state.envelope.payload)

    log.run("bundle", parse, stop=True)
    log.run("encoding", decode, stop=True)
    log.run("signatures", signatures, stop=True)
    log.run("threshold", threshold, stop=True)
    log.run("payload-type", payload_type, stop=True)
    log.run("payload", payload, stop=True)


def _signed_by(
    envelope: dsse.Envelope, trusted: TrustPolicy, moment: datetime
) -> tuple[TrustedKey, ...]:
    able = dsse.signers(envelope, trusted.keys)
    standing = tuple(k for k in able if k.key.fingerprint not in trusted.revoked_keys)
    valid = tuple(k for k in standing if k.is_valid_at(moment))
    if valid:
        return valid
    if able and not standing:
        raise Rejected("signature/key-revoked", f"{', '.join(k.name for k in able)} was revoked")
    if able:
        names = ", ".join(k.name for k in able)
        raise Rejected("signature/key-not-valid-now", f"{names} is outside its own validity")
    # The hint is only used in the message, since it is not authenticated.
    hints = {s.keyid for s in envelope.signatures}
    named = [k.name for k in trusted.keys if k.key.keyid in hints]
    detail = (
        f"the certificate names the key {', '.join(named)}, but that key did not sign these bytes: "
        "the content or the signature was changed"
        if named
        else "no trusted key signed these bytes: another key did, or they were changed"
    )
    raise Rejected("signature/none-trusted", detail)


def meets_threshold(keys: tuple[TrustedKey, ...], threshold: int, reason: str) -> str:
    """Check the number of distinct keys; raises Rejected with `reason` if it is too small."""
    count = unique_keys(keys)
    if threshold < 1 or count < threshold:
        raise Rejected(reason, f"{count} distinct trusted key(s), {threshold} needed")
    return f"{count} of {threshold} needed"


def refuse_other_type(statement: Statement) -> None:
    """Refuse anything but an in-toto statement of version 1."""
    if statement.type != STATEMENT_TYPE:
        raise Rejected("statement/type", f"_type is {statement.type!r}")


def allowed(keys: tuple[TrustedKey, ...], kind: str, threshold: int) -> tuple[TrustedKey, ...]:
    """Return the keys that may sign a predicate type; raises Rejected where they are too few."""
    able = tuple(k for k in keys if kind in k.predicate_types)
    meets_threshold(able, threshold, "statement/key-not-allowed")
    return able


def authentic_head(bundle: bytes, trusted: TrustPolicy, moment: datetime) -> RegisterHead:
    """Return the head of a register in a bundle; raises Rejected unless trusted keys signed it."""
    from kcdsl_certs.statement import parse_head

    return parse_head(authentic(bundle, trusted, moment, (REGISTER_HEAD_TYPE,)).statement)
