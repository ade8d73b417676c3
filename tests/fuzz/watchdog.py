"""A time limit for a block of code."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 30
"""The factor of the limit that bounds wall time; a busy machine needs more than processor time."""


class Hang(Exception):
    """Raised inside code that exceeds its limit."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise Hang in or after the body once it exceeds the limit of processor time.

    A wall-clock limit of thirty times as much applies too: a busy machine is not a hang. Main
    thread only.
    """

    caught: list[str] = []

    def stop(*_: object) -> None:
        caught.append(f"more than {seconds:g} s of processor time")
        raise Hang(caught[-1])

    def wake(*_: object) -> None:
        caught.append(f"more than {PATIENCE * seconds:g} s")
        raise Hang(caught[-1])

    before = signal.signal(signal.SIGPROF, stop), signal.signal(signal.SIGALRM, wake)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])
    if caught:  # and the code continued
        raise Hang(caught[0])
