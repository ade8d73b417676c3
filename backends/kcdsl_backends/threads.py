"""How many threads torch may use for work of a given size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 2**17
"""Below so many elements, threads that wait for each other cost more than they bring."""


@contextmanager
def threads_for(elements: int) -> Iterator[None]:
    """Run the body on one thread if its tensors are small; the number set before comes back."""
    before = torch.get_num_threads()
    if elements >= SMALL or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body on one thread, so that sums have the same last bits wherever it runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
