"""Questions to a server: limits of time, size and retries, and a key that nothing shows."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.verdict.quantities import stated

if TYPE_CHECKING:
    import httpx

LATER = frozenset((408, 425, 429, 500, 502, 503, 504))
"""Answers after which it is asked again."""
ABSENT = frozenset((404, 405, 501))
"""Answers of a server that does not know the question."""
_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Limits:
    """How long (seconds), how often and how much (bytes) a server may answer."""

    connect: float = 10.0
    answer: float = 120.0
    """For the whole answer, however slowly its bytes come."""
    attempts: int = 4
    slow_attempts: int = 2
    """How often it is asked again where it does not answer in time."""
    pause: float = 0.5
    """Before the second attempt; doubled before each further one."""
    longest_pause: float = 30.0
    size: int = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Transport:
    """Asks the server at an address. `key` is sent with each question and shown nowhere."""

    url: str
    key: str | None = field(default=None, repr=False)
    limits: Limits = field(default=Limits())
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def get(self, path: str) -> Any:
        """Return what the server says at a path; None where it does not know the path.

        Raises Refusal where it does not answer, or not in JSON.
        """
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to a question; None where the server does not know the path.

        Raises Refusal where it does not answer, refuses the question, or answers no whole JSON.
        """
        return self._ask("POST", path, body)

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
                )
        assert last is not None
        raise last

    def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        """Return status and text of one answer."""
        import httpx

        headers = {"Accept": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        started, parts, size = self.clock(), [], 0
        local = urlsplit(self.url).hostname in _LOOPBACK
        try:
            with (
                self._client(httpx, local) as client,
                client.stream(method, self.url + path, json=body, headers=headers) as reply,
            ):
                for part in reply.iter_bytes():
                    size += len(part)
                    if size > self.limits.size:
                        raise _NoAnswer(f"the answer has more than {self.limits.size} bytes", True)
                    if self.clock() - started > self.limits.answer:
                        raise _NoAnswer(
                            f"no whole answer in {stated(self.limits.answer, 's')}", True
                        )
                    parts.append(part)
                return reply.status_code, b"".join(parts).decode("utf-8", errors="replace")
        except httpx.TimeoutException as error:
            slow = not isinstance(error, httpx.ConnectTimeout)
            seconds = self.limits.answer if slow else self.limits.connect
            raise _NoAnswer(f"no answer in {stated(seconds, 's')}", slow) from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise _NoAnswer(self._hidden(f"{type(error).__name__}: {error}"), False) from None

    def _client(self, library: Any, local: bool) -> httpx.Client:
        times = library.Timeout(self.limits.answer, connect=self.limits.connect)
        client: httpx.Client = library.Client(
            timeout=times, follow_redirects=False, trust_env=not local
        )
        return client

    def _unreachable(self, what: str, attempt: int) -> Refusal:
        return refuse(
            codes.SERVER_UNREACHABLE,
            f"the server {self.url} does not answer {what}",
            notes=(f"asked {attempt} {'time' if attempt == 1 else 'times'}",),
            help="start it, or correct `url` of the kernel",
        )

    def _said(self, text: str) -> str:
        """Return what a server said of its refusal, cut off, without the key."""
        words = " ".join(self._hidden(text).split())
        return f" ({words[:_SHOWN]}{'…' if len(words) > _SHOWN else ''})" if words else ""

    def _hidden(self, text: str) -> str:
        return text.replace(self.key, "[key]") if self.key else text


class _NoAnswer(Exception):
    """No answer came; `slow` says that the time was over."""

    def __init__(self, message: str, slow: bool) -> None:
        super().__init__(message)
        self.slow = slow


def _help(status: int) -> str:
    if status in (401, 403):
        return "name the variable that holds the key of the server: `key: VARIABLE`"
    return "look whether the server has the model, takes token ids and gives log-probabilities"


def key_of(variable: str | None) -> str | None:
    """Return the key that a variable of the environment holds. Refuse one that is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if key and key.isascii() and key.isprintable():
        return key
    raise refuse(
        codes.SERVER_UNREACHABLE,
        f"the environment variable {variable} "
        + ("holds what cannot be a key" if key else "is not set or empty"),
        help=f"put the key of the server into {variable}, or take `key` out of the contract",
    )
