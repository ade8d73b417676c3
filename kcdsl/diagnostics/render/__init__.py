"""Renderers: one function per format, from diagnostics to text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from kcdsl.diagnostics.model import Diagnostic

FORMATS = ("full", "concise", "json", "github", "sarif", "junit")
SUFFIXES = {".json": "json", ".sarif": "sarif", ".xml": "junit", ".txt": "full"}
"""The format of a file that is written, by its suffix."""


def render(
    diagnostics: Iterable[Diagnostic],
    format: str,
    stream: TextIO | None = None,
    files: Sequence[str] = (),
) -> str:
    """Render in one of `FORMATS`. `stream` decides colour and width of `full`; `files` are the
    names of all files that were checked, for the formats that list them."""
    match format:
        case "json":
            from kcdsl.diagnostics.render.json import render_json

            return render_json(diagnostics)
        case "concise":
            from kcdsl.diagnostics.render.concise import render_concise

            return render_concise(diagnostics)
        case "github":
            from kcdsl.diagnostics.render.github import render_github

            return render_github(diagnostics)
        case "sarif":
            from kcdsl.diagnostics.render.sarif import render_sarif

            return render_sarif(diagnostics)
        case "junit":
            from kcdsl.diagnostics.render.junit import render_junit

            return render_junit(diagnostics, files)
        case _:
            from kcdsl.diagnostics.render.full import render_full

            return render_full(diagnostics, stream)
