"""DSSE: the nine published cases, rebuilt from RFC 8032 keys, and openssl as second verifier."""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from kcdsl_certs.signatures import (
    PAYLOAD_TYPE,
    Algorithm,
    Envelope,
    Signature,
    SigningKey,
    TrustedKey,
    TrustPolicy,
    bundle_bytes,
    decode,
    generate,
    pae,
    parse_bundle,
    sign,
    signers,
    unique_keys,
)

_S = b'{"_type":"https://in-toto.io/Statement/v1"}'
_SINGLE = "2WAfaHm5jluo0w+0rk8uVkluELJYWjSmU9x7EUzx+AyteDGJ4/nqyJXfmAUVFIAoQafWm7AxBZNw5M9ixNHiCA=="
_SECOND = "c1+67/aT0yqEpwx8PsVY3MLHsj9D0CZ014/Fv/QlG59P+9CobUZ7xECJ/V3USG0Ob9CiE5LjReEZUzNF2l7eBw=="
_URL_SAFE = (
    "P-_KHICeR7tI6S_YyejJTRtrXhcQyQ2LYPaL8h90KjC9qN8HU_svOQ6TuDOT1HIrsGW886DbWNWcCmX5twLrAw=="
)
_EXAMPLE = (
    "xmSk/ug66ysT7ayhkCIjhAq42zgZXSsEWuzUaNL7w2eGAdF/NU6/fRXPtmfN+5DNSAs5/i2lUnHjbbjPsu0tAw=="
)
_EMPTY = "gSggCAaTLTYyRH6FIDBem6meyIynsYy8RTHVzwx9tnTb7Bg/1jMWnuVgI/gffqmbsC2VX5/jHfkkDqsj7CDbDg=="
_NO_TYPE = (
    "iC3q/+3Rm0+lpAJRueDmDh15PnwCfxKmS0NAfKsbv+zgulXQC/WM9trc+j1XEqlwDIg/vf/uNfebeD6sxInrDg=="
)
_BOTH = (PAYLOAD_TYPE, "application/vnd.example.other+json")

_Case = tuple[bytes, str, list[tuple[str, str | None]], str, int, tuple[str, ...], bool]
# payload, type, signatures (base64, keyid), keys, threshold, supported types, accepted
_CASES: dict[str, _Case] = {
    "single": (_S, PAYLOAD_TYPE, [(_SINGLE, "a")], "A", 1, _BOTH, True),
    "url-safe": (b"\xfb\xff\xbf\x3e\x3f", PAYLOAD_TYPE, [(_URL_SAFE, "a")], "A", 1, _BOTH, True),
    "type-swapped": (_S, _BOTH[1], [(_SINGLE, "a")], "A", 1, _BOTH, False),
    "non-ascii-type": (
        _S, "application/vnd.exämple+json", [(_EXAMPLE, "a")], "A", 1,
        ("application/vnd.exämple+json",), True,
    ),
    "empty-payload": (b"", PAYLOAD_TYPE, [(_EMPTY, "a")], "A", 1, _BOTH, True),
    "empty-type": (_S, "", [(_NO_TYPE, "a")], "A", 1, (PAYLOAD_TYPE,), False),
    "two-keys": (_S, PAYLOAD_TYPE, [(_SINGLE, "a"), (_SECOND, "b")], "AB", 2, _BOTH, True),
    "same-key-twice": (_S, PAYLOAD_TYPE, [(_SINGLE, "a"), (_SINGLE, "a")], "AB", 2, _BOTH, False),
    "no-keyid": (_S, PAYLOAD_TYPE, [(_SINGLE, None), (_SECOND, None)], "AB", 2, _BOTH, True),
}  # fmt: skip


def _trust(golden: ModuleType, names: str) -> tuple[TrustedKey, ...]:
    keys = {"A": golden.KEY_A, "B": golden.KEY_B}
    return tuple(TrustedKey(name, keys[name].public, frozenset({"t"})) for name in names)


@pytest.mark.parametrize("name", _CASES)
def test_published_dsse_case(name: str, golden: ModuleType) -> None:
    payload, kind, listed, names, threshold, supported, accepted = _CASES[name]
    plain = [(s.replace("-", "+").replace("_", "/"), keyid) for s, keyid in listed]
    envelope = Envelope(
        payload, kind, tuple(Signature(base64.b64decode(s), keyid) for s, keyid in plain)
    )
    raw = bundle_bytes(envelope, "hint")
    for (standard, _), (published, _) in zip(plain, listed, strict=True):
        raw = raw.replace(standard.encode(), published.encode())
    read = decode(parse_bundle(raw))
    assert read == envelope
    policy = TrustPolicy(_trust(golden, names), threshold)
    found = unique_keys(signers(read, policy.keys)) >= policy.threshold
    assert (found and read.payload_type in supported) is accepted


