"""Executors of processes, here or on ray, and of threads; the cores and memory they may use."""

from __future__ import annotations

import multiprocessing
import os
import signal
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
from typing import Any, TypeVar

from kcdsl.diagnostics import codes, refuse

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


T = TypeVar("T")
_ADDRESS = "RAY_ADDRESS"


class WorkerLost(Exception):
    """A piece of work whose worker ended before it; only that piece is lost."""


class Ray(Executor):
    """An executor on ray: the cluster that RAY_ADDRESS names, else one of this machine alone.

    Every call takes `threads` cores. A worker that ends is replaced, and what it worked on is not
    tried again.
    """

    def __init__(self, jobs: int | None, threads: int) -> None:
        """Connect; `jobs` is how many calls run at a time on this machine, None for all cores.

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
        """Leave ray; end calls that still run, unless they are waited for."""
        if cancel_futures:
            for reference in list(self._references.values()):
                self._ray.cancel(reference, force=True)
        elif wait:
            self._ray.wait(list(self._references.values()) or [self._ray.put(None)])
        if self._mine and self._ray.is_initialized():
            self._ray.shutdown()

    def kill(self) -> None:
        """End all calls now."""
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
"""The name of threads that ask."""
Asked = TypeVar("Asked")
Given = TypeVar("Given")


def in_order(
    questions: Sequence[Asked],
    ask: Callable[[Asked], Given],
    at_once: int = 1,
    known: Mapping[int, Given] | None = None,
) -> Generator[Given, None, None]:
    """Yield the answer to each question, in the order of the questions.

    `known` are answers by their place, which are not asked for. With `at_once` 1 a question is
    asked when its answer is wanted; else so many threads ask, ahead of what is wanted. What `ask`
    raises is raised here as soon as it comes. Once the generator is closed nothing more is asked.
    """
    ready: dict[int, Given] = dict(known or {})
    left = [place for place in range(len(questions)) if place not in ready]
    with closing(_arriving(questions, left, ask, at_once)) as arriving:
        for place in range(len(questions)):
            while place not in ready:
                at, given = next(arriving)
                ready[at] = given
            yield ready.pop(place)


def _arriving(
    questions: Sequence[Asked], places: Sequence[int], ask: Callable[[Asked], Given], at_once: int
) -> Generator[tuple[int, Given], None, None]:
    """Yield (place, answer) as answers come."""
    if at_once == 1:
        for place in places:
            yield place, ask(questions[place])
        return
    waiting, lock, over = iter(places), Lock(), Event()
    come: SimpleQueue[tuple[int, Given] | BaseException] = SimpleQueue()

    def work() -> None:
        while not over.is_set():
            with lock:
                place = next(waiting, None)
            if place is None:
                return
            try:
                come.put((place, ask(questions[place])))
            except BaseException as error:  # it is raised where answers are taken
                over.set()
                come.put(error)

    # daemons: an evaluation that is ended does not wait for answers on their way
    for _ in range(min(at_once, len(places))):
        Thread(target=work, name=THREAD, daemon=True).start()
    try:
        for _ in places:
            found = come.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        over.set()
