"""Run something again whenever files change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kcdsl.diagnostics import Refusal
from kcdsl.exits import Exit

_PAUSE = 0.2
"""Seconds between two looks at the files."""
_CALM = 0.05
"""Seconds without a change after which a change counts as complete."""
_TRIES = 20
_CLEAR = "\x1b[H\x1b[2J"
_Files = Callable[[], Iterable[Path]]
_State = dict[str, tuple[int, int, int] | None]
"""Time, size and number of each file by its name; None for one that is not there."""


def watch(files: _Files, work: Callable[[], Exit]) -> Exit:
    """Do the work now and after each change of a file, until interrupted; return its last outcome.

    A file has changed when its time, its size or its number has, so one that an editor puts in its
    place counts too; what is written in parts, or removed and put back at once, is one change. The
    screen of a terminal is cleared before the work is done again; what it has scrolled away stays.
    """
    outcome = Exit.HELD
    before: _State | None = None
    try:
        while True:
            now = _state(files)
            if before is not None and now != before:
                now = _settled(files, before)
            if now != before:
                if before is not None and sys.stdout.isatty():
                    sys.stdout.write(_CLEAR)
                outcome = _guarded(work)
                # The work may have found more files that matter; those known already count as
                # they were before it, so that no change meanwhile is missed.
                before = {name: now.get(name, mark) for name, mark in _state(files).items()}
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


def _settled(files: _Files, before: _State) -> _State:
    """Return the state once nothing changes any more; wait a while for files that have gone."""
    now = _state(files)
    for _ in range(_TRIES):
        time.sleep(_CALM)
        last, now = now, _state(files)
        gone = any(mark is not None and now.get(name) is None for name, mark in before.items())
        if now == last and not gone:
            break
    return now


def _state(files: _Files) -> _State:
    try:
        paths = sorted(files())
    except (Refusal, OSError):
        return {}
    return {str(path): _mark(path) for path in paths}


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
