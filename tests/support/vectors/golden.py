"""The golden certificate from which the vectors are made, and the verifier's expectation of it."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.strict import canonical_digest, canonical_json
from kcdsl_certs.signatures import SigningKey, load_private
from kcdsl_certs.statement import (
    CertifiedClause,
    ChainTerms,
    Checkpoint,
    Comparison,
    Contract,
    Evaluator,
    Evidence,
    EvidenceFile,
    Expectation,
    Input,
    Kernel,
    Predicate,
    ProofReference,
    Quantity,
    Region,
    RequiredClause,
    Scope,
    SliceSource,
    Triple,
    Verdict,
    build_manifest,
)
from kcdsl_certs.verification.rows import BYTES

SEED_A = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
SEED_B = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
SEED_C = bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7")


def ed25519_from_seed(seed: bytes) -> SigningKey:
    """Return the Ed25519 key of a 32-byte seed (RFC 8032)."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
    return load_private(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, serialization.NoEncryption())
    )


KEY_A, KEY_B, KEY_C = (ed25519_from_seed(seed) for seed in (SEED_A, SEED_B, SEED_C))

AT = "2026-12-01T00:00:00Z"
ISSUED = datetime(2026, 11, 30, 12, tzinfo=UTC)
UNTIL = datetime(2027, 2, 28, 12, tzinfo=UTC)
PROOF_NAME, WEIGHTS_NAME = "N-ATTN-0.proof.json", "model.safetensors"
DATA_NAME = "prompts.jsonl"
ROWS = tuple(f"{number:03}" for number in range(200))
SLICES = {
    "all": {"all": []},
    "short": {"field": "length", "op": "<=", "value": {"real": "1"}},
    "long": {"field": "length", "op": ">", "value": {"real": "160"}},
}
"""Slices of rows with 1 to 200 bytes: every row, the first one, the last forty."""


def sha(text: str) -> str:
    """Return a placeholder digest."""
    return hashlib.sha256(text.encode()).hexdigest()


def weights() -> bytes:
    """Return a safetensors file with one 2x2 float32 tensor."""
    header = b'{"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + struct.pack("<4f", 1, 2, 3, 4)


def numerics(compute: str) -> dict[str, Any]:
    """Return a numerics record such as fingerprints carry."""
    return {"preset": "torch-eager", "compute": compute, "accumulate": "float32"}


TRAIN = Kernel("torch.eager", {"run": "torch.eager", "numerics": numerics("float32")})
HARDWARE = {
    "processor": {"machine": "x86_64", "model": "Processor 1", "instructions": ["avx2"]},
    "host": {"cores": 4, "memory": 16},
}
INFER = Kernel(
    "torch.sdpa",
    {
        "run": "torch.sdpa",
        "numerics": numerics("bfloat16"),
        "device": "cpu",
        "hardware": HARDWARE,
    },
)
CONTRACT = Contract("vectors", "1.0.0", sha("contract"))


def data() -> bytes:
    """Return the data: row n has n + 1 bytes of text."""
    rows = ({"id": name, "text": "x" * (number + 1)} for number, name in enumerate(ROWS))
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def pin(name: str) -> str:
    """Return the digest of a slice."""
    stated = {"data": hashlib.sha256(data()).hexdigest(), "where": SLICES[name]}
    return canonical_digest(stated)


def radius(value: float) -> dict[str, object]:
    """Return a radius in the representation of proofs."""
    data = base64.b64encode(struct.pack("<d", value)).decode("ascii")
    return {"dtype": "float64", "shape": [1, 1], "data": data}


def proof() -> bytes:
    """Return a proof document with the fields by which it is bound to its clause (no cases)."""
    return canonical_json(
        {
            "schema": "kcdsl.interval-proof/2",
            "block": "attn_0",
            "checkpoint": {"sha256": hashlib.sha256(weights()).hexdigest()},
            "numerics": {"train": numerics("float32"), "infer": numerics("bfloat16")},
            "functional": {"kind": "inf", "k": 1},
            "cases": [
                {
                    "name": ROWS[0],
                    "region": {"kind": "ball", "centre": radius(0.5), "radius": radius(0.001)},
                }
            ],
            "claim": (0.03125).hex(),
        }
    )


def triple(folder: Path) -> Triple:
    """Return the triple that the expectation is about; the weights lie in `folder`."""
    manifest = build_manifest(folder / WEIGHTS_NAME)
    checkpoint = Checkpoint.of(WEIGHTS_NAME, manifest, {"config": sha("config")})
    return Triple(checkpoint, TRAIN, INFER, CONTRACT)


ATTENTION = Quantity("norm", "inf", block="attn_0")
DRIFT = Comparison("N-ATTN-0/short/0", ATTENTION, "<=", Fraction(1, 20))
SEEDS = Quantity("share", fields=("rng_seed",))
TRACE = Comparison("O-TRACE/all/0", SEEDS, ">=", Fraction(1), "ratio")


def percentile(metric: str, q: Fraction) -> Quantity:
    """Return a percentile of a metric."""
    return Quantity("statistic", "quantile", (Quantity("metric", metric),), q=q)


P95, P99 = Fraction(95, 100), Fraction(99, 100)
LATENCY = Comparison("R-LAT/all/0", percentile("latency", P95), "<=", Fraction(1, 4), "s")
KL_ALL, KL_LONG = (
    Comparison(
        f"N-KL/{name}/0", percentile("kl", P99), "<=", Fraction(1, 50), "nat", ChainTerms("kl")
    )
    for name in ("all", "long")
)

