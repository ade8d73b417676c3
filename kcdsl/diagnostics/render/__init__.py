"""Renderers: one function per format, from diagnostics to text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from kcdsl.diagnostics.model import Diagnostic
from kcdsl.diagnostics.render.concise import render_concise
from kcdsl.diagnostics.render.full import render_full
from kcdsl.diagnostics.render.json import render_json

FORMATS = ("full", "concise", "json")


def render(diagnostics: Iterable[Diagnostic], format: str, stream: TextIO) -> str:
    """Render for `stream` (which decides colour and width) in one of `FORMATS`."""
    match format:
        case "json":
            return render_json(diagnostics)
        case "concise":
            return render_concise(diagnostics)
        case _:
            return render_full(diagnostics, stream)


__all__ = ["FORMATS", "render", "render_concise", "render_full", "render_json"]
