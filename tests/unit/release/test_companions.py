"""`kcdsl companions`: signed statements about an image, only after a successful check."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal, codes
from kcdsl.release import companions
from kcdsl.release.register import Register
from kcdsl_certs.encoding.strict import canonical_json
from kcdsl_certs.signatures import (
    SigningKey,
    TrustedKey,
    TrustPolicy,
    bundle_bytes,
    decode,
    load_private,
    pae,
    parse_bundle,
    sign,
    signers,
)
from kcdsl_certs.signatures.policy import ROLES
from kcdsl_certs.verification.report import Combined, Report

Cli = Callable[..., Any]
DIGEST = "ab" * 32
IMAGE = f"registry.example:5000/llm/tiny@sha256:{DIGEST}"
AT = datetime(2026, 12, 1, tzinfo=UTC)


@pytest.fixture
def companion(
    cli: Cli, folder: Path, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Return a function that runs `kcdsl companions` while the certificate is valid."""
    monkeypatch.setattr("kcdsl.api.certificates.moment_of", lambda text: AT)
    monkeypatch.setattr("kcdsl.release.issue.utc_now", lambda: AT)

    def run(
        *words: str,
        image: str = IMAGE,
        sign: tuple[str, ...] = ("kcdsl.key",),
        certificates: tuple[Path, ...] = (certificate,),
    ) -> Any:
        keys = [word for name in sign for word in ("--sign", name)]
        trusted = ("--key", "kcdsl.key.pub", "-o", "made")
        given = ("--image", image) if image else ()
        return cli("companions", *certificates, *given, *trusted, *keys, *words, cwd=folder)

    return run


def _payload(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_bytes())
    found = json.loads(base64.b64decode(document.get("dsseEnvelope", document)["payload"]))
    assert isinstance(found, dict)
    return found


def test_each_form_has_one_signed_file_per_key(
    companion: Callable[..., Any], cli: Cli, folder: Path, key: SigningKey, follows: Any
) -> None:
    assert cli("keygen", "-o", "two.key", cwd=folder).code == 0
    ran = companion(sign=("kcdsl.key", "two.key"))
    assert ran.code == 0, ran.stderr
    two = load_private((folder / "two.key").read_bytes())
    made = folder / "made"
    for signer in (key, two):
        mark = signer.public.fingerprint[:8]
        bundles = [made / f"tiny.{mark}.{kind}.sigstore.json" for kind in ("image", "svr")]
        plain = [made / f"tiny.{mark}.image.att", made / f"tiny.{mark}.vsa.json"]
        for path in bundles:
            envelope = decode(parse_bundle(path.read_bytes()))
            assert len(envelope.signatures) == 1
            both = [TrustedKey(k.public.hint, k.public, frozenset()) for k in (key, two)]
            assert [k.key for k in signers(envelope, both)] == [signer.public]
        for path in plain:
            record = json.loads(path.read_bytes())
            (signature,) = record["signatures"]
            message = pae(record["payloadType"], base64.b64decode(record["payload"]))
            assert signer.public.verifies(base64.b64decode(signature["sig"]), message)
            assert signature["keyid"] == signer.public.keyid
        for path in (*bundles, *plain):
            (subject,) = _payload(path)["subject"]
            assert subject == {
                "name": "registry.example:5000/llm/tiny",
                "digest": {"sha256": DIGEST},
            }
        statement = _payload(bundles[0])
        follows(statement, "urn:kcdsl:schema:certified-image:v0.1")
        assert statement == _payload(plain[0])
        assert statement["predicate"]["validUntil"] == "2027-02-28T12:00:00Z"
        summary, simple = _payload(plain[1]), _payload(bundles[1])
        levels = ["KCDSL_CONTRACT_KEPT", "KCDSL_STAGE_OFFLINE_CI"]
        assert summary["predicateType"] == companions.VSA_TYPE
        assert summary["predicate"]["verificationResult"] == "PASSED"
        assert summary["predicate"]["resourceUri"] == f"oci://{IMAGE}"
        assert summary["predicate"]["verifiedLevels"] == levels
        assert simple["predicateType"] == companions.SVR_TYPE
        assert simple["predicate"]["properties"] == levels
    assert {path.name for path in made.iterdir()} >= {"tiny.policy.rego", "tiny.policy.cue"}


