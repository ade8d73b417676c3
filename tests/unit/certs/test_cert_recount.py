"""Coverage of proofs, counted again by the checker."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_digest
from kcdsl_certs.statement import (
    ATTACK,
    CertifiedClause,
    Evidence,
    ProofReference,
    Quantity,
    Region,
    SliceSource,
    Verdict,
)
from kcdsl_certs.verification.recount import Recount
from kcdsl_certs.verification.rows import read_rows, select
from tests.support.quantities import norm

DATA = b'{"id": "a", "tokens": [1, 2]}\n{"id": "b", "tokens": [1, 2, 3]}\n'
WHERE: dict[str, list[str]] = {"all": []}


def recorded(folder: Path, signed: bytes, present: bytes) -> Recount:
    """Return the count of a result whose units are in a recording, not rows of it."""
    (folder / "batch.parquet").write_bytes(present)
    digest = hashlib.sha256(signed).hexdigest()
    clause = CertifiedClause(
        obligation="C/all/0",
        id="C",
        quantity=norm("inf", "attn_0"),
        op="<=",
        tau=Fraction(1, 2),
        unit="1",
        evidence=Evidence.SAMPLE,
        method="one-sided-limits/1",
        verdict=Verdict.PASSED,
        slice="all",
        slice_digest=canonical_digest({"data": digest, "where": WHERE}),
        n=3,
    )
    source = SliceSource("batch.parquet", WHERE, units="other")
    count = Recount(
        {"all": source}, lambda name: folder / name, {source.data: digest}, folder, None
    )
    count.run([clause])
    return count


def test_recordings_of_any_format_are_checked_by_digest(tmp_path: Path) -> None:
    """Parquet, or rows without ids: the units are not counted again, and the digest was signed."""
    count = recorded(tmp_path, b"PAR1\xff", b"PAR1\xff")
    assert count.beyond == ["C [all]: its units are drawn or recorded, not rows of the data"]
    assert (count.counted, count.missing) == ([], [])
    with pytest.raises(Rejected, match="recount/data"):
        recorded(tmp_path, b"PAR1\xff", b"PAR1\xfe")


def counted(folder: Path, kind: str, names: list[str]) -> Recount:
    """Return the count of one proved result whose proof has these cases."""
    proof = json.dumps({"cases": [{"name": name} for name in names]}).encode()
    (folder / "x.proof.json").write_bytes(proof)
    (folder / "data.jsonl").write_bytes(DATA)
    digest = hashlib.sha256(DATA).hexdigest()
    clause = CertifiedClause(
        obligation="C/all/0",
        id="C",
        quantity=norm("inf", "attn_0"),
        op="<=",
        tau=Fraction(1, 2),
        unit="1",
        evidence=Evidence.PROOF,
        method="interval/1",
        verdict=Verdict.PASSED,
        slice="all",
        slice_digest=canonical_digest({"data": digest, "where": WHERE}),
        region=Region(kind, "all", longest=8 if kind == "rows" else None),
        n=len(names),
        proof=ProofReference(hashlib.sha256(proof).hexdigest(), "x.proof.json"),
    )
    source = SliceSource("data.jsonl", WHERE)
    count = Recount(
        {"all": source}, lambda name: folder / name, {source.data: digest}, folder, None
    )
    count.run([clause])
    return count


def test_boxes_are_counted_but_not_their_rows(tmp_path: Path) -> None:
    """A box for every length exists; that the rows are inside is the evaluator's claim."""
    count = counted(tmp_path, "hull", ["hull-3", "hull-2"])
    assert count.counted == ["C [all]: 2 box(es) for every length of 2 row(s)"]
    assert count.beyond == ["C [all]: which rows lie in its box(es)"]
    rows = counted(tmp_path, "rows", ["rows"])
    assert (rows.counted, rows.beyond) == ([], ["C [all]: which rows lie in its box(es)"])


