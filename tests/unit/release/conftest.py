"""A tiny contract with weights and data, and a signed certificate about it."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Program
from kcdsl.model.fingerprint import kernel_fingerprint
from kcdsl.model.presets import resolve
from kcdsl.release.issue import issue, resting_on, results_for
from kcdsl.release.requirements import required_clauses
from kcdsl.release.results import proof_reference
from kcdsl.source.writing import write_bytes
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.signatures import SigningKey, load_private
from kcdsl_certs.statement import (
    CertifiedClause,
    Evidence,
    EvidenceFile,
    ProofReference,
    Verdict,
)
from tests.support.configurations import DECODER_TEXT

CONTRACT = """\
kcdsl: 1
contract: tiny
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json}
kernels:
  train:
    run: torch.eager
    numerics: {preset: torch-eager, compute: float32}
  infer:
    run: torch.sdpa
    numerics: {preset: flash-attention-2, compute: bfloat16}
data: prompts.jsonl
slices:
  all: {}
  long: {where: "length > 3"}
clauses:
  N-ATTN-0:
    require: forall x in ball(all, 1e-3): norm_inf(drift(attn_0, x)) <= 0.05
    evidence: proof
    level: L2
  N-KL: {require: p99(kl) <= 0.02, slices: [all, long], level: L2}
  N-BOTH: {require: mean(kl) <= 0.01 and max(tv) < 0.5, slices: [all], level: L2}
  R-LAT:
    require: p95(latency) <= 250 ms
    budget: 5% of windows
    slices: [all]
    level: L1
  O-TRACE: {require: "has(trace, [rng_seed])", slices: [all], level: L3}
"""
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def weights(*values: float) -> bytes:
    """Return a safetensors file with one vector."""
    size = 4 * len(values)
    table = {"w": {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, size]}}
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + struct.pack(f"<{len(values)}f", *values)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the contract, its weights, configuration and data."""
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    (tmp_path / "model.safetensors").write_bytes(weights(1.0, 2.0))
    (tmp_path / "config.json").write_text(DECODER_TEXT)
    (tmp_path / "prompts.jsonl").write_text('{"id": "1", "text": "hello"}\n')
    return tmp_path


@pytest.fixture
def program(folder: Path) -> Program:
    """Return the compiled contract."""
    return load_program(folder / "contract.yaml")


