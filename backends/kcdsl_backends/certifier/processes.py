"""Worker processes that never outlive their parent, and what the machine has for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Numeric libraries read these when a worker first imports them."""


def thread_variables() -> dict[str, str]:
    """Return those variables of the environment that say how many threads libraries use."""
    return {name: os.environ[name] for name in _LIBRARIES if name in os.environ}


def set_thread_variables(values: Mapping[str, str]) -> None:
    """Set those variables to the values that another process has; others are unset.

    A library that is imported already keeps its threads.
    """
    for name in _LIBRARIES:
        os.environ.pop(name, None)
    os.environ.update(values)


class Processes(ProcessPoolExecutor):
    """An executor of spawned processes that can be ended at once.

    A worker ignores Ctrl-C, which is its parent's to answer, and ends with its parent, however that
    ends. It has `threads` threads in every numeric library.
    """

    def __init__(self, jobs: int, threads: int) -> None:
        """Prepare `jobs` processes; each is started when there is work for it."""
        self._context = _Context(threads)
        super().__init__(jobs, mp_context=self._context, initializer=_begin)

    def kill(self) -> None:
        """End all workers now; what they were doing is lost."""
        self.shutdown(wait=False, cancel_futures=True)
        for process in self._context.started:
            if process.is_alive():
                process.kill()
        for process in self._context.started:
            process.join()


class _Context(SpawnContext):
    """Spawns processes, and remembers them."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = threads
        self.started: list[SpawnProcess] = []

    def Process(self, *arguments: Any, **named: Any) -> SpawnProcess:  # type: ignore[override]
        """Return a new process that `start` starts with the right surroundings."""
        process = _Worker(*arguments, **named)
        process.surroundings = dict.fromkeys(_LIBRARIES, str(self.threads))
        self.started.append(process)
        return process


class _Worker(SpawnProcess):
    surroundings: dict[str, str]

    def start(self) -> None:
        """Start with Ctrl-C held back, which the worker inherits from its first instruction on."""
        with _environment(self.surroundings), _interrupts_held():
            super().start()


def let_interrupts_through() -> None:
    """Let Ctrl-C end a wait of this process at once.

    z3 puts back the handler that it replaced, but so that system calls go on after it; a wait for
    workers would then hear of Ctrl-C only when one of them answers.
    """
    if hasattr(signal, "siginterrupt"):
        signal.siginterrupt(signal.SIGINT, True)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold SIGINT back during the body, where the system can; it arrives afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Prepare a worker: no Ctrl-C, and an end when the parent's comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


# --- the machine ----------------------------------------------------------------------------------


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def available_memory() -> int | None:
    """Return how many bytes of memory new processes can have, None where nothing says so."""
    found = [value for value in (_free_pages(), _group_room()) if value is not None]
    return min(found) if found else None


def _free_pages() -> int | None:
    """Return what the kernel calls available; without it, what is free."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _group_room(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what the limit of the control group leaves, None where there is none."""
    try:
        limit = int((root / "memory.max").read_text(encoding="ascii"))
        used = int((root / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return max(0, limit - used)
