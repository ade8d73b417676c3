"""One line per diagnostic, as editors and grep like it."""

from __future__ import annotations

from collections.abc import Iterable

from kcdsl.diagnostics.model import Diagnostic
from kcdsl.diagnostics.render.terminal import printable


def render_concise(diagnostics: Iterable[Diagnostic]) -> str:
    """Return `file:line:column: error[KC203] message (help)` lines."""
    return "\n".join(_line(diagnostic) for diagnostic in diagnostics)


def _line(diagnostic: Diagnostic) -> str:
    place = ""
    if diagnostic.source is not None:
        place = f"{diagnostic.source.name}: "
        if diagnostic.span is not None:
            at = diagnostic.source.position(diagnostic.span.start)
            place = f"{diagnostic.source.name}:{at.line}:{at.column}: "
    help = f" ({diagnostic.help})" if diagnostic.help else ""
    text = f"{place}{diagnostic.severity}[{diagnostic.code}] {diagnostic.message}{help}"
    return printable(" ".join(text.split()))
