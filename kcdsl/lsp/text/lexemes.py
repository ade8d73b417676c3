"""The words of an expression with their roles, even if the expression is unfinished.

Roles depend on the context: an argument of `points` is a slice, whatever its name. So they are
correct in every well-formed expression, and useful in others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from kcdsl.check.expressions.names import BLOCK, DRIFTS, REGIONS
from kcdsl.source.numbers import NUMBER_PATTERN
from kcdsl.syntax.parser import SIGNS
from kcdsl_grammar.expression_table import ENDS, KEYWORDS, RULES, STARTS, STATES

Start = Literal["requirement", "predicate", "budget", "quantity"]
"""The start rules of the expression grammar."""


class Role(StrEnum):
    """Roles of words in an expression."""

    KEYWORD = "keyword"
    FUNCTION = "function"
    VARIABLE = "variable"
    METRIC = "metric"
    SLICE = "slice"
    TABLE = "table"
    BLOCK = "block"
    FIELD = "field"
    UNIT = "unit"
    NUMBER = "number"
    TEXT = "text"
    OPERATOR = "operator"
    BRACKET = "bracket"
    WORD = "word"


@dataclass(frozen=True, slots=True)
class Lexeme:
    """A word with its range `[start, end)` of the decoded expression.

    `binder` is the offset of the quantified variable, for its occurrences; `within` names the
    function whose argument number `argument` contains the word.
    """

    role: Role
    text: str
    start: int
    end: int
    binder: int | None = None
    within: str = ""
    argument: int = 0


@dataclass(frozen=True, slots=True)
class OpenBracket:
    """An open bracket: the function before it (or "" or "["), and the number of commas so far."""

    opener: str
    argument: int = 0


_PIECE = re.compile(
    rf"(?P<number>{NUMBER_PATTERN})"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)"
    r"""|(?P<text>"(?:[^"\\\n]|\\["\\])*"?|'(?:[^'\\\n]|\\['\\])*'?)"""
    r"|(?P<operator><=|>=|==|!=|[<>=+*/-])"
    r"|(?P<bracket>[()\[\],:])"
    r"|(?P<percent>%)"
    r"|(?P<other>[^\s])"
)
_UNIT = re.compile(r"[A-Za-z]+(?:/[A-Za-z]+)?")
_BLOCK_FIRST = {*DRIFTS, "no_flip"}


def lexemes(
    text: str, start: Start = "requirement", is_metric: Callable[[str], bool] = lambda _: False
) -> tuple[Lexeme, ...]:
    """Return the words of an expression in their order."""
    return _Reader(text, start, is_metric).read()


def open_frames(words: tuple[Lexeme, ...]) -> list[OpenBracket]:
    """Return the brackets that are open after the words, outermost first."""
    frames: list[OpenBracket] = []
    for number, word in enumerate(words):
        _step(frames, words, number, word)
    return frames


def _step(frames: list[OpenBracket], words: tuple[Lexeme, ...], number: int, word: Lexeme) -> None:
    if word.role is not Role.BRACKET:
        return
    if word.text == "(":
        before = words[number - 1] if number else None
        named = before is not None and before.role is Role.FUNCTION
        frames.append(OpenBracket(before.text if named and before is not None else ""))
    elif word.text == "[":
        frames.append(OpenBracket("["))
    elif word.text in ")]" and frames:
        frames.pop()
    elif word.text == "," and frames:
        frames[-1] = replace(frames[-1], argument=frames[-1].argument + 1)


class _Reader:
    """One pass over the text, with the open brackets and the bound variables."""

    def __init__(self, text: str, start: Start, is_metric: Callable[[str], bool]) -> None:
        self._text = text
        self._start = start
        self._is_metric = is_metric
        self._frames: list[OpenBracket] = []
        # Bound variables: name, offset of the binder, and depth of brackets of the binder.
        self._bound: list[tuple[str, int, int]] = []
        self._found: list[Lexeme] = []

    def read(self) -> tuple[Lexeme, ...]:
        at = 0
        while (piece := _PIECE.search(self._text, at)) is not None:
            kind, text, begin, end = piece.lastgroup or "", piece[0], piece.start(), piece.end()
            before = self._found[-1] if self._found else None
            if kind == "word" and before is not None and before.role is Role.NUMBER:
                unit = _UNIT.match(self._text, begin)
                if text not in KEYWORDS and unit is not None:
                    text, end = unit[0], unit.end()
                    kind = "unit"
            self._add(kind, text, begin, end)
            at = end
        return tuple(self._found)

    def _add(self, kind: str, text: str, begin: int, end: int) -> None:
        frame = self._frames[-1] if self._frames else OpenBracket("")
        role = {
            "number": Role.NUMBER,
            "text": Role.TEXT,
            "operator": Role.OPERATOR,
            "bracket": Role.BRACKET,
            "percent": Role.UNIT,
            "unit": Role.UNIT,
        }.get(kind, Role.WORD)
        binder = None
        if kind == "word":
            role, binder = self._word(text, begin, end, frame)
        word = Lexeme(role, text, begin, end, binder, self._function(), self._argument())
        self._found.append(word)
        if role is Role.BRACKET:
            if text in ")]":
                depth = len(self._frames)
                self._bound = [b for b in self._bound if b[2] < depth]
            _step(self._frames, tuple(self._found[-2:]), len(self._found[-2:]) - 1, word)

    def _function(self) -> str:
        """Return the nearest function that is open; a list inside `has` belongs to it."""
        for frame in reversed(self._frames):
            if frame.opener != "[":
                return frame.opener
        return ""

    def _argument(self) -> int:
        for frame in reversed(self._frames):
            if frame.opener != "[":
                return frame.argument
        return 0

    def _word(self, text: str, begin: int, end: int, frame: OpenBracket) -> tuple[Role, int | None]:
        if text in KEYWORDS:
            return Role.KEYWORD, None
        if self._text[end:].lstrip().startswith("("):
            return Role.FUNCTION, None
        before = self._found[-1] if self._found else None
        after_keyword = before.text if before is not None and before.role is Role.KEYWORD else ""
        if self._start == "budget":
            return Role.KEYWORD if after_keyword == "of" else Role.WORD, None
        if after_keyword in {"forall", "exists"}:
            self._bound.append((text, begin, len(self._frames)))
            return Role.VARIABLE, begin
        if self._start == "predicate":
            return Role.FIELD, None
        if frame.opener == "[" and self._function() == "has":
            return Role.FIELD, None
        role = _by_argument(frame)
        if role is Role.VARIABLE or (role is None and self._binder(text) is not None):
            return Role.VARIABLE, self._binder(text)
        if role is not None:
            return role, None
        if self._is_metric(text):
            return Role.METRIC, None
        return (Role.BLOCK if BLOCK.fullmatch(text) else Role.WORD), None

    def _binder(self, name: str) -> int | None:
        return next((b[1] for b in reversed(self._bound) if b[0] == name), None)


def _by_argument(frame: OpenBracket) -> Role | None:
    """Return the role that is determined by the position in a call."""
    if frame.opener in REGIONS and frame.argument == 0:
        return Role.SLICE
    if frame.opener == "table":
        return Role.TABLE
    if frame.opener in _BLOCK_FIRST:
        return {0: Role.BLOCK, 1: Role.VARIABLE}.get(frame.argument)
    if frame.opener == "has" and frame.argument == 0:
        return Role.KEYWORD
    return None


# --- terminals ------------------------------------------------------------------------------------


_ALL_TERMINALS = tuple(
    sorted({name for row in STATES for name in row if name.isupper()} | {"$END"})
)


def next_terminals(words: tuple[Lexeme, ...], start: Start) -> frozenset[str]:
    """Return the terminals allowed after the words, `$END` for the end."""
    states = [STARTS[start]]
    for word in words:
        following = _feed(states, _terminal(word, states[-1]), start)
        states = states if following is None else following
    return frozenset(name for name in _ALL_TERMINALS if _feed(states, name, start) is not None)


def _terminal(word: Lexeme, state: int) -> str:
    match word.role:
        case Role.NUMBER:
            return "NUMBER"
        case Role.TEXT:
            return "STRING"
        case Role.UNIT:
            return "UNIT"
        case Role.OPERATOR | Role.BRACKET:
            return SIGNS.get(word.text, "COMPARE")
        case _:
            keyword = KEYWORDS.get(word.text, "")
            return keyword if keyword in STATES[state] else "NAME"


def _feed(states: list[int], terminal: str, start: Start) -> list[int] | None:
    """Return the states after a terminal; None where it cannot follow."""
    stack = list(states)
    while True:
        step = STATES[stack[-1]].get(terminal)
        if step is None:
            return None
        if step >= 0:
            return None if step == ENDS[start] else [*stack, step]
        name, length = RULES[-1 - step]
        del stack[-length:]
        stack.append(STATES[stack[-1]][name])
        if terminal == "$END" and stack[-1] == ENDS[start]:
            return stack
