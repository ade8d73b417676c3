"""A limit on the time that a piece of work may take."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 30
"""How many times its limit work may last on a busy machine; beyond that it waits for something."""


class Hang(Exception):
    """Raised inside work that takes longer than its limit."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise Hang in the body, or after it, once it has used so much processor time, or has lasted
    thirty times as long.

    Processor time first: a busy machine is no hang. Main thread only.
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
    if caught:  # and the work went on
        raise Hang(caught[0])
