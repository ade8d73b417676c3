"""The golden certificate from which the vectors are made, and what a verifier expects of it."""

from __future__ import annotations

import base64
import hashlib
import struct
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

from kcdsl_certs.canonical import canonical_digest, canonical_json
from kcdsl_certs.clauses import CertifiedClause, Evidence, ProofReference, Verdict
from kcdsl_certs.keys import ed25519_from_seed
from kcdsl_certs.manifest import build_manifest
from kcdsl_certs.requirements import Chain, Comparison, Expectation, RequiredClause
from kcdsl_certs.statement import Evaluator, Input, Predicate, Scope
from kcdsl_certs.triple import Checkpoint, Contract, Kernel, Triple

SEED_A = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
SEED_B = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
SEED_C = bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7")
KEY_A, KEY_B, KEY_C = (ed25519_from_seed(seed) for seed in (SEED_A, SEED_B, SEED_C))

AT = "2026-12-01T00:00:00Z"
ISSUED = datetime(2026, 11, 30, 12, tzinfo=UTC)
UNTIL = datetime(2027, 2, 28, 12, tzinfo=UTC)
PROOF_NAME, WEIGHTS_NAME = "N-ATTN-0.proof.json", "model.safetensors"


def sha(text: str) -> str:
    """Return a stand-in digest."""
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
INFER = Kernel("torch.sdpa", {"run": "torch.sdpa", "numerics": numerics("bfloat16")})
CONTRACT = Contract("vectors", "1.0.0", sha("contract"))


def radius(value: float) -> dict[str, object]:
    """Return a radius as it stands in a proof."""
    data = base64.b64encode(struct.pack("<d", value)).decode("ascii")
    return {"dtype": "float64", "shape": [1, 1], "data": data}


def proof() -> bytes:
    """Return a proof document with the fields by which it is bound to its clause (no cases)."""
    return canonical_json(
        {
            "schema": "kcdsl.interval-proof/1",
            "block": "attn_0",
            "checkpoint": {"sha256": hashlib.sha256(weights()).hexdigest()},
            "numerics": {"train": numerics("float32"), "infer": numerics("bfloat16")},
            "functional": {"kind": "inf", "k": 1},
            "cases": [{"name": "a", "region": {"kind": "ball", "radius": radius(0.001)}}],
            "claim": (0.03125).hex(),
        }
    )


def triple(folder: Path) -> Triple:
    """Return the triple that the expectation is about; the weights lie in `folder`."""
    manifest = build_manifest(folder / WEIGHTS_NAME)
    checkpoint = Checkpoint.of(WEIGHTS_NAME, manifest, {"config": sha("config")})
    return Triple(checkpoint, TRAIN, INFER, CONTRACT)


DRIFT = Comparison("norm_inf(drift(attn_0, x))", "<=", Fraction(1, 20))
KL = Comparison("p99(kl)", "<=", Fraction(1, 50), Chain("kl"))
LATENCY = Comparison("p95(latency)", "<=", Fraction(1, 4))
TRACE = Comparison("has(trace, [rng_seed])", ">=", Fraction(1))

REQUIRED = (
    RequiredClause(
        "N-ATTN-0",
        "all",
        ((DRIFT,),),
        evidence=Evidence.PROOF,
        slice_digest=sha("all"),
        block="attn_0",
        region="ball(all, 0.001)",
    ),
    RequiredClause("N-KL", "all", ((KL,),), slice_digest=sha("all"), inside=("all",)),
    RequiredClause("N-KL", "long", ((KL,),), slice_digest=sha("long"), inside=("all", "long")),
    RequiredClause("R-LAT", "all", ((LATENCY,),), budget=Fraction(1, 20), slice_digest=sha("all")),
    RequiredClause("O-TRACE", "all", ((TRACE,),), slice_digest=sha("all")),
)


def result(required: RequiredClause, **numbers: Any) -> CertifiedClause:
    """Return a result with what the requirement states filled in."""
    wanted = required.alternatives[0][0]
    stated: dict[str, Any] = {
        "id": required.id,
        "slice": required.slice,
        "slice_digest": required.slice_digest,
        "block": required.block,
        "region": required.region,
        "budget": required.budget,
        "quantity": wanted.quantity,
        "op": wanted.op,
        "tau": wanted.tau,
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
            unit="region",
            proof=ProofReference(hashlib.sha256(proof()).hexdigest(), PROOF_NAME),
        ),
        result(kl_all, **census, value=0.0071, n=200, unit="requests"),
        result(kl_long, **census, value=0.0113, n=40, unit="requests"),
        result(
            latency,
            evidence=Evidence.SAMPLE,
            method="clopper-pearson/1",
            n=600,
            exceed=12,
            alpha=Fraction(1, 20),
            unit="windows",
        ),
        result(trace, **census, value=1.0, n=200, unit="records"),
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
        inputs=(Input("prompts.jsonl", sha("prompts")),),
        non_claims=("It says nothing about other inputs.",),
    )


def expectation(folder: Path) -> Expectation:
    """Return what a verifier of these vectors knows beforehand."""
    return Expectation(triple(folder), REQUIRED, {"prompts.jsonl": sha("prompts")})
