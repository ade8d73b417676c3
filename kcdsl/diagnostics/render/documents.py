"""Diagnostics as documents for other programs: JSON, SARIF 2.1.0, and JUnit XML."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from xml.etree import ElementTree as xml

from kcdsl import __version__
from kcdsl.diagnostics.codes import Code
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Severity, Suppressed
from kcdsl.diagnostics.render import WITHOUT_FILE, page_url
from kcdsl.diagnostics.render.lines import render_concise
from kcdsl.diagnostics.render.terminal import json_text, printable
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.diagnostics.render import Checked, LintRun


# --- JSON -----------------------------------------------------------------------------------------


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
        **_range(source, diagnostic.span),
        "message": diagnostic.message,
        "help": diagnostic.help,
    }
    if diagnostic.notes:
        record["notes"] = list(diagnostic.notes)
    if diagnostic.labels:
        record["labels"] = [
            {**_range(source, label.span), "text": label.text} for label in diagnostic.labels
        ]
    if diagnostic.fix is not None:
        record["fix"] = {
            "title": diagnostic.fix.title,
            "safe": diagnostic.fix.safe,
            "edits": [
                {**_range(source, edit.span), "text": edit.text} for edit in diagnostic.fix.edits
            ],
        }
    return record


def _range(source: SourceFile | None, span: Span | None) -> dict[str, int | None]:
    if source is None or span is None:
        return dict.fromkeys(("line", "column", "end_line", "end_column"))
    start, end = source.position(span.start), source.position(span.end)
    return {
        "line": start.line,
        "column": start.column,
        "end_line": end.line,
        "end_column": end.column,
    }


# --- SARIF ----------------------------------------------------------------------------------------


_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "note"}


def render_sarif(diagnostics: Iterable[Diagnostic], run: LintRun) -> str:
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


# --- JUnit ----------------------------------------------------------------------------------------


_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_Finding = tuple[Diagnostic, str | None]
"""A finding, with the reason for which it is accepted; None where it is not."""
_RANK = {Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}


def render_junit(diagnostics: Iterable[Diagnostic], run: LintRun) -> str:
    """Return a suite for each file, with a case for each clause and one, named as the file, for the
    rest of the file. Findings at least as severe as `fail_on` fail their case; others are output,
    as are accepted findings, with their reasons.

    Files without findings are passed cases. Findings without a file are a separate suite.
    """
    by_file: dict[str, list[_Finding]] = {file.name: [] for file in run.files}
    accepted = ((item.diagnostic, item.reason) for item in run.suppressed)
    for diagnostic, reason in (*((found, None) for found in diagnostics), *accepted):
        name = diagnostic.source.name if diagnostic.source is not None else WITHOUT_FILE
        by_file.setdefault(name, []).append((diagnostic, reason))
    clauses = {file.name: file for file in run.files}
    root = xml.Element("testsuites", {"name": run.command})
    tests = failures = 0
    for name, found in by_file.items():
        suite = xml.SubElement(root, "testsuite", {"name": _clean(name)})
        cases = list(_cases_of(name, found, clauses.get(name)))
        failed = sum(_add_case(suite, name, case, d, run) for case, d in cases)
        _count(suite, len(cases), failed)
        tests, failures = tests + len(cases), failures + failed
    _count(root, tests, failures)
    xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(root, encoding="unicode")


def _cases_of(
    name: str, found: list[_Finding], file: Checked | None
) -> Iterator[tuple[str, list[_Finding]]]:
    """Yield the cases of a file: the name of each and its findings."""
    clauses = file.clauses if file is not None else ()
    parts: list[list[_Finding]] = [[] for _ in clauses]
    rest: list[_Finding] = []
    for diagnostic, reason in found:
        at = -1 if diagnostic.span is None else diagnostic.span.start
        # Where one clause ends and the next begins, it is about the next.
        inside = [i for i, (_, span) in enumerate(clauses) if span.start <= at <= span.end]
        (parts[inside[-1]] if inside else rest).append((diagnostic, reason))
    yield name, rest
    yield from ((clause, part) for (clause, _), part in zip(clauses, parts, strict=True))


def _add_case(
    suite: xml.Element, file: str, name: str, found: list[_Finding], run: LintRun
) -> bool:
    """Add one case; return whether it failed."""
    attributes = {"classname": _clean(file), "name": _clean(name), "file": _clean(file)}
    open_findings = [d for d, reason in found if reason is None]
    failing = [d for d in open_findings if _RANK[d.severity] >= _RANK[run.fail_on]]
    first = failing[0] if failing else None
    if first is not None and first.source is not None and first.span is not None:
        attributes["line"] = str(first.source.position(first.span.start).line)
    element = xml.SubElement(suite, "testcase", attributes)
    if first is not None:
        more = f" and {len(failing) - 1} more" if len(failing) > 1 else ""
        message = _clean(f"{first.code}: {first.message}{more}")
        failure = xml.SubElement(element, "failure", {"message": message, "type": str(first.code)})
        failure.text = _clean(render_concise(failing))
    rest = (d for d in open_findings if _RANK[d.severity] < _RANK[run.fail_on])
    others = [render_concise([d]) for d in rest]
    others += [f"{render_concise([d])} accepted: {reason}" for d, reason in found if reason]
    if others:
        output = xml.SubElement(element, "system-out")
        output.text = _clean("\n".join(others))
    return first is not None


def _count(element: xml.Element, tests: int, failures: int) -> None:
    for name, number in (("tests", tests), ("failures", failures), ("errors", 0), ("skipped", 0)):
        element.set(name, str(number))


def _clean(text: str) -> str:
    """Remove characters that XML 1.0 does not allow, and control characters of terminals."""
    return printable(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text))