@pytest.mark.parametrize(
    ("kind", "names", "reason"),
    [
        ("hull", ["hull-2"], "recount/rows-missing"),
        ("hull", ["hull-2", "hull-3", "hull-4"], "recount/rows-missing"),
        ("rows", ["rows", "more"], "recount/rows-extra"),
    ],
)
def test_wrong_numbers_of_boxes_are_refused(
    tmp_path: Path, kind: str, names: list[str], reason: str
) -> None:
    with pytest.raises(Rejected, match=reason):
        counted(tmp_path, kind, names)


# --- samples of rows that repeat a prompt ---------------------------------------------------------

REPEATED = b'{"id": "a", "tokens": [1]}\n{"id": "b", "tokens": [1]}\n{"id": "c", "tokens": [2]}\n'
UNKNOWN = b'{"id": "a", "tokens": [1]}\n{"id": "b", "text": "x"}\n{"id": "c", "text": "y"}\n'


@pytest.mark.parametrize(
    ("data", "evidence", "admitted"),
    [
        (REPEATED, Evidence.SAMPLE, {2}),
        (REPEATED, Evidence.CENSUS, {3}),
        (UNKNOWN, Evidence.SAMPLE, {1, 2, 3}),
        (UNKNOWN, Evidence.CENSUS, {3}),
    ],
    ids=["prompts", "rows", "unknown prompts", "rows of unknown prompts"],
)
@pytest.mark.parametrize("metric", ["kl", "latency"])
@pytest.mark.parametrize("counted", ["requests", "windows", "timed runs"])
@pytest.mark.parametrize("records", [True, False])
def test_sample_counts_prompts_and_census_counts_rows(
    tmp_path: Path,
    data: bytes,
    evidence: Evidence,
    admitted: set[int],
    metric: str,
    counted: str,
    records: bool,
) -> None:
    """Independent of the number of timed runs per row."""
    if counted != "requests":  # windows of 16 units, or one; timed runs are not units
        known = {1} if counted == "windows" else set()
        admitted = known if records else {0, 1, 2, 3, 4}
    (tmp_path / "rows.jsonl").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    lines = [
        {"request": f"rows.jsonl:{name}", "slices": ["all"], "latency_s": [0.1, 0.1]}
        for name in "abc"
    ]
    found = set()
    for n in range(5):
        clause = CertifiedClause(
            obligation="C/all/0",
            id="C",
            quantity=Quantity("statistic", "mean", (Quantity("metric", metric),)),
            op="<=",
            tau=Fraction(1, 2),
            unit="nat",
            evidence=evidence,
            method="census/1" if evidence is Evidence.CENSUS else "one-sided-limits/1",
            verdict=Verdict.PASSED,
            slice="all",
            slice_digest=canonical_digest({"data": digest, "where": WHERE}),
            n=n,
            counted=counted,
        )
        text = "\n".join(map(json.dumps, lines)).encode()
        count = Recount(
            {"all": SliceSource("rows.jsonl", WHERE, units="rows")},
            lambda name: tmp_path / name,
            {"rows.jsonl": digest},
            tmp_path,
            text if records else None,
        )
        with suppress(Rejected):
            count.run([clause])
            found.add(n)
    assert found == admitted


# --- records, proofs and data that contradict a result --------------------------------------------

THREE = b'{"id": "a", "tokens": [1]}\n{"id": "b", "tokens": [2]}\n{"id": "c", "tokens": [3]}\n'
NAME = "rows.jsonl"
KEPT = Quantity("share", fields=("trace_id",))
TIME = Quantity("statistic", "mean", (Quantity("metric", "latency"),))


def recounted(
    folder: Path,
    *,
    records: list[dict[str, object]] | None = None,
    cases: list[dict[str, object]] | None = None,
    data: bytes = THREE,
    **changes: Any,
) -> Recount:
    """Recount one census of three rows, with the changes of its fields."""
    (folder / NAME).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    clause = CertifiedClause(
        obligation="C/all/0",
        id="C",
        quantity=KEPT,
        op=">=",
        tau=Fraction(1),
        unit="1",
        evidence=Evidence.CENSUS,
        method="census/1",
        verdict=Verdict.PASSED,
        slice="all",
        slice_digest=canonical_digest({"data": digest, "where": WHERE}),
        n=3,
        counted="records",
    )
    if cases is not None:
        proof = json.dumps({"cases": cases}).encode()
        (folder / "x.proof.json").write_bytes(proof)
        reference = ProofReference(hashlib.sha256(proof).hexdigest(), "x.proof.json")
        clause = replace(clause, proof=reference, method="interval/1")
    text = None if records is None else "\n".join(map(json.dumps, records)).encode()
    slices, pins = {"all": SliceSource(NAME, WHERE, units="rows")}, {NAME: digest}
    count = Recount(slices, lambda name: folder / name, pins, folder, text)
    count.run([replace(clause, **changes)])
    return count


