"""Formatting of a whole document; a range is expanded to it."""

from __future__ import annotations

from kcdsl.diagnostics.model import Edit, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.format import edits, format_text


def formatting(source: SourceFile) -> tuple[Edit, ...]:
    """Return the edits that bring a document into the house layout; none where it is not YAML."""
    text = format_text(source, Sink())
    return () if text is None or text == source.text else edits(source.text, text)
