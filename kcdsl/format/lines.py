"""What changed between two texts, line by line, in the time that reading them takes.

Lines that occur once in both texts, and come in the same order, are taken for the same line, and so
are equal lines next to those; what is left between them is replaced. The matcher of the standard
library takes minutes for a contract with thousands of lines such as `level: L2`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from kcdsl.diagnostics.model import Edit
from kcdsl.diagnostics.spans import Span


def edits(old: str, new: str) -> tuple[Edit, ...]:
    """Return edits of whole lines that turn one text into another."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    starts = [0]
    for line in before:
        starts.append(starts[-1] + len(line))
    return tuple(
        Edit(Span(starts[a], starts[b]), "".join(after[c:d]))
        for a, b, c, d in _changes(before, after)
    )


def _changes(before: Sequence[str], after: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the ranges `before[a:b]` that become `after[c:d]`, in their order."""
    a = c = 0
    for anchor, other in [*_anchors(before, after), (len(before), len(after))]:
        b, d = anchor, other
        while a < b and c < d and before[a] == after[c]:
            a, c = a + 1, c + 1
        while a < b and c < d and before[b - 1] == after[d - 1]:
            b, d = b - 1, d - 1
        if a < b or c < d:
            yield a, b, c, d
        a, c = anchor, other


def _anchors(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int]]:
    """Return the numbers of the lines that occur once in both: a longest run in one order."""
    here, there = _once(before), _once(after)
    pairs = [(number, there[line]) for line, number in here.items() if line in there]
    # Each entry: the least last line of a run of its length, and the pair before in that run.
    ends: list[int] = []
    runs: list[int] = []
    earlier: list[int] = []
    for index, (_, other) in enumerate(pairs):
        length = bisect_left(ends, other)
        earlier.append(runs[length - 1] if length else -1)
        ends[length : length + 1] = [other]
        runs[length : length + 1] = [index]
    found: list[tuple[int, int]] = []
    at = runs[-1] if runs else -1
    while at >= 0:
        found.append(pairs[at])
        at = earlier[at]
    return found[::-1]


def _once(lines: Sequence[str]) -> dict[str, int]:
    """Return the lines that occur once, with their numbers, in their order."""
    seen: dict[str, int] = {}
    again: set[str] = set()
    for number, line in enumerate(lines):
        if line in seen:
            again.add(line)
        seen[line] = number
    return {line: number for line, number in seen.items() if line not in again}
