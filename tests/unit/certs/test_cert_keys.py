"""Key files and trust policies."""

from __future__ import annotations

import base64
from datetime import timedelta
from types import ModuleType

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import parse_time
from kcdsl_certs.signatures import (
    Algorithm,
    PublicKey,
    TrustedKey,
    TrustPolicy,
    generate,
    load_private,
    load_public,
)
from kcdsl_certs.signatures.keys import refuse_weak_key

_KINDS = frozenset({"t"})


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> tuple[bytes, bytes]:
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private, public


@pytest.mark.parametrize("algorithm", list(Algorithm))
@pytest.mark.parametrize("password", [None, "gehe\u0131m".encode()])
def test_keys_survive_a_round_trip(algorithm: Algorithm, password: bytes | None) -> None:
    key = generate(algorithm)
    again = load_private(key.to_pem(password), password)
    assert again.public == key.public == load_public(key.public.pem)
    assert key.public.algorithm is algorithm
    assert again.public.verifies(again.sign(b"m"), b"m")
    assert not again.public.verifies(again.sign(b"m"), b"n")


def test_invalid_private_keys_are_refused() -> None:
    plain, locked = generate().to_pem(), generate().to_pem(b"right")
    cases: list[tuple[bytes, bytes | None, str]] = [
        (b"", None, "key/unreadable"),
        (b"hello", None, "key/unreadable"),
        (plain[:60], None, "key/unreadable"),
        (generate().public.pem, None, "key/unreadable"),
        (locked, None, "key/password-missing"),
        (locked, b"wrong", "key/password-wrong"),
        (plain, b"right", "key/password-superfluous"),
        (plain + b"x" * 100_000, None, "key/unreadable"),
        (_pem(ec.generate_private_key(ec.SECP384R1()))[0], None, "key/unsupported"),
        (_pem(rsa.generate_private_key(65537, 1024))[0], None, "key/unsupported"),
    ]
    for pem, password, reason in cases:
        with pytest.raises(Rejected) as caught:
            load_private(pem, password)
        assert caught.value.reason == reason


def test_invalid_public_keys_are_refused() -> None:
    one = generate().public.pem
    cases = [
        (b"", "key/unreadable"),
        (one[:50], "key/unreadable"),
        (generate().to_pem(), "key/private-given"),
        (one + generate().public.pem, "key/several"),
        (_pem(ec.generate_private_key(ec.SECP384R1()))[1], "key/unsupported"),
        (_pem(rsa.generate_private_key(65537, 1024))[1], "key/unsupported"),
    ]
    for pem, reason in cases:
        with pytest.raises(Rejected) as caught:
            load_public(pem)
        assert caught.value.reason == reason


def test_algorithm_of_a_record_must_match_the_key() -> None:
    key = generate(Algorithm.ED25519).public
    with pytest.raises(Rejected, match="key/algorithm-mismatch"):
        PublicKey(key.spki, Algorithm.ECDSA_P256)
    with pytest.raises(Rejected, match="key/unreadable"):
        PublicKey(b"\0" * 44, Algorithm.ED25519)


def test_key_in_another_encoding_or_of_another_kind_is_refused() -> None:
    curve = ec.generate_private_key(ec.SECP256R1()).public_key()
    point = curve.public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    )
    header = bytes.fromhex("3039301306072a8648ce3d020106082a8648ce3d030107032200")
    assert serialization.load_der_public_key(header + point) == curve
    with pytest.raises(Rejected, match="key/encoding: the key has another"):
        PublicKey(header + point, Algorithm.ECDSA_P256)
    other = rsa.generate_private_key(65537, 1024).public_key()
    spki = other.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for algorithm in Algorithm:
        with pytest.raises(Rejected, match="key/unsupported"):
            PublicKey(spki, algorithm)


@pytest.mark.parametrize(
    ("point", "words"),
    [
        # of mixed order: test vectors of Chalkias et al., "Taming the many EdDSAs", 2020
        (
            "cdb267ce40c5cd45306fa5d2f29731459387dbf9eb933b7bd5aed9a765b88d4d",
            "small-order: the public key has a part",
        ),
        ("03" + 31 * "00", "small-order: the public key has a part"),
        # the neutral element, with which anyone can sign, and its other encodings
        ("01" + 31 * "00", "small-order: the public key is a point"),
        ("01" + 30 * "00" + "80", "encoding: the point is not encoded canonically"),
        ("ee" + 30 * "ff" + "7f", "encoding: the point is not encoded canonically"),
        # points of order 2 and 4
        ("ec" + 30 * "ff" + "7f", "small-order: the public key is a point"),
        (32 * "00", "small-order: the public key is a point"),
        ("02" + 31 * "00", "encoding: the bytes are no point of the curve"),
        ("02" + 30 * "00" + "80", "encoding: the bytes are no point of the curve"),
    ],
)
def test_weak_ed25519_key_is_refused(point: str, words: str) -> None:
    spki = bytes.fromhex("302a300506032b6570032100" + point)
    with pytest.raises(Rejected, match=f"key/{words}"):
        PublicKey(spki, Algorithm.ED25519)
    pem = b"-----BEGIN PUBLIC KEY-----\n" + base64.encodebytes(spki) + b"-----END PUBLIC KEY-----\n"
    with pytest.raises(Rejected, match=f"key/{words}"):
        load_public(pem)


def test_point_has_32_bytes() -> None:
    raw = generate(Algorithm.ED25519).public.spki[-32:]
    refuse_weak_key(raw)
    for encoding in (b"", raw[:31], raw + b"\0"):
        with pytest.raises(Rejected, match=r"key/encoding: .* bytes encode no point"):
            refuse_weak_key(encoding)


@pytest.mark.parametrize("threshold", [0, -1, 2, 100])
def test_zero_and_unreachable_thresholds_are_refused(threshold: int) -> None:
    key = TrustedKey("k", generate().public, _KINDS)
    with pytest.raises(Rejected, match="policy/threshold"):
        TrustPolicy((key,), threshold)


def test_policy_with_no_key_or_duplicate_keys_is_refused() -> None:
    key = generate().public
    with pytest.raises(Rejected, match="policy/threshold"):
        TrustPolicy(())
    with pytest.raises(Rejected, match="policy/duplicate-key"):
        TrustPolicy((TrustedKey("a", key, _KINDS), TrustedKey("b", key, _KINDS)), 2)


def test_end_of_validity_is_exclusive(golden: ModuleType) -> None:
    start, end = parse_time("2026-01-01T00:00:00Z"), parse_time("2026-02-01T00:00:00Z")
    key = TrustedKey("k", golden.KEY_A.public, _KINDS, None, start, end)
    second = timedelta(seconds=1)
    assert [key.is_valid_at(t) for t in (start - second, start, end - second, end)] == [
        False, True, True, False,
    ]  # fmt: skip
