"""Verifiers of PyPI, run in a separate environment; each answer is a line of JSON.

Run by tests/support/verifiers.py. Imports nothing of kcdsl.
"""

# mypy: ignore-errors
# Its libraries are not in the environment that mypy sees.

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def rego(policy: str, *documents: str) -> list[Any]:
    """Evaluate a policy as cosign does: version 0 of the language, `data.signature.allow`."""
    from hobofan_regorus import Engine

    found = []
    for document in documents:
        engine = Engine()
        engine.add_policy("policy.rego", Path(policy).read_text())
        engine.set_input_json(Path(document).read_text())
        (result,) = engine.eval_query("data.signature.allow")["result"]
        found.append(result["expressions"][0]["value"] is True)
    return found


def rego_cpp(policy: str, *documents: str) -> list[Any]:
    """Evaluate a policy as `rego` does, with rego-cpp."""
    from regopy import Interpreter

    found = []
    for document in documents:
        engine = Interpreter()
        engine.add_module("policy.rego", Path(policy).read_text())
        engine.set_input_term(Path(document).read_text())
        found.append(str(engine.query("data.signature.allow")) == '{"expressions":[true]}')
    return found


def sigstore(key: str, *envelopes: str) -> list[Any]:
    """Verify envelopes with the DSSE of `sigstore`, below its verifier, which knows no keys."""
    pem = Path(key).read_bytes()
    return [_tried(lambda path=path: _by_sigstore(pem, _text(path))) for path in envelopes]


def securesystemslib(key: str, *envelopes: str) -> list[Any]:
    """Verify envelopes with `securesystemslib`, one signature needed; it skips other key ids."""
    pem = Path(key).read_bytes()
    return [_tried(lambda path=path: _by_securesystemslib(pem, _text(path))) for path in envelopes]


def _text(path: str) -> str:
    return Path(path).read_text()


def _by_sigstore(pem: bytes, envelope: str) -> bytes:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from sigstore import dsse

    return dsse._verify(load_pem_public_key(pem), dsse.Envelope._from_json(envelope))


def _by_securesystemslib(pem: bytes, envelope: str) -> bytes:
    import base64

    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        load_pem_public_key,
        ssh_key_fingerprint,
    )
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey

    loaded = load_pem_public_key(pem)
    fingerprint = base64.b64encode(ssh_key_fingerprint(loaded, SHA256())).decode().rstrip("=")
    public = SSlibKey.from_crypto(loaded, f"SHA256:{fingerprint}")
    read = Envelope.from_dict(json.loads(envelope))
    read.verify([public], 1)
    return read.payload


def envelopes(library: str) -> list[Any]:
    """Verify envelopes with the DSSE of a library; lines of the input are {"key", "envelope"}."""
    import base64

    verify = {"sigstore": _by_sigstore, "securesystemslib": _by_securesystemslib}[library]
    found = []
    for line in sys.stdin:
        case = json.loads(line)
        answer: dict[str, Any] = {"accepted": False}
        try:
            payload = verify(case["key"].encode(), case["envelope"])
            answer = {"accepted": True, "payload": base64.b64encode(payload).decode()}
        except Exception as error:
            answer["detail"] = type(error).__name__
        found.append(answer)
    return found


def bundle(path: str) -> list[Any]:
    """Read a bundle; return the text of the rejection."""
    from sigstore.models import Bundle

    return [_tried(lambda: Bundle.from_json(Path(path).read_text()))["detail"]]


def manifest(folder: str) -> list[Any]:
    """Hash a folder with `model-signing`, method files, nothing ignored."""
    import hashlib

    from model_signing import hashing

    config = hashing.Config().set_ignored_paths(paths=[], ignore_git_paths=False)
    listed = list(config.hash(Path(folder)).resource_descriptors())
    root = hashlib.sha256(b"".join(one.digest.digest_value for one in listed)).hexdigest()
    return [{"resources": [[o.identifier, o.digest.digest_hex] for o in listed], "root": root}]


def sign_model(folder: str, key: str, signature: str) -> list[Any]:
    """Sign a folder with `model-signing`; return the sha256 of the subject that it signed."""
    import base64

    import model_signing

    config = model_signing.signing.Config().use_elliptic_key_signer(private_key=Path(key))
    hashed = model_signing.hashing.Config().set_ignored_paths(paths=[], ignore_git_paths=False)
    config.set_hashing_config(hashed).sign(Path(folder), Path(signature))
    envelope = json.loads(Path(signature).read_text())["dsseEnvelope"]
    statement = json.loads(base64.b64decode(envelope["payload"]))
    return [statement["subject"][0]["digest"]["sha256"]]


def versions() -> list[Any]:
    """Return the versions of the packages."""
    names = ("sigstore", "securesystemslib", "model-signing", "hobofan-regorus", "regopy")
    return [{name: version(name) for name in names}]


def _tried(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        work()
    except Exception as error:
        return {"accepted": False, "detail": f"{type(error).__name__}: {error}"[:200]}
    return {"accepted": True, "detail": ""}


ASKED = {
    one.__name__: one
    for one in (
        *(rego, rego_cpp, sigstore, securesystemslib, envelopes),
        *(bundle, manifest, sign_model, versions),
    )
}

if __name__ == "__main__":
    for line in ASKED[sys.argv[1]](*sys.argv[2:]):
        print(json.dumps(line))
