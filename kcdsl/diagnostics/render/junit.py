"""Diagnostics as JUnit XML, for the test tabs of build servers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from xml.etree import ElementTree as xml

from kcdsl.diagnostics.model import Diagnostic, Severity

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(diagnostics: Iterable[Diagnostic], files: Sequence[str] = ()) -> str:
    """Return one suite with a case for each file: failed by its errors, the rest as output.

    `files` are those that were checked, so that one without findings is a passed case. Findings of
    no file make a case of their own, named `kcdsl`.
    """
    by_file: dict[str, list[Diagnostic]] = {name: [] for name in files}
    for diagnostic in diagnostics:
        name = diagnostic.source.name if diagnostic.source is not None else "kcdsl"
        by_file.setdefault(name, []).append(diagnostic)
    failed = sum(any(_is_error(d) for d in found) for found in by_file.values())
    counts = {"tests": str(len(by_file)), "failures": str(failed), "errors": "0"}
    root = xml.Element("testsuites", {"name": "kcdsl", **counts})
    suite = xml.SubElement(root, "testsuite", {"name": "kcdsl lint", **counts, "skipped": "0"})
    for name, found in by_file.items():
        case = {"classname": "kcdsl.lint", "name": _clean(name), "file": _clean(name)}
        element = xml.SubElement(suite, "testcase", case)
        errors = [d for d in found if _is_error(d)]
        if errors:
            more = f" and {len(errors) - 1} more" if len(errors) > 1 else ""
            message = _clean(f"{errors[0].code}: {errors[0].message}{more}")
            failure = xml.SubElement(
                element, "failure", {"message": message, "type": str(errors[0].code)}
            )
            failure.text = _clean("\n".join(_line(d) for d in errors))
        others = [d for d in found if not _is_error(d)]
        if others:
            output = xml.SubElement(element, "system-out")
            output.text = _clean("\n".join(_line(d) for d in others))
    xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(root, encoding="unicode")


def _is_error(diagnostic: Diagnostic) -> bool:
    return diagnostic.severity is Severity.ERROR


def _line(diagnostic: Diagnostic) -> str:
    from kcdsl.diagnostics.render.concise import render_concise

    return render_concise([diagnostic])


def _clean(text: str) -> str:
    """Keep characters out that XML 1.0 does not have."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
