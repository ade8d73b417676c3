"""Comments that accept a finding: `# kcdsl: ignore[KC507] reason`, on its line or the one above.

Warnings and notes may be accepted, with a reason; errors may not, because nothing is compiled while
there is one. A comment that accepts nothing is itself a finding, so that none outlives its cause.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kcdsl.diagnostics.codes import BAD_SUPPRESSION, UNUSED_SUPPRESSION, find
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Severity, Sink
from kcdsl.format.comments import find_comments
from kcdsl.source.text import SourceFile, Span
from kcdsl.source.yaml_nodes import Node

MARK = "kcdsl: ignore"
_COMMENT = re.compile(r"#\s*kcdsl: ignore(?:\[([^\]]*)\])?[ \t]*(.*)")


@dataclass(frozen=True, slots=True)
class Suppression:
    """One code that a comment accepts: the lines it speaks of (from 1), its reason, its place."""

    code: str
    lines: tuple[int, ...]
    reason: str
    span: Span
    comment: Span


@dataclass(frozen=True, slots=True)
class Suppressed:
    """A finding that a comment accepts, with the reason."""

    diagnostic: Diagnostic
    reason: str


def apply(source: SourceFile, root: Node | None, sink: Sink) -> tuple[Suppressed, ...]:
    """Take accepted findings out of a sink and return them; report comments that are of no use."""
    if root is None or MARK not in source.text:
        return ()
    written = read(source, root, sink)
    accepted: list[Suppressed] = []
    used: set[Suppression] = set()
    kept: list[Diagnostic] = []
    for diagnostic in sink:
        match = _match(source, diagnostic, written)
        if match is None:
            kept.append(diagnostic)
        else:
            used.add(match)
            accepted.append(Suppressed(diagnostic, match.reason))
    sink.found[:] = kept
    for item in written:
        if item not in used:
            sink.add(_unused(source, item, written, sink))
    return tuple(accepted)


def read(source: SourceFile, root: Node, sink: Sink) -> tuple[Suppression, ...]:
    """Return the suppressions of a document; those without codes, known codes or a reason are
    reported and left out."""
    found: list[Suppression] = []
    for comment in find_comments(source, root):
        match = _COMMENT.fullmatch(comment.text)
        if match is None:
            continue
        whole = Span(comment.start, comment.start + len(comment.text))
        problem = _problem(match)
        if problem is not None:
            help = "write `# kcdsl: ignore[KC507] why it is accepted`"
            sink.add(
                Diagnostic(
                    BAD_SUPPRESSION, problem, source, whole, help=help, severity=Severity.WARNING
                )
            )
            continue
        line = comment.line + 1
        lines = (_next_line(source, line),) if comment.alone else (line,)
        for word in re.finditer(r"[^\s,]+", match[1]):
            start = comment.start + match.start(1) + word.start()
            place = Span(start, start + len(word[0]))
            found.append(Suppression(word[0].upper(), lines, match[2].strip(), place, whole))
    return tuple(found)


def _problem(match: re.Match[str]) -> str | None:
    codes = re.findall(r"[^\s,]+", match[1] or "")
    if not codes:
        return "the comment does not say which code it accepts"
    unknown = [code for code in codes if find(code) is None]
    if unknown:
        return f"there is no code {unknown[0]}"
    return None if match[2].strip() else "the comment gives no reason"


def _next_line(source: SourceFile, line: int) -> int:
    """Return the next line that is neither empty nor a comment."""
    for number in range(line + 1, source.line_count + 1):
        text = source.line(number).strip()
        if text and not text.startswith("#"):
            return number
    return line


def _match(
    source: SourceFile, diagnostic: Diagnostic, written: tuple[Suppression, ...]
) -> Suppression | None:
    if diagnostic.severity is Severity.ERROR or diagnostic.span is None:
        return None
    if diagnostic.source is not source and diagnostic.source != source:
        return None
    line = source.position(diagnostic.span.start).line
    fitting = (s for s in written if s.code == diagnostic.code.id and line in s.lines)
    return next(fitting, None)


def _unused(
    source: SourceFile, item: Suppression, written: tuple[Suppression, ...], sink: Sink
) -> Diagnostic:
    line = item.lines[0]
    at_line = (d for d in sink if d.span is not None and source.position(d.span.start).line == line)
    error = any(d.code.id == item.code and d.severity is Severity.ERROR for d in at_line)
    alone = sum(other.comment == item.comment for other in written) == 1
    return Diagnostic(
        UNUSED_SUPPRESSION,
        f"{item.code} is an error here, and errors cannot be accepted"
        if error
        else f"nothing here is reported as {item.code}",
        source,
        item.span,
        help="correct what it speaks of" if error else "remove the comment",
        severity=Severity.WARNING,
        fix=Fix("remove the comment", (Edit(_removal(source, item.comment), ""),))
        if alone and not error
        else None,
    )


def _removal(source: SourceFile, comment: Span) -> Span:
    """Return what goes with a comment: its whole line, or the white space before it."""
    text = source.text
    start = comment.start
    while start > 0 and text[start - 1] in " \t":
        start -= 1
    if start == 0 or text[start - 1] == "\n":
        return Span(start, min(comment.end + 1, len(text)))
    return Span(start, comment.end)
