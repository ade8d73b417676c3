"""Executors of local processes, ray and threads; available cores and memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import closing, contextmanager
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Thread
from types import ModuleType
from typing import Any, TypeVar

from kcdsl.diagnostics import codes, refuse

_LIBRARIES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables of numeric libraries, which are read at the first import in a worker."""


def thread_variables() -> dict[str, str]:
    """Return the environment variables that set the threads of numeric libraries."""
    return {name: os.environ[name] for name in _LIBRARIES if name in os.environ}


def set_thread_variables(values: Mapping[str, str]) -> None:
    """Set these variables to the values of another process; unset the others.

    A library that is already imported keeps its number of threads.
    """
    for name in _LIBRARIES:
        os.environ.pop(name, None)
    os.environ.update(values)


class Processes(ProcessPoolExecutor):
    """An executor of spawned processes that can be killed at once.

    A worker ignores Ctrl-C, which the parent handles, and ends whenever its parent ends. Every
    numeric library in it has `threads` threads.
    """

    def __init__(self, jobs: int, threads: int) -> None:
        """Prepare `jobs` processes, which start on demand."""
        self._context = _Context(threads)
        super().__init__(jobs, mp_context=self._context, initializer=_initialise)

    def kill(self) -> None:
        """Kill all workers now; running calls are lost."""
        self.shutdown(wait=False, cancel_futures=True)
        for process in self._context.started:
            if process.is_alive():
                process.kill()
        for process in self._context.started:
            process.join()


class _Context(SpawnContext):
    """Spawns processes and records them."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.threads = threads
        self.started: list[SpawnProcess] = []

    def Process(self, *arguments: Any, **named: Any) -> SpawnProcess:  # type: ignore[override]
        """Return a new process with the thread variables of this context."""
        process = _Worker(*arguments, **named)
        process.variables = dict.fromkeys(_LIBRARIES, str(self.threads))
        self.started.append(process)
        return process


class _Worker(SpawnProcess):
    variables: dict[str, str]

    def start(self) -> None:
        """Start with SIGINT blocked, which the worker inherits, and without running the program of
        this process again: a script that calls kcdsl may have no `if __name__ == "__main__"`."""
        with _environment(self.variables), _interrupts_blocked(), _unnamed_program():
            super().start()


def allow_interrupts() -> None:
    """Let Ctrl-C interrupt a wait of this process at once.

    z3 restores the handler that it replaced, but in a mode that restarts system calls; a wait for
    workers would then notice Ctrl-C only when one of them answers.
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
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT during the body if the system supports it; it is delivered afterwards."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _unnamed_program() -> Iterator[None]:
    """Hide the file of the running program, which a spawned process would import."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _initialise() -> None:
    """Initialise a worker: ignore Ctrl-C, and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


# --- the machine ----------------------------------------------------------------------------------


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def available_memory() -> int | None:
    """Return the bytes of memory available to new processes; None if unknown."""
    found = [value for value in (_free_pages(), _group_memory()) if value is not None]
    return min(found) if found else None


def _free_pages() -> int | None:
    """Return the available memory according to the kernel, else the free memory, in bytes."""
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


