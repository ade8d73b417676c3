"""The in-toto Statement v1 with the kernel-certificate predicate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any

from kcdsl_certs.encoding.records import (
    COUNT,
    DIGEST,
    FLAG,
    PLAIN_NAME,
    TEXT,
    TIME,
    Codec,
    Record,
    RecordField,
    many,
    member,
    one_of,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import Fields, canonical_json, sha256_of
from kcdsl_certs.statement.clauses import CertifiedClause, Verdict
from kcdsl_certs.statement.triple import Triple
from kcdsl_certs.statement.verdicts import overall

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:kcdsl:attestation:kernel-certificate:v0.3"
TRANSFER_TYPE = "urn:kcdsl:attestation:weights-transfer:v0.1"
KERNEL_CLASS_TYPE = "urn:kcdsl:attestation:kernel-class:v0.1"
REGISTER_HEAD_TYPE = "urn:kcdsl:attestation:register-head:v0.1"
SUBJECT_NAME = "kcdsl-triple"
STAGES = ("offline-ci", "shadow", "canary", "full")
LARGEST_PAYLOAD = 6 * 1024 * 1024
NEEDED = ("trace", "records", "report", "kernels")
"""The evidence of every measured result: the values of the kernels, the record of each request, the
report, and the fingerprints of the kernels that ran."""
ROLES = (*NEEDED, "run-checkpoint", "counterexample")


@dataclass(frozen=True, slots=True)
class Input:
    """A file that the evaluation read; `name` is its name in the contract."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, order=True)
class AcceptedFinding:
    """A finding about the contract that its author accepts, with the reason."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The program that decided the clauses."""

    id: str
    version: str


@dataclass(frozen=True, slots=True)
class Scope:
    """The (clause, slice) pairs that the certificate covers.

    `complete`: they are the whole contract.
    """

    complete: bool
    covers: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    """A file beside the certificate, identified by its digest; `path` is its location."""

    role: str
    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Predicate:
    """The body of a certificate."""

    triple: Triple
    stage: str
    issued_at: datetime
    valid_until: datetime
    sequence: int
    scope: Scope
    clauses: tuple[CertifiedClause, ...]
    evaluator: Evaluator
    inputs: tuple[Input, ...] = ()
    assumptions: tuple[str, ...] = ()
    non_claims: tuple[str, ...] = ()
    supersedes: str | None = None
    suppressions: tuple[AcceptedFinding, ...] = ()
    evidence: tuple[EvidenceFile, ...] = ()
    contract_source: str | None = None

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of the clauses."""
        return overall(self.clauses)

    @property
    def every_assumption(self) -> tuple[str, ...]:
        """Return the assumptions of the certificate and its clauses, each once, in order."""
        own = (*self.assumptions, *(text for c in self.clauses for text in c.assumptions))
        return tuple(dict.fromkeys(own))

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        return _PREDICATE.write(self)


def _printable(value: Any, place: str) -> str:
    name: str = TEXT.read(value, place)
    if not name.isprintable():
        raise Rejected("statement/malformed", f"the name {name!a} of an input is not printable")
    return name


NAMED = (RecordField("id", TEXT), RecordField("slice", TEXT, absent=None))
"""A clause on a slice, or on none."""
BODY = (
    RecordField("triple", Codec(Triple.to_json, Triple.from_json)),
    RecordField("stage", one_of(STAGES)),
    RecordField("issuedAt", TIME, "issued_at"),
    RecordField("validUntil", TIME, "valid_until"),
    RecordField("sequence", COUNT),
    RecordField(
        "evaluator", Record(Evaluator, RecordField("id", TEXT), RecordField("version", TEXT)).codec
    ),
    RecordField("assumptions", many(TEXT)),
    RecordField("nonClaims", many(TEXT), "non_claims"),
)
"""The common fields of statements about a triple."""
_COVERED = Record(
    lambda id, slice: (id, slice),
    RecordField("id", TEXT, get=itemgetter(0)),
    RecordField("slice", TEXT, absent=None, get=itemgetter(1)),
)
_INPUT = Record(
    Input, RecordField("name", Codec(str, _printable)), RecordField("digest", DIGEST, "sha256")
)
_FILE = Record(
    EvidenceFile,
    RecordField("role", one_of(ROLES)),
    RecordField("path", PLAIN_NAME),
    RecordField("digest", DIGEST, "sha256"),
)
_FINDING = Record(AcceptedFinding, RecordField("code", TEXT), RecordField("reason", TEXT))
_PREDICATE = Record(
    lambda verdict, **found: (Predicate(**found), verdict),
    *BODY,
    RecordField("verdict", member(Verdict)),
    RecordField(
        "scope",
        Record(
            Scope, RecordField("complete", FLAG), RecordField("covers", many(_COVERED.codec))
        ).codec,
    ),
    RecordField("clauses", many(Codec(CertifiedClause.to_json, CertifiedClause.from_json))),
    RecordField("inputs", many(_INPUT.codec)),
    RecordField("supersedes", DIGEST, absent=None),
    RecordField("contractSource", DIGEST, "contract_source", absent=None),
    RecordField("evidence", many(_FILE.codec), absent=()),
    RecordField("suppressions", many(_FINDING.codec), absent=()),
)


def payload_bytes(predicate: Predicate) -> bytes:
    """Return the canonical statement: the same evaluation gives the same bytes."""
    return statement_bytes(PREDICATE_TYPE, predicate.triple, predicate.to_json())


def statement_bytes(kind: str, triple: Triple, body: dict[str, Any]) -> bytes:
    """Return the canonical statement of a predicate type about a triple."""
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": SUBJECT_NAME, "digest": {"sha256": triple.digest}}],
            "predicateType": kind,
            "predicate": body,
        }
    )


def certificate_id(payload: bytes) -> str:
    """Return the identifier of a certificate: sha256 (hex) of the payload, not of the envelope.

    Signatures and base64 are malleable, the payload is not.
    """
    return hashlib.sha256(payload).hexdigest()


@dataclass(frozen=True, slots=True)
class Statement:
    """The outer statement; unknown fields are ignored, as in-toto requires."""

    type: str
    predicate_type: str
    subjects: tuple[str | None, ...]
    """The sha256 of each subject, None without one (other algorithms never match)."""
    predicate: Any


def parse_statement(value: Any) -> Statement:
    """Read the outer fields of a statement."""
    fields = Fields.of(value, "statement")
    subjects: list[str | None] = []
    for item in fields.items("subject"):
        digest = Fields.of(item, "subject").inner("digest").record.get("sha256")
        subjects.append(None if digest is None else sha256_of(digest, "subject"))
    return Statement(
        fields.text("_type"), fields.text("predicateType"), tuple(subjects), fields.raw("predicate")
    )


def parse_predicate(value: Any) -> tuple[Predicate, Verdict]:
    """Read the predicate and its stated verdict; unknown fields are refused."""
    return _PREDICATE.read(value, "predicate")
