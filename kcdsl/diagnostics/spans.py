"""Source texts, with the spans and positions that diagnostics refer to."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

_LINE_BREAK = re.compile("\n")


class Span(NamedTuple):
    """A half-open range `[start, end)` of code points of one source file."""

    start: int
    end: int

    def hull(self, other: Span) -> Span:
        """Return the smallest span that covers both."""
        return Span(min(self.start, other.start), max(self.end, other.end))

    def holds(self, offset: int) -> bool:
        """Return whether an offset lies in the span or at one of its ends."""
        return self.start <= offset <= self.end

    def touches(self, other: Span) -> bool:
        """Return whether two spans share a character or an end."""
        return self.start <= other.end and other.start <= self.end


class Position(NamedTuple):
    """A position for people: line and column start at 1, columns count code points."""

    line: int
    column: int


@dataclass(frozen=True)
class SourceFile:
    """The text of one file and the name under which it is reported."""

    name: str
    text: str = field(repr=False)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return (0, *(found.end() for found in _LINE_BREAK.finditer(self.text)))

    def position(self, offset: int) -> Position:
        """Return the line and column of a code-point offset."""
        line = bisect_right(self._starts, offset) - 1
        return Position(line + 1, offset - self._starts[line] + 1)

    def line_start(self, number: int) -> int:
        """Return the offset of the first code point of line `number` (from 1)."""
        return self._starts[number - 1]

    def line(self, number: int) -> str:
        """Return line `number` (from 1) without its line break."""
        start = self._starts[number - 1]
        end = self._starts[number] if number < len(self._starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    @property
    def line_count(self) -> int:
        """Return the number of lines."""
        return len(self._starts)
