"""Text for a terminal: colour, width, the cells of a character, and protection from control
characters in hostile files."""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from functools import lru_cache
from typing import Any, TextIO

FIXED_WIDTH = 100
"""Columns when the output is not a terminal, so that recorded output never changes."""
TAB = 4
RED, GREEN, YELLOW, BLUE, BOLD, DIM = "31", "32", "33", "34", "1", "2"
_BIDIRECTIONAL = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
_COMMAND = re.compile(r"(?:^|\n)[^\S\n]*::|##\[")
_OBEYED = "[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
"""Compiled where a text has such characters: a set of them takes 2 ms."""


def wants_colour(stream: TextIO | None) -> bool:
    """Return whether output to a stream is coloured: by NO_COLOR, FORCE_COLOR, or the kind of
    stream."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def width_of(stream: TextIO | None) -> int:
    """Return the columns of a stream, at least 40."""
    if stream is None or not stream.isatty():
        return FIXED_WIDTH
    return max(40, shutil.get_terminal_size((FIXED_WIDTH, 24)).columns)


def paint(text: str, code: str, colour: bool) -> str:
    """Return a text in a colour, if colour is on."""
    return f"\x1b[{code}m{text}\x1b[0m" if colour and text else text


def printable(text: str) -> str:
    """Return a text of one or more lines without characters that move the cursor, change the order
    of characters, or form a workflow command in the log of a build server."""
    if not text.isprintable():
        text = "".join(char if char == "\n" else visible(char) for char in text)
    if "::" not in text and "##[" not in text:
        return text
    return _COMMAND.sub(lambda found: found[0][:-1] + "\N{REPLACEMENT CHARACTER}", text)


def one_line(text: str) -> str:
    """Return a text for one line: as `printable`, with line ends shown as signs."""
    return printable(text).replace("\n", "\N{REPLACEMENT CHARACTER}")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def json_for_terminals(text: str) -> str:
    """Return the text of a JSON document with control characters and workflow commands escaped; the
    document is the same."""
    text = text.replace("##[", "##\\u005b")
    return (
        text
        if text.isascii() and "\x7f" not in text
        else re.sub(_OBEYED, lambda found: f"\\u{ord(found[0]):04x}", text)
    )


def json_text(document: Any, **how: Any) -> str:
    """Return a JSON document without control characters of terminals, ending with a line break."""
    import json

    text = json.dumps(document, **{"indent": 2, "ensure_ascii": False} | how)
    return f"{json_for_terminals(text)}\n"


@lru_cache(maxsize=1024)
def visible(char: str) -> str:
    """Return a character, or the replacement sign for one that controls the terminal or changes the
    order of the following text."""
    if char in _BIDIRECTIONAL or unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"}:
        return "\N{REPLACEMENT CHARACTER}"
    return char


@lru_cache(maxsize=1024)
def cells(char: str) -> int:
    """Return how many columns a character takes, as `shown` writes it."""
    if char == "\t":
        return TAB
    if visible(char) != char:
        return 1
    if unicodedata.combining(char) or unicodedata.category(char) == "Cf":
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def shown(text: str) -> str:
    """Return a piece of a source line with tabs as spaces and control characters replaced."""
    text = text.replace("##[", "##\N{REPLACEMENT CHARACTER}")
    if text.isprintable():
        return text
    return "".join(" " * TAB if char == "\t" else visible(char) for char in text)
