"""Write the golden and tampered certificates of certs/vectors; deterministic.

Run `python -m tests.support.vectors.make` after a change of the format. The keys are the public
test keys of RFC 8032 (Ed25519 signatures are deterministic); they protect nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kcdsl_certs.statement import certificate_id, payload_bytes
from tests.support.vectors.building import Vector, certificate
from tests.support.vectors.claims import freshness, results, triples
from tests.support.vectors.envelopes import envelopes, statements, valid
from tests.support.vectors.golden import (
    AT,
    DATA_NAME,
    KEY_A,
    KEY_B,
    PROOF_NAME,
    WEIGHTS_NAME,
    data,
    documents,
    expectation,
    fewer,
    predicate,
    proof,
    report,
    weights,
)

HERE = Path(__file__).resolve().parents[3] / "certs" / "vectors"


def vectors(folder: Path) -> list[Vector]:
    """Return every vector."""
    body = predicate(folder)
    golden = certificate(body)
    return [
        *valid(body, golden),
        *envelopes(body, golden),
        *statements(body),
        *triples(body),
        *results(body),
        *freshness(body, golden),
    ]


def build(folder: Path) -> dict[str, bytes]:
    """Return every file of the vectors; the weights are read from `folder`."""
    body = predicate(folder)
    files = {
        PROOF_NAME: proof(),
        DATA_NAME: data(),
        **dict(documents().values()),
        "fewer.report.json": report(fewer()[1:]),
        "a.pub": KEY_A.public.pem,
        "b.pub": KEY_B.public.pem,
        "revoked-certificate.toml": _revoked("certificates", certificate_id(payload_bytes(body))),
        "revoked-key.toml": _revoked("keys", KEY_B.public.fingerprint),
        "expectation.json": _json(expectation(folder).to_json()),
    }
    index: list[dict[str, Any]] = []
    for vector in vectors(folder):
        name = f"{vector.name}.cert.json"
        files[name] = vector.data
        index.append(
            {
                "file": name,
                "description": vector.description,
                "expect": "invalid" if vector.reason else "valid",
                "step": vector.step,
                "reason": vector.reason,
                "options": {"keys": ["a.pub"], "threshold": 1, "at": AT, **vector.options},
            }
        )
    files["index.json"] = _json({"schema": "kcdsl.vectors/1", "vectors": index})
    return files


def _revoked(what: str, digest: str) -> bytes:
    return f'revoked-{what} = ["{digest}"]\n'.encode()


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n"


def main(arguments: Sequence[str]) -> int:
    """Write the files into certs/vectors, or into the folder that is given."""
    folder = Path(arguments[0]) if arguments else HERE
    (folder / WEIGHTS_NAME).write_bytes(weights())
    for name, content in build(folder).items():
        (folder / name).write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
