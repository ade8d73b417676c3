"""Suppressed findings of a contract are listed in its certificates; a gate may refuse them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_contract
from kcdsl.release.issue import issue
from kcdsl.release.results import proof_reference
from kcdsl.source.output import write_bytes
from kcdsl_certs.__main__ import main
from kcdsl_certs.signatures import SigningKey
from kcdsl_certs.statement import CertifiedClause, EvidenceFile, ProofReference

AT = ("--at", "2026-12-01T00:00:00Z")
COMMENTS = """\
  # kcdsl: ignore[KC208] the field of our own tracer
  O-OWN: {require: "has(trace, [rng_sed])", slices: [all], level: L3}
  # kcdsl: ignore[KC415] a promise of its own
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    """Return the folder of the tiny contract, with suppressed findings."""
    path = folder / "contract.yaml"
    path.write_text(path.read_text().replace("  O-TRACE:", f"{COMMENTS}  O-TRACE:"))
    return folder


@pytest.fixture
def certificate(
    folder: Path,
    key: SigningKey,
    proof: bytes,
    evidence: tuple[EvidenceFile, ...],
    every_result: Callable[[ProofReference], list[CertifiedClause]],
) -> Path:
    """Write a certificate about the contract."""
    program, accepted = load_contract(folder / "contract.yaml")
    write_bytes(folder / "out" / "N-ATTN-0.proof.json", proof)
    bundle = issue(
        program=program,
        base=folder,
        clauses=every_result(proof_reference("N-ATTN-0", proof)),
        keys=[key],
        suppressed=accepted,
        evidence=evidence,
    )
    write_bytes(folder / "out" / "tiny.cert.json", bundle)
    return folder / "out" / "tiny.cert.json"


def test_certificate_lists_suppressed_findings_of_solvers_too(certificate: Path) -> None:
    envelope = json.loads(certificate.read_text())["dsseEnvelope"]
    payload = json.loads(base64.b64decode(envelope["payload"]))
    assert payload["predicate"]["suppressions"] == [
        {"code": "KC208", "reason": "the field of our own tracer"},
        {"code": "KC415", "reason": "a promise of its own"},
    ]


def test_check_shows_suppressed_findings(cli: Any, folder: Path, certificate: Path) -> None:
    ran = cli("check", certificate, "--key", "kcdsl.key.pub", "--format", "json", cwd=folder)
    assert ran.code == 0
    (step,) = [c for c in json.loads(ran.stdout)["checks"] if c["name"] == "contract"]
    assert "KC208: the field of our own tracer" in step["detail"]
    assert "KC415: a promise of its own" in step["detail"]


@pytest.mark.parametrize("kept", [True, False])
def test_gate_can_refuse_suppressed_findings(
    cli: Any, folder: Path, certificate: Path, kept: bool, tmp_path: Path
) -> None:
    expectation = tmp_path / "expectation.json"
    written = cli(
        *("check", certificate, "--key", "kcdsl.key.pub"),
        *("--write-expectation", expectation),
        cwd=folder,
    )
    assert written.code == 0
    words = ["check", str(certificate), "--expect", str(expectation)]
    words += ["--key", str(folder / "kcdsl.key.pub")]
    words += ["--checkpoint", str(folder / "model.safetensors")]
    assert main(words) == 0
    assert main([*words, "--refuse-suppressions"]) == 4
    if not kept:  # the comments are gone, but the certificate is about the contract with them
        path = folder / "contract.yaml"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if "kcdsl: ignore" not in line))
    (folder / "kcdsl.toml").write_text("refuse-suppressions = true\n")
    ran = cli("check", certificate, "--key", "kcdsl.key.pub", cwd=folder)
    assert ran.code == (2 if kept else 4), ran
    told = ran.stderr if kept else ran.stdout
    assert ("KC906" if kept else "with accepted findings") in " ".join(told.split())
