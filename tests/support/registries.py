"""An in-process registry of OCI artefacts, correct or with one defect."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

NAME = "llm/tiny"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"


def digest_of(data: bytes) -> str:
    """Return the digest of a document in the form of registries."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(slots=True)
class FakeRegistry:
    """The contents of one registry, and a log of its requests."""

    lists_referrers: bool = True
    token: str = ""
    """The token demanded in `Authorization`, if not empty."""
    changed: Callable[[str, bytes], bytes] = lambda _, data: data
    """Replacement contents by path."""
    redirect: str = ""
    """The location of blobs, if elsewhere."""
    place: str = ""
    """The location of uploads, if elsewhere."""
    scopes: bool = False
    """True if a token allows writing only when its challenge asked for it."""
    raw: Callable[[str, str], Iterable[bytes] | None] = lambda method, path: None
    """A hook that replaces the answer to a method and path, in pieces."""
    host: str = ""
    documents: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and `Authorization` of each request."""

    def image(self) -> str:
        """Add an image, and return its name with the digest of its manifest."""
        data = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "layers": []}).encode()
        self.documents[digest_of(data)] = (MANIFEST_TYPE, data)
        return f"{self.host}/{NAME}@{digest_of(data)}"

    def referrers(self, digest: str) -> bytes:
        """Return the index of manifests whose subject is a given one."""
        found = []
        for own, (kind, data) in self.documents.items():
            document = json.loads(data)
            if document.get("subject", {}).get("digest") == digest:
                found.append(
                    {"mediaType": kind, "digest": own, "size": len(data),
                     "artifactType": document.get("artifactType", "")}
                )  # fmt: skip
        return json.dumps({"schemaVersion": 2, "manifests": found}).encode()

    def sent(self, method: str) -> list[str]:
        """Return the paths of the requests of one method."""
        return [path for verb, path, _ in self.requests if verb == method]


@contextmanager
def serving(registry: FakeRegistry) -> Iterator[FakeRegistry]:
    """Serve a registry on this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

        def answer(self, status: int, data: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body, given = self.rfile.read(length), self.headers.get("Authorization", "")
            path = self.path
            registry.requests.append((self.command, path, given))
            pieces = registry.raw(self.command, path)
            if pieces is not None:
                self.close_connection = True
                with suppress(OSError):
                    for piece in pieces:
                        self.wfile.write(piece)
                return
            token = registry.token
            if path.startswith("/token"):
                scope = parse_qs(urlsplit(path).query)["scope"][0]
                found = json.dumps({"token": f"{token}.{scope}" if registry.scopes else token})
                self.answer(200 if given == "Basic dXNlcjpwYXNz" else 401, found.encode())
                return
            scope = "pull" if self.command in ("GET", "HEAD") else "pull,push"
            wanted = (token, f"{token}.{scope}", f"{token}.pull,push")
            if token and given not in [f"Bearer {each}" for each in wanted]:
                asked = f'Bearer realm="http://{registry.host}/token",service="s",scope="{scope}"'
                self.answer(401, WWW_Authenticate=asked)
                return
            rest = urlsplit(path).path.removeprefix(f"/v2/{NAME}/")
            getattr(self, f"on_{rest.partition('/')[0]}")(rest.rpartition("/")[2], body)

        do_GET = do_HEAD = do_PUT = do_POST = handle_any

        def on_manifests(self, name: str, body: bytes) -> None:
            if self.command == "PUT":
                registry.documents[name] = (self.headers["Content-Type"], body)
                about = json.loads(body).get("subject") if registry.lists_referrers else None
                more = {"OCI_Subject": about["digest"]} if about else {}
                self.answer(201, **more)
                return
            if name not in registry.documents:
                self.answer(404)
                return
            kind, data = registry.documents[name]
            self.answer(200, registry.changed(f"manifests/{name}", data), Content_Type=kind)

        def on_referrers(self, name: str, body: bytes) -> None:
            if not registry.lists_referrers:
                self.answer(404)
                return
            self.answer(200, registry.changed("referrers", registry.referrers(name)))

        def on_blobs(self, name: str, body: bytes) -> None:
            if self.command == "POST":
                place = registry.place or f"/v2/{NAME}/blobs/uploads/1?state=x"
                self.answer(202, Location=place)
                return
            if self.command == "PUT":
                named = parse_qs(urlsplit(self.path).query)["digest"][0]
                if digest_of(body) != named:
                    self.answer(400)
                    return
                registry.blobs[named] = body
                self.answer(201)
                return
            if name not in registry.blobs:
                self.answer(404)
                return
            if registry.redirect and self.command == "GET":
                self.answer(307, Location=f"{registry.redirect}{self.path}")
                return
            self.answer(200, registry.changed(f"blobs/{name}", registry.blobs[name]))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    registry.host = f"localhost:{server.server_port}"
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()


def artefacts(registry: FakeRegistry) -> list[str]:
    """Return the digests of the certificates that a registry holds."""
    found = []
    for name, (_, data) in registry.documents.items():
        if re.fullmatch(r"sha256:[0-9a-f]{64}", name) and b"vnd.kcdsl.certificate" in data:
            found.append(name)
    return found
