"""Requests to an OCI registry, with limits of size and time.

A registry is untrusted: it may name other addresses or send endless data. So credentials are sent
only to its own addresses, and every request has a time limit.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from math import isfinite
from threading import Timer
from typing import IO, TYPE_CHECKING, Any, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urldefrag, urlencode, urljoin, urlsplit
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    Request,
    build_opener,
)

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import FILE_MISSING, SERVER_REPLY, SERVER_UNREACHABLE
from kcdsl.release.oci.credentials import credentials

if TYPE_CHECKING:
    from email.message import Message
    from http.client import HTTPResponse

LARGEST_DOCUMENT = 4 * 2**20
"""The size in bytes of manifests and lists that registries must accept."""
CHUNK = 1 << 20
SECONDS = 60.0
"""Time limit of a request with its answer, without the time for its blob."""
SLOWEST = 2**17
"""The least transfer rate of a blob in bytes per second; slower requests are aborted."""
_MOST_REDIRECTS = 4


@dataclass(frozen=True, slots=True)
class RegistryAnswer:
    """The answer of a registry to one request.

    `where` is the requested address; the address of a redirect may contain a secret and is not
    shown.
    """

    where: str
    status: int
    headers: Message
    links: str
    """The `Link` headers, joined."""
    _body: HTTPResponse
    _watch: ConnectionTimer

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end; raises Refusal for a truncated answer."""
        try:
            found = self._body.read(size)
        except (OSError, HTTPException, ValueError) as error:
            self._watch.refuse_late(self.where)
            raise bad_reply(self.where, "it ended in the middle of an answer") from error
        self._watch.refuse_late(self.where)
        return found

    def data(self) -> bytes:
        """Return the whole answer; raises Refusal where it exceeds `LARGEST_DOCUMENT`."""
        found = bytearray()
        while len(found) <= LARGEST_DOCUMENT and (chunk := self.read(CHUNK)):
            found += chunk
        if len(found) > LARGEST_DOCUMENT:
            raise bad_reply(self.where, f"it sent more than {LARGEST_DOCUMENT} bytes")
        return bytes(found)

    def document(self) -> dict[str, Any]:
        """Return the JSON object that was sent; raises Refusal for anything else."""
        return parse_document(self.data(), self.where)

    def expect(self, wanted: int) -> None:
        """Raise Refusal for another status."""
        if self.status == wanted:
            return
        if self.status in (401, 403):
            raise _denied(urlsplit(self.where).netloc)
        if self.status == 404:
            raise refuse(
                FILE_MISSING,
                f"{self.where} is not there",
                help="check the name and the digest of the manifest",
            )
        raise bad_reply(self.where, f"status {self.status}, not {wanted}")


