"""Diagnostics as SARIF 2.1.0, for code scanning and editors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from kcdsl import __version__
from kcdsl.diagnostics.codes import Code
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Severity
from kcdsl.source.text import SourceFile, Span

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def render_sarif(diagnostics: Iterable[Diagnostic]) -> str:
    """Return one run with the rules that occur, and a result for each diagnostic.

    Columns count code points from 1, the end exclusive (`columnKind` says so). Source: SARIF
    2.1.0, OASIS standard, sections 3.14 (run), 3.27 (result), 3.30 (region), 3.55 (fix).
    """
    found = tuple(diagnostics)
    codes = sorted({d.code for d in found}, key=lambda code: code.id)
    number = {code: index for index, code in enumerate(codes)}
    run = {
        "tool": {
            "driver": {
                "name": "kcdsl",
                "version": __version__,
                "semanticVersion": __version__,
                "rules": [_rule(code) for code in codes],
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": [_result(d, number[d.code]) for d in found],
    }
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2, ensure_ascii=False)


def _rule(code: Code) -> dict[str, Any]:
    return {
        "id": code.id,
        "name": "".join(word.capitalize() for word in code.title.replace("'", "").split()),
        "shortDescription": {"text": code.title},
        "fullDescription": {"text": code.explanation},
        "help": {"text": f"kcdsl explain {code.id}: {code.explanation}"},
    }


def _result(diagnostic: Diagnostic, rule: int) -> dict[str, Any]:
    lines = [diagnostic.message]
    lines += [f"note: {note}" for note in diagnostic.notes]
    lines += [f"help: {diagnostic.help}"] if diagnostic.help else []
    result: dict[str, Any] = {
        "ruleId": diagnostic.code.id,
        "ruleIndex": rule,
        "level": _LEVELS[diagnostic.severity],
        "message": {"text": "\n".join(lines)},
        "locations": [],
    }
    source = diagnostic.source
    if source is not None:
        result["locations"] = [{"physicalLocation": _place(source, diagnostic.span)}]
        if diagnostic.labels:
            result["relatedLocations"] = [
                {
                    "id": number,
                    "message": {"text": label.text or "here"},
                    "physicalLocation": _place(source, label.span),
                }
                for number, label in enumerate(diagnostic.labels, start=1)
            ]
        if diagnostic.fix is not None:
            result["fixes"] = [_fix(source, diagnostic.fix)]
    return result


def _artifact(source: SourceFile) -> dict[str, str]:
    """Return the file as a URI reference; a relative name stays relative."""
    path = PurePath(source.name)
    if path.is_absolute():
        return {"uri": path.as_uri()}
    return {"uri": quote(path.as_posix())}


def _place(source: SourceFile, span: Span | None) -> dict[str, Any]:
    place: dict[str, Any] = {"artifactLocation": _artifact(source)}
    if span is not None:
        place["region"] = _region(source, span)
    return place


def _region(source: SourceFile, span: Span) -> dict[str, int]:
    start, end = source.position(span.start), source.position(span.end)
    return {
        "startLine": start.line,
        "startColumn": start.column,
        "endLine": end.line,
        "endColumn": end.column,
    }


def _fix(source: SourceFile, fix: Fix) -> dict[str, Any]:
    return {
        "description": {"text": fix.title},
        "artifactChanges": [
            {
                "artifactLocation": _artifact(source),
                "replacements": [_replacement(source, edit) for edit in fix.edits],
            }
        ],
    }


def _replacement(source: SourceFile, edit: Edit) -> dict[str, Any]:
    replacement: dict[str, Any] = {"deletedRegion": _region(source, edit.span)}
    if edit.text:
        replacement["insertedContent"] = {"text": edit.text}
    return replacement
