"""DSSE 1.0.2 envelopes in a Sigstore bundle v0.3 with a public-key hint."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import Fields, strict_base64, strict_load
from kcdsl_certs.signatures.keys import SigningKey, TrustedKey

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
LARGEST_BUNDLE = 8 * 1024 * 1024
MOST_SIGNATURES = 32


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature. `keyid` is an unauthenticated hint without effect on verification."""

    value: bytes
    keyid: str | None = None


@dataclass(frozen=True, slots=True)
class Envelope:
    """Payload bytes with their type and signatures."""

    payload: bytes
    payload_type: str
    signatures: tuple[Signature, ...]


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return the DSSE pre-authentication encoding; lengths count bytes, not characters."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def sign(payload: bytes, keys: Sequence[SigningKey], payload_type: str = PAYLOAD_TYPE) -> Envelope:
    """Sign the payload with every key."""
    message = pae(payload_type, payload)
    signatures = tuple(Signature(k.sign(message), k.public.keyid) for k in keys)
    return Envelope(payload, payload_type, signatures)


def signers(envelope: Envelope, keys: Iterable[TrustedKey]) -> tuple[TrustedKey, ...]:
    """Return the trusted keys with at least one valid signature, each once."""
    message = pae(envelope.payload_type, envelope.payload)
    return tuple(
        trusted
        for trusted in keys
        if any(trusted.key.verifies(s.value, message) for s in envelope.signatures)
    )


def bundle_bytes(envelope: Envelope, hint: str) -> bytes:
    """Return the Sigstore bundle v0.3 (compact JSON, one line)."""
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": hint}, "tlogEntries": []},
        "dsseEnvelope": _dsse(envelope),
    }
    return _line(bundle)


def envelope_bytes(envelope: Envelope) -> bytes:
    """Return the DSSE envelope alone (compact JSON, one line), for tools without bundle support."""
    return _line(_dsse(envelope))


def _dsse(envelope: Envelope) -> dict[str, Any]:
    signatures: list[dict[str, str]] = []
    for signature in envelope.signatures:
        record = {"sig": base64.b64encode(signature.value).decode("ascii")}
        if signature.keyid is not None:
            record["keyid"] = signature.keyid
        signatures.append(record)
    return {
        "payload": base64.b64encode(envelope.payload).decode("ascii"),
        "payloadType": envelope.payload_type,
        "signatures": signatures,
    }


def _line(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8") + b"\n"


@dataclass(frozen=True, slots=True)
class RawEnvelope:
    """The envelope of a bundle, base64 not yet decoded."""

    payload: str
    payload_type: str
    signatures: tuple[tuple[str, str | None], ...]


def parse_bundle(raw: bytes) -> RawEnvelope:
    """Read a bundle strictly (step 1); unknown fields are refused, hints are ignored."""
    try:
        return _parse_bundle(strict_load(raw, LARGEST_BUNDLE))
    except Rejected as error:
        if error.reason.startswith("statement/"):
            raise Rejected("bundle/malformed", error.detail) from None
        raise


def _parse_bundle(value: object) -> RawEnvelope:
    bundle = Fields.of(value, "bundle")
    if bundle.text("mediaType") != MEDIA_TYPE:
        raise Rejected("bundle/media-type", f"the media type is not {MEDIA_TYPE}")
    material = bundle.inner("verificationMaterial")
    hint = material.inner("publicKey")
    hint.text_or_none("hint")
    hint.done()
    if material.items("tlogEntries"):
        raise Rejected("bundle/malformed", "log entries are not supported")
    material.done()
    inner = bundle.inner("dsseEnvelope")
    payload, payload_type = inner.raw("payload"), inner.raw("payloadType")
    if not isinstance(payload, str) or not isinstance(payload_type, str):
        raise Rejected("bundle/malformed", "payload or payloadType is not a text")
    items = inner.items("signatures")
    if not 0 < len(items) <= MOST_SIGNATURES:
        raise Rejected("bundle/signatures", f"{len(items)} signatures; 1 to {MOST_SIGNATURES} pass")
    signatures: list[tuple[str, str | None]] = []
    for item in items:
        record = Fields.of(item, "signature")
        keyid = record.raw("keyid")
        if keyid is not None and not isinstance(keyid, str):
            raise Rejected("bundle/malformed", "keyid is not a text")
        signatures.append((record.text("sig"), keyid))
        record.done()
    inner.done()
    bundle.done()
    return RawEnvelope(payload, payload_type, tuple(signatures))


def decode(raw: RawEnvelope) -> Envelope:
    """Decode payload and signatures strictly (step 2)."""
    return Envelope(
        strict_base64(raw.payload),
        raw.payload_type,
        tuple(Signature(strict_base64(sig), keyid) for sig, keyid in raw.signatures),
    )
