"""Tasks that fail in a known way, for tests of the worker pool."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl_backends.certifier.tasks import RecheckResult
from kcdsl_backends.certifier.worker import WorkerContext


@dataclass(frozen=True)
class Echo:
    """Return a text after some seconds; `own` adds the process id."""

    text: str
    seconds: float = 0.0
    own: bool = False

    def run(self, context: WorkerContext) -> tuple[RecheckResult, None]:
        time.sleep(self.seconds)
        return RecheckResult(f"{self.text} {os.getpid()}" if self.own else self.text), None


@dataclass(frozen=True)
class Crash:
    """Kill the worker, as the system does when memory runs out."""

    def run(self, context: WorkerContext) -> tuple[Any, None]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


@dataclass(frozen=True)
class CrashOnce:
    """Kill the worker the first time; return normally the next."""

    marker: Path

    def run(self, context: WorkerContext) -> tuple[RecheckResult, None]:
        if not self.marker.exists():
            self.marker.touch()
            os._exit(7)
        return RecheckResult("second"), None


@dataclass(frozen=True)
class RaiseError:
    """Raise a given exception."""

    kind: str

    def run(self, context: WorkerContext) -> tuple[Any, None]:
        match self.kind:
            case "memory":
                raise MemoryError("no room")
            case "refusal":
                raise refuse(codes.WEIGHT_OVERFLOW, "a weight overflows", help="take bfloat16")
            case "file":
                raise FileNotFoundError(2, "No such file", "gone.safetensors")
            case kind:
                raise ValueError(kind)
