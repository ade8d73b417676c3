"""Fixes of syntax errors, each by the advice that goes with it."""

from __future__ import annotations

import re

from kcdsl.diagnostics.model import Edit, Fix
from kcdsl.source.text import SourceFile, Span

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


def mended(source: SourceFile, span: Span, help: str) -> Fix | None:
    """Return the fix that an advice describes, None where it leaves a choice open."""
    text = source.text
    word = _INSTEAD.fullmatch(help)
    instead = word[1] if word is not None else _GUESSES.get(help)
    if instead is not None:
        edit = Edit(span, _apart(text, span, instead))
        return Fix(f"write `{instead}`", (edit,), word is not None or help in _SURE)
    if help.startswith("write `us`") and text[span.end : span.end + 1] == "s":
        return Fix("write `us`", (Edit(span, "u"),))
    if help in _BEHIND:
        at = len(text[: span.start].rstrip())
        missing = _BEHIND[help]
        return Fix(f"add `{missing.strip()}`", (Edit(Span(at, at), missing),), safe=False)
    if help == "there is no `(` to this `)`":
        return Fix("remove `)`", (Edit(span, ""),), safe=False)
    return None


def _apart(text: str, span: Span, word: str) -> str:
    """Return a word with spaces where it would grow together with its neighbours."""
    if not word.isalpha():
        return word
    before = " " if text[span.start - 1 : span.start].isalnum() else ""
    after = " " if text[span.end : span.end + 1].isalnum() else ""
    return f"{before}{word}{after}"
