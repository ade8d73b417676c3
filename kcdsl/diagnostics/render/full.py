"""Diagnostics for people: the source line, carets under the exact characters, notes, help, and
what a fix would change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO

from kcdsl.diagnostics.model import Diagnostic, Fix, Severity
from kcdsl.diagnostics.render.snippet import Mark, Page, changed_lines, marks_of, snippet
from kcdsl.diagnostics.render.terminal import (
    BLUE,
    BOLD,
    RED,
    YELLOW,
    one_line,
    paint,
    printable,
    wants_colour,
    width_of,
)
from kcdsl.diagnostics.spans import SourceFile, Span

_COLOURS = {Severity.ERROR: RED, Severity.WARNING: YELLOW, Severity.NOTE: BLUE}


def render_full(diagnostics: Iterable[Diagnostic], stream: TextIO | None = None) -> str:
    """Return all diagnostics, separated by empty lines."""
    page = Page(width_of(stream), wants_colour(stream))
    return "\n\n".join("\n".join(_one(diagnostic, page)) for diagnostic in diagnostics)


def render_place(source: SourceFile, span: Span, text: str, stream: TextIO | None = None) -> str:
    """Return one place of a file: where it is, its line, and carets with a few words."""
    marks = marks_of(source, span, True, text)
    page = Page(width_of(stream), wants_colour(stream), _gutter(marks))
    return "\n".join([_arrow(source, span, page), *snippet(source, marks, page, YELLOW)])


def _one(diagnostic: Diagnostic, page: Page) -> Iterator[str]:
    colour, tint = page.colour, _COLOURS[diagnostic.severity]
    title = paint(f"{diagnostic.severity}[{diagnostic.code}]", f"{BOLD};{tint}", colour)
    yield f"{title}: {paint(one_line(diagnostic.message), BOLD, colour)}"
    source, span = diagnostic.source, diagnostic.span
    if source is not None:
        marks = _marks(source, diagnostic)
        page = Page(page.width, colour, _gutter(marks))
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


def _arrow(source: SourceFile, span: Span | None, page: Page) -> str:
    name, place = one_line(source.name), ""
    if span is not None:
        at = source.position(span.start)
        place = f":{at.line}:{at.column}"
    return f"{' ' * page.gutter} {paint('-->', BLUE, page.colour)} {name}{place}"


def _tail(kind: str, text: str, page: Page) -> Iterator[str]:
    first, *more = printable(text).split("\n")
    yield f"{page.margin(sign='=')} {paint(kind, BOLD, page.colour)}: {first}"
    yield from (f"{' ' * (page.gutter + len(kind) + 5)}{line}" for line in more)


def _evident(diagnostic: Diagnostic) -> bool:
    """Say whether the help shows what the fix would write."""
    assert diagnostic.fix is not None
    edits, help = diagnostic.fix.edits, diagnostic.help or ""
    return len(edits) == 1 and bool(edits[0].text) and f"`{edits[0].text.strip()}`" in help


def _fix(source: SourceFile, fix: Fix, page: Page) -> Iterator[str]:
    yield from _tail("fix" if fix.safe else "unsafe fix", fix.title, page)
    yield from changed_lines(source, fix.edits, page)
