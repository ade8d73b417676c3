"""Reduce a document that reveals a defect."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Shows = Callable[[bytes], bool]


def reduce(data: bytes, shows: Shows, seconds: float = 20.0) -> bytes:
    """Return a part of a document that still reveals the defect: remove lines, then characters.

    No line and no single character can be removed from the result, unless the time ran out.
    """
    stop = time.monotonic() + seconds
    for cut in (_lines, _characters):
        size = len(data) + 1
        while len(data) < size and time.monotonic() < stop:
            size = len(data)
            data = _shorten(cut(data), shows, stop)
    return data


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def _characters(data: bytes) -> list[bytes]:
    try:
        return [char.encode() for char in data.decode("utf-8")]
    except UnicodeDecodeError:
        return [data[i : i + 1] for i in range(len(data))]


def _shorten(parts: Sequence[bytes], shows: Shows, stop: float) -> bytes:
    """Remove runs of parts, from half of all down to single ones, while the defect remains."""
    kept = list(parts)
    size = max(1, len(kept) // 2)
    while True:
        at = 0
        while at < len(kept):
            if time.monotonic() > stop:
                return b"".join(kept)
            fewer = kept[:at] + kept[at + size :]
            if shows(b"".join(fewer)):
                kept = fewer
            else:
                at += size
        if size == 1:
            return b"".join(kept)
        size //= 2
