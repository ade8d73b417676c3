"""Places as clients count them: lines from 0, and characters in units of a negotiated encoding.

The only module that knows of UTF-8, UTF-16 and UTF-32 units; everything else counts code points.
As in the protocol, a line ends at a line feed, a carriage return, or both together.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate

from kcdsl.diagnostics.spans import Span

_BREAK = re.compile(r"\r\n|\n|\r")


class Encoding(StrEnum):
    """What a client counts characters in."""

    UTF8 = "utf-8"
    UTF16 = "utf-16"
    UTF32 = "utf-32"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A line and a character, both from 0."""

    line: int
    character: int


@dataclass(frozen=True, slots=True)
class Change:
    """New text for a range, or for the whole document where there is no range."""

    text: str
    start: Place | None = None
    end: Place | None = None


def units(text: str, encoding: Encoding) -> int:
    """Return the length of a text in units of an encoding."""
    if encoding is Encoding.UTF32 or text.isascii():
        return len(text)
    if encoding is Encoding.UTF8:
        return len(text.encode("utf-8", "surrogatepass"))
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _code_points(text: str, wanted: int, encoding: Encoding) -> int:
    """Return how many code points of a text lie before a number of units, rounded down."""
    if encoding is Encoding.UTF32 or text.isascii():
        return min(wanted, len(text))
    lengths = range(len(text) + 1)
    return bisect_right(lengths, wanted, key=lambda length: units(text[:length], encoding)) - 1


@dataclass(frozen=True)
class Lines:
    """The lines of a text, to go from offsets to places and back."""

    text: str

    @cached_property
    def _starts(self) -> list[int]:
        if "\r" not in self.text:
            return [0, *(end + 1 for end in self._ends[:-1])]
        return [0, *(found.end() for found in _BREAK.finditer(self.text))]

    @cached_property
    def _ends(self) -> list[int]:
        if "\r" not in self.text:
            lengths = [len(line) + 1 for line in self.text.split("\n")]
            return [end - 1 for end in accumulate(lengths)]
        return [*(found.start() for found in _BREAK.finditer(self.text)), len(self.text)]

    def __len__(self) -> int:
        return len(self._starts)

    def span(self, line: int) -> Span:
        """Return the range of a line without its line break."""
        return Span(self._starts[line], self._ends[line])

    def number(self, offset: int) -> int:
        """Return the number of the line that holds an offset."""
        return bisect_right(self._starts, offset) - 1

    def place(self, offset: int, encoding: Encoding) -> Place:
        """Return the place of a code-point offset."""
        line = self.number(max(0, min(offset, len(self.text))))
        start = self._starts[line]
        # An offset between a carriage return and its line feed is the end of the line.
        end = min(max(offset, start), self._ends[line])
        return Place(line, units(self.text[start:end], encoding))

    def offset(self, place: Place, encoding: Encoding) -> int:
        """Return the code-point offset of a place.

        Beyond the end of a line lies its end, beyond the last line the end of the text, and in
        the middle of a character its beginning.
        """
        if place.line >= len(self._starts):
            return len(self.text)
        start, end = self._starts[max(place.line, 0)], self._ends[max(place.line, 0)]
        if place.character >= end - start and self.text[start:end].isascii():
            return end
        return start + _code_points(self.text[start:end], max(place.character, 0), encoding)

    def places(self, span: Span, encoding: Encoding) -> tuple[Place, Place]:
        """Return the places of both ends of a span."""
        return self.place(span.start, encoding), self.place(span.end, encoding)


def apply_changes(text: str, changes: Iterable[Change], encoding: Encoding) -> str:
    """Return the text after changes, each of which speaks of the text that the one before left."""
    for change in changes:
        if change.start is None or change.end is None:
            text = change.text
            continue
        lines = Lines(text)
        start, end = (lines.offset(place, encoding) for place in (change.start, change.end))
        text = text[:start] + change.text + text[max(start, end) :]
    return text
