"""Vectors about bundles, signatures and statements."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kcdsl_certs.signatures import PAYLOAD_TYPE, Envelope, Signature, bundle_bytes, pae
from kcdsl_certs.statement import Predicate, Scope, payload_bytes
from tests.support.vectors.building import (
    Vector,
    certificate,
    edited,
    rewrapped,
    signed,
    with_payload,
)
from tests.support.vectors.golden import (
    KEY_A,
    KEY_B,
    KEY_C,
    SEED_A,
    sha,
)


def valid(body: Predicate, golden: bytes) -> list[Vector]:
    partial = replace(body, clauses=body.clauses[:1], scope=Scope(False, (("N-ATTN-0", "short"),)))
    url_safe = rewrapped(golden, _url_safe)
    return [
        Vector("valid", "everything holds", golden, options={"complete": True}),
        Vector("valid-url-safe", "URL-safe base64 is accepted", url_safe),
        Vector(
            "valid-two-keys",
            "signed by A and B, both needed",
            certificate(body, KEY_A, KEY_B),
            options={"keys": ["a.pub", "b.pub"], "threshold": 2},
        ),
        Vector("valid-partial", "one clause, within its scope", certificate(partial)),
        Vector(
            "partial-for-complete",
            "one clause where the whole contract is demanded",
            certificate(partial),
            "clauses",
            "clause/missing",
            {"complete": True},
        ),
    ]


def _url_safe(bundle: dict[str, Any]) -> None:
    inner = bundle["dsseEnvelope"]
    inner["payload"] = inner["payload"].replace("+", "-").replace("/", "_")
    for signature in inner["signatures"]:
        signature["sig"] = signature["sig"].replace("+", "-").replace("/", "_")


def _neutral(payload: bytes) -> bytes:
    """Return a signature of key A whose nonce r is zero."""
    order = 2**252 + 27742317777372353535851937790883648493
    wide = int.from_bytes(hashlib.sha512(SEED_A).digest()[:32], "little")
    secret = wide & (2**254 - 8) | 2**254
    neutral = (1).to_bytes(32, "little")
    point = KEY_A.public.spki[-32:]
    message = pae(PAYLOAD_TYPE, payload)
    challenge = int.from_bytes(hashlib.sha512(neutral + point + message).digest(), "little")
    return neutral + (challenge * secret % order).to_bytes(32, "little")


def envelopes(body: Predicate, golden: bytes) -> list[Vector]:
    payload = payload_bytes(body)
    signature = KEY_A.sign(pae(PAYLOAD_TYPE, payload))
    hint = KEY_A.public.hint

    def twice(*keyids: str | None) -> bytes:
        signatures = tuple(Signature(signature, keyid) for keyid in keyids)
        return bundle_bytes(Envelope(payload, PAYLOAD_TYPE, signatures), hint)

    def flip(bundle: dict[str, Any]) -> None:
        broken = bytes([signature[0] ^ 1]) + signature[1:]
        bundle["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(broken).decode()

    def retype(bundle: dict[str, Any]) -> None:
        bundle["dsseEnvelope"]["payloadType"] = "application/vnd.example.other+json"

    def trailing(bundle: dict[str, Any]) -> None:
        bundle["dsseEnvelope"]["payload"] += "=AAAA"

    def loose(bundle: dict[str, Any]) -> None:
        bundle["dsseEnvelope"]["signatures"][0]["sig"] += "\n"

    none = ("signatures", "signature/none-trusted")
    two = {"keys": ["a.pub", "b.pub"], "threshold": 2}
    duplicate = golden.replace(b'"payloadType":', b'"payload":"e30=","payloadType":')
    return [
        Vector("signature-changed", "one bit of the signature", rewrapped(golden, flip), *none),
        Vector(
            "result-changed",
            "a clause result is edited, the signature kept",
            with_payload(golden, b'"value":"0.0071"', b'"value":"0.0001"'),
            *none,
        ),
        Vector(
            "weights-changed-in-payload",
            "the checkpoint digest is edited, the signature kept",
            with_payload(golden, body.triple.checkpoint.digest.encode(), sha("x").encode()),
            *none,
        ),
        Vector(
            "commitment-of-small-order",
            "R of the signature is the neutral element; the equation of Ed25519 holds",
            bundle_bytes(Envelope(payload, PAYLOAD_TYPE, (Signature(_neutral(payload)),)), hint),
            *none,
        ),
        Vector("other-key", "signed by a key that is not trusted", certificate(body, KEY_C), *none),
        Vector(
            "type-swapped",
            "signed as in-toto, claims another type",
            rewrapped(golden, retype),
            *none,
        ),
        Vector(
            "other-payload-type",
            "rightly signed as another type",
            signed(payload, "application/vnd.example.other+json"),
            "payload-type",
            "payload/type",
        ),
        Vector(
            "payload-trailing-bytes",
            "bytes after the payload",
            rewrapped(golden, trailing),
            "encoding",
            "base64/alphabet",
        ),
        Vector(
            "signature-line-break",
            "a line break in base64",
            rewrapped(golden, loose),
            "encoding",
            "base64/alphabet",
        ),
        Vector("envelope-duplicate-key", "two payloads", duplicate, "bundle", "json/duplicate-key"),
        Vector("bundle-trailing-data", "two documents", golden + golden, "bundle", "json/syntax"),
        Vector(
            "bundle-utf16",
            "UTF-16 instead of UTF-8",
            golden.decode().encode("utf-16"),
            "bundle",
            "json/encoding",
        ),
        Vector(
            "bundle-bom", "a byte order mark", b"\xef\xbb\xbf" + golden, "bundle", "json/syntax"
        ),
        Vector(
            "no-signature",
            "an envelope without signatures",
            bundle_bytes(Envelope(payload, PAYLOAD_TYPE, ()), hint),
            "bundle",
            "bundle/signatures",
        ),
        Vector(
            "same-signature-twice",
            "A twice",
            twice(hint, hint),
            "threshold",
            "signature/threshold",
            two,
        ),
        Vector(
            "same-key-two-keyids",
            "A under two names",
            twice("one", "two"),
            "threshold",
            "signature/threshold",
            two,
        ),
    ]


def statements(body: Predicate) -> list[Vector]:
    def set_at(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
        *way, last = path.split(".")

        def edit(statement: dict[str, Any]) -> None:
            place: Any = statement
            for part in way:
                place = place[int(part)] if part.isdigit() else place[part]
            place[last] = value

        return edit

    subject = {"name": "kcdsl-triple", "digest": {"sha256": body.triple.digest}}
    other = {"name": "other", "digest": {"sha256": sha("other")}}
    raw = payload_bytes(body)
    cases: list[tuple[str, str, bytes, str, str]] = [
        (
            "two-subjects",
            "the right subject and another",
            edited(body, set_at("subject", [subject, other])),
            "subject",
            "subject/count",
        ),
        (
            "no-subject",
            "no subject",
            edited(body, set_at("subject", [])),
            "subject",
            "subject/count",
        ),
        (
            "subject-without-sha256",
            "another algorithm never matches",
            edited(body, set_at("subject", [{"name": "kcdsl-triple", "digest": {"sha512": "00"}}])),
            "subject",
            "subject/no-sha256",
        ),
        (
            "subject-only-changed",
            "the components are right, the subject is not",
            edited(body, set_at("subject", [other])),
            "subject",
            "subject/mismatch",
        ),
        (
            "statement-type",
            "another _type",
            edited(body, set_at("_type", "https://in-toto.io/Statement/v0.1")),
            "statement-type",
            "statement/type",
        ),
        (
            "predicate-type",
            "a type the key may not sign",
            edited(body, set_at("predicateType", "urn:example:other")),
            "statement-type",
            "statement/key-not-allowed",
        ),
        (
            "unknown-field",
            "a field that could narrow a result",
            edited(body, set_at("predicate.clauses.0.except", "weekends")),
            "statement-type",
            "statement/unknown-field",
        ),
        (
            "fingerprint-changed",
            "a fingerprint that is not the digest beside it",
            edited(body, set_at("predicate.triple.kernels.infer.fingerprint.run", "torch.eager")),
            "statement-type",
            "triple/fingerprint-inconsistent",
        ),
        (
            "proof-path-outside",
            "a proof file in another folder",
            edited(body, set_at("predicate.clauses.0.proofPath", "../N.json")),
            "statement-type",
            "statement/malformed",
        ),
        (
            "rounded-inwards",
            "a decimal below the exact bound",
            edited(body, set_at("predicate.clauses.0.bound.decimal", "0.0312")),
            "statement-type",
            "number/rounded-inwards",
        ),
        (
            "verdict-of-the-whole",
            "FAILED is stated, every clause passed",
            edited(body, set_at("predicate.verdict", "FAILED")),
            "clauses",
            "verdict/contradicts-clauses",
        ),
        (
            "payload-float",
            "a float in the payload",
            signed(raw.replace(b'"sequence":41', b'"sequence":41.0')),
            "payload",
            "json/float",
        ),
        (
            "payload-large-integer",
            "2^53",
            signed(raw.replace(b'"sequence":41', b'"sequence":9007199254740992')),
            "payload",
            "json/integer",
        ),
        (
            "payload-duplicate-key",
            "two stages",
            signed(raw.replace(b'"stage":', b'"stage":"full","stage":')),
            "payload",
            "json/duplicate-key",
        ),
        (
            "payload-lone-surrogate",
            "a lone surrogate",
            signed(raw.replace(b"kcdsl-triple", b"\\ud800")),
            "payload",
            "json/encoding",
        ),
        ("payload-empty", "an empty payload", signed(b""), "payload", "json/syntax"),
    ]
    return [Vector(*case) for case in cases]
