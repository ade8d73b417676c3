"""Reading evidence of a stage: reports of `kcdsl evaluate` and windows of `kcdsl aggregate`.

Neither is signed, so a document is used only if its contract, kernels and weights are those of the
candidate. Documents about other triples are ignored, with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import FILE_MISSING, PROMOTION_EVIDENCE
from kcdsl.release.promotion.evidence import (
    DocumentKind,
    EvidenceDocument,
    ObligationResult,
    Period,
    printable,
)
from kcdsl.release.promotion.stages import DemandedObligation
from kcdsl.source.files import open_regular
from kcdsl.verdict.model import WORST_FIRST
from kcdsl.verdict.report import LARGEST, REPORT_SCHEMA, read_report
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import LARGEST_INTEGER, loose_load, parse_time, time_text
from kcdsl_certs.statement import Contract, Evidence, Kernel, Triple, differences, relaxed
from kcdsl_certs.statement.triple import INFER_CHECKPOINT

WINDOW_SCHEMA = "kcdsl.aggregate/2"
_SHA256 = 64
LONGEST_REASON = 1000
MOST_COUNTED = LARGEST_INTEGER // 1024
"""The largest count in one document; the sum of a thousand documents fits the register."""


class OtherSubject(Exception):
    """Raised for a document that is not about the candidate; the text is the reason."""


def window_of(triple: Triple, stage: str, period: Period) -> dict[str, Any]:
    """Return the identification of a window of traffic, a field of `kcdsl.aggregate/2`."""
    return {
        "stage": stage,
        "from": time_text(period.start),
        "until": time_text(period.end),
        "triple": f"sha256:{triple.digest}",
        "kernels": {
            role: dict(kernel.fingerprint)
            for role, kernel in (("train", triple.train), ("infer", triple.infer))
        },
    }


def schema_of(path: Path) -> str | None:
    """Return the schema that a JSON document names; None without one, as in a certificate.

    Raises Refusal for a file that cannot be read.
    """
    found = _load(path)[0].get("schema")
    return found if isinstance(found, str) else None


def read_evidence(
    path: Path,
    demands: Sequence[DemandedObligation],
    expected: Triple,
    inputs: Mapping[str, str],
    stage: str,
    parts: Iterable[str],
) -> EvidenceDocument:
    """Read a report or a window.

    `expected` is the candidate, `inputs` the digests of the contract's data, `parts` the parts of
    kernels that may differ. Raises OtherSubject for a document that is not about the candidate at
    this stage, and Refusal (KC698) for any other document.
    """
    document, identity = _load(path)
    schema = document.get("schema")
    try:
        if schema == REPORT_SCHEMA:
            if read_report(path) != document:
                raise unusable(path, "it changed while it was read")
            return _report(path, document, identity, expected, inputs, {*parts, "host"})
        if schema == WINDOW_SCHEMA:
            about = (demands, expected, stage, {*parts, "host"})
            return _window(path, document, identity, *about)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, Rejected) as error:
        raise unusable(path, f"a field is missing or of another kind: {error}") from error
    named = "it names no schema" if schema is None else f"its schema is {str(schema)[:60]!a}"
    raise unusable(path, f"{named}, which is no evidence of a stage")


def unusable(path: Path, why: str) -> Refusal:
    """Return the refusal of evidence (KC698)."""
    return refuse(
        PROMOTION_EVIDENCE,
        f"{path} is no usable evidence: {why}",
        help="give certificates, report.json of `kcdsl evaluate`, or windows of `kcdsl aggregate "
        "--stage`",
    )


def _load(path: Path) -> tuple[dict[str, Any], str]:
    """Return a JSON object and the sha256 of its bytes."""
    try:
        with open_regular(path) as stream:
            data = stream.read(LARGEST + 1)
    except OSError as error:
        why = error.strerror or "it cannot be read"
        raise refuse(
            FILE_MISSING,
            f"the evidence {path} cannot be read: {why}",
            help="name the certificates and the evidence of the stage to evaluate",
        ) from None
    if len(data) > LARGEST:
        raise unusable(path, f"it is larger than {LARGEST} bytes")
    try:
        document = loose_load(data)
    except Rejected as error:
        raise unusable(path, f"it is no JSON: {error.detail}") from None
    if not isinstance(document, dict):
        raise unusable(path, "it is no JSON object")
    return document, hashlib.sha256(data).hexdigest()


# --- reports --------------------------------------------------------------------------------------


def _report(
    path: Path,
    document: Mapping[str, Any],
    identity: str,
    expected: Triple,
    inputs: Mapping[str, str],
    parts: Iterable[str],
) -> EvidenceDocument:
    _refuse_other_subject(document, expected, parts)
    if INFER_CHECKPOINT in expected.checkpoint.companions:
        raise OtherSubject("it does not name the weights that the inference kernel read")
    data = {str(file["name"]): str(file["sha256"]) for file in document["data"]}
    for name, digest in data.items():
        if inputs.get(name) != digest:
            raise OtherSubject(f"its data {name} is not that of the contract")
    for used in document["environment"].get("metrics", ()):
        name = str(used["function"]).rpartition(":")[0]
        if inputs.get(name) != used["sha256"]:
            raise OtherSubject(f"another file than {name} of the contract computed a metric")
    if inputs and not data:
        raise OtherSubject("it names no data of the contract")
    looks = document.get("statistics", {}).get("looks", 1)
    return EvidenceDocument(
        DocumentKind.REPORT,
        printable(path),
        identity,
        frozenset(),
        _results(document["clauses"]),
        requests_of=frozenset(data.values()),
        looks=looks if isinstance(looks, int) else 0,
    )


def is_about(report: Mapping[str, Any], triple: Triple) -> bool:
    """Return whether a report names a triple as its subject, on any host.

    Raises KeyError, TypeError or ValueError for a report without usable fields.
    """
    try:
        _refuse_other_subject(report, triple, ("host",))
    except OtherSubject:
        return False
    except (Rejected, OverflowError) as error:
        raise ValueError(f"its kernels: {error}") from error
    return True


def _refuse_other_subject(
    document: Mapping[str, Any], expected: Triple, parts: Iterable[str]
) -> None:
    _refuse_other_triple(claimed_triple(document, expected, document["kernels"]), expected, parts)
    weights = document["model"]["sha256"]
    if weights is None or not names_weights_of(str(weights), expected):
        raise OtherSubject("it is about other weights, or names none")


def claimed_triple(
    document: Mapping[str, Any], expected: Triple, kernels: Mapping[str, Any]
) -> Triple:
    """Return the triple that a document names as its subject; the checkpoint is compared elsewhere.

    Raises OtherSubject, KeyError or TypeError for a document that does not name one.
    """
    named = document["contract"]
    if not isinstance(named, dict):
        raise OtherSubject("it was not decided by a contract")
    contract = Contract(
        str(named["name"]), str(named["version"]), str(named["digest"]).removeprefix("sha256:")
    )
    found = {}
    for role, kernel in (("train", expected.train), ("infer", expected.infer)):
        given = kernels[role]
        fingerprint = given.get("fingerprint", given)
        if not isinstance(fingerprint, dict):
            raise TypeError(f"the fingerprint of the {role} kernel")
        found[role] = Kernel(kernel.name, fingerprint)
    return replace(expected, train=found["train"], infer=found["infer"], contract=contract)


def _refuse_other_triple(claimed: Triple, expected: Triple, parts: Iterable[str]) -> None:
    found = differences(claimed, relaxed(claimed, expected, parts))
    if found:
        raise OtherSubject("; ".join(difference.detail for difference in found))


def names_weights_of(weights: str, expected: Triple) -> bool:
    """Return whether a digest of weights in a report is that of the checkpoint: the sha256 of a
    single file, or the digest of the manifest of several."""
    if len(weights) != _SHA256:
        return False
    root = hashlib.sha256(bytes.fromhex(weights)).hexdigest()
    return expected.checkpoint.root_digest == root or expected.checkpoint.digest == weights


def _results(rows: Any) -> dict[str, ObligationResult]:
    found: dict[str, ObligationResult] = {}
    for row in rows:
        name, verdict = row["obligation"], row["verdict"]
        if not isinstance(name, str) or verdict not in WORST_FIRST or name in found:
            raise ValueError(f"a clause {name!r} twice, or with an unknown verdict")
        counted = row["exceedance"] or {"k": None, "n": None}
        k, n = counted["k"], counted["n"]
        if not (k is None and n is None) and not (_is_count(k) and _is_count(n)):
            raise TypeError(f"the counts of {name}")
        why = row["reason"]
        evidence = Evidence(row["evidence"]).value
        told = why if isinstance(why, str) else _far(row)
        found[name] = ObligationResult(verdict, evidence, k, n, told and told[:LONGEST_REASON])
    return found


def _is_sha256(text: str) -> bool:
    return len(text) == _SHA256 and not {*text} - {*"0123456789abcdef"}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_COUNTED


def _far(row: Mapping[str, Any]) -> str | None:
    """Return by how much a row is violated; None where it is not violated."""
    from kcdsl.verdict.messages import how_far, where

    if row["verdict"] != "violated":
        return None
    return ", ".join(filter(None, (how_far(row), where(row))))


# --- windows --------------------------------------------------------------------------------------


def _window(
    path: Path,
    document: Mapping[str, Any],
    identity: str,
    demands: Sequence[DemandedObligation],
    expected: Triple,
    stage: str,
    parts: Iterable[str],
) -> EvidenceDocument:
    window = document.get("window")
    if window is None:
        raise unusable(
            path, "it does not say of which triple, stage and time its tables are (`--stage`)"
        )
    claimed = claimed_triple(document, expected, window["kernels"])
    if window["triple"] != f"sha256:{claimed.digest}":
        raise OtherSubject("its traffic was served with other weights, kernels or contract")
    _refuse_other_triple(claimed, expected, parts)
    if window["stage"] != stage:
        raise OtherSubject(f"its traffic is of the stage {window['stage']}")
    period = Period(_time(window["from"]), _time(window["until"]))
    if period.end <= period.start:
        raise OtherSubject("its time ends before it begins")
    results = _results(document["clauses"])
    _refuse_partial(results, demands, document["deferred"])
    given = document["tables"]
    own = [str(file["content"]) for file in given["files"] if "content" in file]
    ids, values = ([str(one) for one in given["sketch"][kind]] for kind in ("ids", "values"))
    tables = frozenset((str(given["content"]), *own, *values))
    if not own or not ids or not values or not all(map(_is_sha256, (*tables, *ids))):
        raise ValueError("tables without digests")
    requests = {str(one["slice"]): one["requests"] for one in document["slices"]}
    if not all(_is_count(n) for n in requests.values()):
        raise TypeError("the requests of a slice")
    return EvidenceDocument(
        DocumentKind.WINDOW,
        printable(path),
        identity,
        tables,
        results,
        period=period,
        requests=requests,
        ids=frozenset(ids),
    )


def _time(text: Any) -> datetime:
    if not isinstance(text, str):
        raise TypeError("a time")
    return parse_time(text)


def _refuse_partial(
    results: Mapping[str, ObligationResult],
    demands: Sequence[DemandedObligation],
    deferred: Mapping[str, str],
) -> None:
    """Refuse a window without a clause or a slice of a decided clause: the omitted part may be the
    one that fails."""
    decided = {demand.clause for demand in demands if demand.obligation in results}
    for demand in demands:
        if demand.obligation in results:
            continue
        if demand.clause in decided or demand.clause not in deferred:
            where = f"{demand.clause} on {demand.slice}" if demand.slice else demand.clause
            raise OtherSubject(f"it leaves {where} out; a window has all slices")
