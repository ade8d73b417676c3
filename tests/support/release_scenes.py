"""A tiny contract with weights and data, its certificate, and companions."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from kcdsl.check.compile import load_program
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Program
from kcdsl.model.fingerprint import kernel_fingerprint
from kcdsl.model.presets import resolve
from kcdsl.release.issue import evidence_entries, issue, result_for
from kcdsl.release.requirements import required_clauses
from kcdsl.release.results import proof_reference
from kcdsl.source.output import write_bytes
from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.signatures import SigningKey, load_private
from kcdsl_certs.statement import CertifiedClause, Evidence, EvidenceFile, ProofReference, Verdict
from tests.support.commands import run_here
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
    require: forall x in ball(long, 1e-3): norm_inf(drift(attn_0, x)) <= 0.05
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
SLICES = {"all": tuple(str(number) for number in range(1, 601)), "long": ("1",)}
"""The rows of each slice: one is long, and enough rows are timed."""
TEXTS = {"1": "hello"}
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def weights(*values: float) -> bytes:
    """Return a safetensors file with one vector."""
    size = 4 * len(values)
    table = {"w": {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, size]}}
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + struct.pack(f"<{len(values)}f", *values)


def tiny(folder: Path) -> None:
    """Write the contract, its weights, configuration and data into a folder."""
    (folder / "contract.yaml").write_text(CONTRACT)
    (folder / "model.safetensors").write_bytes(weights(1.0, 2.0))
    (folder / "config.json").write_text(DECODER_TEXT)
    rows = [{"id": name, "text": TEXTS.get(name, f"{int(name):x}")} for name in SLICES["all"]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def stand_in(program: Program, folder: Path, **changes: Any) -> bytes:
    """Return a document with the bindings of a proof of N-ATTN-0 and nothing to derive."""
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


def results(program: Program, folder: Path, proof: ProofReference) -> list[CertifiedClause]:
    """Return results that show every clause."""
    required = {(r.id, r.slice): r for r in required_clauses(program, folder)}
    both = required["N-BOTH", "all"]
    census: dict[str, Any] = {
        "evidence": Evidence.CENSUS, "method": "census/1", "verdict": Verdict.PASSED, "n": 600,
        "counted": "requests",
    }  # fmt: skip
    return [
        result_for(
            required["N-ATTN-0", "long"],
            evidence=Evidence.PROOF,
            method="interval/1",
            verdict=Verdict.PASSED,
            bound=0.03125,
            low=0.01,
            n=1,
            proof=proof,
        ),
        result_for(required["N-KL", "all"], **census, value=Fraction(1, 100)),
        result_for(required["N-KL", "long"], **{**census, "n": 1}, value=Fraction(1, 100)),
        *(
            result_for(both, wanted, **census, value=value)
            for wanted, value in zip(
                both.alternatives[0], (Fraction(1, 1000), Fraction(1, 5)), strict=True
            )
        ),
        result_for(
            required["R-LAT", "all"],
            evidence=Evidence.SAMPLE,
            method="clopper-pearson/1",
            verdict=Verdict.PASSED,
            n=600,
            exceed=12,
            alpha=Fraction(1, 20),
            counted="requests",
        ),
        result_for(required["O-TRACE", "all"], **census, value=Fraction(1)),
    ]


def evidence_of(
    program: Program,
    folder: Path,
    found: Sequence[CertifiedClause],
    slices: Mapping[str, Sequence[str]] = SLICES,
) -> tuple[EvidenceFile, ...]:
    """Write the evidence files of measured results into a folder; return their references.

    `slices` lists the rows of the data in each slice.
    """
    names = dict.fromkeys(name for rows in slices.values() for name in rows)
    records = [
        {
            "request": f"prompts.jsonl:{name}",
            "slices": [s for s, rows in slices.items() if name in rows],
            "rng_seed": 1,
            "latency_s": [0.1, 0.1, 0.1],
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
        "trace": ("trace.parquet", f"PAR1 {folder.name}".encode()),
        "records": ("trace.jsonl", "\n".join(map(json.dumps, records)).encode()),
        "report": (
            "report.json",
            json.dumps(
                {
                    "schema": "kcdsl.report/3",
                    "contract": contract,
                    "clauses": rows,
                    "environment": {"folder": folder.name},
                }
            ).encode(),
        ),
        "kernels": ("kernels.json", json.dumps({"schema": "kcdsl.kernels/1", **prints}).encode()),
    }
    for name, content in files.values():
        write_bytes(folder / name, content)
    return evidence_entries({role: (folder / name, data) for role, (name, data) in files.items()})


# --- companions -----------------------------------------------------------------------------------


IMAGE = f"registry.example/llm/tiny@sha256:{'ab' * 32}"


@dataclass(frozen=True, slots=True)
class Released:
    """A folder with a contract, a certificate that is valid now, and companions by two keys."""

    folder: Path
    certificate: Path
    keys: tuple[SigningKey, SigningKey]

    @property
    def bundles(self) -> list[tuple[Path, SigningKey]]:
        """Return every Sigstore bundle with the key that signed it."""
        kinds = ("image.sigstore.json", "svr.sigstore.json")
        found = [(self._of(kind, key), key) for key in self.keys for kind in kinds]
        return [(self.certificate, self.keys[0]), *found]

    @property
    def envelopes(self) -> list[tuple[Path, SigningKey]]:
        """Return every plain envelope with the key that signed it."""
        return [(self._of(kind, k), k) for k in self.keys for kind in ("image.att", "vsa.json")]

    def _of(self, kind: str, key: SigningKey) -> Path:
        return self.certificate.with_name(f"tiny.{key.public.fingerprint[:8]}.{kind}")

    def policy(self, language: str) -> Path:
        """Return the policy in a language, `rego` or `cue`."""
        return self.certificate.with_name(f"tiny.policy.{language}")

    @property
    def image_statement(self) -> dict[str, Any]:
        """Return the statement of the image."""
        envelope = json.loads(self.envelopes[0][0].read_bytes())
        found = json.loads(base64.b64decode(envelope["payload"]))
        assert isinstance(found, dict)
        return found


def form_of(path: Path) -> str:
    """Return the form of a certificate or a companion, by its file name."""
    if path.name.endswith(".cert.json"):
        return "certificate, Sigstore bundle v0.3"
    for ending, form in (
        (".image.sigstore.json", "image statement, Sigstore bundle v0.3"),
        (".svr.sigstore.json", "SVR v0.2, Sigstore bundle v0.3"),
        (".image.att", "image statement, DSSE envelope"),
        (".vsa.json", "SLSA VSA v1, DSSE envelope"),
    ):
        if path.name.endswith(ending):
            return form
    raise ValueError(path.name)


def released(folder: Path) -> Released:
    """Write a contract with weights and data, a certificate of it, and its companions."""
    tiny(folder)
    for name in ("one.key", "two.key"):
        assert run_here("keygen", "-o", name, cwd=folder).code == 0
    one, two = (load_private((folder / f"{name}.key").read_bytes()) for name in ("one", "two"))
    program = load_program(folder / "contract.yaml")
    proof = stand_in(program, folder)
    found = results(program, folder, proof_reference("N-ATTN-0", proof))
    rests_on = evidence_of(program, folder / "out", found[1:])
    write_bytes(folder / "out" / "N-ATTN-0.proof.json", proof)
    certificate = folder / "out" / "tiny.cert.json"
    bundle = issue(program=program, base=folder, clauses=found, keys=[one], evidence=rests_on)
    write_bytes(certificate, bundle)
    words = ("--image", IMAGE, "--key", "one.key.pub", "--sign", "one.key", "--sign", "two.key")
    ran = run_here("companions", certificate, *words, cwd=folder)
    if ran.code != 0:
        raise RuntimeError(f"{ran.stdout}{ran.stderr}")
    return Released(folder, certificate, (one, two))
