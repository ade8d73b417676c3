"""Run something again whenever files change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kcdsl.exits import Exit

_PAUSE = 0.2


def watch(files: Callable[[], Iterable[Path]], work: Callable[[], Exit]) -> Exit:
    """Do the work now and after each change of a file, until interrupted; return its last outcome.

    A file has changed when its time or its size has; it may vanish and come back.
    """
    outcome = Exit.HELD
    before: object = None
    try:
        while True:
            now = _state(files)
            if now != before:
                before = now
                outcome = work()
                sys.stdout.flush()
                print("watching; Ctrl-C ends", file=sys.stderr, flush=True)
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return outcome


def _state(files: Callable[[], Iterable[Path]]) -> tuple[tuple[str, int, int], ...]:
    found = []
    for path in files():
        try:
            status = path.stat()
        except OSError:
            found.append((str(path), 0, -1))
        else:
            found.append((str(path), status.st_mtime_ns, status.st_size))
    return tuple(found)
