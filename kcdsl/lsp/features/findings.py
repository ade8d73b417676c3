"""Findings as diagnostics of the protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from lsprotocol import types as lsp

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Diagnostic, Severity
from kcdsl.diagnostics.spans import Span
from kcdsl.lsp.text.positions import Ranges

_SEVERITIES = {
    Severity.ERROR: lsp.DiagnosticSeverity.Error,
    Severity.WARNING: lsp.DiagnosticSeverity.Warning,
    Severity.NOTE: lsp.DiagnosticSeverity.Information,
}
_UNNECESSARY = {codes.UNUSED_VARIABLE, codes.UNUSED_IMPORT, codes.UNUSED_TABLE}


def diagnostics(found: Iterable[Diagnostic], ranges: Ranges) -> list[lsp.Diagnostic]:
    """Return findings as diagnostics: the help is below the message, the fix in `data`."""
    return [_diagnostic(finding, ranges) for finding in found]


def _diagnostic(finding: Diagnostic, ranges: Ranges) -> lsp.Diagnostic:
    href = finding.code.uri
    tail = [*(f"note: {note}" for note in finding.notes)]
    tail += [f"help: {finding.help}"] if finding.help else []
    related = [
        lsp.DiagnosticRelatedInformation(
            lsp.Location(ranges.uri, ranges.of(label.span)), label.text
        )
        for label in finding.labels
    ]
    return lsp.Diagnostic(
        range=ranges.of(finding.span or Span(0, 0)),
        message="\n".join([finding.message, *tail]),
        severity=_SEVERITIES[finding.severity],
        code=finding.code.id,
        code_description=None if href is None else lsp.CodeDescription(href),
        source="kcdsl",
        related_information=related or None,
        tags=_tags(finding.code) or None,
        data=_fix(finding, ranges),
    )


def _fix(finding: Diagnostic, ranges: Ranges) -> dict[str, object] | None:
    if finding.fix is None:
        return None
    edits = [
        {
            "range": {
                name: {"line": place.line, "character": place.character}
                for name, place in (("start", edit.range.start), ("end", edit.range.end))
            },
            "newText": edit.new_text,
        }
        for edit in ranges.edits(finding.fix.edits)
    ]
    return {"title": finding.fix.title, "safe": finding.fix.safe, "edits": edits}


def _tags(code: codes.Code) -> list[lsp.DiagnosticTag]:
    """Return the tags of a code: `Unnecessary` for unused names."""
    unused = code in _UNNECESSARY or code.title.startswith("unused")
    return [lsp.DiagnosticTag.Unnecessary] if unused else []


def result_id(found: list[lsp.Diagnostic]) -> str:
    """Return an identifier of a list of diagnostics that depends on its content."""
    return hashlib.sha256(repr(found).encode("utf-8", "surrogatepass")).hexdigest()[:16]
