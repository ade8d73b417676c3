"""Diagnostics for people: the source line, carets under the exact characters, notes and help."""

from __future__ import annotations

import os
import shutil
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TextIO

from kcdsl.diagnostics.model import Diagnostic, Severity
from kcdsl.source.text import SourceFile, Span

FIXED_WIDTH = 100
"""Columns when the output is not a terminal, so that recorded output never changes."""
_TAB = 4
_LINES_PER_SPAN = 6
_RED, _YELLOW, _BLUE, _BOLD = "31", "33", "34", "1"
_COLOURS = {Severity.ERROR: _RED, Severity.WARNING: _YELLOW, Severity.NOTE: _BLUE}


@dataclass(frozen=True, slots=True)
class _Mark:
    """Carets under part of one line; columns are code points from 0, the end exclusive."""

    line: int
    start: int
    end: int
    primary: bool
    text: str


def render_full(diagnostics: Iterable[Diagnostic], stream: TextIO | None = None) -> str:
    """Return all diagnostics, separated by empty lines."""
    colour = _wants_colour(stream)
    width = _width(stream)
    return "\n\n".join(_one(diagnostic, colour, width) for diagnostic in diagnostics)


def render_place(source: SourceFile, span: Span, text: str, stream: TextIO | None = None) -> str:
    """Return one place of a file: where it is, its line, and carets with a few words."""
    colour, width = _wants_colour(stream), _width(stream)
    marks = _spread(source, span, True, text)
    gutter = len(str(max(mark.line for mark in marks)))
    at = source.position(span.start)
    arrow = _paint("-->", _BLUE, colour)
    lines = [f"{' ' * gutter} {arrow} {source.name}:{at.line}:{at.column}"]
    return "\n".join([*lines, *_snippet(source, marks, gutter, colour, width, _YELLOW)])


def _wants_colour(stream: TextIO | None) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream is not None and stream.isatty()


def _width(stream: TextIO | None) -> int:
    if stream is None or not stream.isatty():
        return FIXED_WIDTH
    return max(40, shutil.get_terminal_size((FIXED_WIDTH, 24)).columns)


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def _one(diagnostic: Diagnostic, colour: bool, width: int) -> str:
    tint = _COLOURS[diagnostic.severity]
    title = _paint(f"{diagnostic.severity}[{diagnostic.code}]", f"{_BOLD};{tint}", colour)
    lines = [f"{title}: {_paint(_printable(diagnostic.message), _BOLD, colour)}"]
    gutter = 1
    source, span = diagnostic.source, diagnostic.span
    if source is not None and span is not None:
        marks = _marks(source, diagnostic)
        gutter = len(str(max(mark.line for mark in marks)))
        at = source.position(span.start)
        arrow = _paint("-->", _BLUE, colour)
        lines.append(f"{' ' * gutter} {arrow} {source.name}:{at.line}:{at.column}")
        lines.extend(_snippet(source, marks, gutter, colour, width, tint))
    elif source is not None:
        lines.append(f"  {_paint('-->', _BLUE, colour)} {source.name}")
    tail = [("note", note) for note in diagnostic.notes]
    if diagnostic.help:
        tail.append(("help", diagnostic.help))
    for kind, text in tail:
        equals = _paint("=", _BLUE, colour)
        lines.append(f"{' ' * gutter} {equals} {_paint(kind, _BOLD, colour)}: {_printable(text)}")
    return "\n".join(lines)


def _marks(source: SourceFile, diagnostic: Diagnostic) -> list[_Mark]:
    assert diagnostic.span is not None
    marks = _spread(source, diagnostic.span, True, "")
    for label in diagnostic.labels:
        marks.extend(_spread(source, label.span, False, label.text))
    return sorted(marks, key=lambda mark: (mark.line, not mark.primary, mark.start))


def _spread(source: SourceFile, span: Span, primary: bool, text: str) -> list[_Mark]:
    """Split a span into one mark per line; indentation and line ends are left out."""
    first, last = source.position(span.start), source.position(max(span.start, span.end))
    marks = []
    for number in range(first.line, last.line + 1):
        line = source.line(number)
        start = first.column - 1 if number == first.line else len(line) - len(line.lstrip())
        end = last.column - 1 if number == last.line else len(line)
        start, end = min(start, len(line)), min(end, len(line))
        if end <= start and number != first.line:
            continue
        marks.append(_Mark(number, start, max(end, start + 1), primary, ""))
    if len(marks) > _LINES_PER_SPAN:
        marks = marks[:_LINES_PER_SPAN]
    closing = marks[-1]
    return [*marks[:-1], _Mark(closing.line, closing.start, closing.end, primary, text)]


def _snippet(
    source: SourceFile, marks: list[_Mark], gutter: int, colour: bool, width: int, tint: str
) -> list[str]:
    bar = _paint("|", _BLUE, colour)
    lines = [f"{' ' * gutter} {bar}"]
    shown = 0
    for mark in marks:
        text = source.line(mark.line)
        skip, cut = _window(text, mark, max(20, width - gutter - 3))
        if mark.line != shown:
            if shown and mark.line > shown + 1:
                lines.append(f"{' ' * gutter} {_paint('...', _BLUE, colour)}")
            number = _paint(str(mark.line).rjust(gutter), _BLUE, colour)
            lines.append(f"{number} {bar} {_shown(text[skip:cut], skip > 0, cut < len(text))}")
            shown = mark.line
        lead = sum(_cells(char) for char in text[skip : mark.start]) + (1 if skip else 0)
        under = sum(_cells(char) for char in text[mark.start : min(mark.end, cut)]) or 1
        sign = ("^" if mark.primary else "-") * under
        words = f" {_printable(mark.text)}" if mark.text else ""
        painted = _paint(sign + words, tint if mark.primary else _BLUE, colour)
        lines.append(f"{' ' * gutter} {bar} {' ' * lead}{painted}")
    return lines


def _window(text: str, mark: _Mark, room: int) -> tuple[int, int]:
    """Choose the part of a long line that is shown: `[skip, cut)`, with the mark inside."""
    if sum(_cells(char) for char in text) <= room:
        return 0, len(text)
    half = room // 2
    skip = max(0, min(mark.start - half // 2, len(text) - half))
    cut, used = skip, 2
    while cut < len(text) and used + _cells(text[cut]) <= room:
        used += _cells(text[cut])
        cut += 1
    return skip, cut


def _shown(text: str, cut_left: bool, cut_right: bool) -> str:
    body = "".join(" " * _TAB if char == "\t" else _visible(char) for char in text)
    return ("…" if cut_left else "") + body + ("…" if cut_right else "")


def _visible(char: str) -> str:
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(char) in {"Cc", "Cs"} else char


def _printable(text: str) -> str:
    """Keep control characters of hostile files away from the terminal."""
    return "".join(char if char == "\n" else _visible(char) for char in text)


def _cells(char: str) -> int:
    if char == "\t":
        return _TAB
    if unicodedata.combining(char) or unicodedata.category(char) == "Cf":
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