def logged(*names: str, **fields: object) -> list[dict[str, object]]:
    """Return one record of each request."""
    record = {"slices": ["all"], "trace_id": "t", "latency_s": [0.1], **fields}
    return [{"request": f"{NAME}:{name}", **record} for name in names]


def cases_of(*rows: tuple[str, list[int]]) -> list[dict[str, object]]:
    """Return the cases of a proof with the tokens of rows."""
    return [{"name": name, "region": {"ids": ids}} for name, ids in rows]


WHOLE = cases_of(("a", [1]), ("b", [2]), ("c", [3]))


def test_honest_counts_are_accepted(tmp_path: Path) -> None:
    assert recounted(tmp_path, records=logged("a", "b", "c")).counted
    assert recounted(tmp_path, cases=WHOLE, quantity=norm("inf", "attn_0")).counted
    timed = recounted(tmp_path, records=logged("a", "b", "c"), quantity=TIME, counted="requests")
    assert timed.counted
    empty = [*logged("a", "b"), *logged("c", trace_id="")]
    allowed: dict[str, Any] = {"budget": Fraction(1, 2), "verdict": Verdict.PASSED}
    assert recounted(tmp_path, records=empty, exceed=1, **allowed).counted
    without = recounted(tmp_path)
    assert (without.missing, without.counted) == (["the records of requests"], [])


@pytest.mark.parametrize(
    ("records", "changes", "reason"),
    [
        (logged("a", "b", "c", "c"), {}, "recount/duplicate: a request is recorded twice"),
        (logged("a", "b"), {}, "recount/rows-missing: .* 1 row"),
        (logged("a", "b", "c", "d"), {}, "recount/rows-extra: .* 1 record"),
        (
            [*logged("a", "b"), *logged("c", request="other.jsonl:c")],
            {},
            "recount/rows-extra: .* a record of other data",
        ),
        (logged("a", "b", "c"), {"counted": "pages"}, "recount/unit"),
        (logged("a", "b", "c", trace_id=""), {}, "recount/fields-missing: .* 3 record"),
        ([*logged("a", "b"), *logged("c", trace_id=None)], {}, "recount/fields-missing"),
        (
            [*logged("a", "b"), *logged("c", trace_id=[])],
            {"exceed": 0, "budget": Fraction(1, 2)},
            "recount/count: .* 0 without a field, 1 are recorded",
        ),
        (
            logged("a", "b", "c"),
            {"exceed": 1, "budget": Fraction(1, 2)},
            "recount/count: .* 1 without a field, 0 are recorded",
        ),
        (
            [*logged("a", "b"), *logged("c", latency_s=[])],
            {"quantity": TIME, "counted": "requests"},
            "recount/rows-missing: .* never timed",
        ),
    ],
    ids=[
        "a request twice",
        "a row without record",
        "a record without row",
        "other data",
        "an unknown unit",
        "no field anywhere",
        "a field without value",
        "exceedances left out",
        "exceedances made up",
        "a row without times",
    ],
)
def test_records_that_contradict_a_result_are_refused(
    tmp_path: Path, records: list[dict[str, object]], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Rejected, match=reason):
        recounted(tmp_path, records=records, **changes)


