"""Requests to a server: limits of time, size and retries, and a key that is never shown."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.verdict.quantities import stated
from kcdsl_backends.empirical.sources.servers.network import (
    HOSTS,
    Deadline,
    Forbidden,
    client,
    destination,
)

LATER = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Statuses after which a request is repeated."""
ABSENT = frozenset((404, 405, 501))
"""Statuses of a server that does not know the path."""
_KEY = re.compile(r"KCDSL_SERVER_KEY(_[A-Z0-9_]+)?")
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an answer: times in seconds, numbers of attempts, size in bytes."""

    connect: float = 10.0
    answer: float = 120.0
    """Time for the whole answer, from first to last byte."""
    attempts: int = 4
    slow_attempts: int = 2
    """Number of attempts if the server does not answer in time."""
    pause: float = 0.5
    """Pause before the second attempt; doubled before each further one."""
    longest_pause: float = 30.0
    size: int = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Transport:
    """Sends requests to the server at an address. `key` is sent with each and never shown."""

    url: str
    key: str | None = field(default=None, repr=False)
    limits: Limits = field(default=Limits())
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def get(self, path: str) -> Any:
        """Return the server's answer at a path; None if it does not know the path.

        Raises Refusal if it does not answer, or not in JSON.
        """
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a request; None if the server does not know the path.

        Raises Refusal if it does not answer, refuses the request, or answers without complete JSON.
        """
        return self._ask("POST", path, body)

    def stream(
        self, path: str, body: Mapping[str, Any], clock: Callable[[], float]
    ) -> Iterator[tuple[float, Any]]:
        """Yield (time of arrival by `clock`, event) of a streamed answer; events that arrive
        together have one time. The first item is the time of the request, with None.

        The request is sent once, since times of a second attempt are not comparable. Raises Refusal
        if the server does not answer, or does not stream.
        """
        asked, moment, started, left = math.nan, math.nan, self.clock(), b""

        def came() -> None:
            nonlocal asked, moment
            moment = clock()
            asked = moment if math.isnan(asked) else asked

        try:
            with self._open("POST", path, body, came) as reply:
                parts = self._parts(reply, started)
                if reply.status_code != 200:
                    said = self._said(b"".join(parts).decode("utf-8", errors="replace"))
                    raise self._unreachable(f"{path}: status {reply.status_code}{said}", 1)
                kind = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "text/event-stream":
                    raise refuse(
                        codes.SERVER_REPLY,
                        f"the server {self.url} does not stream its answer to {path}: it is"
                        f" {kind or 'of no type'}, not text/event-stream",
                        help="ask the server itself, and not through a proxy that collects its"
                        " answers; clauses about times need a stream",
                    )
                yield asked, None
                for part in parts:
                    *lines, left = (left + part).split(b"\n")
                    for line in lines:
                        data = line.removeprefix(b"data:").strip()
                        if data == line.strip() or not data:
                            continue  # a comment, another field or the end of an event
                        if data == b"[DONE]":
                            return
                        yield moment, self._event(path, data)
        except _NoAnswer as error:
            raise self._unreachable(f"{path}: {error}", 1) from None

    def _event(self, path: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise refuse(
                codes.SERVER_REPLY,
                f"the server {self.url} streams what is no JSON in answer to {path}: {error}",
                help="ask the server itself, and not through a proxy; see its log for errors "
                "while it answered",
            ) from None

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        last: Refusal | None = None
        attempts, attempt = self.limits.attempts, 0
        while attempt < attempts:
            if attempt:
                self.sleep(min(self.limits.pause * 2 ** (attempt - 1), self.limits.longest_pause))
            attempt += 1
            try:
                status, text = self._once(method, path, body)
            except _NoAnswer as error:
                last = self._unreachable(f"{path}: {error}", attempt)
                if error.slow:
                    attempts = min(attempts, self.limits.slow_attempts)
                continue
            if status in ABSENT:
                return None
            if status in LATER:
                last = self._unreachable(f"{path}: status {status}{self._said(text)}", attempt)
                continue
            if status != 200:
                raise refuse(
                    codes.SERVER_UNREACHABLE,
                    f"the server {self.url} refuses {path}: status {status}{self._said(text)}",
                    help=_help(status),
                )
            try:
                return json.loads(text)
            except (ValueError, RecursionError) as error:
                last = refuse(
                    codes.SERVER_REPLY,
                    f"the server {self.url} answers {path} with no whole JSON: {error}",
                    notes=(f"asked {attempt} times",),
                    help="see the log of the server, and whether `url` names its root and not"
                    " a page of something else",
                )
        assert last is not None
        raise last

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        """Return status and text of one answer."""
        started = self.clock()
        with self._open(method, path, body) as reply:
            content = b"".join(self._parts(reply, started))
            return reply.status_code, content.decode("utf-8", errors="replace")

    def _parts(self, reply: Any, started: float) -> Iterator[bytes]:
        """Yield the bytes of an answer, within the limits of size and time."""
        size = 0
        for part in reply.iter_raw():
            size += len(part)
            if size > self.limits.size:
                raise _NoAnswer(f"the answer has more than {self.limits.size} bytes", True)
            if self.clock() - started > self.limits.answer:
                raise _NoAnswer(f"no whole answer in {stated(self.limits.answer, 's')}", True)
            yield part

    @contextmanager
    def _open(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        came: Callable[[], None] = lambda: None,
    ) -> Iterator[Any]:
        """Send a request, and yield the open answer; `came` is called before the request and
        whenever bytes arrive."""
        import httpx

        # A compressed answer could exceed the limit of size once it is unpacked.
        headers = {"Accept": "application/json, text/event-stream", "Accept-Encoding": "identity"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            place = destination(self.url, self.key is not None)
        except ValueError as error:
            raise self._no_address(error) from None
        times = self.limits.connect, self.limits.answer
        deadline = Deadline(self.clock() + self.limits.answer, self.clock, came)
        try:
            with client(httpx, place, *times, deadline) as asking:
                came()
                asked = asking.stream(method, self.url + path, json=body, headers=headers)
                with asked as reply:
                    if reply.headers.get("content-encoding", "identity") != "identity":
                        raise _NoAnswer("the answer is compressed, which was not requested", True)
                    yield reply
        except Forbidden as error:
            raise refuse(
                codes.SERVER_ADDRESS,
                f"the server {self.url} is not asked: {error}",
                help=f"allow its host, {HOSTS}={place.host}, if you know whose it is; "
                f"{HOSTS}=http://{place.host} also without TLS",
            ) from None
        except httpx.TimeoutException as error:
            slow = not isinstance(error, httpx.ConnectTimeout)
            seconds = self.limits.answer if slow else self.limits.connect
            raise _NoAnswer(f"no answer in {stated(seconds, 's')}", slow) from None
        except UnicodeError as error:  # from the encoder of host names in httpx
            raise self._no_address(error) from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise _NoAnswer(self._hidden(f"{type(error).__name__}: {error}"), False) from None

    def _no_address(self, error: ValueError) -> Refusal:
        return refuse(
            codes.SERVER_ADDRESS,
            f"`url` is no address of a server: {error}",
            help="write http://HOST:PORT, or https://HOST/PATH, without what comes before /v1",
        )

    def _unreachable(self, what: str, attempt: int) -> Refusal:
        return refuse(
            codes.SERVER_UNREACHABLE,
            f"the server {self.url} does not answer {what}",
            notes=(f"asked {attempt} {'time' if attempt == 1 else 'times'}",),
            help="start it, or correct `url` of the kernel",
        )

    def _said(self, text: str) -> str:
        """Return the text of a server's refusal, truncated, without the key."""
        words = " ".join(self._hidden(text).split())
        return f" ({words[:_SHOWN]}{'…' if len(words) > _SHOWN else ''})" if words else ""

    def _hidden(self, text: str) -> str:
        return text.replace(self.key, "[key]") if self.key else text


class _NoAnswer(Exception):
    """No answer arrived; `slow`: the time was over."""

    def __init__(self, message: str, slow: bool) -> None:
        super().__init__(message)
        self.slow = slow


def _help(status: int) -> str:
    if status in (401, 403):
        return "name the variable that holds the key of the server: `key: VARIABLE`"
    return "look whether the server has the model, takes token ids and gives log-probabilities"


def key_of(variable: str | None) -> str | None:
    """Return the key in an environment variable. Refuse one that is not set, and every variable not
    for keys of servers: a contract must not read secrets of other programs."""
    if variable is None:
        return None
    if _KEY.fullmatch(variable) is None:
        raise refuse(
            codes.SERVER_UNREACHABLE,
            f"the variable {variable} is not read: it is none for keys of servers",
            help="put the key into KCDSL_SERVER_KEY, or KCDSL_SERVER_KEY_NAME, and write that",
        )
    key = os.environ.get(variable, "").strip()
    if key and key.isascii() and key.isprintable():
        return key
    raise refuse(
        codes.SERVER_UNREACHABLE,
        f"the environment variable {variable} "
        + ("holds what cannot be a key" if key else "is not set or empty"),
        help=f"put the key of the server into {variable}, or take `key` out of the contract",
    )
