"""Issuing certificates: deterministic payloads, no overstatement."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.kernels import LogProbabilities, Service
from kcdsl.ir.obligations import alternatives
from kcdsl.ir.terms import (
    Compare,
    Connective,
    EvidenceKind,
    Formula,
    HasFields,
    Metric,
    Not,
    Number,
    Program,
    Quantified,
    Region,
    RegionKind,
)
from kcdsl.model.files import CHECKPOINT
from kcdsl.model.fingerprint import kernel_fingerprint
from kcdsl.release.issue import issue, result_for, weakened
from kcdsl.release.requirements import build_triple, required_clauses
from kcdsl.release.results import proof_reference, proved_clauses
from kcdsl.route.goals import goals
from kcdsl.source.output import write_bytes
from kcdsl.verdict.model import Evidence as ProvedBy
from kcdsl.verdict.model import Held
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.signatures import SigningKey, parse_bundle
from kcdsl_certs.statement import CertifiedClause, Evidence, EvidenceFile, Verdict
from tests.support.vectors.golden import ed25519_from_seed

NOW = datetime.fromisoformat("2026-11-30T12:00:00+00:00")


def _payload(bundle: bytes) -> bytes:
    return base64.b64decode(json.loads(bundle)["dsseEnvelope"]["payload"])


def _census(program: Program, folder: Path, **numbers: Any) -> CertifiedClause:
    required = next(r for r in required_clauses(program, folder) if r.id == "N-KL")
    filled: dict[str, Any] = {
        "evidence": Evidence.CENSUS, "method": "census/1", "verdict": Verdict.PASSED, "n": 1,
    }  # fmt: skip
    return result_for(required, **{**filled, **numbers})


def test_equal_results_give_equal_bytes(
    program: Program, folder: Path, key: SigningKey, evidence: tuple[EvidenceFile, ...]
) -> None:
    fixed = ed25519_from_seed(bytes(32))
    common: dict[str, Any] = {
        "program": program, "base": folder,
        "clauses": [_census(program, folder, value=Fraction(1, 100))],
        "evidence": evidence,
    }  # fmt: skip
    one = issue(**common, keys=[fixed], clock=lambda: NOW)
    assert one == issue(**common, keys=[fixed], clock=lambda: NOW + timedelta(microseconds=5))
    assert _payload(one) == _payload(issue(**common, keys=[key], clock=lambda: NOW))
    later = json.loads(_payload(issue(**common, keys=[fixed], clock=lambda: NOW + timedelta(1))))
    assert later["predicate"]["sequence"] > json.loads(_payload(one))["predicate"]["sequence"]


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ({"value": Fraction("0.01")}, Verdict.PASSED),
        ({"value": Fraction("0.03")}, Verdict.FAILED),
        ({"value": Fraction("0.01"), "n": 0}, Verdict.INCONCLUSIVE),
        ({"value": None}, Verdict.INCONCLUSIVE),
        (
            {
                "value": Fraction("0.01"),
                "evidence": Evidence.SAMPLE,
                "method": "one-sided-limits/1",
            },
            Verdict.INCONCLUSIVE,
        ),
        ({"value": Fraction("0.01"), "verdict": Verdict.INCONCLUSIVE}, Verdict.INCONCLUSIVE),
        ({"value": Fraction("0.03"), "verdict": Verdict.INCONCLUSIVE}, Verdict.FAILED),
    ],
)
def test_verdict_is_weakened_to_its_numbers(
    numbers: dict[str, Any], verdict: Verdict, program: Program, folder: Path
) -> None:
    assert _census(program, folder, **numbers).verdict is verdict


@pytest.mark.parametrize(
    "numbers",
    [
        {"value": Fraction("0.01"), "high": float("nan")},
        {"value": Fraction("0.01"), "high": float("inf")},
        {"value": Fraction("0.01"), "exceed": 2},
        {"value": Fraction("0.01"), "slice_digest": None},
        {"evidence": Evidence.PROOF, "bound": 0.01},
        {"evidence": Evidence.PROOF_REAL, "bound": 0.01},
    ],
)
def test_results_without_support_are_refused(
    numbers: dict[str, Any], program: Program, folder: Path
) -> None:
    with pytest.raises(Refusal) as caught:
        _census(program, folder, **numbers)
    assert caught.value.diagnostics[0].code.id == "KC645"


def test_results_unknown_to_the_contract_are_refused(
    program: Program, folder: Path, key: SigningKey
) -> None:
    known = _census(program, folder, value=Fraction(1, 100))
    for stray in (
        dataclasses.replace(known, slice="night"),
        dataclasses.replace(known, id="N-KM"),
    ):
        with pytest.raises(Refusal, match="the contract has no"):
            issue(program=program, base=folder, clauses=[stray], keys=[key])
    with pytest.raises(Refusal):
        issue(program=program, base=folder, clauses=[], keys=[key])


def test_measured_results_name_their_evidence(
    program: Program, folder: Path, key: SigningKey, evidence: tuple[EvidenceFile, ...]
) -> None:
    clauses = [_census(program, folder, value=Fraction(1, 100))]
    for files in ((), evidence[1:], (*evidence, evidence[0])):
        with pytest.raises(Refusal, match="evidence/"):
            issue(program=program, base=folder, clauses=clauses, keys=[key], evidence=files)


@pytest.mark.parametrize(("named", "wanted"), [(True, "PASSED"), (False, "INCONCLUSIVE")])
def test_times_of_an_unnamed_machine_are_inconclusive(
    program: Program,
    folder: Path,
    proof: bytes,
    evidence: tuple[EvidenceFile, ...],
    every_result: Callable[[Any], list[CertifiedClause]],
    named: bool,
    wanted: str,
) -> None:
    results = every_result(proof_reference("N-ATTN-0", proof))
    (times,) = (clause for clause in results if clause.id == "R-LAT")
    prints = {side: kernel_fingerprint(getattr(program, side)) for side in ("train", "infer")}
    if not named:
        del prints["infer"]["hardware"]
    made = issue(
        program=program,
        base=folder,
        clauses=[times],
        keys=[],
        fingerprints=prints,
        clock=lambda: NOW,
        evidence=evidence,
    )
    (found,) = json.loads(made)["predicate"]["clauses"]
    assert found["verdict"] == wanted
    assert ("machine" in found.get("reason", "")) is not named


def test_requirement_without_a_normal_form_gets_no_result(program: Program, folder: Path) -> None:
    required = next(r for r in required_clauses(program, folder) if r.id == "N-KL")
    stated = dataclasses.replace(required, alternatives=())
    with pytest.raises(Refusal, match="a form that a certificate cannot state") as caught:
        result_for(stated, evidence=Evidence.CENSUS, method="census/1", verdict=Verdict.PASSED, n=1)
    assert caught.value.diagnostics[0].code is codes.CANNOT_CERTIFY


def test_slice_without_data_is_not_pinned(program: Program, folder: Path) -> None:
    bare = dataclasses.replace(program, data=None)
    assert {r.slice_digest for r in required_clauses(bare, folder)} == {None}
    assert None not in {r.slice_digest for r in required_clauses(program, folder)}


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        ({}, "nothing says which weights were loaded"),
        ({CHECKPOINT: "0" * 64}, "the checkpoint changed while the command ran"),
    ],
)
def test_results_of_other_files_are_not_certified(
    program: Program,
    folder: Path,
    evidence: tuple[EvidenceFile, ...],
    loaded: dict[str, str],
    words: str,
) -> None:
    clauses = [_census(program, folder, value=Fraction(1, 100))]
    with pytest.raises(Refusal, match=words):
        issue(
            program=program,
            base=folder,
            clauses=clauses,
            keys=[],
            evidence=evidence,
            loaded=loaded,
        )


@pytest.mark.parametrize("named", [True, False])
def test_proof_names_the_numerics_of_its_kernels_if_they_are_known(
    program: Program, folder: Path, proof: bytes, every_result: Any, named: bool
) -> None:
    first = every_result(proof_reference("N-ATTN-0", proof))[0]
    prints = {side: kernel_fingerprint(getattr(program, side)) for side in ("train", "infer")}
    if not named:
        del prints["infer"]["numerics"]
    made = issue(program=program, base=folder, clauses=[first], keys=[], fingerprints=prints)
    (found,) = json.loads(made)["predicate"]["clauses"]
    assert ("numerics" in found) is named


def test_certificate_does_not_claim_the_weights_of_a_server(
    program: Program, folder: Path, evidence: tuple[EvidenceFile, ...]
) -> None:
    server = Service("http://localhost:1/v1", LogProbabilities("raw"))
    served = dataclasses.replace(program, infer=dataclasses.replace(program.infer, service=server))
    clauses = [_census(served, folder, value=Fraction(1, 100))]
    made = issue(program=served, base=folder, clauses=clauses, keys=[], evidence=evidence)
    claims = json.loads(made)["predicate"]["nonClaims"]
    assert any("The inference kernel was asked as a server" in claim for claim in claims)


def test_unsigned_output_is_a_statement(
    program: Program, folder: Path, key: SigningKey, evidence: tuple[EvidenceFile, ...]
) -> None:
    def made(*keys: SigningKey) -> bytes:
        clauses = [_census(program, folder, value=Fraction(1, 100))]
        common: Any = {"program": program, "base": folder, "clauses": clauses}
        return issue(**common, keys=keys, clock=lambda: NOW, evidence=evidence)

    assert _payload(made(key)) == made()
    with pytest.raises(Rejected, match="bundle/malformed"):
        parse_bundle(made())


def test_triple_needs_its_files(program: Program, folder: Path) -> None:
    before = build_triple(program, folder)
    (folder / "tokenizer.json").write_text("{}")
    after = build_triple(program, folder)
    assert after.digest != before.digest
    (folder / "model.safetensors").unlink()
    with pytest.raises(Refusal, match=r"model\.safetensors"):
        build_triple(program, folder)


def test_fingerprints_with_floats_are_refused(program: Program, folder: Path) -> None:
    prints: dict[str, dict[str, Any]] = {"train": {"a": 0.5}, "infer": {"a": 1}}
    with pytest.raises(Refusal, match="canonical form"):
        build_triple(program, folder, fingerprints=prints)


def test_certificate_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made" / "c.json"
    write_bytes(target, b"one")
    write_bytes(target, b"two")
    assert target.read_bytes() == b"two"

    def full(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kcdsl.source.output.os.replace", full)
    with pytest.raises(Refusal, match="No space left"):
        write_bytes(target, b"three")
    assert [p.name for p in target.parent.iterdir()] == ["c.json"]
    assert target.read_bytes() == b"two"


# --- forms of requirements -----------------------------------------------------------------------


def _at_most(name: str, limit: int, op: str = "<=") -> Compare:
    return Compare(op, Metric(name), Number(Fraction(limit)))


def _texts(formula: Formula) -> list[list[str]]:
    return [[f"{c.text} {c.op} {c.threshold}" for c in part] for part in alternatives(formula)]


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (_at_most("a", 1), [["a <= 1"]]),
        (Compare("<=", Number(Fraction(1)), Metric("a")), [["a >= 1"]]),
        (Compare("<", Metric("a"), Metric("b")), [["a - b < 0"]]),
        (Not(_at_most("a", 1)), [["a > 1"]]),
        (Not(_at_most("a", 1, "==")), []),
        (Connective("and", (_at_most("a", 1), _at_most("b", 2))), [["a <= 1", "b <= 2"]]),
        (Connective("or", (_at_most("a", 1), _at_most("b", 2))), [["a <= 1"], ["b <= 2"]]),
        (Connective("implies", (_at_most("a", 1), _at_most("b", 2))), [["a > 1"], ["b <= 2"]]),
        (Not(Connective("and", (_at_most("a", 1), _at_most("b", 2)))), [["a > 1"], ["b > 2"]]),
        (Not(Connective("or", (_at_most("a", 1), _at_most("b", 2)))), [["a > 1", "b > 2"]]),
        (HasFields(("x", "y")), [['has(trace, ["x", "y"]) >= 1']]),
        (Not(HasFields(("x",))), []),
    ],
)
def test_disjunctive_normal_form(formula: Formula, expected: list[list[str]]) -> None:
    assert _texts(formula) == expected


def test_normal_form_of_quantifiers_and_large_formulas() -> None:
    region = Region(RegionKind.POINTS, "all")
    inner = _at_most("a", 1)
    assert _texts(Quantified("forall", "x", region, inner)) == [["a <= 1"]]
    assert _texts(Quantified("exists", "x", region, inner)) == []
    assert _texts(Not(Quantified("forall", "x", region, inner))) == []
    either = Connective("or", (inner, _at_most("b", 2)))
    assert len(alternatives(Connective("and", (either,) * 6))) == 64
    assert alternatives(Connective("and", (either,) * 7)) == ()


def test_weakening_keeps_supported_verdicts(program: Program, folder: Path) -> None:
    clause = _census(program, folder, value=Fraction(1, 100))
    assert weakened(clause) is clause


Cli = Callable[..., Any]


def test_keygen_writes_a_key_pair(cli: Cli, tmp_path: Path) -> None:
    ran = cli("keygen", cwd=tmp_path)
    assert ran.code == 0
    assert (tmp_path / "kcdsl.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kcdsl.key.pub").read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert cli("keygen", cwd=tmp_path).code == 2
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert cli("keygen", "--force", cwd=tmp_path).code == 0
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    assert after["kcdsl.key"] != before["kcdsl.key"]


def test_keygen_writes_both_files_or_none(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.key.pub").write_text("mine")
    ran = cli("keygen", "-o", "a.key", cwd=tmp_path)
    assert (ran.code, "KC642" in ran.stderr) == (2, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.key.pub"]
    (tmp_path / "b.key.pub").mkdir()
    ran = cli("keygen", "-o", "b.key", "--force", cwd=tmp_path)
    assert (ran.code, "KC602" in ran.stderr) == (2, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.key.pub", "b.key.pub"]
    ran = cli("keygen", "-o", "a.key.pub/c.key", cwd=tmp_path)
    assert (ran.code, "KC602" in ran.stderr) == (2, True)
    assert cli("keygen", "-o", "made/c.key", cwd=tmp_path).code == 0


@pytest.mark.parametrize("name", ["d.key", "d.key.pub"])
def test_keygen_does_not_follow_symlinks(cli: Cli, tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    ran = cli("keygen", "-o", "d.key", "--force", cwd=tmp_path)
    assert (ran.code, "is a link" in ran.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_keygen_with_a_password(cli: Cli, tmp_path: Path) -> None:
    words = ("keygen", "--algorithm", "ed25519", "--password-env", "KEY_WORD")
    ran = cli(*words, cwd=tmp_path)
    assert (ran.code, "KC644" in ran.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []
    assert cli(*words, cwd=tmp_path, env={"KEY_WORD": "geheim"}).code == 0
    assert b"ENCRYPTED" in (tmp_path / "kcdsl.key").read_bytes()
    assert b"geheim" not in (tmp_path / "kcdsl.key").read_bytes()


@pytest.mark.parametrize("kind", [EvidenceKind.PROOF, EvidenceKind.PROOF_REAL])
def test_real_arithmetic_proof_is_certified_as_such(
    kind: EvidenceKind, program: Program, folder: Path, proof: bytes
) -> None:
    """Any backend may find one; the certificate lists its assumptions."""
    (goal,) = goals(program)
    outcome = GoalOutcome(
        goal=goal,
        verdict=Held(),
        evidence=ProvedBy(kind, n=1, assumptions=("roundings are small",)),
        backend="reals",
        cases=(CaseOutcome("1", 5, 0.01),),
        seconds=0.1,
        peak_bytes=1,
        proof=proof,
    )
    reference = {goal.clause.id: proof_reference(goal.clause.id, proof)}
    (result,) = proved_clauses(program, folder, (outcome,), reference)
    assert (result.evidence.value, result.verdict) == (kind.value, Verdict.PASSED)
