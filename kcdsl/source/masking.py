"""Expressions may stand unquoted where YAML alone would cut them.

`require: forall x in points(all): ...` and `{require: quantile(0.999, kl) <= 0.02, level: L2}`
are natural to write, but a YAML parser takes the colon, and in a flow mapping the commas and
square brackets, for its own. Before parsing, those characters inside the expression of `require`
or `where` are replaced one for one by unused characters, and put back in the decoded scalars, so
offsets stay exact. Nothing outside such an expression changes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIELD = re.compile(r"(?<![^\s{,])(?:require|where):[ \t]+(?=[A-Za-z0-9(.+-])")
_SPECIAL = ":,[]{}#"


@dataclass(frozen=True, slots=True)
class Masked:
    """The text for the YAML parser, and the table that undoes the replacement."""

    text: str
    back: dict[int, int]

    def restore(self, text: str) -> str:
        """Return a decoded scalar with its own characters."""
        return text.translate(self.back) if self.back else text

    def changed(self, text: str) -> bool:
        """Say whether a scalar of the masked text holds a replaced character."""
        return any(ord(char) in self.back for char in text) if self.back else False


def mask_expressions(text: str) -> Masked:
    """Replace what YAML would misread inside unquoted expressions."""
    fields = list(_FIELD.finditer(text))
    if not fields:
        return Masked(text, {})
    unused = (c for c in range(0xE000, 0xF8FF) if chr(c) not in text)
    forward = {char: chr(next(unused)) for char in _SPECIAL}
    chars = list(text)
    for field in fields:
        line_start = text.rfind("\n", 0, field.start()) + 1
        for i in _misread(text, field.end(), _in_flow(text[line_start : field.start()])):
            chars[i] = forward[chars[i]]
    masked = "".join(chars)
    if masked == text:
        return Masked(text, {})
    return Masked(masked, {ord(new): ord(old) for old, new in forward.items()})


def _in_flow(before: str) -> bool:
    return before.count("{") > before.count("}")


def _misread(text: str, start: int, flow: bool) -> list[int]:
    """Return the offsets of the characters of one expression that YAML would misread."""
    found = []
    depth, quote, i = 0, "", start
    while i < len(text) and text[i] not in "\r\n":
        char = text[i]
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([":
            depth += 1
        elif char in ")]":
            if depth == 0 and char == "]":
                break
            depth = max(0, depth - 1)
        elif (char == "#" and text[i - 1] in " \t") or (flow and depth == 0 and char in ",}"):
            break
        if _clashes(text, i, flow):
            found.append(i)
        i += 1
    return found


def _clashes(text: str, i: int, flow: bool) -> bool:
    """Say whether YAML would take the character for its own at this place."""
    char, after = text[i], text[i + 1 : i + 2]
    if char == ":":
        return after in {" ", "\t", "\r", "\n", ""} or (flow and after in ",[]{}")
    if char == "#":
        return text[i - 1] in " \t"
    return flow and char in ",[]{}"
