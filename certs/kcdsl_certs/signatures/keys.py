"""Keys: ECDSA P-256 (default) and Ed25519, and the trust of a verifier in them.

Signature libraries differ in the encodings of points of Ed25519 (RFC 8032) that they accept. A
public key of small order makes one signature valid for many messages, and a second encoding of a
point makes one key look like two: both are rejected.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from kcdsl_certs.encoding.rejected import Rejected

_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493
"""The order of the base point."""
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT = pow(2, (_P - 1) // 4, _P)
"""A square root of -1."""

_Point = tuple[int, int, int, int]
"""Extended coordinates X, Y, Z, T: x = X/Z, y = Y/Z, x*y = T/Z."""


def refuse_weak_key(encoding: bytes) -> None:
    """Raise Rejected unless the 32 bytes are the canonical encoding of a point of large prime
    order.

    The eight points of small order are refused, and so are their sums with other points: generated
    keys are never among them.
    """
    point = _decode(encoding, "key")
    if _is_small(point):
        raise Rejected("key/small-order", "the public key is a point of small order")
    if not _is_zero(_times(_L, point)):
        raise Rejected("key/small-order", "the public key has a part of small order")


def is_strong_commitment(signature: bytes) -> bool:
    """Return whether R, the first half of a signature, is encoded canonically and not of small
    order."""
    try:
        return len(signature) == 64 and not _is_small(_decode(signature[:32], "signature"))
    except Rejected:
        return False


def _decode(encoding: bytes, what: str) -> _Point:
    if len(encoding) != 32:
        raise Rejected(f"{what}/encoding", f"{len(encoding)} bytes encode no point")
    whole = int.from_bytes(encoding, "little")
    y, odd = whole & (2**255 - 1), whole >> 255
    if y >= _P:
        raise Rejected(f"{what}/encoding", "the point is not encoded canonically")
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if x * x % _P != square:
        x = x * _ROOT % _P
    if x * x % _P != square:
        raise Rejected(f"{what}/encoding", "the bytes are no point of the curve")
    if x == 0 and odd:
        raise Rejected(f"{what}/encoding", "the point is not encoded canonically")
    if x & 1 != odd:
        x = _P - x
    return x, y, 1, x * y % _P


def _add(a: _Point, b: _Point) -> _Point:
    """Add two points; complete, so that it doubles too (RFC 8032, section 5.1.4)."""
    e = (a[1] - a[0]) * (b[1] - b[0]) % _P
    f = (a[1] + a[0]) * (b[1] + b[0]) % _P
    g = 2 * a[3] * b[3] * _D % _P
    h = 2 * a[2] * b[2] % _P
    i, j, k, m = f - e, h - g, h + g, f + e
    return i * j % _P, k * m % _P, j * k % _P, i * m % _P


def _times(factor: int, point: _Point) -> _Point:
    total: _Point = (0, 1, 1, 0)
    while factor:
        if factor & 1:
            total = _add(total, point)
        point, factor = _add(point, point), factor >> 1
    return total


def _is_zero(point: _Point) -> bool:
    return point[0] % _P == 0 and (point[1] - point[2]) % _P == 0


def _is_small(point: _Point) -> bool:
    return _is_zero(_times(8, point))


_ECDSA = ec.ECDSA(hashes.SHA256())
_LARGEST_PEM = 64 * 1024
LONGEST_VALIDITY = timedelta(days=366)
"""The default of the longest validity of a certificate."""


class Algorithm(StrEnum):
    """A signature algorithm; it always comes from the key record, never from an envelope."""

    ECDSA_P256 = "ecdsa-p256"
    ED25519 = "ed25519"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key in the canonical DER encoding of its SPKI; keys are equal if these bytes are.

    Raises Rejected for another encoding, a mismatched algorithm, and a weak point.
    """

    spki: bytes
    algorithm: Algorithm

    def __post_init__(self) -> None:
        key = _public_object(self.spki)
        if _algorithm_of(key) is not self.algorithm:
            raise Rejected("key/algorithm-mismatch", f"the key is no {self.algorithm}")
        if _spki(key) != self.spki:
            raise Rejected("key/encoding", "the key has another, canonical encoding")
        if isinstance(key, ed25519.Ed25519PublicKey):
            refuse_weak_key(key.public_bytes_raw())

    @property
    def fingerprint(self) -> str:
        """Return the sha256 of the SPKI DER in hex, its name in policies and revocations."""
        return hashlib.sha256(self.spki).hexdigest()

    @property
    def hint(self) -> str:
        """Return base64(sha256(SPKI DER)), the Sigstore hint for a managed key."""
        return base64.b64encode(hashlib.sha256(self.spki).digest()).decode("ascii")

    @property
    def keyid(self) -> str:
        """Return the OpenSSH fingerprint, `SHA256:…`, the name of the key in signatures.

        DSSE verifiers in Go (cosign, slsa-verifier) compute this fingerprint and skip a signature
        with another one.
        """
        line = _public_object(self.spki).public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
        return f"SHA256:{base64.b64encode(digest).decode('ascii').rstrip('=')}"

    @property
    def pem(self) -> bytes:
        """Return the PEM text."""
        body = base64.encodebytes(self.spki).replace(b"\n", b"")
        lines = [body[i : i + 64] for i in range(0, len(body), 64)]
        head, tail = b"-----BEGIN PUBLIC KEY-----", b"-----END PUBLIC KEY-----"
        return b"\n".join([head, *lines, tail, b""])

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Return whether the signature (ECDSA: ASN.1 DER) of the message was made by this key."""
        key = _public_object(self.spki)
        try:
            match key:
                case ec.EllipticCurvePublicKey():
                    key.verify(signature, message, _ECDSA)
                case _:
                    key.verify(signature, message)
                    return is_strong_commitment(signature)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key with its public half."""

    private: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
    public: PublicKey

    def sign(self, message: bytes) -> bytes:
        """Return the signature: ASN.1 DER for ECDSA, 64 bytes for Ed25519."""
        match self.private:
            case ec.EllipticCurvePrivateKey():
                return self.private.sign(message, _ECDSA)
            case _:
                return self.private.sign(message)

    def to_pem(self, password: bytes | None = None) -> bytes:
        """Return the PKCS#8 PEM text, encrypted if a password is given."""
        guard: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if password is not None:
            guard = serialization.BestAvailableEncryption(password)
        return self.private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, guard
        )


