"""Coverage of proofs, counted again by the checker."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_digest
from kcdsl_certs.statement import (
    CertifiedClause,
    Evidence,
    ProofReference,
    Quantity,
    Region,
    SliceSource,
    Verdict,
)
from kcdsl_certs.verification.recount import Recount
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
