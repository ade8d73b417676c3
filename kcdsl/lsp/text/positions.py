"""Positions of clients: lines from 0, and characters in units of a negotiated encoding.

Only this module handles UTF-8, UTF-16 and UTF-32 units; everything else counts code points.
As in the protocol, a line ends at a line feed, a carriage return, or both together. The documents
and the codec of pygls are not used: they have other line separators, scan a line for each position,
and round a position inside a character up.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from lsprotocol import types as lsp
from lsprotocol.types import PositionEncodingKind as Encoding

from kcdsl.diagnostics.model import Edit
from kcdsl.diagnostics.spans import SourceFile, Span

_BREAK = re.compile(r"\r\n|\n|\r")


def units(text: str, encoding: Encoding) -> int:
    """Return the length of a text in units of an encoding."""
    if encoding is Encoding.Utf32 or text.isascii():
        return len(text)
    if encoding is Encoding.Utf8:
        return len(text.encode("utf-8", "surrogatepass"))
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _code_points(text: str, wanted: int, encoding: Encoding) -> int:
    """Return the number of code points of a text within a number of units, rounded down."""
    if encoding is Encoding.Utf32 or text.isascii():
        return min(wanted, len(text))
    lengths = range(len(text) + 1)
    return bisect_right(lengths, wanted, key=lambda length: units(text[:length], encoding)) - 1


@dataclass(frozen=True)
class Lines:
    """The lines of a text, for conversion between offsets and positions."""

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
        """Return the number of the line with an offset."""
        return bisect_right(self._starts, offset) - 1

    def place(self, offset: int, encoding: Encoding) -> lsp.Position:
        """Return the position of a code-point offset."""
        line = self.number(max(0, min(offset, len(self.text))))
        start = self._starts[line]
        # An offset between a carriage return and its line feed is the end of the line.
        end = min(max(offset, start), self._ends[line])
        return lsp.Position(line, units(self.text[start:end], encoding))

    def offset(self, place: lsp.Position, encoding: Encoding) -> int:
        """Return the code-point offset of a position.

        A position beyond the end of a line is its end, one beyond the last line is the end of the
        text, and one inside a character is its beginning.
        """
        if place.line >= len(self._starts):
            return len(self.text)
        start, end = self._starts[max(place.line, 0)], self._ends[max(place.line, 0)]
        if place.character >= end - start and self.text[start:end].isascii():
            return end
        return start + _code_points(self.text[start:end], max(place.character, 0), encoding)


def apply_changes(
    text: str, changes: Iterable[lsp.TextDocumentContentChangeEvent], encoding: Encoding
) -> str:
    """Return the text after sequential changes."""
    for change in changes:
        if isinstance(change, lsp.TextDocumentContentChangePartial):
            lines = Lines(text)
            start = lines.offset(change.range.start, encoding)
            end = max(start, lines.offset(change.range.end, encoding))
            text = text[:start] + change.text + text[end:]
        else:
            text = change.text
    return text


@dataclass(frozen=True, slots=True)
class OffsetMap:
    """Maps offsets of one text to those of another that differs from it in one range."""

    start: int
    here: int
    there: int

    def offset(self, offset: int) -> int | None:
        """Return the offset of the same character; None inside the range that differs."""
        if offset >= self.here:
            return offset + self.there - self.here
        return offset if offset <= self.start else None

    def span(self, span: Span) -> Span:
        """Return the range of the same characters, including the differing range if inside."""
        start, end = self.offset(span.start), self.offset(span.end)
        if span.end <= self.start:
            end = span.end
        first = self.start if start is None else start
        return Span(first, max(first, self.there if end is None else end))

    @property
    def back(self) -> OffsetMap:
        """Return the inverse map."""
        return OffsetMap(self.start, self.there, self.here)


NOWHERE = OffsetMap(0, 0, 0)
"""The identity map."""


def offset_map(here: str, there: str) -> OffsetMap:
    """Return the map from offsets of `here` to offsets of `there`."""
    shortest = min(len(here), len(there))
    start = _common(here, there, shortest)
    tail = _common(here[start:][::-1], there[start:][::-1], shortest - start)
    return OffsetMap(start, len(here) - tail, len(there) - tail)


def _common(one: str, other: str, most: int) -> int:
    """Return the length of the common prefix, at most `most`, by bisection."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_MARKS = re.compile(r"^```\w*\n?|`|\*\*|^---$", re.MULTILINE)


def markup(text: str, formats: Collection[lsp.MarkupKind | str] | None) -> lsp.MarkupContent | str:
    """Return Markdown, or plain text for a client without Markdown support."""
    if lsp.MarkupKind.Markdown in (formats or ()):
        return lsp.MarkupContent(lsp.MarkupKind.Markdown, text)
    return _MARKS.sub("", text)


@dataclass(frozen=True, slots=True)
class LinkTarget:
    """A range of a file; `path` is None for the document itself, and `source` its text, if
    available."""

    span: Span
    path: Path | None = None
    source: SourceFile | None = None


@dataclass(frozen=True, slots=True)
class Ranges:
    """Converts offsets and positions in one document, for one client.

    `way` maps offsets of the analysed text to offsets of the document.
    """

    uri: str
    version: int | None
    lines: Lines
    encoding: Encoding
    way: OffsetMap = NOWHERE

    def offset(self, position: lsp.Position) -> int:
        """Return the offset of a position."""
        return self.lines.offset(position, self.encoding)

    def at(self, offset: int) -> lsp.Position:
        """Return the position of an offset."""
        return self.of(Span(offset, offset)).start

    def span(self, range: lsp.Range) -> Span:
        """Return the span of a range."""
        start, end = self.offset(range.start), self.offset(range.end)
        return Span(min(start, end), max(start, end))

    def of(self, span: Span, lines: Lines | None = None) -> lsp.Range:
        """Return the range of a span, in another text if its lines are given."""
        if self.way is not NOWHERE and lines is None:
            span = self.way.span(span)
        place = (lines or self.lines).place
        return lsp.Range(place(span.start, self.encoding), place(span.end, self.encoding))

    def location(self, target: LinkTarget) -> lsp.Location:
        """Return the location of a target."""
        if target.path is None:
            return lsp.Location(self.uri, self.of(target.span))
        text = target.source.text if target.source is not None else ""
        return lsp.Location(target.path.as_uri(), self.of(target.span, Lines(text)))

    def edits(self, found: Iterable[Edit]) -> list[lsp.TextEdit]:
        """Return edits of the document."""
        return [lsp.TextEdit(self.of(edit.span), edit.text) for edit in found]

    def workspace_edit(self, found: Iterable[Edit], versioned: bool) -> lsp.WorkspaceEdit:
        """Return edits of the document, for this version only if the client supports it."""
        if not versioned:
            return lsp.WorkspaceEdit(changes={self.uri: self.edits(found)})
        identifier = lsp.OptionalVersionedTextDocumentIdentifier(self.uri, self.version)
        return lsp.WorkspaceEdit(
            document_changes=[lsp.TextDocumentEdit(identifier, list(self.edits(found)))]
        )