def generate(algorithm: Algorithm = Algorithm.ECDSA_P256) -> SigningKey:
    """Generate a new key."""
    match algorithm:
        case Algorithm.ECDSA_P256:
            return _signing_key(ec.generate_private_key(ec.SECP256R1()))
        case Algorithm.ED25519:
            return _signing_key(ed25519.Ed25519PrivateKey.generate())


def load_private(pem: bytes, password: bytes | None = None) -> SigningKey:
    """Read a private key from PEM; raises Rejected with a `key/…` reason where that fails."""
    _refuse_large(pem)
    try:
        key = serialization.load_pem_private_key(pem, password)
    except TypeError as error:
        reason = "key/password-missing" if password is None else "key/password-superfluous"
        raise Rejected(reason, str(error)) from None
    except (ValueError, UnsupportedAlgorithm) as error:
        if password is not None and b"ENCRYPTED" in pem:
            raise Rejected("key/password-wrong", "the password does not open this key") from None
        raise Rejected("key/unreadable", f"not a PEM private key ({error})") from None
    return _signing_key(key)


def load_public(pem: bytes) -> PublicKey:
    """Read a public key from PEM; raises Rejected with a `key/…` reason where that fails."""
    _refuse_large(pem)
    if b"PRIVATE KEY" in pem:
        raise Rejected("key/private-given", "this is a private key; give the public one (.pub)")
    if pem.count(b"-----BEGIN") > 1:
        raise Rejected("key/several", "the file holds more than one key; give one file per key")
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise Rejected("key/unreadable", f"not a PEM public key ({error})") from None
    return _public_key(key)


