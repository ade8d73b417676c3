"""Diagnostics as JSON for other programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kcdsl.diagnostics.model import Diagnostic, Suppressed
from kcdsl.diagnostics.render.terminal import json_text
from kcdsl.diagnostics.spans import SourceFile, Span


def render_json(diagnostics: Iterable[Diagnostic], suppressed: Iterable[Suppressed] = ()) -> str:
    """Return a JSON list; places are null where no file is involved. Accepted findings come last
    and have `suppressed`."""
    records = [to_record(d) for d in diagnostics]
    for item in suppressed:
        accepted = {"reason": item.reason, "line": item.line}
        records.append({**to_record(item.diagnostic), "suppressed": accepted})
    return json_text(records).rstrip("\n")


def to_record(diagnostic: Diagnostic) -> dict[str, Any]:
    """Return one diagnostic as plain data. Lines and columns start at 1, columns count code
    points, and the end is exclusive."""
    source = diagnostic.source
    record: dict[str, Any] = {
        "code": diagnostic.code.id,
        "severity": str(diagnostic.severity),
        "file": source.name if source is not None else None,
        **_place(source, diagnostic.span),
        "message": diagnostic.message,
        "help": diagnostic.help,
    }
    if diagnostic.notes:
        record["notes"] = list(diagnostic.notes)
    if diagnostic.labels:
        record["labels"] = [
            {**_place(source, label.span), "text": label.text} for label in diagnostic.labels
        ]
    if diagnostic.fix is not None:
        record["fix"] = {
            "title": diagnostic.fix.title,
            "safe": diagnostic.fix.safe,
            "edits": [
                {**_place(source, edit.span), "text": edit.text} for edit in diagnostic.fix.edits
            ],
        }
    return record


def _place(source: SourceFile | None, span: Span | None) -> dict[str, int | None]:
    if source is None or span is None:
        return dict.fromkeys(("line", "column", "end_line", "end_column"))
    start, end = source.position(span.start), source.position(span.end)
    return {
        "line": start.line,
        "column": start.column,
        "end_line": end.line,
        "end_column": end.column,
    }
