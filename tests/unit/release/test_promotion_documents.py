"""Reports and windows that do not say what they must: refused, and never a pass."""

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
from kcdsl.release.promotion.documents import read_evidence, window_of
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
    rest: dict[str, Any] = dict.fromkeys(("health", "environment", "deferred"), {})
    rest |= dict.fromkeys(("slices", "prechecks", "crosschecks", "implied", "notes", "data"), [])
    return {
        "schema": "kcdsl.report/2", **base(ABOUT, row), "kernels": kernels, "model": weights,
        "verdict": row["verdict"], "exit": int(EXITS[row["verdict"]]), "action": "log", **rest,
    }  # fmt: skip


def window(row: dict[str, Any], requests: int = 600) -> dict[str, Any]:
    period = Period(NOW - timedelta(hours=1), NOW)
    return {
        "schema": "kcdsl.aggregate/2", **base(ABOUT, row), "deferred": {},
        "window": window_of(ABOUT, CANARY, period),
        "tables": {"files": [{"sha256": digest("table")}]},
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
def test_what_is_well_formed_is_read(read: Read, make: Any) -> None:
    found = read(make(ROW)).results[RATE.obligation]
    assert (found.verdict, found.evidence, found.k, found.n) == ("held", "sample", 0, 600)


@pytest.mark.parametrize("make", [report, window])
@pytest.mark.parametrize("kind", [None, "", "None", "guess", "PROOF", 3, ["proof"]])
def test_evidence_of_no_known_kind_is_refused(read: Read, make: Any, kind: Any) -> None:
    refused(read, make({**ROW, "evidence": kind, "exceedance": None}))


@pytest.mark.parametrize("kind", ["None", "guess", "census"])
def test_only_a_proof_shows_a_rate_of_traffic_without_counts(kind: str) -> None:
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
