"""`kcdsl status`: proofs and measurements combined into C-convergence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.ir.terms import Program
from kcdsl.release.issue import issue
from kcdsl.release.results import proof_reference
from kcdsl.source.output import write_bytes
from kcdsl_certs.encoding.strict import canonical_json
from kcdsl_certs.statement import CertifiedClause, ProofReference, Verdict

Results = Callable[[ProofReference], list[CertifiedClause]]
Status = Callable[..., tuple[int, dict[str, Any]]]
Write = Callable[..., Path]


@pytest.fixture
def shown(every_result: Results, proof: bytes, folder: Path) -> list[CertifiedClause]:
    """Return results that show every clause; the proof that they name is in `out`."""
    (folder / "out").mkdir()
    reference = proof_reference("N-ATTN-0", proof)
    write_bytes(folder / "out" / reference.path, proof)
    return every_result(reference)


@pytest.fixture
def write(program: Program, folder: Path, rest_on: Callable[..., Any]) -> Write:
    """Return a function that writes an unsigned statement to out."""

    def statement(name: str, results: list[CertifiedClause], **how: Any) -> Path:
        file = folder / "out" / name / f"{name}.statement.json"
        file.parent.mkdir(exist_ok=True)
        for proof in (folder / "out").glob("*.proof.json"):
            (file.parent / proof.name).write_bytes(proof.read_bytes())
        measured = [r for r in results if not r.evidence.is_proof]
        evidence = rest_on(folder / "out" / name, measured) if measured else ()
        file.write_bytes(
            issue(program=program, base=folder, clauses=results, keys=[], evidence=evidence, **how)
        )
        return file

    return statement


@pytest.fixture
def status(cli: Callable[..., Any], folder: Path, follows: Callable[..., None]) -> Status:
    """Return a function that runs `kcdsl status --format json`: the exit code and the document."""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        written = sorted((folder / "out").glob("*/*.statement.json"))
        named = [word for file in written for word in ("--from", str(file))]
        ran = cli("status", "--format", "json", *named, *words, cwd=folder)
        document = json.loads(ran.stdout)
        follows(document)
        assert document["exit"] == ran.code
        return ran.code, document

    return run


ATTACKS = (
    "weights",
    "contract",
    "data",
    "proof",
    "trace",
    "report",
    "expired",
    "future",
    "scope",
    "forged",
)


def verdicts(document: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Return the verdict of each clause on each slice."""
    return {(row["clause"], row["slice"]): row["verdict"] for row in document["clauses"]}


def test_two_statements_jointly_decide_the_contract(
    status: Status, write: Write, shown: list[CertifiedClause]
) -> None:
    write("verify", [r for r in shown if r.evidence.is_proof])
    code, document = status()
    assert (code, document["convergent"], document["verdict"]) == (3, None, "inconclusive")
    assert verdicts(document)["N-ATTN-0", "long"] == "held"
    write("evaluate", [r for r in shown if not r.evidence.is_proof])
    code, document = status()
    assert (code, document["convergent"], document["verdict"]) == (0, True, "held")
    assert set(verdicts(document).values()) == {"held"}
    soft = next(row for row in document["clauses"] if row["clause"] == "R-LAT")
    assert (soft["hard"], soft["budget"]) == (False, "5% of windows")


@pytest.mark.parametrize("missing", range(7))
def test_every_clause_is_needed_on_every_slice(
    status: Status, write: Write, shown: list[CertifiedClause], missing: int
) -> None:
    left = [r for i, r in enumerate(shown) if i != missing]
    write("all", left)
    code, document = status()
    assert code == 3
    lost = shown[missing]
    assert verdicts(document)[lost.id, lost.slice or ""] == "inconclusive"
    assert set(verdicts(document).values()) == {"held", "inconclusive"}


def test_parts_of_several_statements_are_not_summed(
    status: Status, write: Write, shown: list[CertifiedClause]
) -> None:
    both = [r for r in shown if r.id == "N-BOTH"]
    assert len(both) == 2
    rest = [r for r in shown if r.id != "N-BOTH"]
    write("one", [*rest, both[0]])
    write("two", [both[1]])
    assert verdicts(status()[1])["N-BOTH", "all"] == "inconclusive"


def test_violation_outweighs_other_statements(
    status: Status, write: Write, shown: list[CertifiedClause]
) -> None:
    write("a-good", shown)
    kl = next(r for r in shown if (r.id, r.slice) == ("N-KL", "all"))
    write("b-bad", [replace(kl, value=Fraction(1, 2), verdict=Verdict.FAILED)])
    code, document = status()
    assert (code, document["convergent"]) == (1, False)
    assert verdicts(document)["N-KL", "all"] == "violated"
    row = next(r for r in document["clauses"] if (r["clause"], r["slice"]) == ("N-KL", "all"))
    assert [Path(name).name for name in row["files"]] == ["b-bad.statement.json"]


@pytest.mark.parametrize("attack", ATTACKS)
def test_statement_about_another_subject_does_not_count(
    status: Status, write: Write, shown: list[CertifiedClause], folder: Path, attack: str
) -> None:
    how: dict[str, Any] = {}
    if attack == "expired":
        how["clock"] = lambda: datetime.now(UTC) - timedelta(days=400)
    if attack == "future":
        how["clock"] = lambda: datetime.now(UTC) + timedelta(days=1)
    file = write("all", shown, **how)
    match attack:
        case "weights":
            weights = folder / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
        case "contract":
            text = (folder / "contract.yaml").read_text()
            (folder / "contract.yaml").write_text(text.replace("<= 0.02", "<= 0.01"))
        case "data":
            (folder / "prompts.jsonl").write_text('{"id": "2", "text": "other"}\n')
        case "proof":
            (file.parent / "N-ATTN-0.proof.json").unlink()
        case "trace":
            (file.parent / "trace.jsonl").write_text("{}")
        case "report":
            (file.parent / "report.json").unlink()
        case "scope":  # a partial statement that claims to be complete
            record = json.loads(file.read_bytes())
            results = record["predicate"]["clauses"]
            del results[1:]
            places = [{"id": r["id"], "slice": r["slice"]} for r in results]
            record["predicate"]["scope"] = {"complete": True, "covers": places}
            record["predicate"]["verdict"] = results[0]["verdict"]
            file.write_bytes(canonical_json(record))
        case "forged":
            before = file.read_bytes()
            file.write_bytes(before.replace((0.01).hex().encode(), (0.09).hex().encode()))
            assert file.read_bytes() != before
    code, document = status()
    assert code == 3
    assert set(verdicts(document).values()) == {"inconclusive"}
    assert list(document["unused"]) == [str(file)]


def test_missing_statements_are_not_a_pass(cli: Callable[..., Any], folder: Path) -> None:
    ran = cli("status", cwd=folder)
    assert ran.code == 3
    assert "not shown to be C-convergent" in ran.stdout
