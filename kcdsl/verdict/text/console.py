"""Print for people: tables as wide as the terminal, in 100 columns elsewhere, and harmless.

A terminal of less than 80 columns breaks the lines of one of 80, so that no number is cut short.

Names of requests and slices come from data: what could steer a terminal is shown as a sign of
replacement.
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


class HarmlessConsole(Console):
    """A console of which no text moves the cursor, changes colours or rings."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the segments of something, their texts made harmless."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def print_on(stream: TextIO, *renderables: RenderableType, **how: Any) -> None:
    """Print, each on lines of its own; colours only where the stream is a terminal."""
    console = HarmlessConsole(file=stream, highlight=False)
    console.width = max(NARROWEST, console.width) if stream.isatty() else WIDTH
    for renderable in renderables:
        console.print(renderable, **how)


def rendered(*parts: RenderableType, terminal: bool) -> str:
    """Return what a terminal, or a file of 100 columns, would show; lines of text stay whole."""
    buffer = StringIO()
    console = HarmlessConsole(
        file=buffer, width=None if terminal else WIDTH, force_terminal=terminal, highlight=False
    )
    for part in parts:
        whole = isinstance(part, str)
        console.print(Text(part) if isinstance(part, str) else part, soft_wrap=whole)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())


def table(
    columns: Iterable[object], rows: Iterable[Iterable[object]], title: str = "", **how: Any
) -> Table:
    """Return a table; cells are texts of rich, or what `str` writes, and nothing is markup.

    A column of numbers has a name that begins with `>`: it is flush right, and its lines are never
    broken. The lines of other columns are folded, unless they are given as columns of rich.
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
    """Return a column of names that are cut after some characters."""
    return Column(name, no_wrap=True, max_width=width, overflow="ellipsis")


def folded(name: str, width: int) -> Column:
    """Return a column of texts that are folded at some width."""
    return Column(name, max_width=width, overflow="fold")


def heading(contract: Any, more: str = "") -> Text:
    """Return the line that names a contract: its name, version and digest."""
    name = f"{contract['name']} {contract['version']}"
    return Text.assemble((name, "bold"), (f"  {contract['digest'][:19]}{more}", "dim"))
