"""Certificates in a real registry: Debian's docker-registry, which has no referrers API."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.support import release_scenes
from tests.support.commands import run_here

pytestmark = pytest.mark.programs
CONFIGURATION = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: 127.0.0.1:{port}}}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Start a registry and return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "registry.yml").write_text(
        CONFIGURATION.format(folder=tmp_path / "storage", port=port)
    )
    command = ["docker-registry", "serve", str(tmp_path / "registry.yml")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        try:
            for _ in range(200):
                try:
                    urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield f"localhost:{port}"
        finally:
            child.terminate()


def _blob(layout: Path, data: bytes) -> dict[str, Any]:
    sha256 = hashlib.sha256(data).hexdigest()
    (layout / "blobs" / "sha256" / sha256).write_bytes(data)
    return {"digest": f"sha256:{sha256}", "size": len(data)}


def _image(folder: Path) -> str:
    """Write an image in the OCI layout and return the digest of its manifest."""
    (folder / "blobs" / "sha256").mkdir(parents=True)
    config = {"mediaType": "application/vnd.oci.image.config.v1+json"}
    config |= _blob(
        folder, b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}'
    )
    kind = "application/vnd.oci.image.manifest.v1+json"
    document = {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": []}
    manifest = {"mediaType": kind, **_blob(folder, json.dumps(document).encode())}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return str(manifest["digest"])


def _skopeo(*words: str) -> str:
    command = ["skopeo", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_attached_certificates_are_checked_and_read_by_another_client(
    registry: str, tmp_path: Path
) -> None:
    (tmp_path / "made").mkdir()
    released = release_scenes.released(tmp_path / "made")
    digest, name = _image(tmp_path / "layout"), f"{registry}/llm/tiny"
    source, target = f"oci:{tmp_path / 'layout'}", f"docker://{name}:latest"
    _skopeo("copy", "--quiet", "--dest-tls-verify=false", source, target)
    image = f"{name}@{digest}"
    ran = run_here("attach", released.certificate, image, "--plain-http", cwd=released.folder)
    assert ran.code == 0, ran.stderr
    again = run_here("attach", released.certificate, image, "--plain-http", cwd=released.folder)
    assert ": 0 bytes sent" in again.stdout
    words = ("--plain-http", "--key", "one.key.pub")
    checked = run_here("check", f"oci://{image}", *words, cwd=released.folder)
    assert checked.code == 0, checked.stdout + checked.stderr
    own = ran.stdout.strip().rpartition("@")[2]
    raw = ("inspect", "--raw", "--tls-verify=false")
    artefact = json.loads(_skopeo(*raw, f"docker://{name}@{own}"))
    assert artefact["subject"]["digest"] == digest
    listed = json.loads(_skopeo(*raw, f"docker://{name}:{digest.replace(':', '-')}"))
    (entry,) = listed["manifests"]
    assert entry["digest"] == own
    assert entry["artifactType"] == artefact["artifactType"]
