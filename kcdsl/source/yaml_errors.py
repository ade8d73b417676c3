"""Syntax errors of the YAML parser as diagnostics, with advice and fixes."""

from __future__ import annotations

import re
from collections.abc import Callable

import yaml

from kcdsl.diagnostics.codes import NOT_YAML
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Label
from kcdsl.diagnostics.spans import SourceFile, Span

NO_CHARACTER = "write one escape for the whole character, as in `\\U0001f600`"
_LEAD = re.compile(r"[ \t]*")
_LINE = re.compile(r"^([ \t]*+)([^\r\n])", re.MULTILINE)


def syntax_error(
    source: SourceFile, error: yaml.MarkedYAMLError, place: Callable[[int], int]
) -> Diagnostic:
    """Return the diagnostic of a syntax error; `place` turns an index of the parser's text into an
    offset of the file."""
    mark = error.problem_mark or error.context_mark
    at = place(mark.index) if mark is not None else 0
    labels: tuple[Label, ...] = ()
    if error.context_mark is not None and error.problem_mark is not None:
        begin = place(error.context_mark.index)
        if begin != at:
            labels = (Label(Span(begin, begin + 1), error.context or "started here"),)
    problem = error.problem or "unreadable"
    return Diagnostic(
        NOT_YAML,
        f"not YAML: {problem}",
        source,
        Span(at, min(at + 1, len(source.text))),
        labels=labels,
        help=_advice(problem, source.text[at : at + 1]),
        fix=_without_tabs(source.text, at),
    )


def _without_tabs(text: str, at: int) -> Fix | None:
    """Return the fix that indents by spaces, where a tab is the trouble: two for each tab in all
    sections that are indented by tabs alone; in another section the line, as the one above, and two
    more behind a key without a value."""
    start = text.rfind("\n", 0, at) + 1
    lead = _LEAD.match(text, start)
    assert lead is not None
    if text[at : at + 1] != "\t" or at >= lead.end():
        return None
    leads = _by_tabs(text)
    if start in leads:
        edits = (
            Edit(Span(begin, end), text[begin:end].replace("\t", "  "))
            for begin, end in leads.items()
        )
        return Fix("indent with spaces", tuple(edits), safe=False)
    above = next((line for line in reversed(text[:start].split("\n")) if line.strip()), "")
    indent = len(above) - len(above.lstrip(" "))
    indent += 2 if above.rstrip().endswith(":") else 0
    return Fix("indent with spaces", (Edit(Span(start, lead.end()), " " * indent),), safe=False)


def _by_tabs(text: str) -> dict[int, int]:
    """Return the range of each indentation in the sections that are indented by tabs alone."""
    sections: list[list[re.Match[str]]] = [[]]
    for line in _LINE.finditer(text):
        if line[1]:
            sections[-1].append(line)
        elif line[2] != "#":
            sections.append([])
    return {
        line.start(1): line.end(1)
        for lines in sections
        if all(line[1][0] == "\t" or line[2] == "#" for line in lines)
        for line in lines
        if "\t" in line[1]
    }


def _advice(problem: str, char: str) -> str | None:
    if char == "\t":
        return "indent with spaces, not tabs"
    if "mapping values are not allowed" in problem:
        return "put the text in quotation marks: an unquoted text may not hold `: `"
    if char in {"%", "@", "`"}:
        return f"put the text in quotation marks: it may not begin with `{char}`"
    if "Unicode character escape" in problem:
        return NO_CHARACTER
    return None
