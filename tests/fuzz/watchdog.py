"""A limit on the processor time that a piece of work may take."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Hang(Exception):
    """Raised inside work that takes longer than its limit."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise Hang in the body, or after it, once it has used so much processor time.

    Processor time and not wall time: a busy machine is no hang. Main thread only.
    """

    def stop(*_: object) -> None:
        raise Hang(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    begun = time.process_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    if time.process_time() - begun > seconds:
        stop()
