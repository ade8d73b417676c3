"""Incomplete reports and windows are refused, and are never a pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.terms import Family
from kcdsl.release.promotion import CANARY, DocumentKind, EvidenceDocument, Period, documents
from kcdsl.release.promotion.documents import (
    LONGEST_REASON,
    MOST_COUNTED,
    OtherSubject,
    read_evidence,
    schema_of,
    window_of,
)
from kcdsl.verdict.model import EXITS
from kcdsl.verdict.report import read_report
from kcdsl_certs.statement import Triple
from kcdsl_certs.statement.triple import INFER_CHECKPOINT
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


# --- what is no evidence --------------------------------------------------------------------------


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (report, lambda d: d["kernels"].update(train={"fingerprint": 3}), "of the train kernel"),
        (
            window,
            lambda d: d["window"]["kernels"].update(infer={"fingerprint": []}),
            "infer kernel",
        ),
        (report, lambda d: d["clauses"].append(ROW), "'N-KL/all/0' twice"),
        (window, lambda d: d["clauses"].append(ROW), "'N-KL/all/0' twice"),
        (window, lambda d: d.update(clauses=[{**ROW, "verdict": "kept"}]), "an unknown verdict"),
        (window, lambda d: d.update(clauses=[{**ROW, "obligation": None}]), "a clause None"),
        (window, lambda d: d["window"].update({"from": 3}), "of another kind: a time"),
    ],
)
def test_malformed_fields_are_refused(read: Read, make: Any, change: Change, words: str) -> None:
    document = make(ROW)
    change(document)
    assert words in refused(read, document)


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (window, lambda d: d.update(contract=None), "not decided by a contract"),
        (report, lambda d: d["model"].update(sha256="abc"), "about other weights"),
        (report, lambda d: d["model"].update(sha256=f"sha256:{'0' * 64}"), "about other weights"),
        (
            report,
            lambda d: d["data"].append({"name": "easy.jsonl", "sha256": digest("easy")}),
            "its data easy.jsonl is not that of the contract",
        ),
        (
            window,
            lambda d: d["window"].update({"from": d["window"]["until"]}),
            "ends before it begins",
        ),
        (window, lambda d: d.update(clauses=[]), "it leaves N-KL on all out"),
    ],
)
def test_document_about_another_subject_is_ignored(
    read: Read, make: Any, change: Change, words: str
) -> None:
    document = make(ROW)
    change(document)
    with pytest.raises(OtherSubject, match=words):
        read(document)


def test_report_of_an_edited_metric_is_ignored(tmp_path: Path) -> None:
    """The contract names the function of a metric, and not the content of its file."""
    path, document = tmp_path / "report.json", report(ROW)
    inputs = {"own.py": digest("own"), "data.jsonl": digest("data")}
    document["data"] = [{"name": "data.jsonl", "sha256": digest("data")}]
    for text in ("own", "edited"):
        own = {"name": "gap", "function": "own.py:gap", "sha256": digest(text)}
        document["environment"] = {"metrics": [own]}
        path.write_text(json.dumps(document))
        if text == "own":
            assert read_evidence(path, [RATE], ABOUT, inputs, CANARY, ()).results
    with pytest.raises(OtherSubject, match=r"another file than own\.py of the contract"):
        read_evidence(path, [RATE], ABOUT, inputs, CANARY, ())


def test_window_with_a_slice_left_out_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "window.json"
    path.write_text(json.dumps(window(ROW) | {"deferred": {"N-KL": "later"}}))
    short = demand("N-KL", "short", family=Family.STATISTICAL)
    with pytest.raises(OtherSubject, match="it leaves N-KL on short out"):
        read_evidence(path, [RATE, short], ABOUT, {}, CANARY, ())


def test_report_does_not_count_where_the_kernels_read_other_weights(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report(ROW)))
    beside = {INFER_CHECKPOINT: digest("served")}
    about = replace(ABOUT, checkpoint=replace(ABOUT.checkpoint, companions=beside))
    with pytest.raises(OtherSubject, match="weights that the inference kernel read"):
        read_evidence(path, [RATE], about, {}, CANARY, ())


def test_report_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report({**ROW, "verdict": "violated"})))

    def replaced(path: Path) -> Any:
        path.write_text(json.dumps(report(ROW)))
        return read_report(path)

    monkeypatch.setattr(documents, "read_report", replaced)
    with pytest.raises(Refusal, match="it changed while it was read"):
        read_evidence(path, [RATE], ABOUT, {}, CANARY, ())


@pytest.mark.parametrize(
    ("text", "words"),
    [("[]", "no JSON object"), (f'{{"a": "{"x" * 99}"}}', "larger than 99 bytes")],
)
def test_file_that_is_no_document_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setattr(documents, "LARGEST", 99)
    path = tmp_path / "evidence.json"
    path.write_text(text)
    with pytest.raises(Refusal, match=words) as caught:
        schema_of(path)
    assert caught.value.diagnostics[0].code is codes.PROMOTION_EVIDENCE
