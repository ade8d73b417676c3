"""ray behind the interface of `concurrent.futures`: the workers of a cluster as an executor."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future
from importlib import import_module
from typing import Any, TypeVar

from kcdsl.diagnostics import codes, refuse

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
