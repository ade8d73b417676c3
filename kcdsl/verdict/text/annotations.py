"""A report as diagnostics, for the formats of build servers: what does not hold is a finding.

Violated clauses and invalid evidence are errors, open clauses are warnings that fail too: nothing
but a held clause is a success. What is no verdict is a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Diagnostic, Severity
from kcdsl.diagnostics.render import Checked, Run, render
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.verdict.html.words import how_far, where

FORMATS = ("junit", "github", "sarif", "concise", "full")
"""The formats that show a report as diagnostics."""
_FOUND = {
    "violated": (codes.CLAUSE_VIOLATED, Severity.ERROR),
    "invalid_evidence": (codes.CLAUSE_INVALID, Severity.ERROR),
    "inconclusive": (codes.CLAUSE_OPEN, Severity.WARNING),
}
Places = Mapping[str, Span]
"""Where each clause stands in the contract."""


def in_format(
    report: Mapping[str, Any],
    format: str,
    command: str,
    source: SourceFile | None = None,
    places: Places | None = None,
) -> str:
    """Return a report document in one of `FORMATS`, at the places of its clauses where known."""
    known = places or {}
    decided = dict.fromkeys(row["clause"] for row in report["clauses"])
    checked: tuple[Checked, ...] = ()
    if source is not None:
        clauses = tuple((name, known[name]) for name in decided if name in known)
        checked = (Checked(source.name, clauses),)
    run = Run(command, checked, fail_on=Severity.WARNING, exit_code=report["exit"])
    return render(list(diagnostics(report, source, known)), format, None, run)


def diagnostics(
    report: Mapping[str, Any], source: SourceFile | None, places: Places
) -> Iterator[Diagnostic]:
    """Yield a finding for each result that is not held, then the notes."""
    for row in report["clauses"]:
        if row["verdict"] == "held":
            continue
        code, severity = _FOUND[row["verdict"]]
        yield Diagnostic(
            code,
            f"`{row['clause']}` on {row['slice']}: {how_far(row)}",
            source,
            places.get(row["clause"]),
            notes=tuple(filter(None, (f"requires {row['requirement']}", where(row)))),
            help=_way_out(row),
            severity=severity,
        )
    for warned in report.get("warnings", ()):
        explained = codes.find(warned["code"])
        if explained is None:
            raise ValueError(f"no such code: {warned['code']}")
        yield Diagnostic(
            explained,
            f"`{warned['clause']}` on {warned['slice']}: {warned['message']}",
            source,
            places.get(warned["clause"]),
            severity=Severity.NOTE,
        )


def _way_out(row: Mapping[str, Any]) -> str | None:
    if row["verdict"] == "inconclusive" and row.get("needed"):
        return f"about {row['needed']} {row['counted']} would decide it if they are like these"
    if row.get("action"):
        return f"the escalation policy asks for: {row['action'].replace('_', ' ')}"
    return None