REQUIRED = (
    RequiredClause(
        "N-ATTN-0",
        "short",
        ((DRIFT,),),
        evidence=Evidence.PROOF,
        slice_digest=pin("short"),
        region=Region("ball", "short", Fraction(1, 1000)),
    ),
    RequiredClause("N-KL", "all", ((KL_ALL,),), slice_digest=pin("all"), inside=("all",)),
    RequiredClause("N-KL", "long", ((KL_LONG,),), slice_digest=pin("long"), inside=("all", "long")),
    RequiredClause("R-LAT", "all", ((LATENCY,),), budget=Fraction(1, 20), slice_digest=pin("all")),
    RequiredClause("O-TRACE", "all", ((TRACE,),), slice_digest=pin("all")),
)


def result(required: RequiredClause, **numbers: Any) -> CertifiedClause:
    """Return a result, completed from its requirement."""
    wanted = required.alternatives[0][0]
    stated: dict[str, Any] = {
        "obligation": wanted.obligation,
        "id": required.id,
        "slice": required.slice,
        "slice_digest": required.slice_digest,
        "region": required.region,
        "budget": required.budget,
        "quantity": wanted.quantity,
        "op": wanted.op,
        "tau": wanted.tau,
        "unit": wanted.unit,
        "verdict": Verdict.PASSED,
    }
    return CertifiedClause(**{**stated, **numbers})


def clauses() -> tuple[CertifiedClause, ...]:
    """Return results that show every requirement."""
    attention, kl_all, kl_long, latency, trace = REQUIRED
    census: dict[str, Any] = {"evidence": Evidence.CENSUS, "method": "census/1"}
    return (
        result(
            attention,
            evidence=Evidence.PROOF,
            method="interval/1",
            numerics=(
                canonical_digest(numerics("float32")),
                canonical_digest(numerics("bfloat16")),
            ),
            bound=0.03125,
            low=0.0123,
            n=1,
            counted="region",
            proof=ProofReference(hashlib.sha256(proof()).hexdigest(), PROOF_NAME),
        ),
        result(kl_all, **census, value=Fraction("0.0071"), n=200, counted="requests"),
        result(kl_long, **census, value=Fraction("0.0113"), n=40, counted="requests"),
        result(
            latency,
            evidence=Evidence.SAMPLE,
            method="clopper-pearson/1",
            n=200,
            exceed=4,
            alpha=Fraction(1, 20),
            counted="requests",
        ),
        result(trace, **census, value=Fraction(1), n=200, counted="records"),
    )


def report(results: Iterable[CertifiedClause]) -> bytes:
    """Return a report that contains these measured results."""
    rows = [
        {
            "obligation": clause.obligation,
            "clause": clause.id,
            "slice": clause.slice,
            "evidence": clause.evidence.value,
            "verdict": "held",
            "n": clause.n,
            "exact": {"value": None if clause.value is None else real_text(clause.value)},
            "exceedance": None if clause.exceed is None else {"k": clause.exceed, "n": clause.n},
        }
        for clause in results
    ]
    digest = f"sha256:{CONTRACT.digest}"
    document = {"schema": "kcdsl.report/3", "contract": {"digest": digest}, "clauses": rows}
    return json.dumps(document, indent=1).encode() + b"\n"


def fewer() -> tuple[CertifiedClause, ...]:
    """Return the results with one record evaluated instead of all."""
    *others, trace = clauses()
    return (*others, replace(trace, n=1))


def documents() -> dict[str, tuple[str, bytes]]:
    """Return the evidence files of the measured results by role: name and content."""
    records = (
        {
            "schema": "kcdsl.trace/1",
            "request": f"{DATA_NAME}:{name}",
            "slices": [
                "all",
                *(["long"] if number >= 160 else []),
                *(["short"] if not number else []),
            ],
            "rng_seed": number + 1,
            "latency_s": [0.125, 0.25, 0.125],
        }
        for number, name in enumerate(ROWS)
    )
    sides = {"train": TRAIN.fingerprint, "infer": INFER.fingerprint}
    return {
        "trace": ("trace.parquet", b"PAR1 stand-in PAR1"),
        "records": ("trace.jsonl", b"".join(json.dumps(r).encode() + b"\n" for r in records)),
        "report": ("report.json", report(clauses()[1:])),
        "kernels": (
            "kernels.json",
            json.dumps({"schema": "kcdsl.kernels/1", **sides}, indent=1).encode() + b"\n",
        ),
    }


def evidence_files() -> tuple[EvidenceFile, ...]:
    """Return the references of the certificate to these files."""
    return tuple(
        EvidenceFile(role, name, hashlib.sha256(content).hexdigest())
        for role, (name, content) in documents().items()
    )


def predicate(folder: Path) -> Predicate:
    """Return the body of the golden certificate."""
    return Predicate(
        triple=triple(folder),
        stage="offline-ci",
        issued_at=ISSUED,
        valid_until=UNTIL,
        sequence=41,
        scope=Scope(True, tuple((r.id, r.slice) for r in REQUIRED)),
        clauses=clauses(),
        evaluator=Evaluator("kcdsl", "0.1.0"),
        inputs=(Input(DATA_NAME, hashlib.sha256(data()).hexdigest()),),
        evidence=evidence_files(),
        non_claims=("It says nothing about other inputs.",),
    )


def expectation(folder: Path) -> Expectation:
    """Return the expectation of a verifier of these vectors."""
    digest = hashlib.sha256(data()).hexdigest()
    slices = {name: SliceSource(DATA_NAME, where, BYTES) for name, where in SLICES.items()}
    return Expectation(triple(folder), REQUIRED, {DATA_NAME: digest}, slices)