def _refuse_large(pem: bytes) -> None:
    if len(pem) > _LARGEST_PEM:
        raise Rejected("key/unreadable", f"{len(pem)} bytes is no PEM key")


def _signing_key(key: object) -> SigningKey:
    match key:
        case ec.EllipticCurvePrivateKey() | ed25519.Ed25519PrivateKey():
            return SigningKey(key, _public_key(key.public_key()))
        case _:
            raise Rejected("key/unsupported", _SUPPORTED)


def _public_key(key: object) -> PublicKey:
    return PublicKey(_spki(key), _algorithm_of(key))


_SUPPORTED = "only ECDSA on P-256 and Ed25519 keys are supported"

_PublicObject = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey


def _algorithm_of(key: object) -> Algorithm:
    match key:
        case ec.EllipticCurvePublicKey() if isinstance(key.curve, ec.SECP256R1):
            return Algorithm.ECDSA_P256
        case ed25519.Ed25519PublicKey():
            return Algorithm.ED25519
        case _:
            raise Rejected("key/unsupported", _SUPPORTED)


def _spki(key: object) -> bytes:
    if not isinstance(key, _PublicObject):
        raise Rejected("key/unsupported", _SUPPORTED)
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _public_object(spki: bytes) -> _PublicObject:
    try:
        key = serialization.load_der_public_key(spki)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise Rejected("key/unreadable", f"not an SPKI public key ({error})") from None
    if not isinstance(key, _PublicObject):
        raise Rejected("key/unsupported", _SUPPORTED)
    return key


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A key with what it may sign; none of it comes from an envelope.

    `stages` None allows every stage; `valid_from` and `valid_until` None leave the window open.
    """

    name: str
    key: PublicKey
    predicate_types: frozenset[str]
    stages: frozenset[str] | None = None
    valid_from: datetime | None = None
    valid_until: datetime | None = None

    def is_valid_at(self, moment: datetime) -> bool:
        """Return whether the key may be used at this time; the end is exclusive."""
        if self.valid_from is not None and moment < self.valid_from:
            return False
        return self.valid_until is None or moment < self.valid_until


@dataclass(frozen=True, slots=True)
class Rules:
    """The trusted keys, the required number of distinct signers, and further conditions.

    `max_validity` limits the time from issue to the end of a certificate. `revoked_certificates`
    are identifiers of certificates, `revoked_keys` fingerprints of keys, both sha256 in hex. Of the
    parts of kernel fingerprints (`triple.PARTS`), `relaxed_parts` may differ from the expected
    ones, and `required_parts` must be present. With `refuse_suppressions`, a contract with accepted
    findings is refused.
    """

    keys: tuple[TrustedKey, ...] = ()
    threshold: int = 1
    max_validity: timedelta = LONGEST_VALIDITY
    revoked_certificates: frozenset[str] = frozenset()
    revoked_keys: frozenset[str] = frozenset()
    refuse_suppressions: bool = False
    relaxed_parts: frozenset[str] = frozenset()
    required_parts: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TrustPolicy(Rules):
    """Valid rules: distinct keys, and a threshold that they can meet."""

    def __post_init__(self) -> None:
        distinct = {k.key.spki for k in self.keys}
        if len(distinct) != len(self.keys):
            raise Rejected("policy/duplicate-key", "the same public key is listed twice")
        if self.threshold < 1:
            raise Rejected("policy/threshold", f"a threshold of {self.threshold} accepts anything")
        if self.threshold > len(distinct):
            raise Rejected(
                "policy/threshold",
                f"the threshold is {self.threshold}, the number of trusted keys {len(distinct)}",
            )


def unique_keys(keys: Iterable[TrustedKey]) -> int:
    """Count distinct public keys, compared by their SPKI DER bytes."""
    return len({k.key.spki for k in keys})
