"""YAML as text: unquoted expressions that YAML alone would cut, anchors and tags before a node.

`require: forall x in points(all): ...` and `{require: quantile(0.999, kl) <= 0.02, level: L2}`
are natural to write, but a YAML parser takes the colon after the region, and in a flow mapping the
commas and square brackets between the round ones, for its own. Before parsing, exactly those
characters are replaced one for one by unused characters, and put back in the decoded scalars: so
offsets stay exact, and text in quotation marks, block scalars and comments is as it was.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import NamedTuple

from kcdsl.diagnostics.spans import Span

_QUANTIFIER = re.compile(
    r"\b(?:forall|exists)[ \t]+\w+[ \t]+in[ \t]+\w+\([^()\r\n]*\)[ \t]*(:)(?!\S)"
)
_TOKEN = re.compile(r"(?<![\w\"'])[A-Za-z_]\w*\(|[(),\[\]\"'{}#\r\n]")
_ESCAPED = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")
_SPECIAL = ":,[]"
_PRIVATE = range(0xE000, 0xF900)
"""Characters that no text has a use for; one that has them all is left as it is."""


class Masked(NamedTuple):
    """The text for the YAML parser, and the table that undoes the replacement."""

    text: str
    back: dict[int, int]

    def restore(self, text: str) -> str:
        """Return a decoded scalar with its own characters."""
        return text.translate(self.back) if self.back else text

    def matters(self, text: str, flow: bool) -> bool:
        """Say whether YAML alone would have misread this plain scalar of the masked text."""
        own = {self.back.get(ord(char)) for char in text} - {None} if self.back else set()
        return bool(own) if flow else ord(":") in own


def mask_expressions(text: str) -> Masked:
    """Replace what YAML would misread inside unquoted expressions."""
    places = [match.start(1) for match in _QUANTIFIER.finditer(text)]
    places += _inside_calls(text)
    if not places:
        return Masked(text, {})
    taken = {ord(char) for char in set(text)}
    taken.update(int(found[1] or found[2], 16) for found in _ESCAPED.finditer(text))
    unused = list(islice((code for code in _PRIVATE if code not in taken), len(_SPECIAL)))
    if len(unused) < len(_SPECIAL):
        return Masked(text, {})
    forward = {char: chr(code) for char, code in zip(_SPECIAL, unused, strict=True)}
    chars = list(text)
    for i in places:
        chars[i] = forward[chars[i]]
    return Masked("".join(chars), {ord(new): ord(old) for old, new in forward.items()})


def _inside_calls(text: str) -> list[int]:
    """Return the offsets of commas and square brackets inside calls closed on their line.

    Quotation marks, braces and comment signs end the search: what holds them is quoted anyway.
    """
    places: list[int] = []
    waiting: list[int] = []
    frames: list[tuple[bool, int]] = []  # whether it is a call, and how many waited before it
    for token in _TOKEN.finditer(text):
        char = token[0][-1]
        if char == "(":
            frames.append((len(token[0]) > 1, len(waiting)))
        elif char == ")" and frames:
            is_call, before = frames.pop()
            if is_call:
                places += waiting[before:]
            if is_call or not frames:
                del waiting[before:]
        elif char in ",[]" and frames:
            waiting.append(token.start())
        elif char not in "),[]":
            frames.clear()
            waiting.clear()
    return places


_PROPERTY = re.compile(
    r"(?:&(?P<anchor>[0-9A-Za-z_-]+)|!(?:<[^>\s]*>|[^\s,\[\]{}]*))"
    r"(?P<gap>(?:[ \t\r\n]++(?:#[^\r\n]*+)?)*+)"
)


class Properties(NamedTuple):
    """The places of an anchor with its `&` and of a tag with its `!`, and where the node begins."""

    anchor: Span | None
    tag: Span | None
    end: int


def properties(text: str, whole: Span) -> Properties:
    """Return the properties of the node that stands at a place together with them."""
    anchor = tag = None
    at = whole.start
    while (found := _PROPERTY.match(text, at)) is not None:
        place = Span(found.start(), found.start("gap"))
        if found["anchor"] is not None:
            anchor = place
        else:
            tag = place
        at = found.end()
    return Properties(anchor, tag, min(at, whole.end))
