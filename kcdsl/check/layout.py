"""Splitting the text of a document into clauses, by indentation only.

Incremental checks and error recovery need the clauses before the document is valid YAML. A YAML
parser stops at its first error, often far from the mistake: an unclosed quotation mark extends to
the rest of the document. `recover` instead parses each clause of a block mapping separately,
reports each one that cannot be parsed at its own place, and checks the document without them.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Container
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from kcdsl.diagnostics.model import Severity, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.yaml_nodes import Mapping, parse_yaml

_SECTION = re.compile(r"^clauses:[ \t]*(?:#[^\n]*)?\n", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^[^ \t\r\n#]", re.MULTILINE)
_KEY = re.compile(r"( +)([A-Za-z][A-Za-z0-9_.-]*):(?= |\n)")
_FIRST = re.compile(r"^ *(?=[^ #\n])", re.MULTILINE)


class Layout(NamedTuple):
    """A document split into clauses: `clauses[i]` is the range of a clause with its comments, and
    `names[i]` its identifier; `context` is the rest of the text."""

    clauses: tuple[Span, ...]
    names: tuple[str, ...]
    context: str

    def at(self, offset: int) -> int | None:
        """Return the number of the clause at an offset, or None."""
        number = bisect_right(self.clauses, offset, key=lambda span: span.start) - 1
        inside = number >= 0 and offset < self.clauses[number].end
        return number if inside else None


def layout(text: str) -> Layout | None:
    """Split a document whose clauses are a block mapping; None for any other layout."""
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
    """Return a pattern for the start of nonempty lines indented by at most `indent`."""
    return re.compile(rf"^ {{0,{indent}}}(?=[^ #\n])", re.MULTILINE)


def blank(text: str) -> str:
    """Return a text of the same length of spaces and line ends, which keeps later offsets."""
    return "\n".join([" " * len(line) for line in text.split("\n")])


def reduced(text: str, found: Layout, kept: Container[int]) -> str:
    """Return a text in which all clauses but the kept ones are blank."""
    pieces = [text[: found.clauses[0].start]]
    for number, span in enumerate(found.clauses):
        piece = text[span.start : span.end]
        pieces.append(piece if number in kept else blank(piece))
    return "".join([*pieces, text[found.clauses[-1].end :]])


def is_separate_yaml(text: str, name: str) -> bool:
    """Return whether the text of a clause alone is YAML with one entry of that name."""
    root = parse_yaml(SourceFile("", text), Sink())
    return isinstance(root, Mapping) and [e.key.text for e in root.entries] == [name]


Check = Callable[[SourceFile, Sink], object]
"""Checks a document into a sink."""


_MOST = 20
"""The largest number of broken clauses to report separately."""


def recover(source: SourceFile, first: Sink, check: Check) -> Sink:
    """Return the separate errors of a document that is not YAML.

    `first` has the error of the YAML parser for the whole; it is returned where the text cannot be
    split into clauses, or where its other parts are not YAML either. Warnings and notes are left
    out, because names used in a broken clause would be reported as unused.
    """
    found = layout(source.text)
    if found is None:
        return first
    text = source.text
    pieces = [text[span.start : span.end] for span in found.clauses]
    broken = [i for i, piece in enumerate(pieces) if not is_separate_yaml(piece, found.names[i])]
    if not broken:
        return first
    errors = Sink()
    for i in broken[:_MOST]:
        span = found.clauses[i]
        alone = SourceFile(source.name, blank(text[: span.start]) + text[span.start : span.end])
        own = Sink()
        parse_yaml(alone, own)
        _collect(own, source, errors)
    if len(broken) < len(pieces):
        good = set(range(len(pieces))).difference(broken)
        rest, others = SourceFile(source.name, reduced(text, found, good)), Sink()
        if check(rest, others) is None:
            return first
        _collect(others, source, errors)
    return errors if errors.has_errors else first


def _collect(found: Sink, source: SourceFile, into: Sink) -> None:
    """Add the errors of a reduced text as errors of the file, at the same spans."""
    for item in found:
        if item.severity is not Severity.ERROR:
            continue
        of_the_file = item.source is not None and item.source.name == source.name
        into.add(replace(item, source=source) if of_the_file else item)
