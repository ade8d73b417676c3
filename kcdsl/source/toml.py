"""Spans in TOML texts, which the parser of the standard library does not provide.

A span is guessed and then verified: the text is parsed with another word at that place, and the
word must appear at the right path. So comments and strings that look like entries are rejected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from kcdsl.diagnostics.spans import SourceFile, Span

_WORD = "kcdsl-looks-here"
_MOST = 200
"""The largest number of candidates to try; each costs one parse of the text."""
_AT = re.compile(r"\(at line (\d+), column (\d+)\)$")


def key_span(text: str, path: Sequence[str]) -> Span | None:
    """Return the span of the last key of a path; None if it cannot be determined."""
    name = re.escape(path[-1])
    pattern = rf"(?<![\w-])(?:\"{name}\"|'{name}'|{name})(?![\w-])"
    for found in _candidates(pattern, text):
        table = _read(f"{text[: found.start()]}{_WORD}{text[found.end() :]}")
        if isinstance(_at(table, path[:-1]), dict) and _WORD in _at(table, path[:-1]):
            return Span(*found.span())
    return None


def text_span(text: str, path: Sequence[str | int], value: str) -> Span | None:
    """Return the span inside the quotation marks of the string at a path of keys and list indices;
    None if it has escapes."""
    for found in _candidates(rf"(?<=[\"']){re.escape(value)}(?=[\"'])", text):
        if _at(_read(f"{text[: found.start()]}{_WORD}{text[found.end() :]}"), path) == _WORD:
            return Span(*found.span())
    return None


def error_span(source: SourceFile, error: ValueError) -> Span:
    """Return the position in a parse error; the end of the text if it has none."""
    found, end = _AT.search(str(error)), len(source.text)
    if found is None:
        return Span(end, end)
    line, column = int(found[1]), int(found[2])
    if line > source.line_count:
        return Span(end, end)
    start = min(source.line_start(line) + column - 1, end)
    return Span(start, min(start + 1, end))


def _candidates(pattern: str, text: str) -> Iterator[re.Match[str]]:
    for number, found in enumerate(re.finditer(pattern, text)):
        if number == _MOST:
            return
        yield found


def _read(text: str) -> Any:
    import tomllib

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def _at(table: Any, path: Sequence[str | int]) -> Any:
    for step in path:
        match table, step:
            case dict(), str():
                table = table.get(step)
            case list(), int():
                table = table[step] if step < len(table) else None
            case _:
                return None
    return table
