"""Comments of a YAML document: text after a `#` outside every scalar."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kcdsl.diagnostics.spans import SourceFile
from kcdsl.source.yaml_nodes import Node, scalars

_LINE_END = re.compile(r"[\r\n]|\Z")
_TO_KCDSL = re.compile(r"#\s*kcdsl\s*:\s*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment: its text from the `#` on, its offset, its line and column (from 0), whether it is
    alone on its line, and whether an empty line precedes it."""

    text: str
    start: int
    line: int
    column: int
    alone: bool
    after_blank: bool

    @property
    def speaks_of_lines(self) -> bool:
        """Return whether it accepts a finding, on its line or the next."""
        return _TO_KCDSL.match(self.text) is not None


def find_comments(source: SourceFile, root: Node) -> tuple[Comment, ...]:
    """Return the comments of a document in their order."""
    text, found, at = source.text, [], 0
    spans = sorted(s.span for s in scalars(root) if s.span.end > s.span.start)
    for start, end in (*((span.start, span.end) for span in spans), (len(text), len(text))):
        while (sign := text.find("#", at, start)) >= 0:
            stop = _LINE_END.search(text, sign)
            assert stop is not None
            found.append(_comment(source, sign, stop.start()))
            at = stop.start()
        at = max(at, end)
    return tuple(found)


def _comment(source: SourceFile, start: int, stop: int) -> Comment:
    place = source.position(start)
    above = source.line(place.line - 1).strip() if place.line > 1 else "x"
    before = source.text[source.line_start(place.line) : start].lstrip("\ufeff")
    alone = not before.strip()
    return Comment(
        source.text[start:stop].rstrip(" \t"),
        start,
        place.line - 1,
        place.column - 1,
        alone,
        alone and above == "",
    )