def _group_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes left under the limit of the control group; None without a limit."""
    try:
        limit = int((root / "memory.max").read_text(encoding="ascii"))
        used = int((root / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return max(0, limit - used)


T = TypeVar("T")
_ADDRESS = "RAY_ADDRESS"


class WorkerLost(Exception):
    """A worker ended before its call returned; only this call is lost."""


class Ray(Executor):
    """An executor on ray: the cluster at RAY_ADDRESS, else a cluster of this machine alone.

    Every call takes `threads` cores. A worker that ends is replaced; its call is not repeated.
    """

    def __init__(self, jobs: int | None, threads: int) -> None:
        """Connect; `jobs` calls run at a time on this machine, None: as many as the cores allow.

        Raises:
            Refusal: ray is not installed, or there is no cluster at RAY_ADDRESS.
        """
        try:
            ray: Any = import_module("ray")
        except ImportError as error:
            raise refuse(
                codes.NO_PACKAGE,
                f"the engine ray needs the package ray: {error}",
                help='pip install "kcdsl[ray]", or use --engine processes',
            ) from None
        self._ray = ray
        self._mine = not ray.is_initialized()
        if self._mine:
            _start(ray, None if jobs is None else jobs * threads)
        self._call = ray.remote(num_cpus=threads, max_retries=0)(_call)
        self._references: dict[Future[Any], Any] = {}
        total = int(ray.cluster_resources().get("CPU", threads))
        self.jobs = max(1, total // threads) if jobs is None else jobs

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Send a call to a worker. Its future raises `WorkerLost` if the worker ends."""
        reference = self._call.remote(fn, args, kwargs)
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._references[future] = reference
        reference.future().add_done_callback(lambda done: self._answer(future, done))
        return future

    def _answer(self, future: Future[Any], done: Future[Any]) -> None:
        self._references.pop(future, None)
        error = done.exception()
        if error is None:
            future.set_result(done.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):
            future.set_exception(error)
        else:
            first = str(error).strip().splitlines()
            future.set_exception(WorkerLost(first[0] if first else type(error).__name__))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnect from ray; wait for running calls or cancel them."""
        if cancel_futures:
            for reference in list(self._references.values()):
                self._ray.cancel(reference, force=True)
        elif wait:
            self._ray.wait(list(self._references.values()) or [self._ray.put(None)])
        if self._mine and self._ray.is_initialized():
            self._ray.shutdown()

    def kill(self) -> None:
        """Cancel all calls now."""
        self.shutdown(wait=False, cancel_futures=True)


def _start(ray: Any, cpus: int | None) -> None:
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    address = os.environ.get(_ADDRESS)
    if not address:
        ray.init(num_cpus=cpus, **quiet)
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise refuse(
            codes.USAGE,
            f"there is no ray cluster at {_ADDRESS}={address}: {error}",
            help=f"unset {_ADDRESS} to use this machine alone",
        ) from None


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)


THREAD = "question"
"""The name of the threads of `in_order`."""
Asked = TypeVar("Asked")
Given = TypeVar("Given")


def in_order(
    questions: Sequence[Asked], ask: Callable[[Asked], Given], at_once: int = 1
) -> Generator[Given, None, None]:
    """Yield the answer to each question, in the order of the questions.

    With `at_once` 1, a question is asked when its answer is requested; otherwise that many threads
    ask ahead. Exceptions of `ask` are raised here as soon as they occur. After the generator is
    closed, no question is asked.
    """
    ready: dict[int, Given] = {}
    with closing(_arriving(questions, ask, at_once)) as arriving:
        for place in range(len(questions)):
            while place not in ready:
                at, given = next(arriving)
                ready[at] = given
            yield ready.pop(place)


def _arriving(
    questions: Sequence[Asked], ask: Callable[[Asked], Given], at_once: int
) -> Generator[tuple[int, Given], None, None]:
    """Yield (index, answer) in the order of arrival."""
    if at_once == 1:
        yield from enumerate(map(ask, questions))
        return
    waiting, lock, over = iter(range(len(questions))), Lock(), Event()
    results: SimpleQueue[tuple[int, Given] | BaseException] = SimpleQueue()

    def work() -> None:
        while not over.is_set():
            with lock:
                place = next(waiting, None)
            if place is None:
                return
            try:
                results.put((place, ask(questions[place])))
            except BaseException as error:  # raised by the consumer
                over.set()
                results.put(error)

    # daemons: a cancelled evaluation does not wait for pending answers
    for _ in range(min(at_once, len(questions))):
        Thread(target=work, name=THREAD, daemon=True).start()
    try:
        for _ in questions:
            found = results.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        over.set()
