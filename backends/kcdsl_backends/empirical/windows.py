"""Windows: consecutive units that are judged together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_Unit = TypeVar("_Unit")

WINDOW = 16
"""Consecutive units that form one window."""
NO_WINDOW_HAS = frozenset({"peak_memory", "determinism"})
"""Metrics that are one number of a whole slice: no window by itself was measured."""


def windows(units: Sequence[_Unit], size: int = WINDOW) -> tuple[tuple[_Unit, ...], ...]:
    """Cut units into windows of `size` in their order; a short rest joins the last window."""
    starts = [size * i for i in range(window_count(len(units), size))]
    ends = [*starts[1:], len(units)]
    return tuple(tuple(units[a:b]) for a, b in zip(starts, ends, strict=True))


def window_count(units: int, size: int = WINDOW) -> int:
    """Return into how many windows so many units are cut."""
    return 0 if units == 0 else max(1, units // size)
