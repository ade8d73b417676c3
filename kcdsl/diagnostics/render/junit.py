"""Diagnostics as JUnit XML, for the test tabs of build servers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from xml.etree import ElementTree as xml

from kcdsl.diagnostics.model import Diagnostic, Severity
from kcdsl.diagnostics.render.lines import render_concise
from kcdsl.diagnostics.render.terminal import printable

if TYPE_CHECKING:
    from kcdsl.diagnostics.render import Checked, Run

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_Finding = tuple[Diagnostic, str | None]
"""A finding, with the reason for which it is accepted; None where it is not."""
_RANK = {Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}


def render_junit(diagnostics: Iterable[Diagnostic], run: Run) -> str:
    """Return a suite for each file, with a case for each clause and one, named as the file, for
    the rest of it: failed by what is at least as severe as `fail_on`, the rest as output, accepted
    findings with their reasons too.

    Files without findings are passed cases. Findings of no file make a suite of their own.
    """
    by_file: dict[str, list[_Finding]] = {file.name: [] for file in run.files}
    accepted = ((item.diagnostic, item.reason) for item in run.suppressed)
    for diagnostic, reason in (*((found, None) for found in diagnostics), *accepted):
        name = diagnostic.source.name if diagnostic.source is not None else "kcdsl"
        by_file.setdefault(name, []).append((diagnostic, reason))
    clauses = {file.name: file for file in run.files}
    root = xml.Element("testsuites", {"name": run.command})
    tests = failures = 0
    for name, found in by_file.items():
        suite = xml.SubElement(root, "testsuite", {"name": _clean(name)})
        cases = list(_cases(name, found, clauses.get(name)))
        failed = sum(_case(suite, name, case, d, run) for case, d in cases)
        _count(suite, len(cases), failed)
        tests, failures = tests + len(cases), failures + failed
    _count(root, tests, failures)
    xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(root, encoding="unicode")


def _cases(
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


def _case(suite: xml.Element, file: str, name: str, found: list[_Finding], run: Run) -> bool:
    """Add one case; say whether it failed."""
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
    """Keep characters out that XML 1.0 does not have, and those that a terminal would obey."""
    return printable(_FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text))
