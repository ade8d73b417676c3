"""The entries of a register: certificates, runs, promotions, slots, revocations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from kcdsl_certs.encoding.records import (
    COUNT,
    DIGEST,
    FLAG,
    OBJECT,
    TEXT,
    TIME,
    Codec,
    Record,
    RecordField,
    by_name,
    many,
    member,
    one_of,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_digest
from kcdsl_certs.statement import STAGES, Verdict

_SLOT = re.compile(r"[a-z0-9][a-z0-9._/-]{0,127}", re.ASCII)
_STAGE = one_of(STAGES)


class StatementKind(StrEnum):
    """The kind of statement in a bundle."""

    CERTIFICATE = "certificate"
    TRANSFER = "transfer"


class Standing(StrEnum):
    """The status of a certificate at a time."""

    IN_FORCE = "in force"
    SUPERSEDED = "superseded"
    REVOKED = "revoked"
    OUTSIDE_VALIDITY = "outside validity"
    UNKNOWN = "unknown"


class Revoked(StrEnum):
    """The kind of subject of a revocation."""

    CERTIFICATE = "certificate"
    KEY = "key"


class PromotionState(StrEnum):
    """The decision about a candidate.

    PROMOTED makes the candidate the live triple of the slot, ROLLED_BACK makes the incumbent the
    live triple again. Other decisions do not change the live triple.
    """

    HELD = "held"
    ADVANCED = "advanced"
    FROZEN = "frozen"
    BLOCKED = "blocked"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled-back"


NEEDS_CERTIFICATE = frozenset({PromotionState.ADVANCED, PromotionState.PROMOTED})
"""Decisions that need certificates of the candidate in force."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A recorded certificate or weights transfer.

    `identity` is the sha256 of the payload, `bundle` that of the bundle, `triple` the digest of the
    triple manifest, `base` the identifier of the earlier certificate of a transfer. `signers` are
    fingerprints of the trusted keys whose signatures were verified; at least `threshold` of them
    had to sign. The verdict of a transfer is always PASSED.
    """

    identity: str
    kind: StatementKind
    bundle: str
    triple: str
    stage: str
    sequence: int
    verdict: Verdict
    issued_at: datetime
    valid_until: datetime
    complete: bool
    signers: tuple[str, ...]
    threshold: int
    supersedes: str | None = None
    base: str | None = None
    number: int = 0
    """The number of the event that recorded it."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        return CERTIFICATE.write(self)


@dataclass(frozen=True, slots=True)
class Run:
    """An evaluation or a verification: its triple, and the digests of its report and trace."""

    kind: str
    triple: str
    stage: str
    report: str
    trace: str | None = None
    trusted: bool = True
    reason: str | None = None
    """The reason of the last change of trust."""
    number: int = 0
    """The number of the event that recorded it."""

    @property
    def identity(self) -> str:
        """Return the sha256 (hex) of the immutable fields of the run."""
        trace = None if self.trace is None else {"sha256": self.trace}
        return canonical_digest(
            {
                "kind": self.kind,
                "triple": {"sha256": self.triple},
                "stage": self.stage,
                "report": {"sha256": self.report},
                "trace": trace,
            }
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        return RUN.write(self)


@dataclass(frozen=True, slots=True)
class PromotionReason:
    """A reason of a decision: a clause on a slice, with its numbers as decimal strings."""

    clause: str
    detail: str
    slice: str | None = None
    numbers: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        return REASON.write(self)


@dataclass(frozen=True, slots=True)
class Promotion:
    """A decision about a candidate in a slot, at a stage.

    `candidate` and `incumbent` are digests of triples. The incumbent is the exact triple with which
    the candidate was compared, None where nothing was live; in a rollback of the live triple, the
    triple that becomes live. `contract` is the digest of the contract, `certificates` are
    identifiers, `evidence` the sha256 of reports, traces and window summaries.
    """

    slot: str
    candidate: str
    incumbent: str | None
    contract: str
    stage: str
    state: PromotionState
    reasons: tuple[PromotionReason, ...] = ()
    certificates: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)
    """Where the candidate is after the decision, as plain data without floats; the register keeps
    it and reads nothing of it."""
    version: int = 0
    """The version of the slot after the decision; 0 before it is recorded."""
    number: int = 0
    """The number of the event that recorded it."""
    at: datetime | None = None
    """When it was recorded."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        return PROMOTION.write(self)


@dataclass(frozen=True, slots=True)
class Slot:
    """The live triple of a slot. Each decision increments the version; 0 is before the first
    one."""

    name: str
    version: int = 0
    triple: str | None = None
    stage: str | None = None
    certificates: tuple[str, ...] = ()
    promotion: int = 0
    """The number of the event that made the triple live."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        return SLOT.write(self)