@pytest.mark.parametrize(
    ("cases", "reason"),
    [
        ([*WHOLE, *cases_of(("a", [1]))], "recount/duplicate: .* a case is there twice"),
        (WHOLE[:2], "recount/rows-missing: .* no case of 1 row"),
        ([*WHOLE, *cases_of(("d", [4]))], "recount/rows-extra: .* 1 case"),
        (cases_of(("a", [1]), ("b", [2]), ("c", [2])), "recount/case-mismatch: .* c has other"),
    ],
    ids=["a case twice", "a row without case", "a case without row", "other tokens"],
)
def test_proofs_of_other_rows_are_refused(
    tmp_path: Path, cases: list[dict[str, object]], reason: str
) -> None:
    with pytest.raises(Rejected, match=reason):
        recounted(tmp_path, cases=cases, quantity=norm("inf", "attn_0"))


def test_boxes_of_no_row_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.proof.json").write_bytes(b"{}")
    with pytest.raises(Rejected, match="selects no row"):
        recounted(tmp_path, cases=WHOLE, data=b"", region=Region("hull", "all"))


def test_attacks_on_more_inputs_than_rows_are_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "method": ATTACK,
        "verdict": Verdict.FAILED,
        "quantity": norm("inf", "attn_0"),
    }
    recounted(tmp_path, n=3, **changes)
    with pytest.raises(Rejected, match="4 of 3 rows"):
        recounted(tmp_path, n=4, **changes)


def test_slices_other_than_the_signed_one_are_refused(tmp_path: Path) -> None:
    other = canonical_digest({"data": hashlib.sha256(THREE).hexdigest(), "where": {"any": []}})
    with pytest.raises(Rejected, match="recount/slice-mismatch"):
        recounted(tmp_path, records=logged("a", "b", "c"), slice_digest=other)


def test_data_too_large_to_count_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kcdsl_certs.verification.recount.LARGEST_DOCUMENT", len(THREE) - 1)
    with pytest.raises(Rejected, match="too large"):
        recounted(tmp_path, records=logged("a", "b", "c"))


# --- rows of data, and predicates -----------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b'{"tokens": [1]}',
        b'{"id": ""}',
        b'{"id": true}',
        b'{"id": "a", "id": "b"}',
        b'{"id": "a", "x": 1e401}',
        b'{"id": "a", "x": NaN}',
        b'{"id": "a"}\n{"id": "a"}',
        b'{"id": 1}\n{"id": "1"}',
        b'{"id": "\xff"}',
    ],
)
def test_unclear_rows_are_refused(line: bytes) -> None:
    with pytest.raises(Rejected, match="recount/rows"):
        read_rows(line, "model")


def test_comparisons_of_fields_and_lengths_select_rows() -> None:
    rows = read_rows(
        b'{"id": "a", "x": true, "n": 2, "text": "bcd"}\n'
        b'{"id": "b", "x": false, "n": 2.5, "tokens": [1]}',
        "model",
    )

    def names(field: str, op: str, value: object) -> tuple[str, str]:
        found = select(rows, {"field": field, "op": op, "value": value})
        return "".join(row.id for row in found.rows), "".join(row.id for row in found.open)

    assert names("x", "==", True) == ("a", "")
    assert names("x", "!=", True) == ("b", "")
    assert names("n", "<=", {"real": "2"}) == ("a", "")
    assert names("n", ">", {"real": "2"}) == ("b", "")
    assert names("length", "==", {"real": "1"}) == ("b", "a")
    assert names("length", "!=", {"real": "1"}) == ("", "a")


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"field": "x", "op": "~", "value": True}, "recount/predicate"),
        ({"field": "x", "op": "==", "value": None}, "recount/predicate"),
        ({"field": "x", "op": "==", "value": 1}, "recount/predicate"),
        ({"field": "x", "op": "==", "value": True, "more": 1}, "recount/predicate"),
        ({"all": [], "any": []}, "recount/predicate"),
        ({"field": "x", "op": "==", "value": {"real": "1"}}, "recount/rows"),
        ({"field": "x", "op": "!=", "value": "true"}, "recount/rows"),
        ({"field": "y", "op": "!=", "value": True}, "recount/rows"),
    ],
)
def test_predicates_that_rows_do_not_answer_are_refused(
    where: dict[str, object], reason: str
) -> None:
    with pytest.raises(Rejected, match=reason):
        select(read_rows(b'{"id": "a", "x": true}', "model"), where)
