"""Certificates and companions, valid and changed, read by verifiers of other projects."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key, ssh_key_fingerprint

from kcdsl_certs.signatures import bundle_bytes, generate, pae, sign
from kcdsl_certs.statement import build_manifest
from tests.support import release_scenes, verifiers
from tests.support.release_scenes import Released

pytestmark = pytest.mark.programs


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Released:
    """Return a certificate and its companions, by two keys."""
    return release_scenes.released(tmp_path_factory.mktemp("released"))


def _signature(envelope: dict[str, Any]) -> tuple[bytes, bytes]:
    message = pae(envelope["payloadType"], base64.b64decode(envelope["payload"]))
    return base64.b64decode(envelope["signatures"][0]["sig"]), message


def test_sigstore_verifies_each_bundle_by_its_own_key_only(released: Released) -> None:
    other = generate().public.pem
    for path, key in released.bundles:
        right, wrong = verifiers.sigstore_js(
            [(key.public.pem, path.read_bytes()), (other, path.read_bytes())]
        )
        assert right.accepted, (path.name, right.detail)
        assert not wrong.accepted


def test_sigstore_rejects_bundles_with_two_signatures(released: Released) -> None:
    payload = b'{"_type":"https://in-toto.io/Statement/v1"}'
    bundle = bundle_bytes(sign(payload, released.keys), released.keys[0].public.hint)
    for key in released.keys:
        (answer,) = verifiers.sigstore_js([(key.public.pem, bundle)])
        assert not answer.accepted


@pytest.mark.parametrize("library", ["sigstore", "securesystemslib"])
def test_python_libraries_verify_plain_envelopes(library: str, released: Released) -> None:
    for key in released.keys:
        own = [path for path, by in released.envelopes if by is key]
        others = [path for path, by in released.envelopes if by is not key]
        public = released.folder / f"{key.public.fingerprint[:8]}.pub"
        public.write_bytes(key.public.pem)
        assert [a.accepted for a in verifiers.dsse_by(library, public, own)] == [True, True]
        assert [a.accepted for a in verifiers.dsse_by(library, public, others)] == [False, False]


def test_openssl_verifies_the_signed_bytes(released: Released) -> None:
    for path, key in released.envelopes:
        signature, message = _signature(json.loads(path.read_bytes()))
        assert verifiers.openssl(key.public.pem, signature, message)
        assert not verifiers.openssl(key.public.pem, signature, message + b" ")


def test_sigstore_python_rejects_bundles_with_a_key(released: Released) -> None:
    path, _ = released.bundles[0]
    assert verifiers.sigstore_python(path) == "InvalidBundle: expected certificate in bundle"


def test_key_id_is_the_openssh_fingerprint(released: Released) -> None:
    for key in released.keys:
        loaded = load_der_public_key(key.public.spki)
        assert isinstance(loaded, EllipticCurvePublicKey)
        digest = base64.b64encode(ssh_key_fingerprint(loaded, SHA256())).decode()
        assert key.public.keyid == f"SHA256:{digest.rstrip('=')}"


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, tuple[Change, bool]] = {
    "verdict": (lambda s: s["predicate"].update(verdict="FAILED"), False),
    "verdict absent": (lambda s: s["predicate"].pop("verdict"), False),
    "stage": (lambda s: s["predicate"].update(stage="canary"), False),
    "stage absent": (lambda s: s["predicate"].pop("stage"), False),
    "contract": (
        lambda s: s["predicate"]["contract"].update(digest={"sha256": "0" * 64}),
        False,
    ),
    "contract absent": (lambda s: s["predicate"].pop("contract"), False),
    "levels": (lambda s: s["predicate"].update(levels=["KCDSL_STAGE_OFFLINE_CI"]), False),
    "levels absent": (lambda s: s["predicate"].pop("levels"), False),
    "no certificate": (lambda s: s["predicate"].update(certificates=[]), False),
    "type": (lambda s: s.update(predicateType="urn:other"), False),
    "two subjects": (lambda s: s["subject"].append(s["subject"][0]), False),
    "no subject": (lambda s: s.update(subject=[]), False),
    "validity absent": (lambda s: s["predicate"].pop("validUntil"), False),
    "expired": (lambda s: s["predicate"].update(validUntil="2025-01-01T00:00:00Z"), True),
    "not yet": (lambda s: s["predicate"].update(issuedAt="2125-01-01T00:00:00Z"), True),
}
"""Changes of a statement that a policy must reject; true if the rejection needs a clock."""


def test_policies_accept_the_statement_and_reject_every_change(
    released: Released, tmp_path: Path
) -> None:
    statement = released.image_statement
    paths = []
    for number, change in enumerate([None, *CHANGES.values()]):
        changed = copy.deepcopy(statement)
        if change is not None:
            change[0](changed)
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(changed))
    by_rego = [a.accepted for a in verifiers.rego(released.policy("rego"), paths)]
    by_cue = [a.accepted for a in verifiers.cue(released.policy("cue"), paths)]
    assert by_rego == [True, *(False for _ in CHANGES)]
    assert by_cue == [True, *(needs_clock for _, needs_clock in CHANGES.values())]


FILES = {"B": b"1", "a/b": b"2", "a-b": b"3", "a.b": b"4", ".git/x": b"5", "ä/ö": b"6"}


def test_manifests_equal_those_of_model_signing(tmp_path: Path, released: Released) -> None:
    tree = tmp_path / "tree"
    for name, data in FILES.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    ours, theirs = build_manifest(tree), verifiers.model_manifest(tree)
    assert [[r.name, r.sha256] for r in ours.resources] == theirs["resources"]
    assert ours.root_digest == theirs["root"]
    key = tmp_path / "model.key"
    key.write_bytes(released.keys[0].to_pem())
    assert verifiers.signed_by_model_signing(tree, key, tmp_path / "model.sig") == ours.root_digest
