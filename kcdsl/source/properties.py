"""What stands before the text of a YAML node: its anchor and its tag."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kcdsl.diagnostics.spans import Span

_PROPERTY = re.compile(
    r"(?:&(?P<anchor>[0-9A-Za-z_-]+)|!(?:<[^>\s]*>|[^\s,\[\]{}]*))"
    r"(?P<gap>(?:[ \t\r\n]++(?:#[^\r\n]*+)?)*+)"
)


@dataclass(frozen=True, slots=True)
class Properties:
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
