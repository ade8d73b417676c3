"""Maps from the decoded characters of a YAML scalar to offsets in the source.

Covers plain, single-quoted, double-quoted, literal and folded scalars with chomping and
indentation indicators, escapes, folds and CRLF. The decoded text is compared with the value from
the YAML parser, so a map is never silently wrong: where they differ, every position falls back to
the span of the whole scalar, and an expression there is refused (KC999). No such document is known;
docs/reference/spans.md defines the map.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.yaml_nodes import Scalar, parse_yaml, scalars

_Piece = tuple[str, int, int]
"""A decoded character with the half-open range of source offsets it came from."""

_ESCAPES = {
    "0": "\0",
    "a": "\a",
    "b": "\b",
    "t": "\t",
    "\t": "\t",
    "n": "\n",
    "v": "\v",
    "f": "\f",
    "r": "\r",
    "e": "\x1b",
    " ": " ",
    '"': '"',
    "/": "/",
    "\\": "\\",
    "N": "\x85",
    "_": "\xa0",
    "L": "\u2028",
    "P": "\u2029",
}
_HEX = {"x": 2, "u": 4, "U": 8}
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_HEADER = re.compile(r"[|>](?:([1-9])([+-]?)|([+-])([1-9])?)?[ \t]*(?:#[^\r\n]*)?(?:\r\n|\r|\n|$)")


class ScalarMap(NamedTuple):
    """Offsets of the decoded characters; `pieces` is None after the fallback."""

    whole: Span
    pieces: tuple[tuple[int, int], ...] | None
    empty: int
    """The offset of the text of an empty scalar: between its quotation marks."""

    def span(self, start: int, end: int) -> Span:
        """Return the source range of the decoded characters `[start, end)`.

        An empty range, or one beyond the end of the text, is placed directly after the preceding
        character, before any white space.
        """
        if self.pieces is None:
            return self.whole
        if not self.pieces:
            return Span(self.empty, self.empty)
        end = min(end, len(self.pieces))
        if start < end:
            return Span(self.pieces[start][0], self.pieces[end - 1][1])
        at = self.pieces[min(start, len(self.pieces)) - 1][1] if start else self.pieces[0][0]
        return Span(at, at)


def map_scalar(source: SourceFile, scalar: Scalar) -> ScalarMap:
    """Return the map of one scalar of this file."""
    raw = source.text[scalar.span.start : scalar.span.end]
    base = scalar.span.start
    match scalar.style:
        case "plain":
            pieces = _flow(raw, base, 0, len(raw), "plain")
        case "'" | '"':
            pieces = _flow(raw, base, 1, len(raw) - 1, scalar.style)
        case _:
            pieces = _block(raw, base, scalar)
    if pieces is None or "".join(piece[0] for piece in pieces) != scalar.text:
        return ScalarMap(scalar.span, None, base)
    empty = base + (scalar.style in {"'", '"'})
    return ScalarMap(scalar.span, tuple((start, end) for _, start, end in pieces), empty)


def _flow(raw: str, base: int, start: int, end: int, style: str) -> list[_Piece] | None:
    """Decode a plain or quoted scalar: fold line breaks and drop white space around them."""
    pieces: list[_Piece] = []
    kept = 0  # a fold may remove white space only from this index on
    i = start
    while i < end:
        char = raw[i]
        if char in "\r\n":
            del pieces[max(kept, _trimmed(pieces)) :]
            i = _fold(raw, base, i, end, pieces)
            kept = len(pieces)
        elif style == "'" and char == "'":
            pieces.append(("'", base + i, base + i + 2))
            i += 2
        elif style == '"' and char == "\\":
            step = _escape(raw, base, i, end, pieces)
            if step is None:
                return None
            i = step
            kept = len(pieces)
        else:
            pieces.append((char, base + i, base + i + 1))
            i += 1
    return pieces


def _trimmed(pieces: list[_Piece]) -> int:
    n = len(pieces)
    while n and pieces[n - 1][0] in " \t" and pieces[n - 1][2] - pieces[n - 1][1] == 1:
        n -= 1
    return n


def _fold(raw: str, base: int, i: int, end: int, pieces: list[_Piece]) -> int:
    """Fold the consecutive line breaks at `i`: one becomes a space, n + 1 become n breaks."""
    breaks: list[tuple[int, int]] = []
    while i < end and raw[i] in " \t\r\n":
        if raw[i] in "\r\n":
            width = 2 if raw.startswith("\r\n", i) else 1
            breaks.append((base + i, base + i + width))
            i += width
        else:
            i += 1
    if len(breaks) == 1:
        pieces.append((" ", *breaks[0]))
    else:
        pieces.extend(("\n", a, b) for a, b in breaks[1:])
    return i


def _escape(raw: str, base: int, i: int, end: int, pieces: list[_Piece]) -> int | None:
    if i + 1 >= end:
        return None
    letter = raw[i + 1]
    if letter in "\r\n":
        i += 1
        i += 2 if raw.startswith("\r\n", i) else 1
        while i < end and raw[i] in " \t\r\n":
            if raw[i] in "\r\n":
                width = 2 if raw.startswith("\r\n", i) else 1
                pieces.append(("\n", base + i, base + i + width))
                i += width
            else:
                i += 1
        return i
    if letter in _HEX:
        width = _HEX[letter]
        digits = raw[i + 2 : i + 2 + width]
        if not re.fullmatch(f"[0-9a-fA-F]{{{width}}}", digits) or int(digits, 16) > 0x10FFFF:
            return None
        pieces.append((chr(int(digits, 16)), base + i, base + i + 2 + width))
        return i + 2 + width
    if letter not in _ESCAPES:
        return None
    pieces.append((_ESCAPES[letter], base + i, base + i + 2))
    return i + 2


class _Line(NamedTuple):
    """A line of a block scalar: its characters and its break, as source ranges within `raw`."""

    start: int
    stop: int
    end: int


def _block(raw: str, base: int, scalar: Scalar) -> list[_Piece] | None:
    header = _HEADER.match(raw)
    if header is None:
        return None
    lines = _lines(raw, header.end())
    indent = _indentation(raw, lines, scalar.text, explicit=bool(header[1] or header[4]))
    decode = _literal if scalar.style == "|" else _folded
    return _chomp(decode(raw, base, lines, indent), header[2] or header[3] or "")


def _lines(raw: str, start: int) -> list[_Line]:
    lines = []
    while start < len(raw):
        match = _LINE.match(raw, start)
        assert match is not None
        content = match[0].rstrip("\r\n")
        lines.append(_Line(start, start + len(content), match.end()))
        start = match.end()
    return lines


def _indentation(raw: str, lines: list[_Line], text: str, *, explicit: bool) -> int:
    """Return the number of spaces before each line that are not part of the text.

    An explicit indicator is relative to the indentation of the parent, which is unknown here, so
    the indentation is inferred from the leading spaces of the decoded text.
    """
    for line in lines:
        deep = _depth(raw[line.start : line.stop])
        if deep < line.stop - line.start:
            if not explicit:
                return deep
            first = next((part for part in text.split("\n") if part.strip(" ")), "")
            return max(deep - _depth(first), 0)
    widest = max((line.stop - line.start for line in lines), default=0)
    return max(widest - max(map(len, text.split("\n"))), 0)


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _content(raw: str, base: int, line: _Line, indent: int) -> list[_Piece]:
    begin = min(line.start + indent, line.stop)
    return [(raw[k], base + k, base + k + 1) for k in range(begin, line.stop)]


def _literal(raw: str, base: int, lines: list[_Line], indent: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    for line in lines:
        pieces.extend(_content(raw, base, line, indent))
        if line.end > line.stop:
            pieces.append(("\n", base + line.stop, base + line.end))
    return pieces


def _folded(raw: str, base: int, lines: list[_Line], indent: int) -> list[_Piece]:
    """Join adjacent lines of text by a space; line breaks at more indented lines are kept."""
    pieces: list[_Piece] = []
    pending: list[_Piece] = []
    previous_is_text = False
    for line in lines:
        content = _content(raw, base, line, indent)
        ending: list[_Piece] = (
            [("\n", base + line.stop, base + line.end)] if line.end > line.stop else []
        )
        if not content:
            pending += ending
            continue
        is_text = content[0][0] not in " \t"
        if previous_is_text and is_text and pending:
            first, rest = pending[0], pending[1:]
            pieces += rest if rest else [(" ", first[1], first[2])]
        else:
            pieces += pending
        pieces += content
        pending = ending
        previous_is_text = is_text
    return pieces + pending


def _chomp(pieces: list[_Piece], chomp: str) -> list[_Piece]:
    if chomp == "+":
        return pieces
    end = len(pieces)
    while end and pieces[end - 1][0] == "\n":
        end -= 1
    if chomp == "" and 0 < end < len(pieces):
        end += 1
    return pieces[:end]


# --- by offset ------------------------------------------------------------------------------------


def scalar_at(source: SourceFile, offset: int) -> Scalar | None:
    """Return the scalar at an offset; None outside, and in a file that is not YAML."""
    found = _scalars(source)
    number = bisect_right(found, offset, key=lambda scalar: scalar.span.start) - 1
    if number < 0 or offset > found[number].span.end:
        return None
    return found[number]


@lru_cache(maxsize=4)
def _scalars(source: SourceFile) -> tuple[Scalar, ...]:
    """Parse a file again and return its scalars in order."""
    root = parse_yaml(source, Sink())
    found = () if root is None else scalars(root)
    return tuple(sorted(found, key=lambda scalar: (scalar.span.start, scalar.span.end)))
