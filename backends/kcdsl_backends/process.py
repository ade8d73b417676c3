"""The process while it runs other code: the threads of torch, and what is printed."""

from __future__ import annotations

import ctypes
import io
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
)
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, of <malloc.h> of the GNU C library."""
_KEPT = 2**30
"""Bytes that may stay free at the end of the heap."""
_RETURNED = 2**25 + 2**12
"""Bytes from which on a block of memory is given back when it is freed: matrices of weights. Their
conversions are few, and in the heap they would leave holes that nothing else fills."""


def reuse_memory() -> None:
    """Let the allocator keep what is freed, up to `_RETURNED` bytes at a time. Otherwise it gives
    every tensor of some size back to the system and takes fresh pages, zeroed one by one, for the
    next. Only the GNU C library does so, and has `mallopt`; elsewhere nothing changes."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _RETURNED)
    mallopt(_TRIM_THRESHOLD, _KEPT)


@contextmanager
def exact_products() -> Iterator[None]:
    """Form products of float32 in float32, whichever interface of PyTorch set it otherwise."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer interface is in use, and the older one does not read it
        library: Any = torch.backends
        places = (library.cuda.matmul, library.mkldnn.matmul)
        known = [place.fp32_precision for place in places]
        for place in places:
            place.fp32_precision = "ieee"
        try:
            yield
        finally:
            for place, before in zip(places, known, strict=True):
                place.fp32_precision = before
        return
    if precision != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)


class OutOfTime(Exception):
    """The search for bounds reached the time limit of the command."""


_LIMIT: list[float] = []
"""When the search that is under way must end, of `time.time`; the last one counts."""


@contextmanager
def until(limit: float | None) -> Iterator[None]:
    """Run the body; `refuse_late` ends it at `limit`, if that is one."""
    _LIMIT.append(math.inf if limit is None else limit)
    try:
        yield
    finally:
        _LIMIT.pop()


def refuse_late() -> None:
    """Raise OutOfTime where the time limit of the search that is under way is past."""
    if _LIMIT and time.time() > _LIMIT[-1]:
        raise OutOfTime


SMALL = 2**17
"""Below so many elements, threads that wait for each other cost more than they bring."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body on one thread, so that sums have the same last bits wherever it runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(elements: int) -> AbstractContextManager[None]:
    """Return the context of work on so many elements: one thread if they are few."""
    return nullcontext() if elements >= SMALL else one_thread()


@contextmanager
def quietly(level: int = logging.WARNING) -> Iterator[None]:
    """Keep what a library prints, warns of, and logs up to a level from the terminal."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def prints_aside(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function with whatever is printed while it runs on stderr."""

    @wraps(function)
    def called(*arguments: _P.args, **named: _P.kwargs) -> _R:
        with redirect_stdout(sys.stderr):
            return function(*arguments, **named)

    return called