def test_invalid_certificate_gets_no_companion(companion: Callable[..., Any], folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    ran = companion()
    assert ran.code == 4
    assert "triple/checkpoint-mismatch" in ran.stdout
    assert not (folder / "made").exists()


def test_revoked_certificate_gets_no_companion(
    companion: Callable[..., Any], folder: Path, certificate: Path, key: SigningKey
) -> None:
    place = folder / "r.db"
    trusted = TrustPolicy(keys=(TrustedKey("key", key.public, frozenset(ROLES.values())),))
    with Register.open(place, create=True, clock=lambda: AT) as register:
        (found,) = register.record_certificates([certificate.read_bytes()], trusted)
        assert companion("--register", str(place)).code == 0
        shutil.rmtree(folder / "made")
        register.revoke(found.identity, "wrong data")
    ran = companion("--register", str(place))
    assert ran.code == 4
    assert "register/revoked" in ran.stdout
    assert not (folder / "made").exists()


def test_partial_certificate_gets_no_companion(companion: Callable[..., Any], folder: Path) -> None:
    text = (folder / "contract.yaml").read_text()
    more = "  S-TOP1: {require: mean(top1_overlap) >= 0.5, slices: [all], level: L2}\n"
    (folder / "contract.yaml").write_text(text + more)
    assert companion().code == 4
    assert not (folder / "made").exists()


@pytest.mark.parametrize(
    "image",
    [
        "",
        "llm/tiny:v1",
        f"llm/tiny:v1@sha256:{DIGEST}",
        f"LLM tiny@sha256:{DIGEST}",
        f"llm/../tiny@sha256:{DIGEST}",
        f"llm/tiny@sha256:{DIGEST.upper()}",
        f"llm/tiny@sha256:{DIGEST}\n",
        f"llm/tiny@sha512:{DIGEST * 2}",
        f"oci://llm/tiny@sha256:{DIGEST}",
    ],
)
def test_image_must_be_named_by_digest(
    image: str, companion: Callable[..., Any], folder: Path
) -> None:
    ran = companion(image=image)
    assert (ran.code, (folder / "made").exists()) == (2, False)
    assert "NAME@sha256:DIGEST" in ran.stderr


def test_nothing_is_written_without_a_key(companion: Callable[..., Any], folder: Path) -> None:
    ran = companion(sign=())
    assert (ran.code, (folder / "made").exists()) == (2, False)
    assert "--sign KEY" in ran.stderr


def test_certificates_of_two_stages_get_no_companion(
    companion: Callable[..., Any], folder: Path, certificate: Path, key: SigningKey
) -> None:
    document = json.loads(decode(parse_bundle(certificate.read_bytes())).payload)
    document["predicate"]["stage"] = "shadow"
    other = sign(canonical_json(document), [key])
    (folder / "out" / "shadow.cert.json").write_bytes(bundle_bytes(other, key.public.hint))
    ran = companion(certificates=(certificate, folder / "out" / "shadow.cert.json"))
    assert (ran.code, (folder / "made").exists()) == (2, False)
    assert "the certificates are of several stages: offline-ci, shadow" in ran.stderr


def test_transfer_gets_no_companion() -> None:
    checked = Combined((("moved.json", Report((), steps=())),), complete=True)
    with pytest.raises(Refusal, match=r"moved\.json is a weights transfer") as refused:
        companions.ValidCertificates.of(checked, AT, rechecked=True)
    assert refused.value.diagnostics[0].code is codes.CANNOT_SIGN


def test_rejected_certificates_get_no_companion() -> None:
    with pytest.raises(ValueError, match="whole contract"):
        companions.ValidCertificates.of(Combined((), complete=True), AT, rechecked=True)
