"""Diagnostics as SARIF 2.1.0, for code scanning and editors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from kcdsl import __version__
from kcdsl.diagnostics.codes import Code
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Severity, Suppressed
from kcdsl.diagnostics.render import page_url
from kcdsl.diagnostics.render.terminal import json_text
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.diagnostics.render import Run

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def render_sarif(diagnostics: Iterable[Diagnostic], run: Run) -> str:
    """Return one run with the rules that occur, and a result for each diagnostic; accepted ones
    come last, with their suppressions.

    Columns count code points from 1, the end exclusive (`columnKind` says so). Source: SARIF
    2.1.0, OASIS standard, sections 3.14 (run), 3.20 (invocation), 3.27 (result), 3.30 (region),
    3.35 (suppression), 3.55 (fix).
    """
    found = tuple(diagnostics)
    codes = sorted(
        {d.code for d in (*found, *(item.diagnostic for item in run.suppressed))},
        key=lambda code: code.id,
    )
    number = {code: index for index, code in enumerate(codes)}
    results = [_result(d, number[d.code]) for d in found]
    # Once one result says whether it is suppressed, all must (3.27.23).
    for result in results if run.suppressed else ():
        result["suppressions"] = []
    for item in run.suppressed:
        result = _result(item.diagnostic, number[item.diagnostic.code])
        results.append({**result, "suppressions": [_suppression(item)]})
    document_run = {
        "tool": {
            "driver": {
                "name": "kcdsl",
                "version": __version__,
                "semanticVersion": __version__,
                "rules": [_rule(code, run.docs_url) for code in codes],
            }
        },
        "invocations": [
            {
                "executionSuccessful": run.exit_code != Exit.COULD_NOT_RUN,
                "exitCode": run.exit_code,
            }
        ],
        "artifacts": [
            {"location": {"uri": uri}} for uri in dict.fromkeys(_uri(f.name) for f in run.files)
        ],
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [document_run]}
    return json_text(document).rstrip("\n")


def _rule(code: Code, docs_url: str | None) -> dict[str, Any]:
    written, url = code.page, page_url(docs_url, code.id)
    words = code.title.replace("'", "").replace("-", " ").split()
    rule: dict[str, Any] = {
        "id": code.id,
        "name": "".join(word[:1].upper() + word[1:] for word in words),
        "shortDescription": {"text": code.title},
        "fullDescription": {"text": written.summary},
        "help": {"text": written.plain, "markdown": written.markdown},
    }
    if url is not None:
        rule["helpUri"] = url
    return rule


def _suppression(item: Suppressed) -> dict[str, Any]:
    suppression: dict[str, Any] = {
        "kind": "inSource",
        "status": "accepted",
        "justification": item.reason,
    }
    source = item.diagnostic.source
    if source is not None:
        place = {"artifactLocation": _artifact(source), "region": {"startLine": item.line}}
        suppression["location"] = {"physicalLocation": place}
    return suppression


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
    return {"uri": _uri(source.name)}


def _uri(name: str) -> str:
    """Return a file as a URI reference; a relative name stays relative."""
    path = PurePath(name)
    return path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))


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
        "properties": {"applicability": "safe" if fix.safe else "unsafe"},
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
