"""Process settings around other code: allocator, precision, time limit, threads, output."""

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
"""Free bytes that the allocator may keep at the end of the heap."""
_RETURNED = 2**25 + 2**12
"""Blocks from this size, such as weight matrices, are returned to the system when freed. There are
few conversions of them, and in the heap they would cause fragmentation."""


def reuse_memory() -> None:
    """Let the allocator keep freed blocks of up to `_RETURNED` bytes. By default it returns larger
    tensors to the system and gets new zeroed pages for the next. This concerns only the GNU C
    library, which has `mallopt`; elsewhere nothing changes."""
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
    """Compute float32 products in float32, whichever PyTorch interface had set another mode."""
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
"""Ends of the running searches, as `time.time`; the last one applies."""


@contextmanager
def until(limit: float | None) -> Iterator[None]:
    """Run the body with a time limit (`time.time`, None: none) for `refuse_late`."""
    _LIMIT.append(math.inf if limit is None else limit)
    try:
        yield
    finally:
        _LIMIT.pop()


def refuse_late() -> None:
    """Raise OutOfTime if the time limit of the running search is exceeded."""
    if _LIMIT and time.time() > _LIMIT[-1]:
        raise OutOfTime


SMALL = 2**17
"""Number of elements below which several threads are slower than one."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body on one thread, so that the last bits of sums are reproducible."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_for(elements: int) -> AbstractContextManager[None]:
    """Return a context for work on this many elements: one thread if they are few."""
    return nullcontext() if elements >= SMALL else one_thread()


@contextmanager
def quietly(level: int = logging.WARNING) -> Iterator[None]:
    """Suppress output, warnings, and log messages up to a level."""
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


def stdout_to_stderr(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function so that its output to stdout goes to stderr."""

    @wraps(function)
    def called(*arguments: _P.args, **named: _P.kwargs) -> _R:
        with redirect_stdout(sys.stderr):
            return function(*arguments, **named)

    return called
