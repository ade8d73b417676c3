"""What the grammar allows after the beginning of an expression.

Runs the parse table of the grammar over the words so far. A word that cannot stand at its place is
left out, so that the answer is useful after a mistake as well.
"""

from __future__ import annotations

from kcdsl.lsp.lexemes import Lexeme, Role, Start
from kcdsl_grammar.expression_table import ENDS, KEYWORDS, RULES, STARTS, STATES

_SIGNS = {
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
_TERMINALS = tuple(sorted({name for row in STATES for name in row if name.isupper()} | {"$END"}))


def next_terminals(words: tuple[Lexeme, ...], start: Start) -> frozenset[str]:
    """Return the terminals that may stand after the words, `$END` for the end."""
    states = [STARTS[start]]
    for word in words:
        following = _feed(states, _terminal(word, states[-1]), start)
        states = states if following is None else following
    return frozenset(name for name in _TERMINALS if _feed(states, name, start) is not None)


def _terminal(word: Lexeme, state: int) -> str:
    match word.role:
        case Role.NUMBER:
            return "NUMBER"
        case Role.TEXT:
            return "STRING"
        case Role.UNIT:
            return "UNIT"
        case Role.OPERATOR | Role.BRACKET:
            return _SIGNS.get(word.text, "COMPARE")
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
