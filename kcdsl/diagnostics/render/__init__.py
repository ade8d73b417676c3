"""Renderers: one function per format, from diagnostics to text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TextIO

from kcdsl.diagnostics.model import FORMATS as FORMATS
from kcdsl.diagnostics.model import Diagnostic, Severity, Suppressed
from kcdsl.diagnostics.spans import Span

SUFFIXES = {".json": "json", ".sarif": "sarif", ".xml": "junit", ".txt": "text"}
"""The format of a file that is written, by its suffix."""
DOCUMENTS = ("json", "sarif", "junit")
"""The formats that write a document even without findings."""
WITHOUT_FILE = "kcdsl"
"""The name of the suite of findings that are in no file."""


class Checked(NamedTuple):
    """A file that was checked, with the places of its clauses by their names."""

    name: str
    clauses: tuple[tuple[str, Span], ...] = ()


class LintRun(NamedTuple):
    """The data that formats show with the findings: the checked files, the accepted findings, the
    location of the published pages of codes, the severity that fails, and the exit code."""

    command: str = "kcdsl lint"
    files: tuple[Checked, ...] = ()
    suppressed: tuple[Suppressed, ...] = ()
    docs_url: str | None = None
    fail_on: Severity = Severity.ERROR
    exit_code: int = 0


def render(
    diagnostics: Iterable[Diagnostic],
    format: str,
    stream: TextIO | None = None,
    run: LintRun | None = None,
) -> str:
    """Render in one of `FORMATS`. `stream` decides colour and width of `text`."""
    about = run if run is not None else LintRun()
    if format in DOCUMENTS:
        from kcdsl.diagnostics.render import documents

        if format == "json":
            return documents.render_json(diagnostics, about.suppressed)
        made = documents.render_sarif if format == "sarif" else documents.render_junit
        return made(diagnostics, about)
    if format in ("concise", "github"):
        from kcdsl.diagnostics.render import lines

        made_of = lines.render_concise if format == "concise" else lines.render_github
        return made_of(diagnostics)
    from kcdsl.diagnostics.render.full import render_full

    return render_full(diagnostics, stream)


def page_url(docs_url: str | None, code: str) -> str | None:
    """Return the URL of the published page of a code: `{code}` in the base URL, else a file below
    it."""
    if docs_url is None:
        return None
    if "{code}" in docs_url:
        return docs_url.replace("{code}", code)
    return f"{docs_url.rstrip('/')}/{code}.md"
