"""The one spelling of an expression: its own tokens with canonical spaces between them.

Numbers, units, brackets and names stay as the author wrote them; so the spelling has the same
tokens, and means the same by construction.
"""

from __future__ import annotations

from kcdsl.syntax.lalr import Node, Token, parse

_TIGHT_BEFORE = {"RPAR", "RSQB", "COMMA", "COLON"}
_TIGHT_AFTER = {"LPAR", "LSQB"}


def spell(text: str, start: str) -> str | None:
    """Return the canonical spelling on one line; None where the text is no such expression."""
    pieces = _pieces(text, start)
    return None if pieces is None else "".join(gap + token.text for token, gap in pieces)


def spell_lines(text: str, start: str) -> list[str] | None:
    """Return the canonical spelling line by line, broken where the text is broken."""
    pieces = _pieces(text, start)
    if pieces is None:
        return None
    lines = [""]
    end = 0
    for token, gap in pieces:
        if "\n" in text[end : token.start] and lines[-1]:
            lines.append(token.text)
        else:
            lines[-1] += gap + token.text if lines[-1] else token.text
        end = token.end
    return lines


def _pieces(text: str, start: str) -> list[tuple[Token, str]] | None:
    """Return the tokens, each with the white space that belongs before it."""
    root = parse(text, start)
    if root is None:
        return None
    calls: set[int] = set()
    unary: set[int] = set()
    tokens: list[Token] = []
    waiting: list[Node | Token] = [root]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Token):
            tokens.append(here)
            continue
        first = here.children[0]
        if isinstance(first, Token):
            if here.rule == "call":
                calls.add(here.children[1].start)
            elif here.rule in {"minus", "quantity"} and first.type == "MINUS":
                unary.add(first.start)
        waiting.extend(reversed(here.children))
    return [(token, _gap(tokens, i, calls, unary)) for i, token in enumerate(tokens)]


def _gap(tokens: list[Token], i: int, calls: set[int], unary: set[int]) -> str:
    if i == 0:
        return ""
    before, token = tokens[i - 1], tokens[i]
    if token.type in _TIGHT_BEFORE or before.type in _TIGHT_AFTER:
        return ""
    if token.start in calls or before.start in unary:
        return ""
    return "" if token.text == "%" else " "
