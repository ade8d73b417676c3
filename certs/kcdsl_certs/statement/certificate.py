"""The in-toto Statement v1 with the kernel-certificate predicate."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kcdsl_certs.rejected import Rejected
from kcdsl_certs.statement.clauses import CertifiedClause, Verdict
from kcdsl_certs.statement.triple import Triple
from kcdsl_certs.statement.verdicts import overall
from kcdsl_certs.strict import Fields, canonical_json, parse_time, plain_name, sha256_of, time_text

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:kcdsl:attestation:kernel-certificate:v0.2"
SUBJECT_NAME = "kcdsl-triple"
STAGES = ("offline-ci", "shadow", "canary", "full")
LARGEST_PAYLOAD = 6 * 1024 * 1024
NEEDED = ("trace", "records", "report", "kernels")
"""What every measured result rests on: what the kernels gave, the record of each request, what was
concluded, and the fingerprints of the kernels that ran."""
ROLES = (*NEEDED, "journal", "counterexample")


@dataclass(frozen=True, slots=True)
class Input:
    """A file that the evaluation read; `name` as the contract writes it."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, order=True)
class AcceptedFinding:
    """A finding about the contract that its author accepts, and why."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The program that decided the clauses."""

    id: str
    version: str


def named(id: str, slice: str | None) -> dict[str, Any]:
    """Return the record of a clause on a slice, or on none."""
    return {"id": id} if slice is None else {"id": id, "slice": slice}


@dataclass(frozen=True, slots=True)
class Scope:
    """The (clause, slice) pairs that the certificate speaks about.

    `complete` says that they are the whole contract.
    """

    complete: bool
    covers: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    """A file beside the certificate: the digest decides, `path` says where to look."""

    role: str
    path: str
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"role": self.role, "path": self.path, "digest": {"sha256": self.sha256}}

    @staticmethod
    def from_json(value: Any) -> EvidenceFile:
        """Read the record of `to_json`."""
        fields = Fields.of(value, "predicate.evidence")
        role = fields.text("role")
        if role not in ROLES:
            raise Rejected("statement/malformed", f"predicate.evidence: there is no role {role!r}")
        path = plain_name(fields.text("path"), "predicate.evidence.path")
        file = EvidenceFile(role, path, fields.sha256("digest"))
        fields.done()
        return file


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

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of the clauses."""
        return overall(self.clauses)

    @property
    def every_assumption(self) -> tuple[str, ...]:
        """Return what the certificate and its clauses count on, each once, as they stand there."""
        own = (*self.assumptions, *(text for c in self.clauses for text in c.assumptions))
        return tuple(dict.fromkeys(own))

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        record: dict[str, Any] = {
            "triple": self.triple.to_json(),
            "stage": self.stage,
            "issuedAt": time_text(self.issued_at),
            "validUntil": time_text(self.valid_until),
            "sequence": self.sequence,
            "verdict": self.verdict.value,
            "scope": {
                "complete": self.scope.complete,
                "covers": [named(id, slice) for id, slice in self.scope.covers],
            },
            "clauses": [clause.to_json() for clause in self.clauses],
            "inputs": [{"name": i.name, "digest": {"sha256": i.sha256}} for i in self.inputs],
            "evaluator": {"id": self.evaluator.id, "version": self.evaluator.version},
            "assumptions": list(self.assumptions),
            "nonClaims": list(self.non_claims),
        }
        if self.supersedes is not None:
            record["supersedes"] = {"sha256": self.supersedes}
        if self.evidence:
            record["evidence"] = [file.to_json() for file in self.evidence]
        if self.suppressions:
            record["suppressions"] = [
                {"code": item.code, "reason": item.reason} for item in self.suppressions
            ]
        return record


def payload_bytes(predicate: Predicate) -> bytes:
    """Return the canonical statement: the same evaluation gives the same bytes."""
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": SUBJECT_NAME, "digest": {"sha256": predicate.triple.digest}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": predicate.to_json(),
        }
    )


def certificate_id(payload: bytes) -> str:
    """Return the identity of a certificate: sha256 (hex) of the payload, not of the envelope.

    Signatures and base64 are malleable, the payload is not.
    """
    return hashlib.sha256(payload).hexdigest()


@dataclass(frozen=True, slots=True)
class Statement:
    """The outer statement; unknown fields are ignored, as in-toto demands."""

    type: str
    predicate_type: str
    subjects: tuple[str | None, ...]
    """The sha256 of each subject, None where it has none (other algorithms never match)."""
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
    """Read the predicate and the verdict that it states; unknown fields are refused."""
    fields = Fields.of(value, "predicate")
    stage = fields.text("stage")
    if stage not in STAGES:
        raise Rejected("statement/malformed", f"predicate.stage is {stage!r}")
    try:
        stated = Verdict(fields.text("verdict"))
    except ValueError:
        raise Rejected("statement/malformed", "predicate.verdict is no verdict") from None
    scope = fields.inner("scope")
    evaluator = fields.inner("evaluator")
    predicate = Predicate(
        triple=Triple.from_json(fields.raw("triple"), "predicate.triple"),
        stage=stage,
        issued_at=parse_time(fields.text("issuedAt")),
        valid_until=parse_time(fields.text("validUntil")),
        sequence=fields.integer("sequence"),
        scope=Scope(
            scope.boolean("complete"), tuple(_covered(item) for item in scope.items("covers"))
        ),
        clauses=tuple(
            CertifiedClause.from_json(item, f"predicate.clauses[{index}]")
            for index, item in enumerate(fields.items("clauses"))
        ),
        evaluator=Evaluator(evaluator.text("id"), evaluator.text("version")),
        inputs=tuple(_input(item) for item in fields.items("inputs")),
        assumptions=fields.texts("assumptions"),
        non_claims=fields.texts("nonClaims"),
        supersedes=fields.sha256_or_none("supersedes"),
        suppressions=tuple(_accepted(item) for item in fields.items("suppressions"))
        if "suppressions" in fields.record
        else (),
        evidence=tuple(EvidenceFile.from_json(item) for item in fields.items("evidence"))
        if "evidence" in fields.record
        else (),
    )
    scope.done()
    evaluator.done()
    fields.done()
    return predicate, stated


def _covered(value: Any) -> tuple[str, str | None]:
    fields = Fields.of(value, "predicate.scope.covers")
    pair = (fields.text("id"), fields.text_or_none("slice"))
    fields.done()
    return pair


def _accepted(value: Any) -> AcceptedFinding:
    fields = Fields.of(value, "predicate.suppressions")
    item = AcceptedFinding(fields.text("code"), fields.text("reason"))
    fields.done()
    return item


def _input(value: Any) -> Input:
    fields = Fields.of(value, "predicate.inputs")
    item = Input(fields.text("name"), fields.sha256("digest"))
    if not item.name.isprintable():
        raise Rejected(
            "statement/malformed", f"the name {item.name!a} of an input is not printable"
        )
    fields.done()
    return item
