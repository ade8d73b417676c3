"""Certificates in OCI registries: attached to a manifest as referrers, found and read by digest.

OCI distribution specification 1.1: an artefact names its subject; the registry lists it by the
referrers API, or the client keeps the list under the tag `sha256-DIGEST`. Whatever a registry
sends is compared with the digest under which it was asked for before it is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import (
    ARTEFACT_REFUSED,
    FILE_MISSING,
    SERVER_REPLY,
    SERVER_UNREACHABLE,
    USAGE,
)
from kcdsl.release import OCI
from kcdsl.release.companions import Image
from kcdsl.source.files import open_regular
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_json, plain_name, strict_load, time_text
from kcdsl_certs.signatures import LARGEST_BUNDLE, TrustedKey, decode, parse_bundle, signers
from kcdsl_certs.statement import (
    LARGEST_PAYLOAD,
    TRANSFER_TYPE,
    Predicate,
    Transfer,
    certificate_id,
    parse_predicate,
    parse_statement,
    parse_transfer,
)
from kcdsl_certs.verification.admission import admit
from kcdsl_certs.verification.proofs import LARGEST_PROOF

if TYPE_CHECKING:
    from http.client import HTTPResponse

ARTEFACT_TYPE = "application/vnd.kcdsl.certificate.v1+json"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
FILE_TYPE = "application/octet-stream"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
TITLE = "org.opencontainers.image.title"
CREATED = "org.opencontainers.image.created"
_ACCEPTED = (
    MANIFEST_TYPE,
    INDEX_TYPE,
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LARGEST_MANIFEST = 4 * 2**20
"""Bytes of a manifest or a list, as registries must accept them."""
_MOST_LISTED, _MOST_CERTIFICATES, _MOST_PAGES, _MOST_REDIRECTS = 10_000, 100, 64, 4
_SECONDS = 60.0
_CHUNK = 1 << 20


class _Plain(HTTPRedirectHandler):
    """Leaves redirects to the caller, who knows where credentials may go."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a manifest says of another document or blob."""

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
            raise _reply(where, "a descriptor has no mediaType, sha256 digest and size")
        return cls(str(kinds[0]), digest, size, str(title), str(kinds[2]))

    def to_json(self) -> dict[str, Any]:
        """Return the descriptor as it stands in a manifest."""
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
    plain_http: bool = False
    _token: str | None = None
    _opener: Any = field(default_factory=lambda: build_opener(_Plain))

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
        return cls(image, plain_http)

    @property
    def host(self) -> str:
        """Return the host with its port."""
        return self.image.name.partition("/")[0]

    @property
    def root(self) -> str:
        """Return the address under which everything of the repository is."""
        scheme = "http" if self.plain_http else "https"
        return f"{scheme}://{self.host}/v2/{self.image.name.partition('/')[2]}"

    # --- reading ----------------------------------------------------------------------------------

    def manifest(self, digest: str) -> tuple[dict[str, Any], Descriptor]:
        """Return a manifest and its descriptor; raises Refusal if it is not what was asked for."""
        where = f"{self.root}/manifests/{digest}"
        with self._send("GET", where, headers={"Accept": ", ".join(_ACCEPTED)}) as answer:
            _refuse_status(answer, where, 200)
            data = _limited(answer, _LARGEST_MANIFEST, where)
            kind = str(answer.headers.get("Content-Type", "")).partition(";")[0].strip()
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise _reply(where, "the registry sent another document than the digest names")
        document = _document(data, where)
        named = document.get("mediaType", kind)
        return document, Descriptor(str(named), digest, len(data))

    def blob(self, descriptor: Descriptor, path: Path, limit: int) -> None:
        """Write a blob to a new file; raises Refusal if it is not what its descriptor says."""
        where = f"{self.root}/blobs/{descriptor.digest}"
        if descriptor.size > limit:
            raise _reply(where, f"{descriptor.size} bytes, more than {limit}")
        found, size = hashlib.sha256(), 0
        with self._send("GET", where, follow=True) as answer, path.open("xb") as file:
            _refuse_status(answer, where, 200)
            while chunk := _read(answer, _CHUNK, where):
                size += len(chunk)
                if size > descriptor.size:
                    break
                found.update(chunk)
                file.write(chunk)
        if size != descriptor.size or f"sha256:{found.hexdigest()}" != descriptor.digest:
            raise _reply(where, "the registry sent other bytes than the digest names")

    def referrers(self) -> list[Descriptor]:
        """Return the certificates that are attached to the image, in the registry's order."""
        found = self._listed()
        known = found if found is not None else self._tagged()[0]
        listed = [Descriptor.of(each, self.root) for each in known[:_MOST_LISTED]]
        own = dict.fromkeys(each for each in listed if each.artefact_type == ARTEFACT_TYPE)
        if len(known) > _MOST_LISTED or len(own) > _MOST_CERTIFICATES:
            raise _reply(self.root, f"{len(own)} certificates among {len(known)} referrers")
        return list(own)

    def _listed(self) -> list[Any] | None:
        """Return what the referrers API lists; None where the registry has none."""
        where: str = f"{self.root}/referrers/sha256:{self.image.sha256}"
        found: list[Any] = []
        for _ in range(_MOST_PAGES):
            with self._send("GET", where, headers={"Accept": INDEX_TYPE}) as answer:
                if answer.status in (404, 405):
                    return None
                _refuse_status(answer, where, 200)
                found += _manifests(_document(_limited(answer, _LARGEST_MANIFEST, where), where))
                link = re.match(r'<([^>]*)>; *rel="?next', answer.headers.get("Link", ""))
            if link is None or len(found) > _MOST_LISTED:
                return found
            where = self._own(urljoin(where, link[1]))
        raise _reply(where, f"more than {_MOST_PAGES} pages of referrers")

    def _tagged(self) -> tuple[list[Any], dict[str, Any]]:
        """Return the list that is kept under the fallback tag, and the index that it stands in."""
        where = f"{self.root}/manifests/sha256-{self.image.sha256}"
        with self._send("GET", where, headers={"Accept": INDEX_TYPE}) as answer:
            if answer.status == 404:
                empty: list[Any] = []
                return empty, {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": empty}
            _refuse_status(answer, where, 200)
            document = _document(_limited(answer, _LARGEST_MANIFEST, where), where)
        return _manifests(document), document

    # --- writing ----------------------------------------------------------------------------------

    def push(self, descriptor: Descriptor, data: bytes | Path) -> bool:
        """Upload a blob unless the registry has it; say whether it was sent."""
        where = f"{self.root}/blobs/{descriptor.digest}"
        with self._send("HEAD", where, follow=True) as answer:
            if answer.status == 200:
                return False
            _refuse_status(answer, where, 404)
        begin = f"{self.root}/blobs/uploads/"
        with self._send("POST", begin, body=b"") as answer:
            _refuse_status(answer, begin, 202)
            place = urljoin(begin, str(answer.headers.get("Location", "")))
        mark = "&" if urlsplit(place).query else "?"
        where = self._own(f"{place}{mark}{urlencode({'digest': descriptor.digest})}")
        headers = {"Content-Type": FILE_TYPE, "Content-Length": str(descriptor.size)}
        if isinstance(data, Path):
            with open_regular(data) as file:
                self._put(where, file, headers)
        else:
            self._put(where, data, headers)
        return True

    def push_manifest(self, document: Mapping[str, Any]) -> Descriptor:
        """Upload an artefact whose subject is the image, and see that it is listed."""
        data = canonical_json(document)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        where = f"{self.root}/manifests/{digest}"
        with self._send("PUT", where, body=data, headers={"Content-Type": MANIFEST_TYPE}) as answer:
            _refuse_status(answer, where, 201)
            listed = answer.headers.get("OCI-Subject") is not None
        own = Descriptor(MANIFEST_TYPE, digest, len(data), artefact_type=ARTEFACT_TYPE)
        if not listed:
            self._tag(own, document.get("annotations", {}))
        return own

    def _tag(self, own: Descriptor, notes: Mapping[str, str]) -> None:
        """Add an artefact to the list under the fallback tag. Another client may write the list at
        the same time, so it is read again."""
        for _ in range(5):
            known, index = self._tagged()
            if any(isinstance(each, dict) and each.get("digest") == own.digest for each in known):
                return
            index["manifests"] = [*known, {**own.to_json(), "annotations": dict(notes)}]
            data = canonical_json(index)
            where = f"{self.root}/manifests/sha256-{self.image.sha256}"
            self._put(where, data, {"Content-Type": INDEX_TYPE})
        raise _reply(self.root, "the list of referrers was replaced by others five times")

    # --- transport --------------------------------------------------------------------------------

    def _put(self, where: str, data: bytes | IO[bytes], headers: Mapping[str, str]) -> None:
        with self._send("PUT", where, body=data, headers=headers) as answer:
            _refuse_status(answer, where, 201)

    def _own(self, where: str) -> str:
        """Return an address that the registry named, if it is one of the registry."""
        if _origin(where) != _origin(self.root):
            raise _reply(self.root, f"it sends its client to {where[:80]!a}")
        return where

    def _send(
        self,
        method: str,
        where: str,
        *,
        body: bytes | IO[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        follow: bool = False,
    ) -> HTTPResponse:
        """Send a request, once more with a token where one is asked for. Redirects are followed
        where `follow` says so, without credentials and never from TLS to plain text."""
        answer = self._once(method, where, body, headers or {}, self._token)
        if answer.status == 401 and self._token is None:
            asked = str(answer.headers.get("WWW-Authenticate", ""))
            answer.close()
            self._token = self._authorised(asked)
            if body is not None and not isinstance(body, bytes):
                body.seek(0)
            answer = self._once(method, where, body, headers or {}, self._token)
        for _ in range(_MOST_REDIRECTS):
            if not follow or answer.status not in (301, 302, 303, 307, 308):
                return answer
            target = urljoin(where, str(answer.headers.get("Location", "")))
            answer.close()
            schemes = ("https", "http") if self.plain_http else ("https",)
            if urlsplit(target).scheme not in schemes:
                raise _reply(where, f"it redirects to {target[:80]!a}")
            same = _origin(target) == _origin(self.root)
            answer = self._once(method, target, None, headers or {}, self._token if same else None)
            where = target
        return answer

    def _once(
        self,
        method: str,
        where: str,
        body: bytes | IO[bytes] | None,
        headers: Mapping[str, str],
        token: str | None,
    ) -> HTTPResponse:
        request = Request(where, data=body, headers=dict(headers), method=method)
        if token is not None:
            request.add_unredirected_header("Authorization", token)
        try:
            answer: HTTPResponse = self._opener.open(request, timeout=_SECONDS)
        except HTTPError as error:
            return cast("HTTPResponse", error)
        except (URLError, OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            said = getattr(reason, "strerror", None) or reason
            raise refuse(
                SERVER_UNREACHABLE,
                f"the registry {self.host} does not answer: {str(said)[:200]!a}",
                help="look at its address; a registry without TLS needs --plain-http, and a"
                " certificate of an own authority needs SSL_CERT_FILE",
            ) from error
        return answer

    def _authorised(self, asked: str) -> str:
        """Return the value of `Authorization` that a registry asks for."""
        scheme, _, rest = asked.partition(" ")
        basic = _credentials(self.host)
        if scheme.lower() == "basic" and basic is not None:
            return f"Basic {basic}"
        given = dict(re.findall(r'([a-z]+)="([^"]*)"', rest))
        realm = given.get("realm", "")
        allowed = ("https", "http") if self.plain_http else ("https",)
        if scheme.lower() != "bearer" or urlsplit(realm).scheme not in allowed:
            raise _denied(self.host)
        query = {key: given[key] for key in ("service", "scope") if key in given}
        token = None if basic is None else f"Basic {basic}"
        where = f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(query)}"
        with self._once("GET", where, None, {}, token) as answer:
            if answer.status in (401, 403):
                raise _denied(self.host)
            _refuse_status(answer, realm, 200)
            document = _document(_limited(answer, _LARGEST_MANIFEST, realm), realm)
        found = document.get("token") or document.get("access_token")
        if not isinstance(found, str) or not re.fullmatch(r"[!-~]+", found):
            raise _reply(realm, "it sent no token")
        return f"Bearer {found}"


# --- certificates ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pulled:
    """A certificate that was read from a registry into a folder of its own."""

    name: str
    path: Path
    body: Predicate | Transfer | None
    identity: str
    """The sha256 of its statement; "" where no trusted key signed it."""


def attach(certificate: Path, registry: Repository, moment: datetime) -> tuple[Descriptor, int]:
    """Attach a certificate, with every file that it names, to an image.

    What the registry has already is not sent again, and the same certificate gives the same
    artefact: an attachment that was cut off is finished by the same command.

    Returns the descriptor of the artefact, and how many bytes were sent.

    Raises:
        Refusal: it is no certificate, a file that it names is missing or another one, or the
            registry does not take it.
    """
    with open_regular(certificate) as file:
        bundle = file.read(LARGEST_BUNDLE + 1)
    folder = certificate.parent
    try:
        body = admit(decode(parse_bundle(bundle)).payload, folder, moment).body
        names = _named(body, folder)
    except Rejected as error:
        raise refuse(
            ARTEFACT_REFUSED,
            f"{certificate}: {error.detail} ({error.reason})",
            help="attach a certificate that `kcdsl check` finds valid, with the files beside it",
        ) from error
    _, subject = registry.manifest(f"sha256:{registry.image.sha256}")
    parts = [_described(certificate, BUNDLE_TYPE, "certificate.json")]
    parts += [_described(folder / name, FILE_TYPE, name) for name in names]
    sent = 0
    registry.push(EMPTY, b"{}")
    for descriptor, path in parts:
        sent += descriptor.size if registry.push(descriptor, path) else 0
    own = registry.push_manifest(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTEFACT_TYPE,
            "config": EMPTY.to_json(),
            "layers": [descriptor.to_json() for descriptor, _ in parts],
            "subject": subject.to_json(),
            "annotations": {CREATED: time_text(body.issued_at)},
        }
    )
    return own, sent


def pull(registry: Repository, folder: Path, keys: Sequence[TrustedKey]) -> list[Pulled]:
    """Read the certificates that are attached to an image, or the one that is named itself.

    Files beside a certificate are read only where a trusted key signed it. Where any is signed so,
    those that are not are left out, and those that a signed one supersedes: whoever may write to
    the registry can attach anything.

    Raises:
        Refusal: there is none, or the registry sends something else than digests name.
    """
    digest = f"sha256:{registry.image.sha256}"
    document, _ = registry.manifest(digest)
    if document.get("artifactType") == ARTEFACT_TYPE:
        return [_pulled(registry, digest, document, folder, keys)]
    found = []
    for each in registry.referrers():
        artefact, _ = registry.manifest(each.digest)
        subject = artefact.get("subject")
        about = subject.get("digest") if isinstance(subject, dict) else None
        if about == digest and artefact.get("artifactType") == ARTEFACT_TYPE:
            found.append(_pulled(registry, each.digest, artefact, folder, keys))
    if not found:
        raise refuse(
            FILE_MISSING,
            f"no certificate is attached to {registry.image.name}@{digest}",
            help="attach one: kcdsl attach CERT HOST/NAME@sha256:DIGEST",
        )
    signed = [each for each in found if each.identity]
    gone = {each.body.supersedes for each in signed if isinstance(each.body, Predicate)}
    return [each for each in signed if each.identity not in gone] or found


def _pulled(
    registry: Repository,
    digest: str,
    document: Mapping[str, Any],
    folder: Path,
    keys: Sequence[TrustedKey],
) -> Pulled:
    """Read one artefact into a folder that is named by its digest."""
    name, where = f"{OCI}{registry.image.name}@{digest}", f"{registry.root}/manifests/{digest}"
    listed = document.get("layers")
    layers = [Descriptor.of(each, where) for each in (listed if isinstance(listed, list) else [])]
    bundles = [layer for layer in layers if layer.media_type == BUNDLE_TYPE]
    if len(bundles) != 1:
        raise _reply(where, f"{len(bundles)} bundles in one artefact")
    own = folder / digest.removeprefix("sha256:")
    own.mkdir()
    path = own / "certificate.json"
    registry.blob(bundles[0], path, LARGEST_BUNDLE)
    try:
        envelope = decode(parse_bundle(path.read_bytes()))
        if not signers(envelope, keys):
            return Pulled(name, path, None, "")
    except Rejected:  # which the check says
        return Pulled(name, path, None, "")
    identity = certificate_id(envelope.payload)
    try:
        body = _body(envelope.payload)
    except Rejected:  # signed, so it is not left out: the check refuses it
        return Pulled(name, path, None, identity)
    files = {layer.title: layer for layer in layers if layer is not bundles[0]}

    def read(names: Sequence[str]) -> None:
        for title in names:
            if title in files and not (own / title).exists():
                registry.blob(files[title], own / title, LARGEST_PROOF)

    if isinstance(body, Transfer):
        read([plain_name(body.path, "transfer")])
    with suppress(Rejected):  # the base of a transfer is missing or another one: the check says so
        read(_named(body, own))
    return Pulled(name, path, body, identity)


def _body(payload: bytes) -> Predicate | Transfer:
    statement = parse_statement(strict_load(payload, LARGEST_PAYLOAD))
    if statement.predicate_type == TRANSFER_TYPE:
        return parse_transfer(statement.predicate)
    return parse_predicate(statement.predicate)[0]


def _named(body: Predicate | Transfer, folder: Path) -> list[str]:
    """Return the files that a certificate names, each once; those of the certificate that a
    transfer carries over are its own. Raises Rejected where that one cannot be read."""
    if isinstance(body, Predicate):
        proofs = [clause.proof.path for clause in body.clauses if clause.proof is not None]
        return list(dict.fromkeys([*proofs, *(file.path for file in body.evidence)]))
    try:
        with open_regular(folder / body.path) as file:
            base = _body(decode(parse_bundle(file.read(LARGEST_BUNDLE + 1))).payload)
    except OSError as error:
        raise Rejected("transfer/base-missing", f"{body.path}: {error.strerror}") from None
    return [body.path, *(_named(base, folder) if isinstance(base, Predicate) else [])]


def _described(path: Path, kind: str, title: str) -> tuple[Descriptor, Path]:
    found, size = hashlib.sha256(), 0
    try:
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK):
                found.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise refuse(FILE_MISSING, f"{path} cannot be read: {error.strerror}") from error
    return Descriptor(kind, f"sha256:{found.hexdigest()}", size, title), path


