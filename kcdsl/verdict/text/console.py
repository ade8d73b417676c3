"""Where reports are printed: as wide as the terminal, in 100 columns elsewhere, and harmless.

A terminal of less than 80 columns breaks the lines of one of 80, so that no number is cut short.

Names of requests and slices come from data: what could steer a terminal is shown as a sign of
replacement.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

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
