"""Code actions: fixes of findings, and suppressions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kcdsl.check.fixes import fix
from kcdsl.diagnostics.model import Diagnostic, Edit, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.format import edits, format_text
from kcdsl.lsp.text.documents import LARGE, Snapshot
from kcdsl.lsp.text.nodes import fields_at
from kcdsl.source.yaml_nodes import Node, Scalar

QUICK_FIX = "quickfix"
FIX_ALL = "source.fixAll.kcdsl"
EXPLAIN = "kcdsl.explain"
_IGNORED = re.compile(r"^([ \t]*#\s*kcdsl:\s*ignore\[)([^\]\n]*)(\])")


@dataclass(frozen=True, slots=True)
class Action:
    """A code action: edits of the document, or a command with a code."""

    title: str
    kind: str
    edits: tuple[Edit, ...] = ()
    findings: tuple[Diagnostic, ...] = ()
    preferred: bool = False
    explains: str | None = None


def actions(snapshot: Snapshot, span: Span, only: Iterable[str] | None = None) -> list[Action]:
    """Return the code actions for a range; `only` lists the requested kinds."""
    wanted = None if only is None else tuple(only)
    found: list[Action] = []
    near = [d for d in snapshot.findings if d.span is not None and d.span.touches(span)]
    if _asked(QUICK_FIX, wanted):
        for finding in near:
            found += _fixes(finding)
        root = snapshot.near(span).analysis.root
        found += [action for d in near for action in _suppress(snapshot.source, root, d)]
        found += _explain(near)
    named = wanted is not None or len(snapshot.source.text) <= LARGE
    if named and _asked(FIX_ALL, wanted) and any(d.fix and d.fix.safe for d in snapshot.findings):
        mended = fix_all(snapshot)
        if mended:
            found.append(Action("fix everything that is safe to fix", FIX_ALL, mended))
    return found


def _asked(kind: str, only: tuple[str, ...] | None) -> bool:
    if only is None:
        return True
    return any(kind == name or kind.startswith(f"{name}.") or not name for name in only)


# --- findings ------------------------------------------------------------------------------------


def _fixes(finding: Diagnostic) -> list[Action]:
    if finding.fix is None:
        return []
    fix = finding.fix
    title = fix.title if fix.safe else f"{fix.title} (a guess)"
    return [Action(title, QUICK_FIX, fix.edits, (finding,), fix.safe)]


def fix_all(snapshot: Snapshot) -> tuple[Edit, ...]:
    """Return the edits that `kcdsl lint --fix` would make."""
    text = snapshot.source.text
    return edits(text, fix(snapshot.source, snapshot.document.folder).source.text)


def _suppress(source: SourceFile, root: Node | None, finding: Diagnostic) -> list[Action]:
    """Return the action that writes an `ignore` comment above a finding."""
    if finding.span is None or finding.severity is Severity.ERROR:
        return []
    code, number = finding.code.id, source.position(finding.span.start).line
    start = source.line_start(number)
    if any(
        f.value.span.start < start < f.value.span.end
        for f in fields_at(root, start)
        if isinstance(f.value, Scalar)
    ):
        return []  # a text of several lines cannot contain comments
    if number > 1:
        above = _IGNORED.match(source.line(number - 1))
        if above is not None:
            at = source.line_start(number - 1) + above.end(2)
            edit = Edit(Span(at, at), f", {code}" if above[2].strip() else code)
            return [Action(f"suppress {code} here", QUICK_FIX, (edit,), (finding,))]
    line = source.line(number)
    indent = line[: len(line) - len(line.lstrip())]
    ending = "\r\n" if source.text[start : start + len(line) + 2].endswith("\r\n") else "\n"
    edit = Edit(Span(start, start), f"{indent}# kcdsl: ignore[{code}] {ending}")
    return [Action(f"suppress {code} with a reason", QUICK_FIX, (edit,), (finding,))]


def _explain(findings: list[Diagnostic]) -> list[Action]:
    codes = {d.code.id: d for d in findings}
    return [
        Action(f"explain {name}: {d.code.title}", QUICK_FIX, (), (d,), explains=name)
        for name, d in codes.items()
    ]


# --- formatting -----------------------------------------------------------------------------------


def formatting(source: SourceFile) -> tuple[Edit, ...]:
    """Return the edits that format a document; none where it is not YAML."""
    text = format_text(source, Sink())
    return () if text is None or text == source.text else edits(source.text, text)