@dataclass(frozen=True, slots=True)
class Revocation:
    """A revoked certificate, by its identifier, or key, by its fingerprint."""

    kind: Revoked
    subject: str
    reason: str
    number: int = 0
    """The number of the event that recorded it."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        return REVOCATION.write(self)


@dataclass(frozen=True, slots=True)
class CertificateStatus:
    """The status of a certificate in a register, and the entry that decides it.

    `by` is the identifier of the newer certificate, or the subject of the revocation; `by_key`: it
    is the fingerprint of a revoked key.
    """

    identity: str
    standing: Standing
    detail: str = ""
    by: str | None = None
    certificate: Certificate | None = None
    by_key: bool = False

    @property
    def in_force(self) -> bool:
        """Return whether the certificate is in force: not revoked, superseded or expired.

        The certificate may still state a failure: see `certificate.verdict`.
        """
        return self.standing is Standing.IN_FORCE


def _slot_name(value: Any, place: str) -> str:
    if not isinstance(value, str) or _SLOT.fullmatch(value) is None:
        raise Rejected("statement/malformed", f"{place} is no name of a slot, such as chat/canary")
    return value


SLOT_NAME = Codec(lambda value: value, _slot_name)
DIGESTS = many(DIGEST)
CERTIFICATE: Record[Certificate] = Record(
    Certificate,
    RecordField("identity", DIGEST),
    RecordField("kind", member(StatementKind)),
    RecordField("bundle", DIGEST),
    RecordField("triple", DIGEST),
    RecordField("stage", _STAGE),
    RecordField("sequence", COUNT),
    RecordField("verdict", member(Verdict)),
    RecordField("issuedAt", TIME, "issued_at"),
    RecordField("validUntil", TIME, "valid_until"),
    RecordField("complete", FLAG),
    RecordField("signers", DIGESTS),
    RecordField("threshold", COUNT),
    RecordField("supersedes", DIGEST, absent=None),
    RecordField("base", DIGEST, absent=None),
)
RUN: Record[Run] = Record(
    Run,
    RecordField("kind", one_of(("evaluate", "verify"))),
    RecordField("triple", DIGEST),
    RecordField("stage", _STAGE),
    RecordField("report", DIGEST),
    RecordField("trace", DIGEST, absent=None),
    RecordField("trusted", FLAG),
    RecordField("reason", TEXT, absent=None),
)
REASON: Record[PromotionReason] = Record(
    PromotionReason,
    RecordField("clause", TEXT),
    RecordField("detail", TEXT),
    RecordField("slice", TEXT, absent=None),
    RecordField("numbers", by_name(TEXT), absent={}),
)
PROMOTION: Record[Promotion] = Record(
    Promotion,
    RecordField("slot", SLOT_NAME),
    RecordField("candidate", DIGEST),
    RecordField("incumbent", DIGEST, absent=None),
    RecordField("contract", DIGEST),
    RecordField("stage", _STAGE),
    RecordField("state", member(PromotionState)),
    RecordField("reasons", many(REASON.codec)),
    RecordField("certificates", DIGESTS),
    RecordField("evidence", DIGESTS),
    RecordField("progress", OBJECT, absent={}),
    RecordField("version", COUNT),
)
SLOT: Record[Slot] = Record(
    Slot,
    RecordField("name", SLOT_NAME),
    RecordField("version", COUNT),
    RecordField("triple", DIGEST, absent=None),
    RecordField("stage", _STAGE, absent=None),
    RecordField("certificates", DIGESTS),
    RecordField("promotion", COUNT),
)
REVOCATION: Record[Revocation] = Record(
    Revocation,
    RecordField("kind", member(Revoked)),
    RecordField("subject", DIGEST),
    RecordField("reason", TEXT),
)
