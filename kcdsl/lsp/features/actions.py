"""Code actions: fixes of findings, suppressions, and meaning-preserving rewrites."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from kcdsl.check.expressions.measurements import in_words
from kcdsl.check.fixing import edited, fix
from kcdsl.diagnostics.model import Diagnostic, Edit, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.format import edits, format_text
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import digest
from kcdsl.lsp.features.knowledge import KnownClause, clause_at
from kcdsl.lsp.text.documents import LARGE, Snapshot
from kcdsl.lsp.text.nodes import fields_at, language
from kcdsl.lsp.text.positions import NOWHERE
from kcdsl.source.removal import remove_parts
from kcdsl.source.yaml_nodes import Node, Scalar

QUICK_FIX = "quickfix"
REWRITE = "refactor.rewrite"
FIX_ALL = "source.fixAll.kcdsl"
EXPLAIN = "kcdsl.explain"
_IGNORED = re.compile(r"^([ \t]*#\s*kcdsl:\s*ignore\[)([^\]\n]*)(\])")
_RECORD = {"metric", "threshold", "op", "delta", "over"}


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
    if _asked(REWRITE, wanted):
        view, way = snapshot.near(span).settled
        found += _rewritings(view, span) if way is NOWHERE else []
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


def _overlap(one: Span, other: Span) -> bool:
    """Return whether two edits conflict: on a character, or on the offset of an insertion."""
    if one.start == one.end or other.start == other.end:
        return one.touches(other)
    return one.start < other.end and other.start < one.end


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


# --- rewritings ----------------------------------------------------------------------------------


def _rewritings(snapshot: Snapshot, span: Span) -> list[Action]:
    analysis = snapshot.analysis
    found = []
    item = clause_at(analysis, span.start)
    if item is not None and item.raw.node("metric") is not None:
        rewritten = _as_expression(snapshot, item)
        if rewritten:
            found.append(Action("write as an expression", REWRITE, rewritten))
    holding = fields_at(analysis.root, span.start)
    scalar = holding[-1].value if holding else None
    if (
        isinstance(scalar, Scalar)
        and scalar.style == "plain"
        and language(holding[-1].path, scalar)
    ):
        edit = Edit(scalar.span, _in_quotes(scalar.text))
        if _means_the_same(snapshot, (edit,)):
            found.append(Action("put the expression in quotation marks", REWRITE, (edit,)))
    return found


def _in_quotes(text: str) -> str:
    if '"' not in text and "\\" not in text:
        return f'"{text}"'
    return "'" + text.replace("'", "''") + "'"


def _as_expression(snapshot: Snapshot, item: KnownClause) -> tuple[Edit, ...]:
    """Return the edits that convert a record to an expression; none where that is impossible."""
    raw, clause, analysis = item.raw, item.clause, snapshot.analysis
    metric, threshold = raw.scalar("metric"), raw.scalar("threshold")
    if metric is None or threshold is None or clause is None:
        return ()
    metrics = analysis.scope.metrics
    record = metrics.find_record(metric.text)
    compare = clause.require
    if record is None or not isinstance(compare, ir.Compare):
        return ()
    op = raw.scalar("op")
    sign = op.text if op is not None else compare.op
    bare = isinstance(threshold.value, int | Fraction) and not isinstance(threshold.value, bool)
    limit = f"{threshold.text} {record.unit}" if bare and record.unit else threshold.text
    node = raw.body
    if node is None:
        return ()
    entries = node.entries
    first = next(e for e in entries if e.key.text == "metric")
    lines = [f"require: {in_words(metric.text, metrics)} {sign} {limit}"]
    if clause.budget is not None:
        share = f"{float(clause.budget.rate * 100):g}%"
        lines.append(f"budget: {share} of {clause.budget.unit}")
    flow = snapshot.source.text[node.span.start : node.span.start + 1] == "{"
    indent = " " * (snapshot.source.position(first.key.span.start).column - 1)
    joined = (", " if flow else f"\n{indent}").join(lines)
    gone = {i for i, e in enumerate(entries) if e.key.text in _RECORD and e is not first}
    changes = (
        Edit(first.key.span.hull(first.value.span), joined),
        *remove_parts(snapshot.source, node, gone),
    )
    return changes if _means_the_same(snapshot, changes) else ()


def _means_the_same(snapshot: Snapshot, changes: tuple[Edit, ...]) -> bool:
    """Return whether edits keep the meaning of a document, if it has one."""
    old = snapshot.analysis
    ordered = tuple(sorted(changes, key=lambda edit: edit.span))
    if any(_overlap(a.span, b.span) for a, b in pairwise(ordered)):
        return False
    source = SourceFile(old.source.name, edited(old.source.text, list(ordered)))
    new = snapshot.read(source, Sink())
    if old.program is not None:
        return new.program is not None and digest(new.program) == digest(old.program)
    return new.clauses == old.clauses


# --- formatting -----------------------------------------------------------------------------------


def formatting(source: SourceFile) -> tuple[Edit, ...]:
    """Return the edits that format a document; none where it is not YAML."""
    text = format_text(source, Sink())
    return () if text is None or text == source.text else edits(source.text, text)