def stand_in(program: Program, folder: Path, **changes: Any) -> bytes:
    """Return a document that is bound to N-ATTN-0 as a proof of it is, with nothing to derive."""
    radius = base64.b64encode(struct.pack("<d", 0.001)).decode()
    array = {"dtype": "float64", "shape": [1, 1], "data": radius}
    centre = {"dtype": "float64", "shape": [5, 1], "data": ""}
    document = {
        "block": "attn_0",
        "checkpoint": {
            "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        },
        "numerics": {
            "train": resolve(program.train).to_json(),
            "infer": resolve(program.infer).to_json(),
        },
        "functional": {"kind": "inf", "k": 1},
        "cases": [{"name": "1", "region": {"kind": "ball", "centre": centre, "radius": array}}],
        **changes,
    }
    return json.dumps(document).encode()


@pytest.fixture
def bound_proof(program: Program, folder: Path) -> Callable[..., bytes]:
    """Return a function that makes a stand-in with other fields."""
    return lambda **changes: stand_in(program, folder, **changes)


@pytest.fixture
def proof(program: Program, folder: Path) -> bytes:
    """Return a stand-in for the proof of N-ATTN-0."""
    return stand_in(program, folder)


def results(program: Program, folder: Path, proof: ProofReference) -> list[CertifiedClause]:
    """Return results that show every clause."""
    required = {(r.id, r.slice): r for r in required_clauses(program, folder)}
    both = required["N-BOTH", "all"]
    census: dict[str, Any] = {
        "evidence": Evidence.CENSUS, "method": "census/1", "verdict": Verdict.PASSED, "n": 1,
        "counted": "requests",
    }  # fmt: skip
    return [
        results_for(
            required["N-ATTN-0", "all"],
            evidence=Evidence.PROOF,
            method="interval/1",
            verdict=Verdict.PASSED,
            bound=0.03125,
            low=0.01,
            n=1,
            proof=proof,
        ),
        results_for(required["N-KL", "all"], **census, value=Fraction(1, 100)),
        results_for(required["N-KL", "long"], **census, value=Fraction(1, 100)),
        *(
            results_for(both, wanted, **census, value=value)
            for wanted, value in zip(
                both.alternatives[0], (Fraction(1, 1000), Fraction(1, 5)), strict=True
            )
        ),
        results_for(
            required["R-LAT", "all"],
            evidence=Evidence.SAMPLE,
            method="clopper-pearson/1",
            verdict=Verdict.PASSED,
            n=600,
            exceed=12,
            alpha=Fraction(1, 20),
            counted="timed runs",
        ),
        results_for(required["O-TRACE", "all"], **census, value=Fraction(1)),
    ]


SLICES = {"all": ("1",), "long": ("1",)}


def evidence_of(
    program: Program,
    folder: Path,
    found: Sequence[CertifiedClause],
    slices: Mapping[str, Sequence[str]] = SLICES,
) -> tuple[EvidenceFile, ...]:
    """Write the files that measured results rest on into a folder; return how they are named.

    `slices` says which rows of the data are in which slice.
    """
    names = dict.fromkeys(name for rows in slices.values() for name in rows)
    records = [
        {
            "request": f"prompts.jsonl:{name}",
            "slices": [s for s, rows in slices.items() if name in rows],
            "rng_seed": 1,
            "latency_s": [0.1] * 600,
        }
        for name in names
    ]
    rows = [
        {
            "obligation": clause.obligation,
            "clause": clause.id,
            "slice": clause.slice,
            "evidence": clause.evidence.value,
            "verdict": {"PASSED": "held", "FAILED": "violated"}.get(clause.verdict, "inconclusive"),
            "n": clause.n,
            "exact": {"value": None if clause.value is None else real_text(clause.value)},
            "exceedance": None if clause.exceed is None else {"k": clause.exceed, "n": clause.n},
        }
        for clause in found
    ]
    contract = {"digest": f"sha256:{digest(program).removeprefix('sha256:')}"}
    prints = {role: kernel_fingerprint(getattr(program, role)) for role in ("train", "infer")}
    files = {
        "trace": ("trace.parquet", b"PAR1"),
        "records": ("trace.jsonl", "\n".join(map(json.dumps, records)).encode()),
        "report": (
            "report.json",
            json.dumps(
                {"schema": "kcdsl.report/2", "contract": contract, "clauses": rows}
            ).encode(),
        ),
        "kernels": ("kernels.json", json.dumps({"schema": "kcdsl.kernels/1", **prints}).encode()),
    }
    for name, content in files.values():
        write_bytes(folder / name, content)
    return resting_on({role: (folder / name, data) for role, (name, data) in files.items()})


@pytest.fixture
def rest_on(program: Program) -> Callable[..., tuple[EvidenceFile, ...]]:
    """Return a function that writes what measured results rest on, and says how it is named."""
    return lambda folder, found, slices=SLICES: evidence_of(program, folder, found, slices)


@pytest.fixture
def evidence(program: Program, folder: Path, proof: bytes) -> tuple[EvidenceFile, ...]:
    """Write what the results of the certificate rest on beside it."""
    found = results(program, folder, proof_reference("N-ATTN-0", proof))
    return evidence_of(program, folder / "out", found[1:])


@pytest.fixture
def every_result(
    program: Program, folder: Path
) -> Callable[[ProofReference], list[CertifiedClause]]:
    """Return a function from a proof to results that show every clause."""
    return lambda proof: results(program, folder, proof)


@pytest.fixture
def key(folder: Path, cli: Callable[..., Any]) -> SigningKey:
    """Make a key pair beside the contract and return it."""
    assert cli("keygen", cwd=folder).code == 0
    return load_private((folder / "kcdsl.key").read_bytes())


@pytest.fixture
def certificate(
    folder: Path,
    program: Program,
    key: SigningKey,
    proof: bytes,
    evidence: tuple[EvidenceFile, ...],
) -> Path:
    """Write a certificate about everything, with a stand-in for its proof."""
    write_bytes(folder / "out" / "N-ATTN-0.proof.json", proof)
    reference = proof_reference("N-ATTN-0", proof)
    bundle = issue(
        program=program,
        base=folder,
        clauses=results(program, folder, reference),
        keys=[key],
        clock=lambda: NOW,
        evidence=evidence,
    )
    path = folder / "out" / "tiny.cert.json"
    write_bytes(path, bundle)
    return path
