"""Document snapshots, for tests of language features as plain functions."""

from __future__ import annotations

from pathlib import Path

from lsprotocol.types import PositionEncodingKind

from kcdsl.diagnostics.spans import Span
from kcdsl.lsp.answers import Question
from kcdsl.lsp.text.documents import Checker, Snapshot, Texts, document
from kcdsl.lsp.text.positions import Ranges


def snapshot(text: str, folder: Path | None = None, texts: Texts | None = None) -> Snapshot:
    """Return the snapshot of a text, as if it were a file of a folder."""
    place = (folder or Path("/nowhere")) / "c.kc.yaml"
    return Checker().snapshot(document(place.as_uri(), text, 1), texts or {})


def ranges(known: Snapshot) -> Ranges:
    """Return the converter from code points to positions."""
    return Question(known, PositionEncodingKind.Utf32).ranges


def place(text: str, piece: str, into: int = 0) -> int:
    """Return an offset a few characters into a piece of a text, which must occur."""
    return text.index(piece) + into


def span(text: str, piece: str) -> Span:
    """Return the span of a piece of a text."""
    return Span(text.index(piece), text.index(piece) + len(piece))
