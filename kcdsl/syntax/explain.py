"""Say what is wrong with an expression that is not well formed, every mistake at its place.

Lark parses the text by the same grammar; at each unusable token the explanation is kept, the token
is dropped, and parsing goes on. An error that follows another one within three tokens is most
probably its consequence and is left out, unless it is a sign of another language.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from lark import Lark
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from kcdsl.diagnostics.codes import EXPRESSION_SYNTAX
from kcdsl.syntax.mistakes import advice_for_character, advice_for_token, expected_words
from kcdsl.syntax.tables import build_lark

_MOST = 10
"""Errors of one expression that are reported."""
_MOST_DROPPED = 100
"""Tokens of one expression that are dropped before its rest is left alone."""
_APART = 3
"""Good tokens after an error before another one is believed."""
_INSTEAD = re.compile(r"write `[^`]+`")
"""The advice for a sign of other languages, which is a mistake wherever it stands."""
_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_TOKEN = re.compile(r"\w+|[<>=!]=|[^\s\w]")


@cache
def grammar() -> Lark:
    """Return Lark's parser of the grammar; building it takes some 70 ms."""
    return build_lark()


def explain(text: str, start: str, report: Callable[..., None]) -> None:
    """Report every mistake by `report(code, message, begin, end, help)`, at least one."""
    last: int | None = None
    found = dropped = 0

    def on_error(error: UnexpectedInput) -> bool:
        nonlocal last, found, dropped
        begin, end, message, help = _explain(error, text)
        foreign = help is not None and _INSTEAD.fullmatch(help) is not None
        apart = last is None or len(_TOKEN.findall(text, last, begin)) >= _APART
        if apart or (foreign and last is not None and begin >= last):
            report(EXPRESSION_SYNTAX, message, begin, end, help)
            found += 1
        last = max(end, last or 0)
        dropped += 1
        lost = help is not None and help.startswith("a region is ")  # its quantifier is not read
        return found < _MOST and dropped < _MOST_DROPPED and not lost

    try:
        grammar().parse(text, start=start, on_error=on_error)
    except UnexpectedInput:
        return
    if last is None:
        # The table refused what Lark takes: never a pass.
        report(EXPRESSION_SYNTAX, "the expression cannot be read", 0, len(text))


def _explain(error: UnexpectedInput, text: str) -> tuple[int, int, str, str | None]:
    """Return the range, the message and the advice for one error."""
    if isinstance(error, UnexpectedToken):
        expected = set(error.accepts or error.expected)
        token = error.token
        if token.type == "$END":
            at = len(text.rstrip())  # an empty range: nothing there is wrong
            message = f"the expression ends too early; expected {expected_words(expected)}"
            advice = advice_for_token("", "$END", text, at, expected)
            return at, at, message, advice
        begin = token.start_pos or 0
        # Where neither may stand, Lark takes the letters of a name for a unit.
        word = _WORD.match(text, begin) if token.type == "UNIT" else None
        shown = str(token) if word is None else max(word[0], str(token), key=len)
        message = f"`{shown}` cannot stand here; expected {expected_words(expected)}"
        advice = advice_for_token(shown, token.type, text, begin, expected)
        return begin, begin + len(shown), message, advice
    begin = error.pos_in_stream or 0
    expected = set(error.allowed or ()) if isinstance(error, UnexpectedCharacters) else set()
    length, help = advice_for_character(text, begin)
    shown = text[begin : begin + length]
    if shown[:1] in {'"', "'"}:
        return begin, len(text.rstrip()), "the text is not closed", help
    message = f"`{shown}` is not part of the language"
    if expected and help is None:
        message += f"; expected {expected_words(expected)}"
    return begin, begin + length, message, help
