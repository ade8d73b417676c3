"""Comments that accept a finding: `# kcdsl: ignore[KC507] reason`, on its line or the one above.

Warnings and notes may be accepted, with a reason; errors may not, because they prevent compilation.
A comment that accepts nothing is itself a finding, so that obsolete comments are removed, except
for findings about missing files, which depend on the machine.
A comment about a line covers every line of the texts that begin there, since a text in block style
cannot contain comments.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kcdsl.diagnostics.codes import (
    ALWAYS_HOLDS,
    BAD_SUPPRESSION,
    CONFLICTING_LEVELS,
    CONTRADICTION,
    DATA_ABSENT,
    DEAD_PART,
    EMPTY_SLICE,
    EQUAL_SLICES,
    NEVER_HOLDS,
    REDUNDANT_CLAUSE,
    REFUSED_SUPPRESSION,
    SOLVER_UNDECIDED,
    SUPPRESSED_ERROR,
    TOO_LARGE,
    UNUSED_SLICE,
    UNUSED_SUPPRESSION,
    Code,
    find,
)
from kcdsl.diagnostics.model import Diagnostic, Edit, Fix, Severity, Sink, Suppressed
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.comments import find_comments
from kcdsl.source.yaml_nodes import Node, scalars

_MOST = 500
"""The largest number of suppressions in a document."""
_HELP = "write `# kcdsl: ignore[KC507] why it is accepted`"
_MEANT = re.compile(r"(?i)#\s*kcdsl\s*:\s*(?:ignore|disable|allow|suppress|noqa)\b")
_COMMENT = re.compile(r"#\s*kcdsl: ignore(?:\[([^\]]*)\])?[ \t]*(.*)")
_HEADER = re.compile(r"[|>][-+0-9]*[ \t]+(#[^\r\n]*)")
_OF_SOLVER = frozenset(
    code.id
    for code in (
        ALWAYS_HOLDS,
        SOLVER_UNDECIDED,
        REDUNDANT_CLAUSE,
        CONFLICTING_LEVELS,
        UNUSED_SLICE,
        EQUAL_SLICES,
        DEAD_PART,
    )
)
"""Codes that only `kcdsl compile --consistency` reports; other commands ignore them."""
_ERRORS = frozenset(code.id for code in (CONTRADICTION, NEVER_HOLDS, EMPTY_SLICE))
"""Solver codes that are errors, which cannot be accepted."""


@dataclass(frozen=True, slots=True)
class Suppression:
    """One code that a comment accepts: the covered lines (from 1), the reason, the span of the
    code, and the comment."""

    code: str
    lines: range
    reason: str
    span: Span
    comment: Span


def accept(
    source: SourceFile,
    root: Node | None,
    sink: Sink,
    folder: Path | None = None,
    *,
    solver: bool = False,
) -> tuple[Suppressed, ...]:
    """Remove accepted findings from a sink and return them; report useless comments.

    If the configuration of `folder` forbids accepted findings, they stay, and the comments are
    errors; comments about solver findings are then always errors, because only a solver could tell
    whether they accept any. With `solver`, the findings are those of a solver, and only comments
    about such findings are considered; without it, only the other comments.
    """
    if root is None:
        return ()
    refused = _refused(folder)
    reports = Sink()
    written = read(source, root, reports)
    accepted: list[Suppressed] = []
    used: set[Suppression] = set()
    kept: list[Diagnostic] = []
    codes = Counter(item.comment for item in written)
    for diagnostic in sink:
        match = _match(source, diagnostic, written)
        if match is not None:
            used.add(match)
        if match is None or refused is not None:
            kept.append(diagnostic)
        else:
            line = source.position(match.comment.start).line
            accepted.append(Suppressed(diagnostic, match.reason, line))
    sink.found[:] = kept
    if not solver:
        for report in reports:
            sink.add(report)
    for item in written:
        if refused is not None and (item in used or item.code in _OF_SOLVER):
            sink.add(_forbidden(source, item, refused))
        elif (
            item not in used and item.code != DATA_ABSENT.id and (item.code in _OF_SOLVER) == solver
        ):
            among = codes[item.comment] > 1
            sink.add(_useless(source, item, among, kept))
    return tuple(accepted)


def unasked(source: SourceFile, root: Node | None) -> tuple[Suppressed, ...]:
    """Return the solver findings that the comments of a document accept: they count as accepted
    although no solver was run."""
    if root is None:
        return ()
    return tuple(
        Suppressed(
            Diagnostic(code, "what a solver finds here", source, item.span, severity=Severity.NOTE),
            item.reason,
            source.position(item.comment.start).line,
        )
        for item in read(source, root, Sink())
        if item.code in _OF_SOLVER and (code := find(item.code)) is not None
    )


def _refused(folder: Path | None) -> str | None:
    """Return where the configuration forbids accepted findings; None where it does not."""
    if folder is None:
        return None
    from kcdsl.source.config import read_config

    config = read_config(folder, Sink())
    return str(config.origin("refuse-suppressions")) if config.refuse_suppressions else None


def _forbidden(source: SourceFile, item: Suppression, where: str) -> Diagnostic:
    return Diagnostic(
        REFUSED_SUPPRESSION,
        f"{item.code} is accepted here, and that is refused",
        source,
        item.span,
        notes=(f"`refuse-suppressions` is set by {where}",),
        help="correct the finding, and remove the comment",
    )


def read(source: SourceFile, root: Node, sink: Sink) -> tuple[Suppression, ...]:
    """Return the suppressions of a document; those without valid codes or a reason are reported and
    left out."""
    found: list[Suppression] = []
    last, following = _last_lines(source, root), _next_lines(source)
    for comment, alone in _comments(source, root):
        text = source.text[comment.start : comment.end]
        if not _MEANT.match(text):
            continue
        match = _COMMENT.fullmatch(text)
        codes = list(re.finditer(r"[^\s,]+", match[1] or "")) if match is not None else []
        problem = _problem(match, codes)
        if problem is not None or match is None:
            sink.add(_bad(source, problem or "", comment))
            continue
        line = source.position(comment.start).line
        first = following[line] if alone else line
        lines = range(first, last.get(first, first) + 1)
        for code in codes:
            start = comment.start + match.start(1) + code.start()
            place = Span(start, start + len(code[0]))
            known = find(code[0])
            if known is None:
                sink.add(_bad(source, f"there is no code {code[0]}", place))
            elif len(found) == _MOST:
                message = f"there are more than {_MOST} comments that accept findings"
                sink.add(
                    Diagnostic(
                        TOO_LARGE,
                        message,
                        source,
                        place,
                        help="correct the findings, or leave their codes out by "
                        "`ignore` of the configuration",
                    )
                )
                return tuple(found)
            else:
                found.append(Suppression(known.id, lines, match[2].strip(), place, comment))
    return tuple(found)


def _comments(source: SourceFile, root: Node) -> Iterator[tuple[Span, bool]]:
    """Yield the comments of a document, including those after a block scalar indicator, and whether
    each is alone on its line."""
    for comment in find_comments(source, root):
        yield Span(comment.start, comment.start + len(comment.text)), comment.alone
    for scalar in scalars(root):
        header = _HEADER.match(source.text, scalar.span.start) if scalar.style in "|>" else None
        if header is not None:
            yield Span(header.start(1), header.start(1) + len(header[1].rstrip())), False


def _problem(match: re.Match[str] | None, codes: list[re.Match[str]]) -> str | None:
    if match is None:
        return "the comment has another form than comments that accept findings"
    if not codes:
        return "the comment does not say which code it accepts"
    return None if match[2].strip() else "the comment gives no reason"


def _bad(source: SourceFile, problem: str, place: Span) -> Diagnostic:
    return Diagnostic(
        BAD_SUPPRESSION, problem, source, place, help=_HELP, severity=Severity.WARNING
    )


def _next_lines(source: SourceFile) -> list[int]:
    """Return for each line (from 1) the next line that is neither empty nor a comment, or else the
    line itself."""
    found, after = list(range(source.line_count + 1)), 0
    for number in range(source.line_count, 0, -1):
        found[number] = after or number
        text = source.line(number).strip()
        if text and not text.startswith("#"):
            after = number
    return found


def _last_lines(source: SourceFile, root: Node) -> dict[int, int]:
    """Return, by first line, the last line of the texts that begin there."""
    found: dict[int, int] = {}
    for scalar in scalars(root):
        first = source.position(scalar.span.start).line
        end = source.position(max(scalar.span.start, scalar.span.end - 1)).line
        found[first] = max(end, found.get(first, end))
    return found


def _match(
    source: SourceFile, diagnostic: Diagnostic, written: tuple[Suppression, ...]
) -> Suppression | None:
    if diagnostic.severity is Severity.ERROR:
        return None
    fitting = (s for s in written if _speaks_of(source, s, diagnostic))
    return next(fitting, None)


def _speaks_of(source: SourceFile, item: Suppression, diagnostic: Diagnostic) -> bool:
    own = diagnostic.source is source or diagnostic.source == source
    if not own or diagnostic.span is None or diagnostic.code.id != item.code:
        return False
    return source.position(diagnostic.span.start).line in item.lines


def _useless(
    source: SourceFile,
    item: Suppression,
    among: bool,
    findings: list[Diagnostic],
) -> Diagnostic:
    error = item.code in _ERRORS or any(
        _speaks_of(source, item, d) for d in findings if d.severity is Severity.ERROR
    )
    code: Code = SUPPRESSED_ERROR if error else UNUSED_SUPPRESSION
    plain = Diagnostic(code, "", source, item.span, severity=Severity.WARNING)
    if error:
        here = "" if item.code in _ERRORS else " here"
        message = f"{item.code} is an error{here}, and errors cannot be accepted"
        return replace(plain, message=message, help="correct the finding")
    span, what = _removal(source, item, among)
    return replace(
        plain,
        message=f"nothing here is reported as {item.code}",
        help=f"remove the {what}",
        fix=Fix(f"remove the {what}", (Edit(span, ""),)),
    )


def _removal(source: SourceFile, item: Suppression, among: bool) -> tuple[Span, str]:
    """Return the range to remove and its description: a code with its comma, or a comment with its
    line or the preceding white space."""
    text = source.text
    if among:
        start, end = item.span.start, item.span.end
        after = re.compile(r"\s*,\s*").match(text, end)
        if after is not None:
            return Span(start, after.end()), "code"
        while start > 0 and (text[start - 1] == "," or text[start - 1].isspace()):
            start -= 1
        return Span(start, end), "code"
    start, end = item.comment.start, item.comment.end
    while start > 0 and text[start - 1] in " \t":
        start -= 1
    if start == 0 or text[start - 1] == "\n":
        line_end = text.find("\n", end)
        return Span(start, len(text) if line_end < 0 else line_end + 1), "comment"
    return Span(start, end), "comment"


def spare_comments(source: SourceFile, root: Node | None, sink: Sink) -> None:
    """Mark fixes as unsafe that remove a comment other than the one of their finding."""
    doubtful = [i for i, found in enumerate(sink.found) if _fix_removes(source, found, "#")]
    if root is None or not doubtful:
        return
    comments = find_comments(source, root)
    for index in doubtful:
        found = sink.found[index]
        lost = any(_fix_removes(source, found, comment.text, comment.start) for comment in comments)
        if lost and found.fix is not None:
            sink.found[index] = replace(found, fix=found.fix._replace(safe=False))


def _fix_removes(source: SourceFile, found: Diagnostic, text: str, at: int | None = None) -> bool:
    """Return whether the safe fix of a finding removes a text, at an offset or anywhere."""
    if found.fix is None or not found.fix.safe or found.code == UNUSED_SUPPRESSION:
        return False
    if found.source is None or found.source.name != source.name:
        return False
    return any(
        text not in edit.text
        and (
            text in source.text[edit.span.start : edit.span.end]
            if at is None
            else edit.span.start <= at and at + len(text) <= edit.span.end
        )
        for edit in found.fix.edits
    )
