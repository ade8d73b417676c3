"""`kcdsl check` end to end: changes are named, with exit code 4."""

from __future__ import annotations

import base64
import json
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.cli.commands.release.check import print_report as print_check
from kcdsl.cli.common.output import Progress
from kcdsl.ir.terms import Program
from kcdsl.release.issue import issue, result_for
from kcdsl.release.requirements import required_clauses
from kcdsl.release.results import proof_reference
from kcdsl.source.output import write_bytes
from kcdsl_certs.signatures import SigningKey, generate
from kcdsl_certs.statement import (
    ROLES,
    CertifiedClause,
    Evidence,
    EvidenceFile,
    ProofReference,
    Verdict,
)
from kcdsl_certs.verification.evidence import EvidenceFiles as EvidenceFolder
from kcdsl_certs.verification.proofs import StepOutcome
from kcdsl_certs.verification.report import STEPS, Combined, Report
from kcdsl_certs.verification.report import Check as Step

Cli = Callable[..., Any]
Results = Callable[[ProofReference], list[CertifiedClause]]
AT = "2026-12-01T00:00:00Z"


@pytest.fixture
def check(
    cli: Cli, folder: Path, certificate: Path, follows: Callable[..., None]
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Return a function that runs `kcdsl check` and returns the exit code and report."""

    def run(*words: str, at: str = AT) -> tuple[int, dict[str, Any]]:
        keys = () if "--key" in words else ("--key", "kcdsl.key.pub")
        ran = cli("check", certificate, "--at", at, "--format", "json", *keys, *words, cwd=folder)
        report = json.loads(ran.stdout)
        follows(report)
        return ran.code, report

    return run


Check = Callable[..., tuple[int, dict[str, Any]]]


def _first(report: dict[str, Any]) -> tuple[str, str, str]:
    failed = [c for c in report["checks"] if c["outcome"] == "failed"]
    return failed[0]["name"], failed[0]["reason"], failed[0]["detail"]


def _reasons(report: dict[str, Any]) -> dict[str, str]:
    return {c["name"]: c["reason"] for c in report["checks"] if c["reason"]}


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_unchanged_certificate_is_valid(check: Check) -> None:
    code, report = check("--complete")
    assert (code, report["verdict"], report["schema"]) == (0, "valid", "kcdsl.check/2")
    assert report["signers"] == ["kcdsl.key.pub"]
    assert report["outside"] == []
    assert len(report["checks"]) == 17


def test_long_check_shows_hashing_progress(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, int, int]] = []

    @contextmanager
    def shown() -> Iterator[Progress]:
        yield lambda *told: heard.append(told)

    monkeypatch.setattr("kcdsl.cli.common.output.progress_bars", shown)
    assert check()[0] == 0
    assert heard == []  # a few bytes are hashed at once
    monkeypatch.setattr("kcdsl.cli.common.output._LONG", 0)
    assert check()[0] == 0
    assert heard == [("MiB hashed", 0, 0)]


def test_check_table_names_every_step(cli: Cli, folder: Path, certificate: Path) -> None:
    ran = cli("check", certificate, "--at", AT, "--key", "kcdsl.key.pub", cwd=folder)
    assert ran.code == 0
    assert ran.stderr == ""
    for word in ("subject", "components", "clauses", "valid"):
        assert word in ran.stdout


def test_assumptions_of_accepted_certificates_precede_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = tuple(Step(name, StepOutcome.OK) for name in STEPS)
    report = Report(done, assumptions=("rows are independent", "clear\x1b[2J\nvalid"))
    print_check(Combined((("a.cert.json", report),)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "assumed: rows are independent",
        "assumed: clear\N{REPLACEMENT CHARACTER}[2J valid",
        "valid",
    ]
    failed = replace(report, checks=(Step("bundle", StepOutcome.FAILED, "a/b"), *done[1:]))
    print_check(Combined((("a.cert.json", failed),)))
    assert "assumed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "old", "new", "reason", "words"),
    [
        ("model.safetensors", None, None, "triple/checkpoint-mismatch", "the weights changed"),
        ("config.json", "{", "{ ", "triple/checkpoint-mismatch", "the config changed"),
        ("prompts.jsonl", "hello", "hallo", "input/mismatch", "prompts.jsonl changed"),
        ("contract.yaml", "<= 0.05", "<= 0.04", "triple/contract-mismatch", "digest"),
        ("contract.yaml", "1.0.0", "1.0.1", "triple/contract-mismatch", "version 1.0.0 is now"),
        (
            "contract.yaml",
            "run: torch.eager",
            "run: torch.sdpa",
            "triple/kernel-train-mismatch",
            "run 'torch.eager' is now 'torch.sdpa'",
        ),
        (
            "contract.yaml",
            "compute: bfloat16",
            "compute: float16",
            "triple/kernel-infer-mismatch",
            "numerics.compute",
        ),
    ],
)
def test_changed_triple_is_named(
    file: str, old: str | None, new: str, reason: str, words: str, folder: Path, check: Check
) -> None:
    if old is None:
        data = bytearray((folder / file).read_bytes())
        data[-1] ^= 1
        (folder / file).write_bytes(data)
    else:
        _edit(folder / file, old, new)
    code, report = check()
    name, found, detail = _first(report)
    assert code == 4
    assert report["verdict"] == "invalid"
    assert found == reason
    assert words in detail
    assert name in {"subject", "components"}


def test_comment_in_the_contract_changes_nothing(folder: Path, check: Check) -> None:
    _edit(folder / "contract.yaml", "kcdsl: 1", "# a comment\nkcdsl: 1")
    assert check()[0] == 0


def test_changed_kernel_build_is_named(folder: Path, check: Check) -> None:
    from kcdsl.check.compile import load_program
    from kcdsl.model.fingerprint import kernel_fingerprint

    program = load_program(folder / "contract.yaml")
    prints: dict[str, Any] = {
        "schema": "kcdsl.kernels/1",
        "train": kernel_fingerprint(program.train),
        "infer": kernel_fingerprint(program.infer),
    }
    (folder / "kernels.json").write_text(json.dumps(prints))
    assert check("--kernels", str(folder / "kernels.json"))[0] == 0
    prints["infer"]["software"]["torch"]["version"] = "99.0"
    (folder / "kernels.json").write_text(json.dumps(prints))
    code, report = check("--kernels", str(folder / "kernels.json"))
    assert code == 4
    assert _first(report)[1] == "triple/kernel-infer-mismatch"
    assert "torch" in _first(report)[2]


def _reload(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    bundle = json.loads(path.read_bytes())
    return bundle, json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))


def test_changed_result_or_signature_is_named(certificate: Path, check: Check) -> None:
    bundle, payload = _reload(certificate)
    payload["predicate"]["clauses"][1]["value"] = "0"
    inner = bundle["dsseEnvelope"]
    untouched = inner["payload"]
    inner["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    certificate.write_text(json.dumps(bundle))
    code, report = check()
    assert code == 4
    assert _first(report)[:2] == ("signatures", "signature/none-trusted")
    inner["payload"] = untouched
    signature = bytearray(base64.b64decode(inner["signatures"][0]["sig"]))
    signature[-1] ^= 1
    inner["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    certificate.write_text(json.dumps(bundle))
    code, report = check()
    assert code == 4
    assert _first(report)[:2] == ("signatures", "signature/none-trusted")


def test_other_key_is_not_trusted(folder: Path, check: Check) -> None:
    other = folder / "other.pub"
    other.write_bytes(generate().public.pem)
    code, report = check("--key", str(other))
    assert (code, _first(report)[1]) == (4, "signature/none-trusted")
    code, report = check("--key", str(other), "--key", str(folder / "kcdsl.key.pub"))
    assert code == 0
    words = ["--key", str(other), "--key", str(folder / "kcdsl.key.pub"), "--threshold", "2"]
    code, report = check(*words)
    assert (code, _first(report)[1]) == (4, "signature/threshold")


def test_time_stage_and_sequence_are_checked(check: Check) -> None:
    for words, at, reason in (
        ([], "2026-11-30T11:59:59Z", "validity/not-yet"),
        ([], "2027-02-28T12:00:00Z", "validity/expired"),
        (["--stage", "full"], AT, "stage/mismatch"),
        (["--minimum-sequence", "99999999999"], AT, "sequence/rollback"),
    ):
        code, report = check(*words, at=at)
        assert (code, _first(report)[1]) == (4, reason)
    assert check("--stage", "offline-ci", "--minimum-sequence", "0")[0] == 0


def test_symlinked_checkpoint_is_invalid(folder: Path, check: Check) -> None:
    (folder / "real").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "real")
    code, report = check()
    assert (code, _first(report)[:2]) == (4, ("components", "checkpoint/symlink"))
    code, report = check("--checkpoint", str(folder / "model.safetensors"))
    assert (code, _first(report)[1]) == (4, "checkpoint/symlink")


def test_changed_proof_file_is_invalid(certificate: Path, check: Check) -> None:
    proof = certificate.parent / "N-ATTN-0.proof.json"
    code, report = check()
    assert (code, _reasons(report)["proofs"]) == (0, "proof/not-rederived")
    proof.write_bytes(b"[]")
    code, report = check()
    assert (code, _first(report)[:2]) == (4, ("proofs", "proof/digest-mismatch"))
    proof.unlink()
    code, report = check()
    assert (code, _first(report)[:2]) == (4, ("proofs", "proof/missing"))
    code, report = check("--recheck")
    assert (code, _first(report)[1]) == (4, "proof/missing")
    code, report = check("--signature-only")
    assert (code, _reasons(report)["proofs"]) == (0, "proof/not-looked-at")
    assert _reasons(report)["evidence"] == "evidence/not-looked-at"
    assert _reasons(report)["recount"] == "recount/no-data"


def test_signature_only_check_on_request(
    folder: Path, certificate: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    from kcdsl_certs.__main__ import main

    expected = folder / "expected.json"
    known = ("--at", AT, "--key", "kcdsl.key.pub")
    written = cli("check", certificate, *known, "--write-expectation", expected, cwd=folder)
    assert (written.code, "only the signed statement" in written.stdout) == (0, False)
    words = ["check", str(certificate), "--expect", str(expected), "--at", AT]
    words += ["--key", str(folder / "kcdsl.key.pub")]
    words += ["--checkpoint", str(folder / "model.safetensors")]
    (certificate.parent / "N-ATTN-0.proof.json").unlink()
    assert cli("check", certificate, *known, cwd=folder).code == 4
    assert main(words) == 4
    ran = cli("check", certificate, *known, "--signature-only", cwd=folder)
    assert (ran.code, "only the signed statement" in ran.stdout) == (0, True)
    capsys.readouterr()
    assert main([*words, "--signature-only"]) == 0
    assert "only the signed statement" in capsys.readouterr().out
    for more in ("--recheck", "--complete"):
        ran = cli("check", certificate, "--signature-only", more, cwd=folder)
        assert (ran.code, "KC901" in ran.stderr) == (2, True)
        assert main([*words, "--signature-only", more]) == 2


def test_recheck_of_an_invalid_proof_is_invalid(check: Check) -> None:
    code, report = check("--recheck")
    assert (code, _first(report)[:2]) == (4, ("proofs", "proof/not-confirmed"))


def test_recheck_without_its_checker_is_invalid(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kcdsl_certs.recheck", None)
    code, report = check("--recheck")
    assert (code, _first(report)[1]) == (4, "proof/checker-missing")


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe", b"[" * 10_000])
def test_files_other_than_certificates_are_invalid(
    content: bytes, certificate: Path, check: Check
) -> None:
    certificate.write_bytes(content)
    code, report = check()
    assert (code, _first(report)[0]) == (4, "bundle")


@pytest.mark.parametrize("words", [("check",), ("show",), ("register", "add", "--register", "r")])
def test_unsigned_statement_is_distinguished_from_a_certificate(
    words: tuple[str, ...], folder: Path, certificate: Path, cli: Cli
) -> None:
    bundle = json.loads(certificate.read_bytes())
    statement = folder / "own.statement.json"
    statement.write_bytes(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    ran = cli(*words, statement, "--key", "kcdsl.key.pub", cwd=folder)
    assert (ran.code, ran.stdout) == (2, "")
    assert "own.statement.json is a statement that is not signed" in ran.stderr
    assert f"`kcdsl sign {statement} --key KEY`" in ran.stderr


def test_other_documents_are_no_certificates(folder: Path, certificate: Path, cli: Cli) -> None:
    other = certificate.with_name("report.json")
    other.write_text('{"schema": "kcdsl.report/3", "confidence": 0.95}')
    ran = cli("check", other, "--key", "kcdsl.key.pub", cwd=folder)
    assert ran.code == 2
    assert f"{other} is the document kcdsl.report/3, no certificate" in ran.stderr


@pytest.mark.parametrize("command", ["check", "show"])
def test_skipped_steps_are_one_line(
    command: str, folder: Path, certificate: Path, cli: Cli
) -> None:
    certificate.write_text("{}")
    ran = cli(command, certificate, "--key", "kcdsl.key.pub", cwd=folder)
    assert ran.code == 4
    text = " ".join(ran.stdout.split())
    assert "bundle failed bundle/malformed" in text
    assert f"not run, because a step failed: {', '.join(STEPS[1:])}" in text
    assert "step/earlier-failed" not in text


def test_private_key_given_as_public_key_is_named(
    folder: Path, certificate: Path, cli: Cli
) -> None:
    ran = cli("check", certificate, "--key", "kcdsl.key", cwd=folder)
    assert ran.code == 2
    assert "help: name the file beside it that ends in .pub" in ran.stderr


def test_standalone_checker_agrees(
    folder: Path,
    certificate: Path,
    cli: Cli,
    capsys: pytest.CaptureFixture[str],
    follows: Callable[..., None],
) -> None:
    from kcdsl_certs.__main__ import main

    expected = folder / "expected.json"
    key = ("--key", "kcdsl.key.pub")
    ran = cli("check", certificate, "--at", AT, *key, "--write-expectation", expected, cwd=folder)
    assert ran.code == 0
    follows(json.loads(expected.read_text()))
    words = ["check", str(certificate), "--expect", str(expected), "--at", AT, "--complete"]
    words += ["--key", str(folder / "kcdsl.key.pub"), "--data", str(folder), "--checkpoint"]
    assert main([*words, str(folder / "model.safetensors")]) == 0
    (folder / "model.safetensors").write_bytes(b"other")
    assert main([*words, str(folder / "model.safetensors")]) == 4
    assert "triple/checkpoint-mismatch" in capsys.readouterr().out


# --- evidence and coverage -----------------------------------------------------------------------

EVIDENCE = ("trace.parquet", "trace.jsonl", "report.json", "kernels.json")


@pytest.mark.parametrize("name", EVIDENCE)
def test_changed_and_missing_evidence_files_are_reported(
    name: str, certificate: Path, check: Check
) -> None:
    file = certificate.parent / name
    kept = file.read_bytes()
    file.write_bytes(kept + b" ")
    code, report = check()
    assert (code, _first(report)[:2]) == (4, ("evidence", "evidence/digest-mismatch"))
    file.unlink()
    code, report = check()
    assert (code, _reasons(report)["evidence"]) == (0, "evidence/missing")
    assert name in next(c["detail"] for c in report["checks"] if c["name"] == "evidence")
    code, report = check("--complete")
    assert (code, _first(report)[:2]) == (4, ("evidence", "evidence/missing"))


ABSENT = {
    **{f"out/{name}": (4, "evidence/missing") for name in EVIDENCE},
    "out/N-ATTN-0.proof.json": (4, "proof/missing"),
    "prompts.jsonl": (2, "KC601"),
    "model.safetensors": (2, "KC601"),
    "config.json": (2, "KC601"),
}


@pytest.mark.parametrize("name", ABSENT)
def test_missing_evidence_makes_the_check_incomplete(
    name: str, folder: Path, certificate: Path, cli: Cli
) -> None:
    words = (
        "check",
        certificate,
        "--at",
        AT,
        "--key",
        "kcdsl.key.pub",
        "--complete",
        "--format=json",
    )
    assert cli(*words, cwd=folder).code == 0
    (folder / name).unlink()
    ran = cli(*words, cwd=folder)
    code, reason = ABSENT[name]
    assert ran.code == code
    assert reason in ran.stdout + ran.stderr
    assert Path(name).name in ran.stdout + ran.stderr


@pytest.mark.parametrize("option", ["--kernels", "--checkpoint", "--policy", "--revocations"])
def test_missing_file_of_an_option_makes_the_check_incomplete(
    option: str, folder: Path, certificate: Path, cli: Cli
) -> None:
    words = ("check", certificate, "--at", AT, "--key", "kcdsl.key.pub", "--complete")
    ran = cli(*words, option, "absent.file", cwd=folder)
    assert ran.code == 2
    assert "absent.file" in ran.stderr


@pytest.mark.parametrize("role", ROLES)
def test_every_missing_kind_of_evidence_is_reported(role: str, tmp_path: Path) -> None:
    found = EvidenceFolder(tmp_path)
    found.examine((EvidenceFile(role, "absent.file", "0" * 64),))
    assert found.missing == ["absent.file"]


def test_skipped_recount_without_data_is_reported(
    folder: Path, certificate: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    from kcdsl_certs.__main__ import main

    expected = folder / "expected.json"
    asked = ("--at", AT, "--key", folder / "kcdsl.key.pub", "--write-expectation", expected)
    assert cli("check", certificate, *asked, cwd=folder).code == 0
    words = ["check", str(certificate), "--expect", str(expected), "--at", AT]
    words += ["--key", str(folder / "kcdsl.key.pub")]
    words += ["--checkpoint", str(folder / "model.safetensors")]
    capsys.readouterr()
    assert main(words) == 0
    assert "coverage was not counted again" in capsys.readouterr().out
    assert main([*words, "--complete"]) == 4
    assert "recount/no-data" in capsys.readouterr().out
    assert main([*words, "--data", str(folder)]) == 0
    assert "1 case(s) of 1 row(s)" in capsys.readouterr().out
    assert main([*words, "--data", str(folder), "--complete"]) == 0
    (folder / "prompts.jsonl").write_text('{"id": "2", "text": "hello"}\n')
    assert main([*words, "--data", str(folder)]) == 4
    assert "recount/data" in capsys.readouterr().out
    (folder / "prompts.jsonl").unlink()
    assert main([*words, "--data", str(folder)]) == 0
    assert main([*words, "--data", str(folder), "--complete"]) == 4


THREE = "".join(f'{{"id": "{n}", "text": "hello{n}"}}\n' for n in range(3))


def _case(name: str, length: int, content: str) -> dict[str, Any]:
    radius = {"data": base64.b64encode(struct.pack("<d", 0.001)).decode()}
    centre = {"shape": [length, 1], "data": content}
    return {"name": name, "region": {"kind": "ball", "centre": centre, "radius": radius}}


CASES = [_case(str(n), 6, f"centre {n}") for n in range(3)]


@pytest.mark.parametrize(
    ("cases", "reason"),
    [
        (CASES, None),
        (CASES[::-1], None),
        (CASES[:1], "recount/rows-missing"),
        ([*CASES[:2], _case("3", 6, "centre 3")], "recount/rows-missing"),
        ([*CASES, _case("3", 6, "centre 3")], "recount/rows-extra"),
        ([CASES[0], _case("1", 6, "centre 0"), CASES[2]], "recount/case-repeated"),
        ([*CASES[:2], _case("2", 5, "centre 2")], "recount/case-mismatch"),
        ([*CASES[:2], _case("2", 1, "centre 2")], "recount/case-mismatch"),
    ],
)
def test_cases_of_a_proof_must_match_the_rows_of_the_slice(
    cases: list[dict[str, Any]],
    reason: str | None,
    folder: Path,
    key: SigningKey,
    bound_proof: Callable[..., bytes],
    cli: Cli,
) -> None:
    """Signed, bound to the clause, with the stated number of cases, but about other rows."""
    (folder / "prompts.jsonl").write_text(THREE)
    program = load_program(folder / "contract.yaml")
    proof = bound_proof(cases=cases)
    write_bytes(folder / "N-ATTN-0.proof.json", proof)
    reference = proof_reference("N-ATTN-0", proof)
    required = next(r for r in required_clauses(program, folder) if r.id == "N-ATTN-0")
    numbers: dict[str, Any] = {"bound": 0.03125, "n": len(cases), "proof": reference}
    clause = result_for(
        required,
        evidence=Evidence.PROOF,
        method="interval/1",
        verdict=Verdict.PASSED,
        **numbers,
    )
    now = datetime(2026, 11, 30, 12, tzinfo=UTC)
    bundle = issue(program=program, base=folder, clauses=[clause], keys=[key], clock=lambda: now)
    write_bytes(folder / "c.json", bundle)
    key_file = folder / "kcdsl.key.pub"
    ran = cli("check", "c.json", "--key", key_file, "--at", AT, "--format", "json", cwd=folder)
    failed = [c for c in json.loads(ran.stdout)["checks"] if c["outcome"] == "failed"]
    assert [(c["name"], c["reason"]) for c in failed] == ([("recount", reason)] if reason else [])
    assert ran.code == (4 if reason else 0)


@pytest.mark.parametrize(
    ("n", "slices", "reason"),
    [
        (3, {"all": ("0", "1", "2")}, None),
        (1, {"all": ("0", "1", "2")}, "recount/count"),
        (1, {"all": ("0",)}, "recount/count"),
        (3, {"all": ("0",)}, "recount/rows-missing"),
        (3, {"all": ("0", "1", "7")}, "recount/rows-missing"),
        (3, {"all": ("0", "1", "2", "7")}, "recount/rows-extra"),
        (3, {"long": ("0", "1", "2")}, "recount/rows-missing"),
    ],
)
def test_units_of_a_result_must_match_the_rows_of_the_slice(
    n: int,
    slices: dict[str, tuple[str, ...]],
    reason: str | None,
    folder: Path,
    key: SigningKey,
    rest_on: Callable[..., Any],
    cli: Cli,
) -> None:
    """The signed report and records agree with the statement."""
    (folder / "prompts.jsonl").write_text(THREE)
    program = load_program(folder / "contract.yaml")
    required = next(r for r in required_clauses(program, folder) if r.id == "N-KL")
    numbers: dict[str, Any] = {"value": Fraction(1, 100), "n": n, "counted": "requests"}
    clause = result_for(
        required,
        evidence=Evidence.CENSUS,
        method="census/1",
        verdict=Verdict.PASSED,
        **numbers,
    )
    now = datetime(2026, 11, 30, 12, tzinfo=UTC)
    bundle = issue(
        program=program,
        base=folder,
        clauses=[clause],
        keys=[key],
        clock=lambda: now,
        evidence=rest_on(folder, [clause], slices),
    )
    write_bytes(folder / "c.json", bundle)
    key_file = folder / "kcdsl.key.pub"
    ran = cli("check", "c.json", "--key", key_file, "--at", AT, "--format", "json", cwd=folder)
    failed = [c for c in json.loads(ran.stdout)["checks"] if c["outcome"] == "failed"]
    assert [(c["name"], c["reason"]) for c in failed] == ([("recount", reason)] if reason else [])
    assert ran.code == (4 if reason else 0)


def test_two_certificates_cover_a_contract_together(
    folder: Path,
    program: Program,
    key: SigningKey,
    proof: bytes,
    every_result: Results,
    rest_on: Callable[..., Any],
    cli: Cli,
    follows: Callable[..., None],
) -> None:
    write_bytes(folder / "N-ATTN-0.proof.json", proof)
    every = every_result(proof_reference("N-ATTN-0", proof))
    now = datetime(2026, 11, 30, 12, tzinfo=UTC)
    files = rest_on(folder, every[1:])
    parts = {"formal.json": every[:1], "measured.json": every[1:], "some.json": every[1:3]}
    for name, clauses in parts.items():
        bundle = issue(
            program=program,
            base=folder,
            clauses=clauses,
            keys=[key],
            clock=lambda: now,
            evidence=() if name == "formal.json" else files,
        )
        write_bytes(folder / name, bundle)

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        key = ("--key", "kcdsl.key.pub")
        ran = cli("check", *words, "--at", AT, *key, "--format", "json", cwd=folder)
        found = json.loads(ran.stdout)
        follows(found)
        return ran.code, found

    code, report = run("formal.json", "measured.json", "--complete")
    assert (code, report["outside"], report["schema"]) == (0, [], "kcdsl.check/2")
    assert report["checks"][-1]["name"] == "coverage"
    code, report = run("formal.json", "some.json", "--complete")
    assert (code, report["checks"][-1]["reason"]) == (4, "clause/missing")
    assert report["outside"] == ["N-BOTH [all]", "R-LAT [all]", "O-TRACE [all]"]
    assert run("formal.json", "some.json")[0] == 0
    assert run("formal.json", "--complete")[0] == 4
    (folder / "N-ATTN-0.proof.json").write_bytes(b"other")
    code, report = run("measured.json", "formal.json", "--complete")
    assert (code, report["verdict"], report["checks"][-1]["outcome"]) == (4, "invalid", "not_run")


# --- what cannot run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["nowhere.json"], "KC601"),
        (["CERT", "--contract", "nowhere.yaml"], "KC601"),
        (["CERT", "--key", "nowhere.pub"], "KC640"),
        (["CERT", "--key", "contract.yaml"], "KC640"),
        (["CERT", "--key", "kcdsl.key"], "KC640"),
        (["CERT", "--threshold", "0"], "KC643"),
        (["CERT", "--threshold", "2"], "KC643"),
        (["CERT", "--key", "kcdsl.key.pub", "--key", "kcdsl.key.pub"], "KC643"),
        (["CERT", "--kernels", "nowhere.json"], "KC601"),
        (["CERT", "--kernels", "config.json"], "KC646"),
        (["CERT", "--kernels", "contract.yaml"], "KC646"),
        (["CERT", "--checkpoint", "nowhere"], "KC601"),
        (["CERT", "--at", "yesterday"], "KC647"),
        (["CERT", "--at", "2026-12-01"], "KC647"),
    ],
)
def test_impossible_checks_state_the_reason(
    words: list[str], code: str, folder: Path, certificate: Path, cli: Cli
) -> None:
    named = [str(certificate) if word == "CERT" else word for word in words]
    if "--key" not in words:
        named += ["--key", "kcdsl.key.pub"]
    ran = cli("check", *named, cwd=folder)
    assert ran.code == 2
    assert code in ran.stderr
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr


def test_missing_trusted_key_is_reported_with_help(
    folder: Path, certificate: Path, cli: Cli
) -> None:
    ran = cli("check", certificate, cwd=folder)
    assert ran.code == 2
    assert "KC641" in ran.stderr
    assert "--key" in ran.stderr
