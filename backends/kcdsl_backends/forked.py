"""Rows of a long computation divided among forked processes, which write into shared memory.

A forked process has all that its parent has computed, and caches of its own. It runs the same code
on its rows as the parent would, so results do not depend on the number of processes.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from kcdsl_backends.process import one_thread

Arrays = tuple[NDArray[np.float64], ...]
Row = TypeVar("Row", bound=tuple[int, ...])

TOGETHER = 8
"""Rows that follow one another stay together, as they share products."""
_POLL = 1.0
"""Seconds after which a process looks whether its parent is still there."""


def processes() -> int:
    """Return the number of processes among which rows are divided: the threads that the caller may
    use, and one where processes cannot be forked safely."""
    if not sys.platform.startswith("linux"):
        return 1
    return torch.get_num_threads()


def over_rows(
    rows: Sequence[Row], results: Arrays, work: Callable[[Sequence[Row], Arrays], None]
) -> Arrays:
    """Return the results after `work(share, results)` for shares that make up all rows.

    A process may not start, or end without having finished its share (it may be killed, or `work`
    may raise an exception there): this process then does that share itself. Rows with the same or
    neighbouring last indices are in the same share.

    Args:
        rows: indices of rows.
        results: what `work` writes into, and may read for its own rows only; not changed.
        work: a function that writes the results of some rows.
    """
    shares = _shares(rows, processes())
    shared = tuple(map(_shared, results)) if len(shares) > 1 else tuple(r.copy() for r in results)
    if len(shares) < 2:
        work(rows, shared)
        return shared
    own, children = [shares[0]], dict[int, Sequence[Row]]()
    with one_thread(), threadpool_limits(1):
        try:
            for share in shares[1:]:
                try:
                    children[_forked(work, share, shared)] = share
                except OSError:  # too many processes, or too little memory
                    own.append(share)
            for share in own:
                work(share, shared)
            for child in list(children):
                status = os.waitpid(child, 0)[1]
                share = children.pop(child)
                if status:
                    work(share, shared)
        finally:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return shared


def _shares(rows: Sequence[Row], count: int) -> list[Sequence[Row]]:
    """Divide rows into at most `count` shares; of rows at different places of a sequence, which
    take different times, each share has some from every part of it."""
    shares: list[list[Row]] = [[] for _ in range(count)]
    for row in rows:
        last = row[-1] if row else 0  # a vector has one row, ()
        shares[last // TOGETHER % count].append(row)
    return [share for share in shares if share]


def _shared(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a copy of an array in memory that is shared with forked processes."""
    room = mmap.mmap(-1, max(1, values.nbytes))
    found = np.frombuffer(room, dtype=np.float64, count=values.size).reshape(values.shape)
    found[...] = values
    return found


def _forked(
    work: Callable[[Sequence[Row], Arrays], None], share: Sequence[Row], results: Arrays
) -> int:
    """Return the number of a new process that does a share of the work and exits with 0 if it has
    finished it."""
    parent, status = os.getpid(), 1
    try:
        with warnings.catch_warnings():  # other threads hold no lock that `work` needs
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
            gc.freeze()
            threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
            work(share, results)
            status = 0
        return child
    finally:
        if os.getpid() != parent:  # nothing that is raised here may reach the code of the parent
            os._exit(status)


def _end_with(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(_POLL)
    os._exit(1)
