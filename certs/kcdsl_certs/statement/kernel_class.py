"""A class of kernels that agree pairwise: a statement about a set of kernels of one fleet.

The statement names the members and the certificates of every ordered pair of them. It makes no
further claim: a verifier derives the class from the certificates again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kcdsl_certs.encoding.records import (
    DIGEST,
    TEXT,
    TIME,
    Record,
    RecordField,
    many,
    one_of,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_digest, canonical_json
from kcdsl_certs.statement.certificate import KERNEL_CLASS_TYPE, STAGES, STATEMENT_TYPE, Statement

CLASS_SCHEMA = "kcdsl.kernel-class/1"
CLASS_NAME = "kcdsl-kernel-class"


@dataclass(frozen=True, slots=True)
class ClassMember:
    """One kernel by the digest of its fingerprint; `name` is a hint."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class KernelClass:
    """Kernels that pairwise satisfy the contracts, in both directions.

    `checkpoint` is the digest of the manifest of the weights, `contracts` are those of the fleet,
    `certificates` the identifiers of the certificates of the pairs. All lists are sorted.
    """

    checkpoint: str
    contracts: tuple[str, ...]
    members: tuple[ClassMember, ...]
    certificates: tuple[str, ...]
    stage: str
    issued_at: datetime
    valid_until: datetime

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of the canonical class manifest: the subject."""
        return canonical_digest(
            {
                "schema": CLASS_SCHEMA,
                "checkpoint": {"sha256": self.checkpoint},
                "contracts": [{"sha256": digest} for digest in self.contracts],
                "kernels": [{"sha256": member.digest} for member in self.members],
            }
        )


_MEMBER = Record(ClassMember, RecordField("name", TEXT), RecordField("digest", DIGEST))
_CLASS: Record[KernelClass] = Record(
    KernelClass,
    RecordField("checkpoint", DIGEST),
    RecordField("contracts", many(DIGEST)),
    RecordField("members", many(_MEMBER.codec)),
    RecordField("certificates", many(DIGEST)),
    RecordField("stage", one_of(STAGES)),
    RecordField("issuedAt", TIME, "issued_at"),
    RecordField("validUntil", TIME, "valid_until"),
)


def class_bytes(found: KernelClass) -> bytes:
    """Return the canonical statement; its one subject is the digest of the class manifest."""
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": CLASS_NAME, "digest": {"sha256": found.digest}}],
            "predicateType": KERNEL_CLASS_TYPE,
            "predicate": _CLASS.write(found),
        }
    )


def parse_class(statement: Statement) -> KernelClass:
    """Read the class in a statement of its type; raises Rejected."""
    if statement.predicate_type != KERNEL_CLASS_TYPE:
        raise Rejected("statement/predicate-type", f"predicateType is {statement.predicate_type!r}")
    found = _CLASS.read(statement.predicate, "predicate")
    lists: tuple[tuple[Any, ...], ...] = (
        found.contracts,
        found.certificates,
        tuple(member.digest for member in found.members),
    )
    if any(list(one) != sorted(set(one)) for one in lists) or len(found.members) < 2:
        raise Rejected(
            "class/malformed", "its lists are not sorted, or it has fewer than two members"
        )
    if statement.subjects != (found.digest,):
        raise Rejected("subject/mismatch", "the subject is not the class that is stated")
    return found
