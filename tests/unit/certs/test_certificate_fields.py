"""Every change of every field of a certificate is rejected, except for a documented list.

Once without a new signature, where the payload must not change; once signed again by a trusted key,
so that only the checks of the statement apply. The certificate rests on a proof that is derived
again. docs/proofs/certificate-fields.md lists the accepted changes with reasons.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kcdsl_certs.encoding.reals import Measured
from kcdsl_certs.encoding.strict import canonical_digest, canonical_json, parse_time
from kcdsl_certs.signatures import TrustedKey, TrustPolicy, bundle_bytes, sign
from kcdsl_certs.statement import (
    PREDICATE_TYPE,
    AcceptedFinding,
    Checkpoint,
    Comparison,
    EvidenceFile,
    ProofReference,
    Region,
    Triple,
    build_manifest,
    payload_bytes,
)
from kcdsl_certs.verification.proofs import Rechecker
from kcdsl_certs.verification.report import Report
from kcdsl_certs.verification.verify import verify
from tests.support import proofs
from tests.support.mutation.bases import made
from tests.support.mutation.changes import Change, changes, field_of, places
from tests.support.mutation.documented import stated
from tests.support.quantities import norm

Check = Callable[[bytes], Report]
VECTORS = Path(__file__).resolve().parents[3] / "certs" / "vectors"
BASE = "piecewise and tanh, interval"
RADIUS = 2.0**-10

PREDICATE = "predicate"
CLAUSE = f"{PREDICATE}.clauses[]"
WORDS: dict[str, tuple[str, ...]] = {
    "_type": ("https://in-toto.io/Statement/v0.1",),
    "predicateType": ("urn:kcdsl:attestation:kernel-certificate:v0.3",),
    f"{PREDICATE}.stage": ("shadow", "canary", "full", "prod"),
    f"{PREDICATE}.verdict": ("FAILED", "INCONCLUSIVE"),
    f"{PREDICATE}.issuedAt": ("2026-12-02T00:00:00Z", "2026-11-30T12:00:00+00:00"),
    f"{PREDICATE}.validUntil": ("2026-11-30T12:00:00Z", "2026-12-01T00:00:00Z", "2099-01-01"),
    f"{CLAUSE}.op": ("<", ">", ">=", "=="),
    f"{CLAUSE}.evidence": ("proof", "proof-real", "probabilistic", "census", "sample"),
    f"{CLAUSE}.verdict": ("FAILED", "INCONCLUSIVE"),
    f"{CLAUSE}.tau": ("0.049", "0.051", "1/20", "0", "-1", "1e9", "nan"),
    f"{CLAUSE}.budget": ("0.049", "0.051", "0", "1", "-1"),
    f"{CLAUSE}.alpha": ("0.049", "0.001", "0", "1", "-1"),
    f"{CLAUSE}.obligation": ("N-ATTN-0/short/1", "N-KL/all/0", "N-KL/long/0"),
    f"{CLAUSE}.quantity.kind": ("metric", "norm", "margin", "share", "statistic", "abs"),
    f"{CLAUSE}.quantity.name": ("inf", "2", "span", "mean", "max", "quantile"),
    f"{CLAUSE}.quantity.of[].kind": ("number", "norm", "margin", "share", "statistic"),
    f"{CLAUSE}.quantity.of[].name": ("kl", "tv", "latency"),
    f"{CLAUSE}.quantity.q": ("0.98", "0.999", "1", "2"),
    f"{CLAUSE}.quantity.fields[]": ("policy_version",),
    f"{CLAUSE}.slice": ("all", "long", "some"),
    f"{CLAUSE}.region.kind": ("points", "hull", "rows"),
    f"{CLAUSE}.region.slice": ("all", "long"),
    f"{CLAUSE}.region.radius": ("0.0005", "1", "0"),
    f"{CLAUSE}.quantity.block": ("block_1", "attn_0"),
    f"{CLAUSE}.proofPath": ("../proof.json", "other.json"),
    f"{CLAUSE}.unit": ("1", "s", "nat", "ratio"),
    f"{CLAUSE}.counted": ("requests", "records", "timed runs", "windows", "region", "tokens"),
    f"{CLAUSE}.method": (
        "census/1", "attack/1", "affine/1", "chain+interval/1", "one-sided-limits/1",
        "clopper-pearson/1", "bound-chain/1",
    ),
    f"{PREDICATE}.evidence[].role": ("trace", "report", "run-checkpoint", "counterexample"),
    f"{PREDICATE}.evidence[].path": ("trace.jsonl", "../report.json", "gone.json"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sealed:
    """A certificate on a proof, with its checker."""

    statement: dict[str, Any]
    signed: Callable[[bytes], bytes]
    check: Check


@pytest.fixture(scope="module")
def sealed(golden: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Sealed:
    """Return the golden certificate, with a proof of a small block for its first clause."""
    folder = tmp_path_factory.mktemp("sealed")
    document, checkpoint, _ = made(BASE, folder)
    document["cases"][0]["name"] = golden.ROWS[0]
    proof = proofs.dump(document)
    (folder / golden.PROOF_NAME).write_bytes(proof)
    train, infer = (
        dataclasses.replace(
            kernel, fingerprint={**kernel.fingerprint, "numerics": document["numerics"][side]}
        )
        for kernel, side in ((golden.TRAIN, "train"), (golden.INFER, "infer"))
    )
    weights = Checkpoint.of(
        checkpoint.name, build_manifest(checkpoint), {"config": golden.sha("c")}
    )
    triple = Triple(weights, train, infer, golden.CONTRACT)
    claim = float.fromhex(document["claim"])
    region = Region("ball", "short", Fraction(RADIUS))
    for name, content in golden.documents().values():
        (folder / name).write_bytes(content)
    (folder / golden.DATA_NAME).write_bytes(golden.data())
    drift = Comparison("N-ATTN-0/short/0", norm("inf", "block_0"), "<=", Fraction(1, 20))
    required = (
        dataclasses.replace(golden.REQUIRED[0], alternatives=((drift,),), region=region),
        *golden.REQUIRED[1:],
    )
    body = golden.predicate(VECTORS)
    numerics = tuple(canonical_digest(document["numerics"][side]) for side in ("train", "infer"))
    first = dataclasses.replace(
        body.clauses[0],
        quantity=drift.quantity,
        region=region,
        numerics=numerics,
        bound=claim,
        low=claim / 2,
        proof=ProofReference(hashlib.sha256(proof).hexdigest(), golden.PROOF_NAME),
        assumptions=("libm",),
        scope="one block",
        reason="bounded",
    )
    sides = {"train": train.fingerprint, "infer": infer.fingerprint}
    kernels = json.dumps({"schema": "kcdsl.kernels/1", **sides}).encode()
    (folder / "kernels.json").write_bytes(kernels)
    ran = EvidenceFile("kernels", "kernels.json", hashlib.sha256(kernels).hexdigest())
    body = dataclasses.replace(
        body,
        triple=triple,
        evidence=(*body.evidence[:3], ran),
        clauses=(first, *body.clauses[1:]),
        assumptions=("libm",),
        supersedes=golden.sha("before"),
        contract_source=golden.sha("source"),
        suppressions=(AcceptedFinding("KC3001", "known"),),
    )
    rechecker = Rechecker(folder, checkpoint)
    expected = golden.expectation(VECTORS)
    # The block is not on tokens, so the length of its rows is unknown here.
    slices = {
        name: dataclasses.replace(source, tokens="other" if name == "short" else "bytes")
        for name, source in expected.slices.items()
    }

    def check(bundle: bytes) -> Report:
        return verify(
            bundle,
            trusted=TrustPolicy(
                (TrustedKey("a", golden.KEY_A.public, frozenset({PREDICATE_TYPE})),)
            ),
            expected_triple=triple,
            clock=lambda: parse_time(golden.AT),
            required_clauses=required,
            expected_inputs=expected.inputs,
            stage="offline-ci",
            minimum_sequence=41,
            proofs=rechecker,
            evidence=folder,
            data=lambda name: folder / name,
            slices=slices,
            strict=True,
        )

    def signed(payload: bytes) -> bytes:
        return bundle_bytes(sign(payload, (golden.KEY_A,)), golden.KEY_A.public.hint)

    return Sealed(json.loads(payload_bytes(body)), signed, check)


def test_unchanged_certificate_is_valid(sealed: Sealed) -> None:
    report = sealed.check(sealed.signed(canonical_json(sealed.statement)))
    assert report.accepted, report.to_json()
    assert [c.outcome.value for c in report.checks] == ["ok"] * len(report.checks)


def measured(statement: dict[str, Any]) -> Iterator[Change]:
    """Yield changes of measured numbers whose two representations agree."""
    for path, value in places(statement):
        if not (isinstance(value, dict) and value.keys() == {"decimal", "hex"}):
            continue
        rounding = {"bound": "up", "low": "down", "high": "up"}.get(str(path[-1]), "nearest")
        number = float.fromhex(value["hex"])
        for kind, factor in (
            ("lower", 0.999), ("lower", 0.5), ("lower", 0.0), ("negative", -1.0),
            ("raise", 1.001), ("raise", 2.0), ("raise", 1e6),
        ):  # fmt: skip
            record = Measured(number * factor, rounding).to_json()  # type: ignore[arg-type]

            def put(document: dict[str, Any], path: Any = path, record: Any = record) -> None:
                for key in path[:-1]:
                    document = document[key]
                document[path[-1]] = record

            yield Change(path, field_of(path), kind, f"times {factor}", put)


@pytest.mark.full
def test_unlisted_changes_are_rejected_though_signed(sealed: Sealed) -> None:
    found: defaultdict[str, set[str]] = defaultdict(set)
    tried = 0
    for change in (*changes(sealed.statement, WORDS), *measured(sealed.statement)):
        changed = change.of(sealed.statement)
        if changed == sealed.statement:
            continue
        payload = json.dumps(changed, ensure_ascii=False, separators=(",", ":")).encode()
        report = sealed.check(sealed.signed(payload))
        reasons = [c.reason for c in report.checks if c.outcome.value == "failed"]
        assert report.accepted is not bool(reasons), str(change)
        assert not any("internal" in reason or "checker-failed" in reason for reason in reasons)
        tried += 1
        if report.accepted:
            found[change.field].add(change.kind)
    assert tried > 3000
    assert {field: frozenset(kinds) for field, kinds in found.items()} == stated("Statements")


def test_unlisted_changes_of_the_envelope_are_rejected(sealed: Sealed) -> None:
    """The signature covers the payload, byte by byte."""
    bundle = json.loads(sealed.signed(canonical_json(sealed.statement)))
    found: defaultdict[str, set[str]] = defaultdict(set)
    for change in changes(bundle, {}):
        data = json.dumps(change.of(bundle)).encode()
        if sealed.check(data).accepted:
            found[change.field].add(change.kind)
    assert {field: frozenset(kinds) for field, kinds in found.items()} == stated("Envelopes")
    payload = canonical_json(sealed.statement)
    good = sealed.signed(payload)
    text = json.loads(good)["dsseEnvelope"]["payload"]
    for at in range(0, len(payload), 37):
        spoiled = payload[:at] + bytes([payload[at] ^ 1]) + payload[at + 1 :]
        data = good.replace(text.encode(), base64.b64encode(spoiled))
        assert data != good
        assert not sealed.check(data).accepted, at