# --- what registries send -------------------------------------------------------------------------


def _credentials(host: str) -> str | None:
    """Return what the configuration of docker or podman holds for a host, in base64.

    Raises Refusal where a program keeps it: this command runs none.
    """
    named = os.environ.get("REGISTRY_AUTH_FILE")
    folder = os.environ.get("DOCKER_CONFIG")
    usual = Path(folder) if folder else Path.home() / ".docker"
    path = Path(named) if named else usual / "config.json"
    try:
        with open_regular(path) as file:
            document = json.loads(file.read(_LARGEST_MANIFEST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(FILE_MISSING, f"the credentials in {path} cannot be read") from error
    known: Any = document if isinstance(document, dict) else {}
    entry = _entry(known.get("auths"), host)
    found = entry.get("auth") if isinstance(entry, dict) else None
    if isinstance(found, str) and found:
        try:
            base64.b64decode(found, validate=True)
        except binascii.Error as error:
            raise refuse(FILE_MISSING, f"{path}: `auth` of {host} is no base64") from error
        return found
    helper = _entry(known.get("credHelpers"), host) or known.get("credsStore")
    if isinstance(helper, str) and helper:
        raise refuse(
            USAGE,
            f"a program keeps the credentials of {host}, docker-credential-{helper[:40]}, and this"
            " command runs none",
            help=f"write them to a file of their own and name it: REGISTRY_AUTH_FILE=FILE, with"
            f' {{"auths": {{"{host}": {{"auth": "…"}}}}}}',
        )
    return None


def _entry(table: Any, host: str) -> Any:
    return table.get(host) if isinstance(table, dict) else None


def _origin(where: str) -> tuple[str, str]:
    parts = urlsplit(where)
    return parts.scheme, parts.netloc


def _document(data: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _reply(where, "it sent no JSON object")
    return found


def _manifests(document: Mapping[str, Any]) -> list[Any]:
    found = document.get("manifests")
    return found if isinstance(found, list) else []


def _limited(answer: HTTPResponse, limit: int, where: str) -> bytes:
    data = b"".join(_chunks(answer, limit + 1, where))
    if len(data) > limit:
        raise _reply(where, f"it sent more than {limit} bytes")
    return data


def _chunks(answer: HTTPResponse, limit: int, where: str) -> Iterator[bytes]:
    left = limit
    while left > 0 and (chunk := _read(answer, min(left, _CHUNK), where)):
        left -= len(chunk)
        yield chunk


def _read(answer: HTTPResponse, size: int, where: str) -> bytes:
    try:
        return answer.read(size)
    except (OSError, HTTPException, ValueError) as error:
        raise _reply(where, "it ended in the middle of an answer") from error


def _refuse_status(answer: HTTPResponse, where: str, wanted: int) -> None:
    if answer.status == wanted:
        return
    if answer.status in (401, 403):
        raise _denied(urlsplit(where).netloc)
    if answer.status == 404:
        raise refuse(
            FILE_MISSING,
            f"{where} is not there",
            help="look at the name and the digest of the manifest",
        )
    raise _reply(where, f"status {answer.status}, not {wanted}")


def _denied(host: str) -> Refusal:
    return refuse(
        SERVER_REPLY,
        f"the registry {host} wants other credentials",
        help="log in with docker or podman, or name a file of credentials: REGISTRY_AUTH_FILE=FILE",
    )


def _reply(where: str, message: str) -> Refusal:
    return refuse(
        SERVER_REPLY,
        f"{where}: {message}",
        help="the registry, or something before it, is at fault; nothing of it was used",
    )