@dataclass(slots=True)
class RegistryClient:
    """A client of one registry."""

    host: str
    plain_http: bool = False
    _token: str | None = None

    @property
    def origin(self) -> str:
        """Return the address of the registry."""
        return f"{'http' if self.plain_http else 'https'}://{self.host}"

    def own(self, base: str, where: str) -> str:
        """Return an address that the registry named in answer to `base`; raises Refusal unless it
        is an address of the registry."""
        found = _address(base, where)
        if _origin(found) != _origin(self.origin):
            raise bad_reply(self.origin, f"it sends its client to {found[:80]!a}")
        return urldefrag(found).url

    @contextmanager
    def send(
        self,
        method: str,
        where: str,
        *,
        body: bytes | IO[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        follow: bool = False,
        size: int = 0,
    ) -> Iterator[RegistryAnswer]:
        """Send a request, repeat it with a token if the registry demands one, and yield the answer.

        With `follow`, redirects are followed, without credentials and never from TLS to plain
        text. `size` is the number of bytes of the transferred blob.
        """
        ask = partial(self._once, method, headers=headers or {}, size=size, named=where)
        with ExitStack() as open_now:
            answer = open_now.enter_context(ask(where, body=body, token=self._token))
            if answer.status == 401:  # there is no token, or its scope is too small
                challenge = answer.headers.get("WWW-Authenticate", "")
                open_now.close()
                self._token = self._authorised(challenge)
                if body is not None and not isinstance(body, bytes):
                    body.seek(0)
                answer = open_now.enter_context(ask(where, body=body, token=self._token))
            place = where
            for _ in range(_MOST_REDIRECTS):
                if not follow or answer.status not in (301, 302, 303, 307, 308):
                    break
                place = _address(place, answer.headers.get("Location", ""))
                open_now.close()
                if urlsplit(place).scheme not in self._schemes:
                    raise bad_reply(where, f"it redirects to {place[:80]!a}")
                token = self._token if _origin(place) == _origin(self.origin) else None
                answer = open_now.enter_context(ask(place, token=token))
            yield answer

    @property
    def _schemes(self) -> tuple[str, ...]:
        return ("https", "http") if self.plain_http else ("https",)

    @contextmanager
    def _once(
        self,
        method: str,
        where: str,
        *,
        named: str,
        headers: Mapping[str, str],
        token: str | None,
        body: bytes | IO[bytes] | None = None,
        size: int = 0,
    ) -> Iterator[RegistryAnswer]:
        """Send one request to `where`; messages show `named`."""
        with ConnectionTimer.over(SECONDS + size / SLOWEST) as watch:
            try:
                request = Request(where, data=body, headers=dict(headers), method=method)
                if token is not None:
                    request.add_unredirected_header("Authorization", token)
                opener = build_opener(_Plain, _Http(watch), _Https(watch))
                found: HTTPResponse = opener.open(request, timeout=SECONDS)
            except HTTPError as error:
                found = cast("HTTPResponse", error)
            except (URLError, OSError, HTTPException, ValueError) as error:
                watch.refuse_late(named)
                reason = getattr(error, "reason", error)
                said = getattr(reason, "strerror", None) or reason
                raise refuse(
                    SERVER_UNREACHABLE,
                    f"the registry {self.host} does not answer: {str(said)[:200]!a}",
                    help="check its address; a registry without TLS needs --plain-http, and a"
                    " certificate of an own authority needs SSL_CERT_FILE",
                ) from error
            with found:
                links = ", ".join(found.headers.get_all("Link", []))
                yield RegistryAnswer(named, found.status, found.headers, links, found, watch)

    def _authorised(self, challenge: str) -> str:
        """Return the `Authorization` header that a registry demands."""
        scheme, _, rest = challenge.partition(" ")
        basic = credentials(self.host)
        if scheme.lower() == "basic" and basic is not None:
            return f"Basic {basic}"
        given = dict(re.findall(r'([a-z]+)="([^"]*)"', rest))
        realm = _address(self.origin, given.get("realm", ""))
        if scheme.lower() != "bearer" or urlsplit(realm).scheme not in self._schemes:
            raise _denied(self.host)
        query = {key: given[key] for key in ("service", "scope") if key in given}
        token = None if basic is None else f"Basic {basic}"
        where = f"{realm}{'&' if urlsplit(realm).query else '?'}{urlencode(query)}"
        with self._once("GET", where, named=realm, headers={}, token=token) as answer:
            if answer.status in (401, 403):
                raise _denied(self.host)
            answer.expect(200)
            document = answer.document()
        found = document.get("token") or document.get("access_token")
        if not isinstance(found, str) or not re.fullmatch(r"[!-~]+", found):
            raise bad_reply(realm, "it sent no token")
        return f"Bearer {found}"


# --- connections ----------------------------------------------------------------------------------


@dataclass(slots=True)
class ConnectionTimer:
    """Closes the connections of a request at its deadline.

    A timeout per read is not enough: a server that sends single bytes slowly would never hit it.
    """

    seconds: float
    is_over: bool = False
    _held: list[socket.socket] = field(default_factory=list)

    @classmethod
    @contextmanager
    def over(cls, seconds: float) -> Iterator[ConnectionTimer]:
        """Watch for `seconds`, or until the end of the context."""
        watch = cls(seconds)
        timer = Timer(seconds, watch._end)
        timer.daemon = True
        timer.start()
        try:
            yield watch
        finally:
            timer.cancel()
            for held in watch._held:
                held.close()

    def hold(self, connection: socket.socket) -> None:
        """Register an open connection, before TLS starts on it."""
        self._held.append(connection.dup())
        if self.is_over:
            self._end()

    def _end(self) -> None:
        self.is_over = True
        for held in self._held:
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)

    def refuse_late(self, where: str) -> None:
        """Raise Refusal after the deadline: the answer is truncated."""
        if self.is_over:
            raise bad_reply(where, f"no whole answer in {self.seconds:.0f} s")


class _Held(HTTPConnection):
    """A connection that a watch can close."""

    watch: ConnectionTimer

    def connect(self) -> None:
        super().connect()
        self.watch.hold(self.sock)


class _HeldTls(HTTPSConnection, _Held):
    """The same with TLS: `HTTPSConnection` calls `connect` above before it starts TLS."""


class _Http(HTTPHandler):
    def __init__(self, watch: ConnectionTimer) -> None:
        super().__init__()
        self.watch = watch

    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_watched, _Held, self.watch), req)


class _Https(HTTPSHandler):
    def __init__(self, watch: ConnectionTimer) -> None:
        super().__init__()
        self.watch = watch

    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(partial(_watched, _HeldTls, self.watch), req)


def _watched(kind: type[_Held], watch: ConnectionTimer, host: str, **options: Any) -> _Held:
    made = kind(host, **options)
    made.watch = watch
    return made


class _Plain(HTTPRedirectHandler):
    """Disables automatic redirects: the caller decides where credentials are sent."""

    def redirect_request(self, *_: Any) -> None:
        """Follow no redirect."""


# --- addresses ------------------------------------------------------------------------------------


def _address(base: str, given: str) -> str:
    """Return the absolute address that a registry named in answer to `base`; raises Refusal."""
    try:
        found = urljoin(base, given)
        port = urlsplit(found).port
    except ValueError:
        port = -1
    if port is not None and not port > 0:
        raise bad_reply(base, f"it names {given[:80]!a}, which is no address")
    return found


def _origin(where: str) -> tuple[str, str]:
    parts = urlsplit(where)
    return parts.scheme, parts.netloc


# --- what registries send -------------------------------------------------------------------------


def parse_document(data: bytes, where: str) -> dict[str, Any]:
    """Return a JSON object; raises Refusal for anything else."""
    try:
        found = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise bad_reply(where, "it sent no JSON object")
    return found


def _finite(text: str) -> float:
    found = float(text)
    if not isfinite(found):
        raise ValueError(f"{text} is no number")
    return found


def _denied(host: str) -> Refusal:
    return refuse(
        SERVER_REPLY,
        f"the registry {host} wants other credentials",
        help="log in with docker or podman, or name a file of credentials: REGISTRY_AUTH_FILE=FILE",
    )


def bad_reply(where: str, message: str) -> Refusal:
    """Return the refusal of an answer that cannot be used."""
    return refuse(
        SERVER_REPLY,
        f"{where}: {message}",
        help="the registry, or something before it, is at fault; nothing of it was used",
    )
