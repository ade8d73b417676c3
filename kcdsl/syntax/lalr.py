"""Run the parse table of the expression grammar: from text to a tree of nodes and tokens.

This is the road of every expression that is well formed. Where it does not get through it says
nothing; Lark then parses the same text by the same grammar and explains (`kcdsl.syntax.parser`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kcdsl_grammar.expression_table import ENDS, KEYWORDS, RULES, STARTS, STATES

_WHITE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNIT = re.compile(r"%|[A-Za-z]+(?:/[A-Za-z]+)?")
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_STRING = re.compile(r'"(?:[^"\\\n]|\\["\\])*"' + r"|'(?:[^'\\\n]|\\['\\])*'")
_COMPARE = re.compile(r"<=|>=|==|!=|<|>")
SIGNS = {
    "+": "PLUS",
    "-": "MINUS",
    "*": "STAR",
    "/": "SLASH",
    "(": "LPAR",
    ")": "RPAR",
    "[": "LSQB",
    "]": "RSQB",
    ",": "COMMA",
    ":": "COLON",
}
_INLINED = tuple(name.startswith("_") for name, _ in RULES)


class Token(NamedTuple):
    """A terminal with its text and its range `[start, end)` of the expression."""

    type: str
    text: str
    start: int
    end: int


class Node(NamedTuple):
    """A rule with its children; the range covers its first to its last token."""

    rule: str
    children: list[Node | Token]
    start: int
    end: int


def parse(text: str, start: str) -> Node | None:
    """Return the tree of a text by one of the start rules; None where it is not well formed."""
    state = STARTS[start]
    end_state = ENDS[start]
    states = [state]
    values: list[list[Node | Token]] = []
    token = _next_token(text, 0, state)
    while token is not None:
        kind = token.type
        step = STATES[state].get(kind)
        if step is None:
            return None
        if step >= 0:
            if step == end_state:
                return None
            states.append(step)
            values.append([token])
            state = step
            token = _next_token(text, token.end, state)
            continue
        name, length = RULES[-1 - step]
        children = values[-length][:] if length == 1 else [c for v in values[-length:] for c in v]
        del states[-length:]
        del values[-length:]
        state = STATES[states[-1]][name]
        if _INLINED[-1 - step]:
            values.append(children)
        else:
            values.append([Node(name, children, children[0].start, children[-1].end)])
        states.append(state)
        if state == end_state and kind == "$END":
            root = values[0][0]
            return root if isinstance(root, Node) else None
    return None


def _next_token(text: str, at: int, state: int) -> Token | None:
    """Return the token at a place, as the state allows it; None where there is none."""
    start = _WHITE.match(text, at).end()  # type: ignore[union-attr]
    if start == len(text):
        return Token("$END", "", start, start)
    char = text[start]
    allowed = STATES[state]
    sign = SIGNS.get(char)
    if sign is not None:
        return Token(sign, char, start, start + 1)
    if char in "0123456789.":
        found, kind = _NUMBER.match(text, start), "NUMBER"
    elif char in "<>=!":
        found, kind = _COMPARE.match(text, start), "COMPARE"
    elif char in "\"'":
        found, kind = _STRING.match(text, start), "STRING"
    else:
        found, kind = _WORD.match(text, start), "NAME"
        if found is not None and KEYWORDS.get(found[0]) in allowed:
            kind = KEYWORDS[found[0]]
        elif "UNIT" in allowed:
            found, kind = _UNIT.match(text, start), "UNIT"
    return None if found is None else Token(kind, found[0], start, found.end())