@pytest.mark.parametrize(
    ("payload", "kind", "key", "expected"),
    [
        (_S, PAYLOAD_TYPE, "KEY_A", _SINGLE),
        (_S, PAYLOAD_TYPE, "KEY_B", _SECOND),
        (b"\xfb\xff\xbf\x3e\x3f", PAYLOAD_TYPE, "KEY_A", _URL_SAFE),
        (_S, "application/vnd.exämple+json", "KEY_A", _EXAMPLE),
        (b"", PAYLOAD_TYPE, "KEY_A", _EMPTY),
        (_S, "", "KEY_A", _NO_TYPE),
    ],
)
def test_signatures_equal_the_published_ones(
    golden: ModuleType, payload: bytes, kind: str, key: str, expected: str
) -> None:
    (signature,) = sign(payload, [getattr(golden, key)], kind).signatures
    assert signature.value == base64.b64decode(expected.replace("-", "+").replace("_", "/"))


def test_payload_lengths_count_bytes() -> None:
    assert pae("ä", b"\xc3") == b"DSSEv1 2 \xc3\xa4 1 \xc3"
    assert pae("", b"") == b"DSSEv1 0  0 "


@pytest.mark.programs
@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_openssl_verifies_the_signature(algorithm: Algorithm, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    assert openssl is not None
    key = generate(algorithm)
    envelope = sign(b'{"a":"\xc3\xa4"}', [key])
    (tmp_path / "pub.pem").write_bytes(key.public.pem)
    (tmp_path / "pae.bin").write_bytes(pae(envelope.payload_type, envelope.payload))
    (tmp_path / "sig.bin").write_bytes(envelope.signatures[0].value)
    if algorithm is Algorithm.ECDSA_P256:
        words = ["dgst", "-sha256", "-verify", "pub.pem", "-signature", "sig.bin", "pae.bin"]
    else:
        words = [
            "pkeyutl",
            "-verify",
            "-pubin",
            "-inkey",
            "pub.pem",
            "-rawin",
            "-in",
            "pae.bin",
            "-sigfile",
            "sig.bin",
        ]
    done = subprocess.run([openssl, *words], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "pae.bin").write_bytes(pae(envelope.payload_type, envelope.payload + b" "))
    assert subprocess.run([openssl, *words], cwd=tmp_path, capture_output=True).returncode != 0


@pytest.mark.programs
def test_key_hint_equals_the_openssl_fingerprint(tmp_path: Path) -> None:
    key = generate()
    (tmp_path / "pub.pem").write_bytes(key.public.pem)
    words = ["openssl", "pkey", "-pubin", "-in", "pub.pem", "-outform", "DER"]
    der = subprocess.run(words, cwd=tmp_path, capture_output=True, check=True).stdout
    assert der == key.public.spki


def test_raw_signature_is_not_parsed_as_der() -> None:
    key = generate(Algorithm.ECDSA_P256)
    envelope = sign(b"x", [key])
    r, s = decode_dss_signature(envelope.signatures[0].value)
    raw = r.to_bytes(32, "big") + s.to_bytes(32, "big")
    trusted = TrustedKey("k", key.public, frozenset({"t"}))
    assert signers(envelope, [trusted]) == (trusted,)
    assert signers(Envelope(b"x", PAYLOAD_TYPE, (Signature(raw),)), [trusted]) == ()


@pytest.mark.parametrize("keyid", ["", "wrong", None])
def test_keyid_is_ignored(keyid: str | None, golden: ModuleType) -> None:
    a, b = _trust(golden, "AB")
    made = sign(_S, [golden.KEY_A])
    renamed = Envelope(_S, PAYLOAD_TYPE, (Signature(made.signatures[0].value, keyid),))
    colliding = Envelope(_S, PAYLOAD_TYPE, (Signature(made.signatures[0].value, b.key.hint),))
    assert signers(renamed, [a, b]) == (a,)
    assert signers(colliding, [a, b]) == (a,)


def test_hint_is_the_digest_of_the_key_in_der(golden: ModuleType) -> None:
    key: SigningKey = golden.KEY_A
    assert len(base64.b64decode(key.public.hint)) == 32
    assert key.public.hint != golden.KEY_B.public.hint
