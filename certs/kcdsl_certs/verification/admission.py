"""Reading a statement before it is signed: refuses statements that a checker would refuse.

Needs neither the contract nor the model, and runs nothing: the checker compares the clauses of the
statement with the contract later.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kcdsl_certs.encoding.files import read_limited
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import strict_load, time_text
from kcdsl_certs.signatures import LARGEST_BUNDLE, decode, parse_bundle
from kcdsl_certs.statement import (
    LARGEST_PAYLOAD,
    PREDICATE_TYPE,
    STATEMENT_TYPE,
    TRANSFER_TYPE,
    Predicate,
    Transfer,
    certificate_id,
    parse_predicate,
    parse_statement,
    parse_transfer,
    payload_bytes,
    transfer_bytes,
)
from kcdsl_certs.verification.coverage import check_results, refuse_stray
from kcdsl_certs.verification.evidence import EvidenceFiles
from kcdsl_certs.verification.proofs import load_proof
from kcdsl_certs.verification.report import NotRun
from kcdsl_certs.verification.verify import check_evidence


@dataclass(frozen=True, slots=True)
class Admitted:
    """A statement that may be signed; `body` is its whole content."""

    payload: bytes
    body: Predicate | Transfer


def admit(payload: bytes, folder: Path, moment: datetime) -> Admitted:
    """Read a statement to be signed; raises Rejected if a checker would refuse it.

    The bytes must be the canonical form of the statement, so that nothing unread is signed. The
    proof objects, or the earlier certificate, that it names must be in `folder`, and existing
    evidence files there must have the stated digests.
    """
    body = read_statement(payload)
    _refuse_window(body, moment)
    if isinstance(body, Transfer):
        _refuse_other_base(body, folder)
        return Admitted(payload, body)
    for clause in body.clauses:
        if clause.proof is not None:
            load_proof(folder, clause)
    with suppress(NotRun):  # missing evidence may be elsewhere; a complete check demands it
        check_evidence(body, EvidenceFiles(folder), strict=False)
    return Admitted(payload, body)


def read_statement(payload: bytes) -> Predicate | Transfer:
    """Return the body of a statement; raises Rejected where it is inconsistent.

    The bytes must be canonical, the subject its triple, and each verdict supported by its numbers.
    Neither the time nor files beside the statement are considered.
    """
    statement = parse_statement(strict_load(payload, LARGEST_PAYLOAD))
    if len(statement.subjects) != 1:
        raise Rejected("subject/count", f"{len(statement.subjects)} subjects, not one")
    if statement.type != STATEMENT_TYPE:
        raise Rejected("statement/type", f"_type is {statement.type!r}")
    if statement.predicate_type == TRANSFER_TYPE:
        transfer = parse_transfer(statement.predicate)
        _refuse_other_spelling(payload, transfer_bytes(transfer))
        return transfer
    if statement.predicate_type != PREDICATE_TYPE:
        raise Rejected("statement/predicate-type", f"predicateType is {statement.predicate_type!r}")
    body, stated = parse_predicate(statement.predicate)
    check_results(body, stated)
    _refuse_other_spelling(payload, payload_bytes(body))
    refuse_stray(body)
    return body


def _refuse_other_spelling(payload: bytes, canonical: bytes) -> None:
    if payload != canonical:
        raise Rejected(
            "statement/not-canonical",
            "the bytes are not the canonical form of what the statement says",
        )


def _refuse_other_base(transfer: Transfer, folder: Path) -> None:
    base = decode(parse_bundle(read_limited(folder / transfer.path, LARGEST_BUNDLE)))
    if certificate_id(base.payload) != transfer.base:
        raise Rejected("transfer/another-base", f"{transfer.path} is not the certificate it names")


def _refuse_window(body: Predicate | Transfer, moment: datetime) -> None:
    if body.valid_until <= body.issued_at:
        raise Rejected("validity/empty", "it ends before it begins")
    if moment < body.issued_at:
        raise Rejected(
            "validity/not-yet",
            f"issued at {time_text(body.issued_at)}, the clock says {time_text(moment)}",
        )
    if moment >= body.valid_until:
        raise Rejected("validity/expired", f"it was valid until {time_text(body.valid_until)}")
