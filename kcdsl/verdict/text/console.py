"""Terminal output: tables as wide as the terminal, or 100 columns elsewhere, without control codes.

The width is at least 80 columns, and a narrower terminal wraps lines, so that no number is cut.

Names of requests and slices come from data: terminal control characters are shown as the
replacement character.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from kcdsl.diagnostics.render.terminal import printable

WIDTH, NARROWEST = 100, 80


class SanitisingConsole(Console):
    """A console that removes control characters from all text."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of a renderable with control characters replaced."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def print_on(stream: TextIO, *renderables: RenderableType, **how: Any) -> None:
    """Print renderables, each on its own lines; colours only where the stream is a terminal."""
    console = SanitisingConsole(file=stream, highlight=False)
    console.width = max(NARROWEST, console.width) if stream.isatty() else WIDTH
    for renderable in renderables:
        console.print(renderable, **how)


def rendered(*parts: RenderableType, terminal: bool) -> str:
    """Return the output for a terminal, or for a file of 100 columns; text is not wrapped."""
    buffer = StringIO()
    console = SanitisingConsole(
        file=buffer, width=None if terminal else WIDTH, force_terminal=terminal, highlight=False
    )
    for part in parts:
        whole = isinstance(part, str)
        console.print(Text(part) if isinstance(part, str) else part, soft_wrap=whole)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def table(
    columns: Iterable[object], rows: Iterable[Iterable[object]], title: str = "", **how: Any
) -> Table:
    """Return a table; cells are rich texts or converted by `str`, never parsed as markup.

    A column whose name begins with `>` has numbers: it is right-aligned and never wrapped. Other
    columns are folded, unless they are given as rich columns.
    """
    found = Table(
        *map(_column, columns),
        **{"box": None, "padding": (0, 1, 0, 0), "header_style": "bold"} | how,
        title=Text(title, "table.title") if title else None,
        title_justify="left",
    )
    for row in rows:
        found.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return found


def _column(given: object) -> Column:
    if isinstance(given, Column):
        return given
    name = str(given)
    if name.startswith(">"):
        return Column(name[1:], justify="right", no_wrap=True)
    return Column(name, overflow="fold")


def short(name: str, width: int) -> Column:
    """Return a column of names that are truncated."""
    return Column(name, no_wrap=True, max_width=width, overflow="ellipsis")


def folded(name: str, width: int) -> Column:
    """Return a column of texts that are folded."""
    return Column(name, max_width=width, overflow="fold")


def heading(contract: Any, more: str = "") -> Text:
    """Return the line that names a contract: its name, version and digest."""
    name = f"{contract['name']} {contract['version']}"
    return Text.assemble((name, "bold"), (f"  {contract['digest'][:19]}{more}", "dim"))
