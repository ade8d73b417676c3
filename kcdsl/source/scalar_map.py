"""Where each decoded character of a YAML scalar stands in the source.

Covers plain, single-quoted, double-quoted, literal and folded scalars with chomping and
indentation indicators, escapes, folds and CRLF. The decoding made here is compared with the value
that the YAML parser delivered, so a map is never silently wrong: where the two differ, every
position falls back to the span of the whole scalar.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kcdsl.source.text import SourceFile, Span
from kcdsl.source.yaml_nodes import Scalar

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


@dataclass(frozen=True, slots=True)
class ScalarMap:
    """Offsets of the decoded characters; `pieces` is None after the fallback."""

    whole: Span
    pieces: tuple[tuple[int, int], ...] | None

    def span(self, start: int, end: int) -> Span:
        """Return the source range of the decoded characters `[start, end)`.

        A range at or beyond the end of the text lies just after its last character.
        """
        if self.pieces is None:
            return self.whole
        if not self.pieces:
            return Span(self.whole.start, self.whole.start)
        if start >= len(self.pieces):
            at = self.pieces[-1][1]
            return Span(at, at)
        first = self.pieces[start][0]
        if end <= start:
            return Span(first, first)
        return Span(first, self.pieces[min(end, len(self.pieces)) - 1][1])


def map_scalar(source: SourceFile, scalar: Scalar) -> ScalarMap:
    """Return the map of one scalar of this file."""
    raw = source.text[scalar.span.start : scalar.span.end]
    base = scalar.span.start
    match scalar.style:
        case "plain":
            candidates = [_flow(raw, base, 0, len(raw), "plain")]
        case "'":
            candidates = [_flow(raw, base, 1, len(raw) - 1, "'")]
        case '"':
            candidates = [_flow(raw, base, 1, len(raw) - 1, '"')]
        case _:
            candidates = _block(raw, base, scalar.style)
    for pieces in candidates:
        if pieces is not None and "".join(piece[0] for piece in pieces) == scalar.text:
            return ScalarMap(scalar.span, tuple((a, b) for _, a, b in pieces))
    return ScalarMap(scalar.span, None)


def _flow(raw: str, base: int, start: int, end: int, style: str) -> list[_Piece] | None:
    """Decode a plain or quoted scalar: line breaks fold, white space around them goes."""
    pieces: list[_Piece] = []
    kept = 0  # pieces before this index are not white space that a fold may remove
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
    """Fold the line break at `i` and all that follow: one is a space, n + 1 are n breaks."""
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


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a block scalar: its characters and its break, as source ranges within `raw`."""

    start: int
    stop: int
    end: int


def _block(raw: str, base: int, style: str) -> list[list[_Piece] | None]:
    header = _HEADER.match(raw)
    if header is None:
        return []
    chomp = header[2] or header[3] or ""
    explicit = header[1] or header[4]
    lines = _lines(raw, header.end())
    full = [line for line in lines if raw[line.start : line.stop].strip(" ")]
    found = _indentation(raw, full[0]) if full else 0
    # With an explicit indicator the indentation of the parent counts too; it is not visible from
    # here, so each possible one is tried and the comparison with the value decides.
    indents = range(int(explicit), found + int(explicit) + 1) if explicit else (found,)
    if not full:
        widest = max((line.stop - line.start for line in lines), default=0)
        indents = range(widest + 1)
    decode = _literal if style == "|" else _folded
    return [_chomp(decode(raw, base, lines, n), chomp) for n in indents]


def _lines(raw: str, start: int) -> list[_Line]:
    lines = []
    while start < len(raw):
        match = _LINE.match(raw, start)
        assert match is not None
        content = match[0].rstrip("\r\n")
        lines.append(_Line(start, start + len(content), match.end()))
        start = match.end()
    return lines


def _indentation(raw: str, line: _Line) -> int:
    text = raw[line.start : line.stop]
    return len(text) - len(text.lstrip(" "))


def _content(raw: str, base: int, line: _Line, indent: int) -> list[_Piece]:
    begin = min(line.start + indent, line.stop)
    if not raw[line.start : line.stop].strip(" "):
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
    """Join neighbouring lines of text by a space; lines that begin with white space keep theirs."""
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
