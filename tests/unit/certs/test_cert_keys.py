"""Key files and trust policies."""

from __future__ import annotations

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
