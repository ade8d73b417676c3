"""Statements that are not signed, because every check would refuse them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import parse_time
from kcdsl_certs.statement import (
    EvidenceFile,
    Predicate,
    Transfer,
    TransferredResult,
    certificate_id,
    payload_bytes,
    transfer_bytes,
)
from kcdsl_certs.verification.admission import admit

Admit = Callable[[bytes], object]


@pytest.fixture
def signed(golden: ModuleType, vectors_folder: Path) -> Admit:
    """Return `admit` beside the files of the golden certificate."""
    return lambda payload: admit(payload, vectors_folder, parse_time(golden.AT))


def changed(body: Predicate, change: Callable[[Any], object]) -> bytes:
    """Return the statement of a body after a change, otherwise in its canonical form."""
    statement = json.loads(payload_bytes(body))
    change(statement)
    return json.dumps(statement, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def test_golden_statement_is_admitted(body: Predicate, signed: Admit) -> None:
    signed(payload_bytes(body))
    signed(changed(body, lambda statement: None))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s["subject"].append(s["subject"][0]), "subject/count: 2"),
        (lambda s: s["subject"].clear(), "subject/count: 0"),
        (lambda s: s.update(_type="https://example.com/Statement"), "statement/type"),
        (lambda s: s.update(predicateType="https://example.com/p"), "statement/predicate-type"),
    ],
    ids=["two subjects", "no subject", "type", "predicate type"],
)
def test_statements_of_another_form_are_not_signed(
    body: Predicate, signed: Admit, change: Callable[[Any], object], reason: str
) -> None:
    with pytest.raises(Rejected, match=reason):
        signed(changed(body, change))


def test_other_spellings_of_a_statement_are_not_signed(body: Predicate, signed: Admit) -> None:
    statement = json.loads(payload_bytes(body))
    with pytest.raises(Rejected, match="statement/not-canonical"):
        signed(json.dumps(statement, sort_keys=True).encode())
    with pytest.raises(Rejected, match="statement/not-canonical"):
        signed(payload_bytes(body) + b"\n")


def test_empty_periods_are_not_signed(body: Predicate, signed: Admit) -> None:
    for moment in (body.issued_at, body.issued_at - timedelta(days=1)):
        with pytest.raises(Rejected, match="validity/empty"):
            signed(payload_bytes(replace(body, valid_until=moment)))


def test_kinds_of_evidence_that_repeat_are_not_signed(body: Predicate, signed: Admit) -> None:
    first = next(file for file in body.evidence if file.role != "counterexample")
    twice = (*body.evidence, EvidenceFile(first.role, "other.json", first.sha256))
    with pytest.raises(Rejected, match="as one kind of evidence"):
        signed(payload_bytes(replace(body, evidence=twice)))
    again = (*body.evidence, first)
    with pytest.raises(Rejected, match="named twice as evidence"):
        signed(payload_bytes(replace(body, evidence=again)))


def test_transfers_of_another_certificate_are_not_signed(body: Predicate, signed: Admit) -> None:
    transfer = Transfer(
        triple=body.triple,
        base=certificate_id(payload_bytes(body)),
        path="valid.cert.json",
        stage=body.stage,
        issued_at=body.issued_at,
        valid_until=body.valid_until,
        sequence=body.sequence + 1,
        carried=(TransferredResult("C", None, Fraction(1, 100), 0.001, "w"),),
        left=(),
        evaluator=body.evaluator,
    )
    signed(transfer_bytes(transfer))
    with pytest.raises(Rejected, match="transfer/another-base"):
        signed(transfer_bytes(replace(transfer, base="0" * 64)))
    with pytest.raises(Rejected, match="validity/empty"):
        signed(transfer_bytes(replace(transfer, valid_until=transfer.issued_at)))


def test_statements_are_signed_within_their_period_only(
    body: Predicate, vectors_folder: Path
) -> None:
    payload, second = payload_bytes(body), timedelta(seconds=1)
    admit(payload, vectors_folder, body.issued_at)
    admit(payload, vectors_folder, body.valid_until - second)
    with pytest.raises(Rejected, match="validity/not-yet"):
        admit(payload, vectors_folder, body.issued_at - second)
    with pytest.raises(Rejected, match="validity/expired"):
        admit(payload, vectors_folder, body.valid_until)
