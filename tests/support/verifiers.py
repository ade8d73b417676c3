"""Run verifiers of other projects: Sigstore, CUE, Rego, openssl, model signing, and more.

Also actionlint and the schemas of build servers. `make tools` installs them into tests/verifiers:
packages of npm by package-lock.json, those of Python by requirements.txt into an environment of
their own.
"""

from __future__ import annotations

import base64
import json
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "verifiers"
PYTHON = FOLDER / ".venv" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a verifier: accepted or not, the payload that it read, and its output."""

    accepted: bool
    payload: bytes | None = None
    detail: str = ""


def sigstore_js(cases: Iterable[tuple[bytes, bytes]]) -> list[Answer]:
    """Verify Sigstore bundles by a public key with @sigstore/verify; cases are (PEM, bundle).

    A bundle that is not UTF-8 is decoded with replacement characters, as a program would do.
    """
    words = ["node", str(FOLDER / "sigstore_verify.cjs")]
    return _answers(_lines(words, _given("bundle", cases)))


def sigstore_dsse(cases: Iterable[tuple[bytes, bytes]]) -> list[Answer]:
    """Verify plain envelopes with the DSSE of `sigstore` of PyPI; cases are (PEM, envelope)."""
    return _dsse("sigstore", cases)


def securesystemslib_dsse(cases: Iterable[tuple[bytes, bytes]]) -> list[Answer]:
    """Verify plain envelopes with `securesystemslib` of PyPI; cases are (PEM, envelope)."""
    return _dsse("securesystemslib", cases)


def _dsse(library: str, cases: Iterable[tuple[bytes, bytes]]) -> list[Answer]:
    words: list[str | Path] = [PYTHON, FOLDER / "python_verifiers.py", "envelopes", library]
    return _answers(_lines(words, _given("envelope", cases)))


def _given(name: str, cases: Iterable[tuple[bytes, bytes]]) -> str:
    return "\n".join(
        json.dumps({"key": pem.decode(), name: data.decode("utf-8", "replace")})
        for pem, data in cases
    )


def _answers(found: Iterable[Mapping[str, Any]]) -> list[Answer]:
    return [
        Answer(
            one["accepted"],
            base64.b64decode(one["payload"]) if "payload" in one else None,
            one.get("detail", ""),
        )
        for one in found
    ]


def cue(policy: Path, documents: Sequence[Path]) -> list[Answer]:
    """Validate JSON documents by a CUE policy."""
    found = _lines(["node", FOLDER / "cue_vet.cjs", policy, *documents], "")
    return [Answer(one["accepted"], detail=one["detail"]) for one in found]


def rego(policy: Path, documents: Sequence[Path]) -> list[Answer]:
    """Evaluate `data.signature.allow` of a Rego policy for JSON documents, with regorus."""
    return [Answer(one) for one in _python("rego", str(policy), *map(str, documents))]


def rego_cpp(policy: Path, documents: Sequence[Path]) -> list[Answer]:
    """Evaluate `data.signature.allow` of a Rego policy for JSON documents, with rego-cpp."""
    return [Answer(one) for one in _python("rego_cpp", str(policy), *map(str, documents))]


def dsse_by(library: str, key: Path, envelopes: Sequence[Path]) -> list[Answer]:
    """Verify plain DSSE envelopes with `sigstore` or `securesystemslib` of PyPI."""
    found = _python(library, str(key), *map(str, envelopes))
    return [Answer(one["accepted"], detail=one["detail"]) for one in found]


def sigstore_python(bundle: Path) -> str:
    """Return the result of `sigstore` of PyPI for a bundle and a key."""
    (found,) = _python("bundle", str(bundle))
    return str(found)


def model_manifest(folder: Path) -> Mapping[str, Any]:
    """Return the manifest that `model-signing` computes of a folder: `resources`, `root`."""
    (found,) = _python("manifest", str(folder))
    assert isinstance(found, dict)
    return found


def signed_by_model_signing(folder: Path, key: Path, signature: Path) -> str:
    """Sign a folder with `model-signing`; return the digest of the subject in the signature."""
    (found,) = _python("sign_model", str(folder), str(key), str(signature))
    return str(found)


def openssl(pem: bytes, signature: bytes, message: bytes) -> bool:
    """Verify an ECDSA signature over bytes with the program openssl."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, data in (("key", pem), ("signature", signature), ("message", message)):
            (folder / name).write_bytes(data)
        words = ["dgst", "-sha256", "-verify", "key", "-signature", "signature", "message"]
        ran = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, check=False)
    return ran.returncode == 0


def actionlint(repository: Path) -> list[str]:
    """Return the findings of actionlint in the workflows and actions of a repository."""
    words = [
        str(PYTHON.parent / "actionlint"),
        "-no-color",
        "-oneline",
        "-shellcheck=",
        "-pyflakes=",
    ]
    ran = subprocess.run(words, cwd=repository, capture_output=True, text=True, check=False)
    found = ran.stdout.splitlines()
    if ran.returncode not in (0, 1) or bool(found) != (ran.returncode == 1):
        raise RuntimeError(f"actionlint: {ran.stderr[-2000:]}")
    return found


def follows_schema(name: str, document: Path) -> bool:
    """Return whether a YAML file follows a schema of check-jsonschema, such as `gitlab-ci`."""
    words = [str(PYTHON.parent / "check-jsonschema"), "--builtin-schema", f"vendor.{name}"]
    ran = subprocess.run([*words, str(document)], capture_output=True, text=True, check=False)
    if ran.returncode != 0 and "Schema validation errors" not in ran.stdout:
        raise RuntimeError(f"check-jsonschema: {ran.stdout[-1000:]}{ran.stderr[-1000:]}")
    return ran.returncode == 0


def versions() -> Mapping[str, str]:
    """Return the version of each verifier by its name."""
    locked = json.loads((FOLDER / "package-lock.json").read_bytes())["packages"]
    npm = {
        path.removeprefix("node_modules/"): record["version"]
        for path, record in locked.items()
        if path.startswith("node_modules/")
    }
    said = subprocess.run(["openssl", "version"], capture_output=True, text=True, check=True)
    (python,) = _python("versions")
    return {**npm, **python, "openssl": said.stdout.split()[1]}


def _lines(words: Sequence[str | Path], given: str) -> list[dict[str, Any]]:
    ran = subprocess.run(
        [str(word) for word in words], input=given, capture_output=True, text=True, check=False
    )
    if ran.returncode != 0:
        raise RuntimeError(f"{words[0]} {words[1]}: {ran.stderr[:2000]}")
    return [json.loads(line) for line in ran.stdout.splitlines()]


def _python(*words: str) -> list[Any]:
    ran = subprocess.run(
        [str(PYTHON), str(FOLDER / "python_verifiers.py"), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        raise RuntimeError(f"{words[0]}: {ran.stderr[-2000:]}")
    return [json.loads(line) for line in ran.stdout.splitlines()]
