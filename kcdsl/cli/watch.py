"""Run something again whenever files change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kcdsl.diagnostics import Refusal
from kcdsl.exits import Exit

_PAUSE = 0.2
_CLEAR = "\x1b[H\x1b[2J"
_State = tuple[tuple[str, int, int], ...]


def watch(files: Callable[[], Iterable[Path]], work: Callable[[], Exit]) -> Exit:
    """Do the work now and after each change of a file, until interrupted; return its last outcome.

    A file has changed when its time or its size has; it may vanish and come back. The screen of a
    terminal is cleared before the work is done again; what it has scrolled away stays.
    """
    outcome = Exit.HELD
    before: _State | None = None
    try:
        while True:
            now = _state(files)
            if before is None or now != before:
                if before is not None and sys.stdout.isatty():
                    sys.stdout.write(_CLEAR)
                outcome = _guarded(work)
                # The work may have found more files that matter; those known already count as
                # they were before it, so that no change meanwhile is missed.
                known = {name: (name, when, size) for name, when, size in now}
                before = tuple(known.get(entry[0], entry) for entry in _state(files))
                sys.stdout.flush()
                print("watching; Ctrl-C ends", file=sys.stderr, flush=True)
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return outcome


def _guarded(work: Callable[[], Exit]) -> Exit:
    """Do the work; what stops it is shown, and may be mended while we watch."""
    try:
        return work()
    except Refusal as refusal:
        from kcdsl.diagnostics.render.full import render_full

        print(render_full(refusal.diagnostics, sys.stderr), file=sys.stderr)
        return Exit.COULD_NOT_RUN


def _state(files: Callable[[], Iterable[Path]]) -> _State:
    found = []
    try:
        paths = sorted(files())
    except Refusal:
        return (("", 0, -1),)
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            found.append((str(path), 0, -1))
        else:
            found.append((str(path), status.st_mtime_ns, status.st_size))
    return tuple(found)
