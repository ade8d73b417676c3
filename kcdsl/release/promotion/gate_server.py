"""The gate over HTTP, for the web metric of Argo Rollouts, the webhooks of Flagger, and probes.

| path | method | answer |
|---|---|---|
| `/gate` | GET, POST | by its status: 200 open, 403 failed, 409 not decided, 404 not known |
| `/analysis` | GET | 200 with `outcome` where the triple is known, 404 else |
| `/rollback` | POST | 200 where the triple was rolled back or blocked, else 409 or 404 |
| `/health` | GET | 204 where the register can be read |

The arguments are `slot`, `stage` and `triple`, in the query or in `metadata` of a JSON body, as
Flagger sends it. Any error gives a status other than 2xx, without details of the machine.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from kcdsl.diagnostics import Refusal
from kcdsl.release.promotion.gate import Gate, GateAnswer, ask
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import loose_load
from kcdsl_certs.statement import STAGES

if TYPE_CHECKING:
    from kcdsl.release.register import Register

LARGEST_BODY = 64 * 1024
SECONDS = 10.0
"""Time limit of a client for sending its request and reading the answer."""
MOST_AT_A_TIME = 32
_NAMES = ("slot", "stage", "triple")
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})", re.ASCII)
_STATUS = {
    GateAnswer.SUCCESSFUL: HTTPStatus.OK,
    GateAnswer.FAILED: HTTPStatus.FORBIDDEN,
    GateAnswer.INCONCLUSIVE: HTTPStatus.CONFLICT,
}
_PATHS = {
    "/gate": ("GET", "POST"),
    "/analysis": ("GET",),
    "/rollback": ("POST",),
    "/health": ("GET",),
}


class BadQuestion(Exception):
    """Raised for an invalid request."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        self.status, self.why = status, why
        super().__init__(why)


def question(given: Mapping[str, Any], usual: Mapping[str, str]) -> tuple[str, str, str]:
    """Return slot, stage and digest of the triple; `usual` has default values.

    Raises BadQuestion for missing, unknown and non-string arguments.
    """
    from kcdsl.release.register.records import SLOT_NAME

    found = {**usual, **{name: given[name] for name in _NAMES if name in given}}
    for name in _NAMES:
        if not isinstance(found.get(name), str) or not found[name]:
            raise BadQuestion(HTTPStatus.BAD_REQUEST, f"the question has no {name}")
    if found["stage"] not in STAGES:
        raise BadQuestion(HTTPStatus.BAD_REQUEST, f"a stage is one of {', '.join(STAGES)}")
    digest = _DIGEST.fullmatch(found["triple"])
    if digest is None:
        raise BadQuestion(HTTPStatus.BAD_REQUEST, "the triple is no sha256 digest")
    try:
        slot = SLOT_NAME.read(found["slot"], "slot")
    except Rejected as error:
        raise BadQuestion(HTTPStatus.BAD_REQUEST, error.detail) from None
    return slot, found["stage"], digest.group(1)


class GateServer(ThreadingHTTPServer):
    """Serves one register; at most `MOST_AT_A_TIME` requests at a time.

    Closing it waits for open requests, at most `SECONDS` plus the time of the register.
    """

    daemon_threads = False
    request_queue_size = MOST_AT_A_TIME

    def __init__(
        self,
        address: tuple[str, int],
        register: Register,
        clock: Callable[[], datetime],
        usual: Mapping[str, str],
    ) -> None:
        self.register, self.clock, self.usual = register, clock, dict(usual)
        self._free = threading.BoundedSemaphore(MOST_AT_A_TIME)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without a look-up of the host name, which may be slow."""
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread; close the connection where too many are open."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then admit the next request; a client that is too slow is disconnected."""
        end = threading.Timer(SECONDS, _cut_off, (request,))
        end.daemon = True
        try:
            end.start()
            super().process_request_thread(request, client_address)
        finally:
            end.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: the client has disconnected, and a traceback would clutter the log."""


def _cut_off(connection: socket.socket) -> None:
    """Shut a connection down, which wakes its waiting thread."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: GateServer
    server_version = "kcdsl"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: paths are untrusted text of the client."""

    def _answer(self, method: str) -> None:
        document: dict[str, Any] | None
        try:
            status, document = self._reply(method)
        except BadQuestion as error:
            status, document = error.status, _closed(error.why)
        except Refusal as refusal:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            document = _closed(f"the register cannot answer ({refusal.diagnostics[0].code})")
        except Exception:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            document = _closed("the question could not be answered")
        body = b""
        self.send_response(status)
        self.send_header("Cache-Control", "no-store")
        if document is not None:
            body = (json.dumps(document, ensure_ascii=True) + "\n").encode("ascii")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _reply(self, method: str) -> tuple[HTTPStatus, dict[str, Any] | None]:
        try:
            url = urlsplit(self.path)
        except ValueError:
            raise BadQuestion(HTTPStatus.BAD_REQUEST, "the path cannot be read") from None
        methods = _PATHS.get(url.path)
        if methods is None:
            raise BadQuestion(HTTPStatus.NOT_FOUND, f"paths are {', '.join(_PATHS)}")
        if method not in methods:
            raise BadQuestion(HTTPStatus.METHOD_NOT_ALLOWED, f"{url.path} takes {methods[0]}")
        server = self.server
        server.register.refuse_other_revision()
        if url.path == "/health":
            server.register.head()
            return HTTPStatus.NO_CONTENT, None
        given = self._asked(url.query, method)
        gate = ask(server.register, *question(given, server.usual), server.clock())
        return _status(url.path, gate), gate.to_json()

    def _asked(self, query: str, method: str) -> dict[str, Any]:
        try:
            fields = parse_qs(query, keep_blank_values=True, max_num_fields=16, errors="strict")
        except ValueError:
            raise BadQuestion(HTTPStatus.BAD_REQUEST, "the query cannot be read") from None
        found: dict[str, Any] = self._metadata() if method == "POST" else {}
        for name, values in fields.items():
            if len(values) != 1 or (name in found and found[name] != values[0]):
                raise BadQuestion(HTTPStatus.BAD_REQUEST, f"{name[:40]!a} is given twice")
            found[name] = values[0]
        return found

    def _metadata(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise BadQuestion(HTTPStatus.LENGTH_REQUIRED, "a body needs a Content-Length")
        if len(length) > 9 or int(length) > LARGEST_BODY:
            self.close_connection = True
            raise BadQuestion(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body is too large")
        data = self.rfile.read(int(length))
        if len(data) != int(length):
            raise BadQuestion(HTTPStatus.REQUEST_TIMEOUT, "the body ends before its length")
        if not data:
            return {}
        try:
            document = loose_load(data)
        except Rejected:
            raise BadQuestion(HTTPStatus.BAD_REQUEST, "the body is no JSON") from None
        metadata = document.get("metadata", {}) if isinstance(document, dict) else None
        if not isinstance(metadata, dict):
            raise BadQuestion(HTTPStatus.BAD_REQUEST, "the body has no object `metadata`")
        return metadata


def _status(path: str, gate: Gate) -> HTTPStatus:
    if not gate.known:
        return HTTPStatus.NOT_FOUND
    if path == "/analysis":
        return HTTPStatus.OK
    if path == "/rollback":
        return HTTPStatus.OK if gate.answer is GateAnswer.FAILED else HTTPStatus.CONFLICT
    return _STATUS[gate.answer]


def _closed(why: str) -> dict[str, Any]:
    return {"schema": "kcdsl.gate/1", "open": False, "outcome": "Inconclusive", "reasons": [why]}
