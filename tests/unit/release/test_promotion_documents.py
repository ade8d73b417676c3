"""Incomplete reports and windows are refused, and are never a pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.terms import Family
from kcdsl.release.promotion import CANARY, DocumentKind, EvidenceDocument, Period
from kcdsl.release.promotion.documents import (
    LONGEST_REASON,
    MOST_COUNTED,
    OtherSubject,
    read_evidence,
    window_of,
)
from kcdsl.verdict.model import EXITS
from kcdsl_certs.statement import Triple
from tests.support.promotions import at, counts, demand, digest, look
from tests.support.registers import NOW, triple

RATE = demand("N-KL", family=Family.STATISTICAL)
ABOUT = triple()
ROW: dict[str, Any] = {
    "obligation": RATE.obligation, "clause": "N-KL", "slice": "all", "verdict": "held",
    "evidence": "sample", "exceedance": {"k": 0, "n": 600}, "reason": None,
}  # fmt: skip

Read = Callable[[dict[str, Any]], EvidenceDocument]


def base(about: Triple, row: dict[str, Any]) -> dict[str, Any]:
    contract = about.contract
    named = {"name": contract.id, "version": contract.version, "digest": contract.digest}
    return {"contract": named, "clauses": [row]}


def report(row: dict[str, Any]) -> dict[str, Any]:
    kernels = {"train": ABOUT.train.fingerprint, "infer": ABOUT.infer.fingerprint}
    weights = {"sha256": ABOUT.checkpoint.digest}
    rest: dict[str, Any] = {key: {} for key in ("health", "environment", "deferred")}
    rest |= {key: [] for key in ("slices", "prechecks", "crosschecks", "implied", "notes", "data")}
    return {
        "schema": "kcdsl.report/3", **base(ABOUT, row), "kernels": kernels, "model": weights,
        "verdict": row["verdict"], "exit": int(EXITS[row["verdict"]]), "action": "log", **rest,
    }  # fmt: skip


def window(row: dict[str, Any], requests: int = 600) -> dict[str, Any]:
    period = Period(NOW - timedelta(hours=1), NOW)
    return {
        "schema": "kcdsl.aggregate/2", **base(ABOUT, row), "deferred": {},
        "window": window_of(ABOUT, CANARY, period),
        "tables": {
            "files": [{"content": digest("table")}], "content": digest("table"),
            "sketch": {"ids": [digest("id")], "values": [digest("request")]},
        },
        "slices": [{"slice": "all", "requests": requests}],
    }  # fmt: skip


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that writes a document and reads it as evidence of a canary."""

    def run(document: dict[str, Any]) -> EvidenceDocument:
        path = tmp_path / "evidence.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        return read_evidence(path, [RATE], ABOUT, {}, CANARY, ())

    return run


def refused(read: Read, document: dict[str, Any]) -> str:
    with pytest.raises(Refusal) as caught:
        read(document)
    (found,) = caught.value.diagnostics
    assert found.code is codes.PROMOTION_EVIDENCE
    return found.message


@pytest.mark.parametrize("make", [report, window])
def test_well_formed_documents_are_read(read: Read, make: Any) -> None:
    found = read(make(ROW)).results[RATE.obligation]
    assert (found.verdict, found.evidence, found.k, found.n) == ("held", "sample", 0, 600)


@pytest.mark.parametrize("kind", ["ids", "values"])
@pytest.mark.parametrize("sketch", [None, [], ["0"], [3], ["é" * 64], ["A" * 64]])
def test_window_without_request_sketches_is_refused(read: Read, kind: str, sketch: Any) -> None:
    document = window(ROW)
    found = read(document)
    assert digest("request") in found.parts
    assert found.ids == {digest("id")}
    document["tables"]["sketch"][kind] = sketch
    refused(read, document)


@pytest.mark.parametrize("make", [report, window])
@pytest.mark.parametrize("kind", [None, "", "None", "guess", "PROOF", 3, ["proof"]])
def test_unknown_kind_of_evidence_is_refused(read: Read, make: Any, kind: Any) -> None:
    refused(read, make({**ROW, "evidence": kind, "exceedance": None}))


@pytest.mark.parametrize("kind", ["None", "guess", "census"])
def test_rate_of_traffic_needs_counts_or_a_proof(kind: str) -> None:
    found = {RATE.obligation: counts(0, 600, kind)}
    document = EvidenceDocument(
        DocumentKind.REPORT, "report.json", digest("report"), frozenset(), found
    )
    assert look(at(CANARY), [RATE], document).rows[0].status == "open"
    proved = {RATE.obligation: counts(0, 600, "proof-real")}
    document = EvidenceDocument(
        DocumentKind.REPORT, "report.json", digest("report"), frozenset(), proved
    )
    assert look(at(CANARY), [RATE], document).rows[0].status == "shown"


@pytest.mark.parametrize("make", [report, window])
@pytest.mark.parametrize(
    "counted", [{"k": 0, "n": 10**400}, {"k": 0, "n": 2**53}, {"k": -1, "n": 6}, {"k": 0, "n": 1e9}]
)
def test_counts_beyond_the_register_are_refused(read: Read, make: Any, counted: Any) -> None:
    assert "the counts of N-KL" in refused(read, make({**ROW, "exceedance": counted}))


def test_report_without_a_data_digest_does_not_count(tmp_path: Path) -> None:
    """The digest identifies a second copy of a report."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report(ROW)), encoding="utf-8")
    with pytest.raises(OtherSubject, match="no data"):
        read_evidence(path, [RATE], ABOUT, {"data.jsonl": digest("data")}, CANARY, ())


def test_number_beyond_float64_is_refused(read: Read) -> None:
    worst = {**ROW, "verdict": "violated", "value": 10**400, "threshold": 1, "op": "<=", "unit": ""}
    refused(read, window(worst))


def test_request_counts_beyond_the_register_are_refused(read: Read) -> None:
    assert "the requests of a slice" in refused(read, window(ROW, requests=10**17))
    assert read(window(ROW, requests=MOST_COUNTED)).requests == {"all": MOST_COUNTED}


def test_lone_surrogate_is_refused(read: Read) -> None:
    assert "surrogate" in refused(read, window({**ROW, "reason": "\ud800"}))


def test_reason_is_truncated_to_the_register_limit(read: Read) -> None:
    reason = read(window({**ROW, "reason": "x" * 30_000})).results[RATE.obligation].reason
    assert reason == "x" * LONGEST_REASON


def test_undecodable_file_name_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "traffic-\udcff.json"
    path.write_text(json.dumps(window(ROW)), encoding="utf-8")
    found = read_evidence(path, [RATE], ABOUT, {}, CANARY, ())
    assert found.name == f"{tmp_path}/traffic-\\udcff.json"
