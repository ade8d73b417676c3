"""Fixes of syntax errors, each by the advice that goes with it.

What to change is decided in the decoded text of the expression, and mapped to the file: there,
escapes, folds and indentation stand between its characters.
"""

from __future__ import annotations

import re

from kcdsl.diagnostics.model import Edit, Fix
from kcdsl.source.scalar_map import ScalarMap
from kcdsl.source.yaml_nodes import Scalar

_INSTEAD = re.compile(r"write `([^`() ]+)`")
_GUESSES = {
    "write `==` for equality, or `<=`, `>=` for a bound": "==",
    "write `or`; a magnitude is `abs(...)`": "or",
    "write the minus sign `-`": "-",
}
_BEHIND = {
    "close the bracket with `)`": ")",
    "close the list with `]`": "]",
    "put `:` after the region": ":",
    "separate arguments with `,`": ",",
    "say what the budget counts: `of requests` or `of windows`": " of requests",
}
"""What is missing behind the last character before the place."""
_SURE = {"write the minus sign `-`"}


def mended(scalar: Scalar, places: ScalarMap, begin: int, end: int, help: str) -> Fix | None:
    """Return the fix that an advice about the characters `[begin, end)` of an expression describes,
    None where it leaves a choice open, or what it writes would have to be put in quotation marks.
    """
    text, span = scalar.text, places.span(begin, end)
    word = _INSTEAD.fullmatch(help)
    instead = word[1] if word is not None else _GUESSES.get(help)
    if instead is not None:
        edit = Edit(span, _apart(text, begin, end, instead))
        return Fix(f"write `{instead}`", (edit,), word is not None or help in _SURE)
    if help.startswith("write `us`") and text[end : end + 1] == "s":
        return Fix("write `us`", (Edit(span, "u"),))
    if help in _BEHIND:
        missing = _BEHIND[help]
        at = len(text[:begin].rstrip())
        if missing == ")":
            at = _argument_end(text, at)
        if missing == ":" and scalar.style == "plain" and not _is_verbatim(places, at):
            return None
        edit = Edit(places.span(at, at), missing)
        return Fix(f"add `{missing.strip()}`", (edit,), safe=False)
    if help == "there is no `(` to this `)`":
        return Fix("remove `)`", (Edit(span, ""),), safe=False)
    return None


def _is_verbatim(places: ScalarMap, end: int) -> bool:
    """Say whether the characters before `end` stand in the file one behind the other, on one line;
    only there may a quantifier have its colon without quotation marks (`kcdsl.source.masking`)."""
    assert places.pieces is not None
    return places.pieces[end - 1][1] - places.pieces[0][0] == end


def _argument_end(text: str, end: int) -> int:
    """Return where the argument ends whose bracket is not closed before `end`: where a comparison
    follows it, before that, since no function takes one."""
    depth, compared = 0, end
    for at in range(end - 1, -1, -1):
        char = text[at]
        if char in ")]":
            depth += 1
        elif depth and char in "([":
            depth -= 1
        elif char in "([":
            return len(text[:compared].rstrip())
        elif not depth and char in "<>=":
            compared = at
    return end


def _apart(text: str, begin: int, end: int, word: str) -> str:
    """Return a word with spaces where it would grow together with its neighbours."""
    if not word.isalpha():
        return word
    before = " " if text[begin - 1 : begin].isalnum() else ""
    after = " " if text[end : end + 1].isalnum() else ""
    return f"{before}{word}{after}"
