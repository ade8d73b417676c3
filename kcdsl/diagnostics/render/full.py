"""Diagnostics for people: the source line, carets under the exact characters, notes, help, and the
changes of a fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TextIO

from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Severity
from kcdsl.diagnostics.render.terminal import (
    BLUE,
    BOLD,
    GREEN,
    RED,
    YELLOW,
    cells,
    one_line,
    paint,
    printable,
    shown,
    wants_colour,
    width_of,
)
from kcdsl.diagnostics.spans import SourceFile, Span

_COLOURS = {Severity.ERROR: RED, Severity.WARNING: YELLOW, Severity.NOTE: BLUE}


def render_full(diagnostics: Iterable[Diagnostic], stream: TextIO | None = None) -> str:
    """Return all diagnostics, separated by empty lines."""
    page = SnippetStyle(width_of(stream), wants_colour(stream))
    return "\n\n".join("\n".join(_one(diagnostic, page)) for diagnostic in diagnostics)


def render_place(source: SourceFile, span: Span, text: str, stream: TextIO | None = None) -> str:
    """Return one place of a file: its position, its line, and carets with a label."""
    marks = marks_of(source, span, True, text)
    page = SnippetStyle(width_of(stream), wants_colour(stream), _gutter(marks))
    return "\n".join([_arrow(source, span, page), *snippet(source, marks, page, YELLOW)])


def _one(diagnostic: Diagnostic, page: SnippetStyle) -> Iterator[str]:
    colour, tint = page.colour, _COLOURS[diagnostic.severity]
    title = paint(f"{diagnostic.severity}[{diagnostic.code}]", f"{BOLD};{tint}", colour)
    yield f"{title}: {paint(one_line(diagnostic.message), BOLD, colour)}"
    source, span = diagnostic.source, diagnostic.span
    if source is not None:
        marks = _marks(source, diagnostic)
        page = SnippetStyle(page.width, colour, _gutter(marks))
        yield _arrow(source, span, page)
        yield from snippet(source, marks, page, tint) if marks else ()
    for note in diagnostic.notes:
        yield from _tail("note", note, page)
    if diagnostic.help:
        yield from _tail("help", diagnostic.help, page)
    if source is not None and diagnostic.fix is not None and not _evident(diagnostic):
        yield from _fix(source, diagnostic.fix, page)


def _marks(source: SourceFile, diagnostic: Diagnostic) -> list[Mark]:
    if diagnostic.span is None:
        return []
    marks = marks_of(source, diagnostic.span, True)
    for label in diagnostic.labels:
        marks.extend(marks_of(source, label.span, False, label.text))
    return marks


def _gutter(marks: Iterable[Mark]) -> int:
    return len(str(max((mark.line for mark in marks), default=1)))


def _arrow(source: SourceFile, span: Span | None, page: SnippetStyle) -> str:
    name, place = one_line(source.name), ""
    if span is not None:
        at = source.position(span.start)
        place = f":{at.line}:{at.column}"
    return f"{' ' * page.gutter} {paint('-->', BLUE, page.colour)} {name}{place}"


def _tail(kind: str, text: str, page: SnippetStyle) -> Iterator[str]:
    first, *more = printable(text).split("\n")
    yield f"{page.margin(sign='=')} {paint(kind, BOLD, page.colour)}: {first}"
    yield from (f"{' ' * (page.gutter + len(kind) + 5)}{line}" for line in more)


def _evident(diagnostic: Diagnostic) -> bool:
    """Return whether the help contains the text that the fix would write."""
    assert diagnostic.fix is not None
    edits, help = diagnostic.fix.edits, diagnostic.help or ""
    return len(edits) == 1 and bool(edits[0].text) and f"`{edits[0].text.strip()}`" in help


def _fix(source: SourceFile, fix: Fix, page: SnippetStyle) -> Iterator[str]:
    yield from _tail("fix" if fix.safe else "unsafe fix", fix.title, page)
    yield from changed_lines(source, fix.edits, page)


# --- snippets -------------------------------------------------------------------------------------


_LINES_PER_SPAN = 6
_LINES_OF_FIX = 6
_LONGEST_OF_FIX = 2**16
"""Largest number of characters in the lines that a fix changes for which they are shown: each
finding reads them all."""


@dataclass(frozen=True, slots=True)
class SnippetStyle:
    """The layout of a snippet: width in columns, colour, columns of the line numbers."""

    width: int
    colour: bool
    gutter: int = 1

    def margin(self, number: int | None = None, sign: str = "|") -> str:
        """Return the prefix of a line: its number, if any, and a sign."""
        label = "" if number is None else str(number)
        return (
            f"{paint(label.rjust(self.gutter), BLUE, self.colour)} {paint(sign, BLUE, self.colour)}"
        )

    @property
    def room(self) -> int:
        """Return the number of columns for a line of source."""
        return max(20, self.width - self.gutter - 3)


@dataclass(frozen=True, slots=True)
class Mark:
    """Carets under part of one line; columns are code points from 0, the end exclusive. `cut`
    says how many more lines of its span are not shown."""

    line: int
    start: int
    end: int
    primary: bool
    text: str = ""
    cut: int = 0


def marks_of(source: SourceFile, span: Span, primary: bool, text: str = "") -> list[Mark]:
    """Split a span into one mark per line, without indentation and line ends; of a long span only
    the first lines."""
    first, last = source.position(span.start), source.position(max(span.start, span.end))
    marks = []
    for number in range(first.line, last.line + 1):
        line = source.line(number)
        start = first.column - 1 if number == first.line else len(line) - len(line.lstrip())
        end = last.column - 1 if number == last.line else len(line.rstrip())
        start, end = min(start, len(line)), min(end, len(line))
        if end <= start and number != first.line:
            continue
        marks.append(Mark(number, start, max(end, start + 1), primary))
    kept = marks[:_LINES_PER_SPAN]
    return [*kept[:-1], replace(kept[-1], text=text, cut=len(marks) - len(kept))]


def snippet(
    source: SourceFile, marks: Sequence[Mark], page: SnippetStyle, tint: str
) -> Iterator[str]:
    """Yield the lines that marks are in, each followed by its carets."""
    yield page.margin()
    ordered = sorted(marks, key=lambda mark: (mark.line, not mark.primary, mark.start))
    shown_line, shown_window = 0, (0, 0)
    for row in _rows(source, ordered, page.room):
        line, window = row[0].line, _window(source.line(row[0].line), row, page.room)
        if (line, window) != (shown_line, shown_window):
            if shown_line and line > shown_line + 1:
                yield page.margin(sign="...")
            yield f"{page.margin(line)} {_piece(source.line(line), *window)}"
            shown_line, shown_window = line, window
        yield f"{page.margin()} {_carets(source.line(line), row, window, page.colour, tint)}"
        cut = row[-1].cut
        if cut:
            yield f"{page.margin(sign='...')} {cut} more line{'s' if cut > 1 else ''}"


def _rows(source: SourceFile, marks: Sequence[Mark], room: int) -> Iterator[list[Mark]]:
    """Group marks that can share a row of carets: one after the other, only the last with a
    label."""
    row: list[Mark] = []
    for mark in marks:
        joined = sorted([*row, mark], key=lambda item: item.start)
        fits = (
            bool(row)
            and all(item.line == mark.line for item in row)
            and all(a.end < b.start and not a.text for a, b in pairwise(joined))
            and _together(source.line(mark.line), joined, room)
        )
        if row and not fits:
            yield row
        row = joined if fits else [mark]
    if row:
        yield row


def _together(text: str, row: Sequence[Mark], room: int) -> bool:
    _, cut = _window(text, row, room)
    return row[-1].end <= cut


def _carets(
    text: str, row: Sequence[Mark], window: tuple[int, int], colour: bool, tint: str
) -> str:
    skip, cut = window
    parts, at = [" " if skip else ""], skip
    for mark in row:
        parts.append(" " * _columns(text[at : mark.start]))
        under = _columns(text[mark.start : min(mark.end, cut)]) or 1
        words = f" {printable(mark.text)}" if mark.text else ""
        sign = ("^" if mark.primary else "-") * under
        parts.append(paint(sign + words, tint if mark.primary else BLUE, colour))
        at = max(mark.end, at)
    return "".join(parts)


def _columns(text: str) -> int:
    return sum(cells(char) for char in text)


def _fits(text: str, room: int) -> bool:
    """Return whether a line fits; one that is much longer is not read to its end."""
    if text.isascii() and len(text) > room:  # each takes a column, or more
        return False
    if text.isascii() and text.isprintable():
        return True
    for char in text:
        room -= cells(char)
        if room < 0:
            return False
    return True


def _window(text: str, row: Sequence[Mark], room: int) -> tuple[int, int]:
    """Choose the part of a long line that is shown: `[skip, cut)`, with the first mark inside."""
    if _fits(text, room):
        return 0, len(text)
    half = room // 2
    skip = max(0, min(row[0].start - half // 2, len(text) - half))
    cut, used = skip, 2
    while cut < len(text) and used + cells(text[cut]) <= room:
        used += cells(text[cut])
        cut += 1
    return skip, cut


def _piece(text: str, skip: int, cut: int) -> str:
    return f"{'…' if skip else ''}{shown(text[skip:cut])}{'…' if cut < len(text) else ''}"


def changed_lines(source: SourceFile, edits: Sequence[Edit], page: SnippetStyle) -> Iterator[str]:
    """Yield the lines that edits change, before and after; nothing if they are too many."""
    first = source.position(min(edit.span.start for edit in edits)).line
    start = source.line_start(first)
    end = max(edit.span.end for edit in edits)
    stop = source.text.find("\n", end)
    stop = len(source.text) if stop < 0 else stop + 1
    if stop - start > _LONGEST_OF_FIX:
        return
    new = source.text[start:stop]
    for edit in sorted(edits, key=lambda item: item.span, reverse=True):
        new = new[: edit.span.start - start] + edit.text + new[edit.span.end - start :]
    old_lines, new_lines = _lines(source.text[start:stop]), _lines(new)
    while old_lines and new_lines and old_lines[0] == new_lines[0]:
        first += 1
        del old_lines[0], new_lines[0]
    while old_lines and new_lines and old_lines[-1] == new_lines[-1]:
        del old_lines[-1], new_lines[-1]
    if len(old_lines) + len(new_lines) > _LINES_OF_FIX:
        return
    at = _first_difference(old_lines, new_lines)
    for sign, tint, lines in (("-", RED, old_lines), ("+", GREEN, new_lines)):
        for number, line in enumerate(lines, start=first):
            window = _window(line, [Mark(0, min(at, len(line)), len(line), True)], page.room)
            body = paint(_piece(line, *window), tint, page.colour)
            yield f"{page.margin(number, sign)} {body}".rstrip()


def _lines(text: str) -> list[str]:
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _first_difference(old: Sequence[str], new: Sequence[str]) -> int:
    if not old or not new:
        return 0
    one, other = old[0], new[0]
    equal, size = 0, min(len(one), len(other))
    while equal < size:  # by halves: a line may be very long
        middle = (equal + size + 1) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            size = middle - 1
    return equal
