"""A minimal client of language servers."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PATIENCE = 30.0
"""Seconds to wait for an answer."""


class Client:
    """A server process on its standard streams; `settings` are the client's answers."""

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self._settings = settings or {}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._told: dict[str, queue.Queue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._next = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def request(self, method: str, params: object) -> Any:
        """Send a request and return its result; raises RuntimeError for an error."""
        self._next += 1
        answer = self._answers.setdefault(self._next, queue.Queue())
        self._send({"id": self._next, "method": method, "params": params})
        message = answer.get(timeout=PATIENCE)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']}")
        return message.get("result")

    def notify(self, method: str, params: object) -> None:
        """Send a notification."""
        self._send({"method": method, "params": params})

    def told(self, method: str) -> Any:
        """Wait for the next notification of a kind; return its parameters."""
        with self._lock:
            heard = self._told.setdefault(method, queue.Queue())
        return heard.get(timeout=PATIENCE)["params"]

    def processor_seconds(self) -> float:
        """Return the processor time of the process; 0 where the system does not report it."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return 0.0
        ticks = stat.rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        stream = self.process.stdout
        while True:
            length = 0
            while (line := stream.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            if length == 0:
                return
            self._take(json.loads(stream.read(length)))

    def _take(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            self._answers[message["id"]].put(message)
        elif "id" in message:
            # a request of the server: for its settings, or to register a capability
            asked = message.get("params")
            items = asked.get("items") if isinstance(asked, dict) else None
            result = None
            if items is not None:
                result = [self._settings.get(item.get("section", "")) for item in items]
            self._send({"id": message["id"], "result": result})
        else:
            with self._lock:
                heard = self._told.setdefault(message["method"], queue.Queue())
            heard.put(message)
