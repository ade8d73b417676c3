"""One line for each diagnostic: for editors and grep, and as commands of GitHub Actions."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kcdsl.diagnostics.model import Diagnostic, Severity
from kcdsl.diagnostics.render.terminal import printable, visible


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


_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}


def render_github(diagnostics: Iterable[Diagnostic]) -> str:
    """Return one line `::error file=…,line=…,endLine=…,col=…,endColumn=…,title=…::message` each.

    Files are named from the root of the checkout, wherever the step runs. Columns count from 1; the
    last column is inclusive, and is left out where the place spans several lines, as the format
    has it. Source: the workflow commands of GitHub Actions.
    """
    return "\n".join(_command(diagnostic) for diagnostic in diagnostics)


def _command(diagnostic: Diagnostic) -> str:
    fields: list[tuple[str, object]] = []
    source, span = diagnostic.source, diagnostic.span
    if source is not None:
        fields.append(("file", _named(source.name)))
    if source is not None and span is not None:
        start, end = source.position(span.start), source.position(span.end)
        fields += [("line", start.line), ("endLine", end.line)]
        if start.line == end.line:
            fields += [("col", start.column), ("endColumn", max(start.column, end.column - 1))]
    fields.append(("title", f"{diagnostic.code}: {diagnostic.code.title}"))
    listed = ",".join(f"{name}={_field(_plain(str(value)))}" for name, value in fields)
    tail = [f"note: {note}" for note in diagnostic.notes]
    tail += [f"help: {diagnostic.help}"] if diagnostic.help else []
    text = _plain("\n".join([diagnostic.message, *tail]), ends="\n")
    return f"::{_COMMANDS[diagnostic.severity]} {listed}::{_message(text)}"


def _named(name: str) -> str:
    """Return the path of a file for annotations: relative to the root of the checkout if inside."""
    root = os.environ.get("GITHUB_WORKSPACE")
    path = Path(name).resolve()
    if not root or not path.is_relative_to(Path(root).resolve()):
        return name
    return path.relative_to(Path(root).resolve()).as_posix()


def _plain(text: str, ends: str = "\r\n") -> str:
    """Return a text without control characters of terminals; line ends are kept, to be encoded."""
    return "".join(char if char in ends else visible(char) for char in text)


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _field(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
