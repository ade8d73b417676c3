"""One repository of an OCI registry: manifests, blobs and lists of referrers, by digest.

OCI distribution specification 1.1: an artefact names its subject; the registry lists it in the
referrers API, or the client keeps the list under the tag `sha256-DIGEST`. All content is compared
with the requested digest before it is parsed.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import IO, Any
from urllib.parse import urlencode, urlsplit

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import USAGE
from kcdsl.release import OCI
from kcdsl.release.companions import Image
from kcdsl.release.oci.transport import CHUNK, RegistryClient, bad_reply, parse_document
from kcdsl.source.files import open_regular
from kcdsl_certs.encoding.strict import canonical_json

ARTEFACT_TYPE = "application/vnd.kcdsl.certificate.v1+json"
FILE_TYPE = "application/octet-stream"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"
_ACCEPTED = (
    MANIFEST_TYPE,
    INDEX_TYPE,
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
SETTLED = 0.5
"""Seconds in which other clients are expected to write a list after reading it."""
_TRIES = 10
_MOST_LISTED, _MOST_CERTIFICATES, _MOST_PAGES = 10_000, 100, 64
_LINK = re.compile(
    r"""<([^<>]*)>((?:\s*+;\s*+[^\s;,="]++\s*+(?:=\s*+(?:"[^"]*+"|[^\s;,"]*+))?+)*+)"""
)
_REL = re.compile(r""";\s*+rel\s*+=\s*+(?:"([^"]*)"|([^\s;,"]*))""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A descriptor of a document or blob in a manifest."""

    media_type: str
    digest: str
    size: int
    title: str = ""
    artefact_type: str = ""

    @classmethod
    def of(cls, document: Any, where: str) -> Descriptor:
        """Read a descriptor; raises Refusal where it is malformed."""
        found = document if isinstance(document, dict) else {}
        notes = found.get("annotations")
        title = notes.get(TITLE, "") if isinstance(notes, dict) else ""
        kinds = found.get("mediaType"), title, found.get("artifactType", "")
        digest, size = found.get("digest"), found.get("size")
        if (
            not all(isinstance(kind, str) for kind in kinds)
            or not (isinstance(digest, str) and _DIGEST.fullmatch(digest))
            or not (isinstance(size, int) and not isinstance(size, bool) and size >= 0)
        ):
            raise bad_reply(where, "a descriptor has no mediaType, sha256 digest and size")
        return cls(str(kinds[0]), digest, size, str(title), str(kinds[2]))

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as JSON data."""
        found: dict[str, Any] = {
            "mediaType": self.media_type,
            "digest": self.digest,
            "size": self.size,
        }
        if self.artefact_type:
            found["artifactType"] = self.artefact_type
        if self.title:
            found["annotations"] = {TITLE: self.title}
        return found


EMPTY = Descriptor(EMPTY_TYPE, f"sha256:{hashlib.sha256(b'{}').hexdigest()}", 2)


@dataclass(slots=True)
class Repository:
    """One repository of a registry."""

    image: Image
    client: RegistryClient

    @classmethod
    def of(cls, text: str, *, plain_http: bool = False) -> Repository:
        """Return the repository of `HOST/NAME@sha256:DIGEST`; raises Refusal for anything else."""
        image = Image.of(text.removeprefix(OCI), what="the artefact")
        host = image.name.partition("/")[0]
        if "/" not in image.name or not ("." in host or ":" in host or host == "localhost"):
            raise refuse(
                USAGE,
                f"{image.name[:80]!a} names no registry",
                help="begin with its host: registry.example/llm/model@sha256:…",
            )
        return cls(image, RegistryClient(host, plain_http))

    @property
    def root(self) -> str:
        """Return the base address of the repository."""
        return f"{self.client.origin}/v2/{self.image.name.partition('/')[2]}"

    # --- reading ----------------------------------------------------------------------------------

    def manifest(self, digest: str) -> tuple[dict[str, Any], Descriptor]:
        """Return a manifest and its descriptor; raises Refusal if its digest differs."""
        where = f"{self.root}/manifests/{digest}"
        with self.client.send("GET", where, headers={"Accept": ", ".join(_ACCEPTED)}) as answer:
            answer.expect(200)
            data = answer.data()
            kind = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise bad_reply(where, "the registry sent another document than the digest names")
        document = parse_document(data, where)
        named = document.get("mediaType", kind)
        return document, Descriptor(str(named), digest, len(data))

    def blob(self, descriptor: Descriptor, path: Path, limit: int) -> None:
        """Write a blob to a new file; raises Refusal if it does not match its descriptor."""
        where = f"{self.root}/blobs/{descriptor.digest}"
        if descriptor.size > limit:
            raise bad_reply(where, f"{descriptor.size} bytes, more than {limit}")
        found, size = hashlib.sha256(), 0
        with (
            self.client.send("GET", where, follow=True, size=descriptor.size) as answer,
            path.open("xb") as file,
        ):
            answer.expect(200)
            while chunk := answer.read(CHUNK):
                size += len(chunk)
                if size > descriptor.size:
                    break
                found.update(chunk)
                file.write(chunk)
        if size != descriptor.size or f"sha256:{found.hexdigest()}" != descriptor.digest:
            raise bad_reply(where, "the registry sent other bytes than the digest names")

    def referrers(self) -> list[Descriptor]:
        """Return the certificates that are attached to the image, in the registry's order."""
        found = self._listed()
        known = found if found is not None else self._tagged()["manifests"]
        ours = [
            each
            for each in known[:_MOST_LISTED]
            if isinstance(each, dict) and each.get("artifactType") == ARTEFACT_TYPE
        ]  # other clients may attach other artefacts
        own = dict.fromkeys(Descriptor.of(each, self.root) for each in ours)
        if len(known) > _MOST_LISTED or len(own) > _MOST_CERTIFICATES:
            raise bad_reply(self.root, f"{len(own)} certificates among {len(known)} referrers")
        return list(own)

    def _listed(self) -> list[Any] | None:
        """Return the list of the referrers API; None where the registry lacks this API."""
        first = where = f"{self.root}/referrers/sha256:{self.image.sha256}"
        found: list[Any] = []
        for _ in range(_MOST_PAGES):
            with self.client.send("GET", where, headers={"Accept": INDEX_TYPE}) as answer:
                if where == first and answer.status in (404, 405):
                    return None
                answer.expect(200)
                found += _index(answer.document(), where)["manifests"]
                following = _next_of(answer.links)
            if following is None or len(found) > _MOST_LISTED:
                return found
            where = self.client.own(where, following)
        raise bad_reply(where, f"more than {_MOST_PAGES} pages of referrers")

    def _tagged(self) -> dict[str, Any]:
        """Return the list under the fallback tag."""
        where = f"{self.root}/manifests/sha256-{self.image.sha256}"
        with self.client.send("GET", where, headers={"Accept": INDEX_TYPE}) as answer:
            if answer.status == 404:
                return {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}
            answer.expect(200)
            return _index(answer.document(), where)

    # --- writing ----------------------------------------------------------------------------------

    def push(self, descriptor: Descriptor, data: bytes | Path) -> bool:
        """Upload a blob unless the registry has it; return whether it was sent."""
        where = f"{self.root}/blobs/{descriptor.digest}"
        with self.client.send("HEAD", where, follow=True) as answer:
            if answer.status == 200:
                return False
            answer.expect(404)
        begin = f"{self.root}/blobs/uploads/"
        with self.client.send("POST", begin, body=b"") as answer:
            answer.expect(202)
            place = self.client.own(begin, answer.headers.get("Location", ""))
        mark = "&" if urlsplit(place).query else "?"
        where = f"{place}{mark}{urlencode({'digest': descriptor.digest})}"
        headers = {"Content-Type": FILE_TYPE, "Content-Length": str(descriptor.size)}
        if isinstance(data, Path):
            with open_regular(data) as file:
                self._put(where, file, headers, descriptor.size)
        else:
            self._put(where, data, headers, descriptor.size)
        return True

    def push_manifest(self, document: Mapping[str, Any]) -> Descriptor:
        """Upload an artefact whose subject is the image, and make sure that it is listed."""
        data = canonical_json(document)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        where = f"{self.root}/manifests/{digest}"
        with self.client.send(
            "PUT", where, body=data, headers={"Content-Type": MANIFEST_TYPE}
        ) as answer:
            answer.expect(201)
            listed = answer.headers.get("OCI-Subject") is not None
        own = Descriptor(MANIFEST_TYPE, digest, len(data), artefact_type=ARTEFACT_TYPE)
        if not listed:
            self._tag(own, document.get("annotations", {}))
        return own

    def _tag(self, own: Descriptor, notes: Mapping[str, str]) -> None:
        """Add an artefact to the list under the fallback tag, and check that it remains: a client
        that read the list earlier may overwrite it."""
        where = f"{self.root}/manifests/sha256-{self.image.sha256}"
        for _ in range(_TRIES):
            index = self._tagged()
            known = index["manifests"]
            if any(isinstance(each, dict) and each.get("digest") == own.digest for each in known):
                return
            index["manifests"] = [*known, {**own.to_json(), "annotations": dict(notes)}]
            data = json.dumps(index).encode()  # preserves entries of other clients
            self._put(where, data, {"Content-Type": INDEX_TYPE})
            sleep(SETTLED * random.uniform(1, 2))  # randomised to avoid collisions
        raise bad_reply(self.root, f"the list of referrers was replaced by others {_TRIES} times")

    def _put(
        self, where: str, data: bytes | IO[bytes], headers: Mapping[str, str], size: int = 0
    ) -> None:
        sent = self.client.send("PUT", where, body=data, headers=headers, size=size)
        with sent as answer:
            answer.expect(201)


def _index(document: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a list of referrers; raises Refusal for anything else."""
    kind = document.get("mediaType", INDEX_TYPE)
    if kind != INDEX_TYPE or not isinstance(document.get("manifests"), list):
        raise bad_reply(where, "it is no list of referrers")
    return document


def _next_of(links: str) -> str | None:
    """Return the target of the `next` link in the `Link` headers; None without one."""
    for found in _LINK.finditer(links):
        for rel in _REL.finditer(found[2]):
            if "next" in (rel[1] or rel[2] or "").lower().split():
                return found[1]
    return None
