"""The head of a register of certificates: the number of events, and the hash of the last one.

A register is a chain of events, each with the hash of its predecessor. A signed head makes later
changes, removals or moves of the events up to it detectable.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from kcdsl_certs.encoding.records import COUNT, DIGEST, TIME, Record, RecordField
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_json
from kcdsl_certs.statement.certificate import REGISTER_HEAD_TYPE, STATEMENT_TYPE, Statement

HEAD_NAME = "kcdsl-register"


@dataclass(frozen=True, slots=True)
class RegisterHead:
    """The state of a register after `number` events.

    `hash` is that of the last event, `register` that of the first, which identifies the register.
    `at` is the time of the last event, or, in a signed head, of the signature.
    """

    register: str
    number: int
    hash: str
    at: datetime


_HEAD: Record[RegisterHead] = Record(
    lambda **found: RegisterHead(hash="", **found),
    RecordField("register", DIGEST),
    RecordField("number", COUNT),
    RecordField("issuedAt", TIME, "at"),
)


def head_bytes(head: RegisterHead) -> bytes:
    """Return the canonical statement; its subject is the hash of the last event."""
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": HEAD_NAME, "digest": {"sha256": head.hash}}],
            "predicateType": REGISTER_HEAD_TYPE,
            "predicate": _HEAD.write(head),
        }
    )


def parse_head(statement: Statement) -> RegisterHead:
    """Read the head in a statement of its type; raises Rejected."""
    if statement.predicate_type != REGISTER_HEAD_TYPE:
        raise Rejected("statement/predicate-type", f"predicateType is {statement.predicate_type!r}")
    if len(statement.subjects) != 1:
        raise Rejected("subject/count", f"{len(statement.subjects)} subjects; exactly one counts")
    (subject,) = statement.subjects
    if subject is None:
        raise Rejected("subject/no-sha256", "the subject has no sha256 digest")
    found = _HEAD.read(statement.predicate, "predicate")
    if found.number < 1:
        raise Rejected("statement/malformed", "a register has at least one event")
    return RegisterHead(found.register, found.number, subject, found.at)
