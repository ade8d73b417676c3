"""Malformed statements that a trusted key signed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import strict_load
from kcdsl_certs.statement import (
    ClassMember,
    ExcludedResult,
    KernelClass,
    Predicate,
    RegisterHead,
    Transfer,
    TransferredResult,
    Verdict,
    class_bytes,
    head_bytes,
    parse_class,
    parse_head,
    parse_predicate,
    parse_statement,
    parse_transfer,
    payload_bytes,
    transfer_bytes,
    transferred_predicate,
)
from kcdsl_certs.statement.quantities import REGION

Document = dict[str, Any]
NOW, LATER = datetime(2026, 12, 1, tzinfo=UTC), datetime(2026, 12, 31, tzinfo=UTC)
A, B, C = (digit * 64 for digit in "abc")


def loaded(data: bytes) -> Document:
    document: Document = strict_load(data, 1 << 20)
    return document


# --- register heads and kernel classes ------------------------------------------------------------


HEAD = loaded(head_bytes(RegisterHead(A, 3, B, NOW)))
CLASS = loaded(
    class_bytes(
        KernelClass(
            A, (A,), (ClassMember("eager", B), ClassMember("sdpa", C)), (A, B), "full", NOW, LATER
        )
    )
)
SUBJECT = {"name": "odd", "digest": {"sha256": C}}


@pytest.mark.parametrize(
    ("document", "parse", "change", "reason"),
    [
        (HEAD, parse_head, {"predicateType": CLASS["predicateType"]}, "statement/predicate-type"),
        (HEAD, parse_head, {"subject": []}, "subject/count"),
        (HEAD, parse_head, {"subject": [*HEAD["subject"], SUBJECT]}, "subject/count"),
        (HEAD, parse_head, {"subject": [{"digest": {"sha1": "0" * 40}}]}, "subject/no-sha256"),
        (CLASS, parse_class, {"predicateType": HEAD["predicateType"]}, "statement/predicate-type"),
        (CLASS, parse_class, {"subject": []}, "subject/mismatch"),
        (CLASS, parse_class, {"subject": [SUBJECT]}, "subject/mismatch"),
        (CLASS, parse_class, {"subject": [*CLASS["subject"], SUBJECT]}, "subject/mismatch"),
    ],
)
def test_statement_of_another_type_or_subject_is_refused(
    document: Document, parse: Callable[[Any], object], change: Document, reason: str
) -> None:
    parse(parse_statement(document))
    with pytest.raises(Rejected) as caught:
        parse(parse_statement(document | change))
    assert caught.value.reason == reason


# --- certificates ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows\x1b[2J.jsonl", "rows\u202e.jsonl", "rows\n.jsonl"])
def test_unprintable_name_of_an_input_is_refused(body: Predicate, name: str) -> None:
    predicate = loaded(payload_bytes(body))["predicate"]
    parse_predicate(predicate)
    predicate["inputs"][0]["name"] = name
    with pytest.raises(Rejected, match=r"statement/malformed: the name .* is not printable"):
        parse_predicate(predicate)


@pytest.mark.parametrize(
    "change",
    [
        {"radius": "-0.001"},
        {"longest": 5},
        {"longest": 0},
        {"longest": 1 << 40},
        {"kind": "rows"},
        {"kind": "rows", "longest": 0},
        {"kind": "rows", "longest": 1 << 40},
    ],
)
def test_inconsistent_region_is_refused(change: Document) -> None:
    region = {"kind": "ball", "slice": "all", "radius": "0.001"}
    assert REGION.read(region, "region").radius == Fraction(1, 1000)
    assert REGION.read({**region, "kind": "rows", "longest": 5}, "region").longest == 5
    with pytest.raises(Rejected, match="statement/malformed: no region is like"):
        REGION.read(region | change, "region")


# --- transfers ------------------------------------------------------------------------------------


@pytest.fixture
def transfer(body: Predicate) -> Transfer:
    """Return a transfer of the first result of the golden certificate."""
    moved = TransferredResult(body.clauses[0].id, "short", Fraction(1, 100), 0.005, "w")
    return Transfer(
        body.triple, A, "verify.cert.json", body.stage, NOW, LATER, 1, (moved,),
        (ExcludedResult("N-KL", "all", "no-region", "measured"),), body.evaluator,
    )  # fmt: skip


def half(record: Document) -> None:
    del record["tensor"]


def alone(record: Document) -> None:
    del record["weights"], record["tensor"]


def far(record: Document) -> None:
    record["moved"] = {"decimal": "1.5", "hex": "0x1.8000000000000p+0"}


def backwards(record: Document) -> None:
    record["moved"] = {"decimal": "-0.5", "hex": "-0x1.0000000000000p-1"}


def no_ball(record: Document) -> None:
    record["weights"] = "0"


def wide(record: Document) -> None:
    record["weights"] = "0.6"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (half, "states a part of how far weights moved"),
        (alone, "states a part of how far weights moved"),
        (far, "has moved 1.5 of 0.01"),
        (backwards, "has moved -0.5 of 0.01"),
        (no_ball, "has moved 0.005 of 0"),
        (wide, "has moved 0.005 of 0.6"),
    ],
)
def test_impossible_distance_of_weights_is_refused(
    transfer: Transfer, change: Callable[[Document], None], words: str
) -> None:
    predicate = loaded(transfer_bytes(transfer))["predicate"]
    assert parse_transfer(predicate) == transfer
    change(predicate["carried"][0])
    with pytest.raises(Rejected, match=f"statement/malformed: .* {words}"):
        parse_transfer(predicate)


def test_result_may_be_stated_once(transfer: Transfer) -> None:
    (first,) = transfer.carried
    excluded = ExcludedResult(first.id, first.slice, "weights", "too far")
    further = TransferredResult(first.id, first.slice)
    for doubled in (
        dataclasses.replace(transfer, carried=(first, further)),
        dataclasses.replace(transfer, left=(excluded,)),
        dataclasses.replace(transfer, left=transfer.left * 2),
    ):
        with pytest.raises(Rejected, match="statement/malformed: a result is stated twice"):
            parse_transfer(doubled.to_json())


def test_transfer_of_nothing_is_refused(transfer: Transfer) -> None:
    with pytest.raises(Rejected, match="transfer/nothing"):
        parse_transfer(dataclasses.replace(transfer, carried=()).to_json())


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.INCONCLUSIVE])
def test_only_passed_results_are_transferred(
    body: Predicate, transfer: Transfer, verdict: Verdict
) -> None:
    first = dataclasses.replace(body.clauses[0], weights=Fraction(1, 100))
    base = dataclasses.replace(body, clauses=(first, *body.clauses[1:]))
    (kept,) = transferred_predicate(base, body.triple, transfer.carried).clauses
    assert kept == first
    other = dataclasses.replace(first, verdict=verdict)
    base = dataclasses.replace(body, clauses=(other, *body.clauses[1:]))
    with pytest.raises(Rejected, match=f"transfer/not-passed: .* is {verdict}"):
        transferred_predicate(base, body.triple, transfer.carried)
