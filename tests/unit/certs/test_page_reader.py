"""A second reader of certificates, written from certs/README.md alone, on every vector.

It implements the steps 1 to 8 and 10 of the page: envelope, statement, subject. It must accept
valid vectors, and reject each vector that the index says fails at one of these steps.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from tests.support.trust_attacks import SMALL_ORDER

HERE = Path(__file__).resolve().parents[3] / "certs"
VECTORS = json.loads((HERE / "vectors" / "index.json").read_text())["vectors"]
SCHEMA = jsonschema.Draft7Validator(
    json.loads((HERE / "kcdsl_certs" / "certificate.schema.json").read_text())
)
STEPS = {
    "bundle", "encoding", "signatures", "threshold", "payload-type", "payload", "statement-type",
    "subject", "validity",
}  # fmt: skip
TYPE = "application/vnd.in-toto+json"


class Wrong(Exception):
    """Raised for a certificate that is rejected."""


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Wrong(what)


def strict(raw: bytes) -> Any:
    def no(_: str) -> NoReturn:
        raise Wrong("float")

    def whole(text: str) -> int:
        need(text != "-0" and abs(int(text)) < 2**53, "integer")
        return int(text)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(items)) == len(items), "duplicate key")
        return dict(items)

    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=pairs, parse_float=no, parse_constant=no,
            parse_int=whole,
        )  # fmt: skip
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise Wrong("json") from error
    return value


def canonical(value: Any) -> bytes:
    """RFC 8785 without floats; keys of the documents here are ASCII."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode("utf-8")


def sha256(data: bytes) -> dict[str, str]:
    return {"sha256": hashlib.sha256(data).hexdigest()}


def decoded(text: str) -> bytes:
    plain = text
    if "-" in text or "_" in text:
        need("+" not in text and "/" not in text, "mixed alphabets")
        plain = text.replace("-", "+").replace("_", "/")
    need(re.fullmatch(r"[A-Za-z0-9+/]*={0,2}", plain) is not None, "alphabet")
    try:
        data = base64.b64decode(plain, validate=True)
    except ValueError as error:
        raise Wrong("padding") from error
    need(base64.b64encode(data).decode() == plain, "spare bits")
    return data


def signed(key: Any, signature: bytes, message: bytes) -> bool:
    try:
        if isinstance(key, EllipticCurvePublicKey):
            key.verify(signature, message, ECDSA(SHA256()))
            return True
        assert isinstance(key, Ed25519PublicKey)
        key.verify(signature, message)
    except InvalidSignature:
        return False
    y = int.from_bytes(signature[:32], "little") % 2**255
    return y < 2**255 - 19 and signature[:32] not in SMALL_ORDER


def triple_manifest(expected: dict[str, Any], weights: Path) -> dict[str, Any]:
    """Return the triple of the page, rebuilt from hashed weights and the expected parts."""
    data = weights.read_bytes()
    file = {"name": weights.name, "size": len(data), **sha256(data)}
    manifest = {"schema": "kcdsl.checkpoint-manifest/1", "method": "files", "hashType": "sha256"}
    kernels = {
        role: {"digest": sha256(canonical(expected["kernels"][role]["fingerprint"]))}
        for role in ("train", "infer")
    }
    return {
        "schema": "kcdsl.triple/1",
        "checkpoint": {
            "digest": sha256(canonical({**manifest, "resources": [file]})),
            "rootDigest": sha256(hashlib.sha256(data).digest()),
            "companions": expected["checkpoint"]["companions"],
        },
        "kernels": kernels,
        "contract": expected["contract"],
    }


def read(
    raw: bytes, keys: list[Any], threshold: int, moment: datetime, subject: dict[str, str]
) -> None:
    """Raise Wrong for a certificate that these steps reject."""
    bundle = strict(raw)
    need(isinstance(bundle, dict), "no object")
    need(set(bundle) == {"mediaType", "verificationMaterial", "dsseEnvelope"}, "fields")
    need(bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json", "media type")
    envelope = bundle["dsseEnvelope"]
    need(set(envelope) == {"payload", "payloadType", "signatures"}, "fields")
    need(1 <= len(envelope["signatures"]) <= 32, "signatures")
    need(all(set(s) <= {"sig", "keyid"} for s in envelope["signatures"]), "fields")
    payload, kind = decoded(envelope["payload"]), envelope["payloadType"].encode()
    signatures = [decoded(one["sig"]) for one in envelope["signatures"]]
    message = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    good = [key for key in keys if any(signed(key, s, message) for s in signatures)]
    need(len(good) >= max(threshold, 1), "threshold")
    need(kind.decode() == TYPE, "payload type")
    statement = strict(payload)
    try:
        SCHEMA.validate(statement)
    except jsonschema.ValidationError as error:
        raise Wrong("schema") from error
    body = statement["predicate"]
    for kernel in body["triple"]["kernels"].values():
        need(kernel["digest"] == sha256(canonical(kernel["fingerprint"])), "fingerprint")
    (one,) = statement["subject"]
    need(one["digest"]["sha256"] == subject["sha256"], "subject")
    begin, end = (_time(body[name]) for name in ("issuedAt", "validUntil"))
    need(begin <= moment < end, "validity")
    need(end - begin <= timedelta(days=366), "too long")
    for clause in body["clauses"]:
        least = clause["op"] in (">", ">=")
        for name, down in (("bound", least), ("low", True), ("high", False)):
            if name in clause:
                exact = Fraction(float.fromhex(clause[name]["hex"]))
                shown = Fraction(clause[name]["decimal"])
                need(shown <= exact if down else shown >= exact, "rounded inwards")


def _time(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


@pytest.fixture(scope="module")
def subject() -> dict[str, str]:
    expected = json.loads((HERE / "vectors" / "expectation.json").read_text())["triple"]
    return sha256(canonical(triple_manifest(expected, HERE / "vectors" / "model.safetensors")))


@pytest.mark.parametrize(
    "vector",
    [
        pytest.param(v, id=v["file"].removesuffix(".cert.json"))
        for v in VECTORS
        if (v["expect"] == "valid" or v["step"] in STEPS) and "revocations" not in v["options"]
    ],
)
def test_page_suffices_to_read_a_certificate(
    vector: dict[str, Any], subject: dict[str, str]
) -> None:
    options = vector["options"]
    keys = [load_pem_public_key((HERE / "vectors" / name).read_bytes()) for name in options["keys"]]
    raw = (HERE / "vectors" / vector["file"]).read_bytes()
    try:
        read(raw, keys, options["threshold"], _time(options["at"]), subject)
    except Wrong:
        assert vector["expect"] == "invalid"
    else:
        assert vector["expect"] == "valid", vector["description"]
