"""A headless browser that tests drive over a pipe, by the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any

_PATIENCE = 60.0


@dataclass
class Page:
    """A loaded page, with its network requests and console errors."""

    browser: Browser
    session: str
    requested: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.browser.call(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
            self.session,
        )
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def picture(self) -> bytes:
        """Return the page as PNG."""
        found = self.browser.call(
            "Page.captureScreenshot", {"captureBeyondViewport": True}, self.session
        )
        return base64.b64decode(found["data"])


@dataclass
class Browser:
    """The process and the two ends of its pipe."""

    out: int
    into: int
    events: list[dict[str, Any]] = field(default_factory=list)
    _left: bytes = b""
    _number: int = 0

    def call(
        self, method: str, parameters: Mapping[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        """Return the answer to a command; events that arrive meanwhile are queued."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise AssertionError(found["error"])
                return dict(found["result"])
            self.events.append(found)

    def wait_for(self, method: str, session: str) -> None:
        """Read until an event of a session arrives."""
        while not any(
            e.get("method") == method and e.get("sessionId") == session for e in self.events
        ):
            self.events.append(self._next())

    def open(self, file: Path, *, width: int, height: int = 900, dark: bool = False) -> Page:
        """Load a file in a new page."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})[
            "sessionId"
        ]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable", {}, session)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", size, session)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]}, session)
        self.events.clear()
        self.call("Page.navigate", {"url": file.resolve().as_uri()}, session)
        self.wait_for("Page.loadEventFired", session)
        page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
        for event in self.events:
            detail = event.get("params", {})
            match event.get("method"):
                case "Network.requestWillBeSent":
                    page.requested.append(detail["request"]["url"])
                case "Runtime.exceptionThrown" | "Page.javascriptDialogOpening":
                    page.complaints.append(json.dumps(detail))
                case "Log.entryAdded":
                    page.complaints.append(detail["entry"]["text"])
                case "Runtime.consoleAPICalled":
                    page.complaints.append(json.dumps(detail["args"]))
        return page

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE
        while b"\0" not in self._left:
            ready, _, _ = select([self.into], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise AssertionError("the browser does not answer")
            read = os.read(self.into, 2**20)
            if not read:
                raise AssertionError("the browser has ended")
            self._left += read
        message, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start the browser with a profile in `folder`, and end it."""
    program = shutil.which("chromium")
    assert program is not None, "`make tools` installs chromium"
    child_in, out = os.pipe()
    into, child_out = os.pipe()
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
    ]
    joined = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{child_in} 4>&{child_out}', "browser", *command],
        pass_fds=(child_in, child_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_in)
    os.close(child_out)
    try:
        yield Browser(out, into)
    finally:
        joined.terminate()
        joined.wait(timeout=30)
        os.close(out)
        os.close(into)
