"""Diagnostics as JSON for other programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kcdsl.diagnostics.model import Diagnostic


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """Return a JSON list; places are null where no file is involved."""
    return json.dumps([to_record(d) for d in diagnostics], indent=2, ensure_ascii=False)


def to_record(diagnostic: Diagnostic) -> dict[str, Any]:
    """Return one diagnostic as plain data. Lines and columns start at 1, columns count code
    points, and the end is exclusive."""
    record: dict[str, Any] = {
        "code": diagnostic.code.id,
        "severity": str(diagnostic.severity),
        "file": diagnostic.source.name if diagnostic.source is not None else None,
        "line": None,
        "column": None,
        "end_line": None,
        "end_column": None,
        "message": diagnostic.message,
        "help": diagnostic.help,
    }
    if diagnostic.source is not None and diagnostic.span is not None:
        start = diagnostic.source.position(diagnostic.span.start)
        end = diagnostic.source.position(diagnostic.span.end)
        record |= {
            "line": start.line,
            "column": start.column,
            "end_line": end.line,
            "end_column": end.column,
        }
    if diagnostic.notes:
        record["notes"] = list(diagnostic.notes)
    return record
