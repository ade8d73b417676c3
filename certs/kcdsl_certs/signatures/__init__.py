"""Signatures: keys, envelopes, and the trust policy of the verifier."""

from kcdsl_certs.signatures.envelope import (
    LARGEST_BUNDLE,
    MOST_SIGNATURES,
    PAYLOAD_TYPE,
    Envelope,
    Signature,
    bundle_bytes,
    decode,
    envelope_bytes,
    pae,
    parse_bundle,
    sign,
    signers,
)
from kcdsl_certs.signatures.keys import (
    Algorithm,
    PublicKey,
    Rules,
    SigningKey,
    TrustedKey,
    TrustPolicy,
    generate,
    load_private,
    load_public,
    unique_keys,
)
from kcdsl_certs.signatures.policy import Policy, Trust, load_key, read_policy, trust

__all__ = [
    "LARGEST_BUNDLE", "MOST_SIGNATURES", "PAYLOAD_TYPE", "Algorithm", "Envelope", "Policy",
    "PublicKey", "Rules", "Signature", "SigningKey", "Trust", "TrustPolicy", "TrustedKey",
    "bundle_bytes", "decode", "envelope_bytes", "generate", "load_key", "load_private",
    "load_public", "pae", "parse_bundle", "read_policy", "sign", "signers", "trust", "unique_keys",
]  # fmt: skip
