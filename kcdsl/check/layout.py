"""The text of a document cut into its clauses, by indentation alone.

Some work needs the clauses before, or without, the document being YAML as a whole: checking only
what an edit changed, and going on after a clause that cannot be read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache

from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.yaml_nodes import Mapping, parse_yaml

_SECTION = re.compile(r"^clauses:[ \t]*(?:#[^\n]*)?\n", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^[^ \t\r\n#]", re.MULTILINE)
_KEY = re.compile(r"( +)([A-Za-z][A-Za-z0-9_.-]*):(?= |\n)")
_FIRST = re.compile(r"^ *(?=[^ #\n])", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Layout:
    """A document cut into its clauses: `clauses[i]` is the range of a clause with its comments, and
    `names[i]` its identifier; `context` is the rest of the text."""

    clauses: tuple[Span, ...]
    names: tuple[str, ...]
    context: str

    def at(self, offset: int) -> int | None:
        """Return the number of the clause that holds a place, or None."""
        number = bisect_right(self.clauses, offset, key=lambda span: span.start) - 1
        inside = number >= 0 and offset < self.clauses[number].end
        return number if inside else None


def layout(text: str) -> Layout | None:
    """Cut a document whose clauses are a block mapping; None for any other layout."""
    headings = list(_SECTION.finditer(text))
    if len(headings) != 1 or "\t" in text or "\r" in text:
        return None
    begin = headings[0].end()
    after = _TOP_LEVEL.search(text, begin)
    end = after.start() if after is not None else len(text)
    first = _FIRST.search(text, begin, end)
    if first is None:
        return None
    starts: list[int] = []
    names: list[str] = []
    for line in _not_deeper(len(first[0])).finditer(text, begin, end):
        key = _KEY.match(text, line.start(), end)
        if key is None or len(key[1]) < len(first[0]):
            return None
        starts.append(line.start())
        names.append(key[2])
    spans = tuple(Span(a, b) for a, b in zip(starts, [*starts[1:], end], strict=True))
    return Layout(spans, tuple(names), text[: starts[0]] + text[end:])


@cache
def _not_deeper(indent: int) -> re.Pattern[str]:
    """Match the beginnings of lines that hold something and are indented so far at most."""
    return re.compile(rf"^ {{0,{indent}}}(?=[^ #\n])", re.MULTILINE)


def blank(text: str) -> str:
    """Return as many spaces and the same line ends, so that nothing after it moves."""
    return "\n".join([" " * len(line) for line in text.split("\n")])


def stands_alone(text: str, name: str) -> bool:
    """Say whether the text of a clause is YAML by itself, one entry of that name."""
    root = parse_yaml(SourceFile("", text), Sink())
    return isinstance(root, Mapping) and [e.key.text for e in root.entries] == [name]
