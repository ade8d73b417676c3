"""Inlay hints: what a contract leaves unsaid and the compiler makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kcdsl.check.expressions.names import PERCENTILE, STATISTICS
from kcdsl.check.expressions.sorts import Real, sorts
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import Span
from kcdsl.lsp.documents import Snapshot
from kcdsl.lsp.knowledge import KnownClause, known_clauses, policy_action, scope_in
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax.parser import parse_expression


@dataclass(frozen=True, slots=True)
class Hint:
    """A few words at a place; `about` explains them."""

    offset: int
    text: str
    about: str


def hints(snapshot: Snapshot, within: Span) -> list[Hint]:
    """Return the hints of the clauses that touch a range."""
    found: list[Hint] = []
    for item in known_clauses(snapshot.analysis):
        end = max([item.raw.span.end, *(e.value.span.end for e in item.raw.fields)])
        if item.raw.id.span.start <= within.end and within.start <= end:
            found += _of_clause(snapshot, item)
    kept = [hint for hint in found if within.start <= hint.offset <= within.end]
    return sorted(kept, key=lambda hint: hint.offset)


def _of_clause(snapshot: Snapshot, item: KnownClause) -> Iterator[Hint]:
    analysis, clause = snapshot.analysis, item.clause
    require = item.raw.scalar("require")
    if require is not None:
        yield from _sorts(snapshot, require)
    if clause is None:
        return
    chosen = snapshot.route(item.raw.id.text)
    if chosen is not None:
        about = f"fragment {chosen.fragment}: {chosen.reason}"
        end = item.raw.id.span.end
        end += snapshot.source.text[end : end + 1] == ":"
        yield Hint(end, f" → {chosen.backend or 'nobody'}", about)
    statement = require or item.raw.scalar("metric")
    if clause.slices and item.raw.node("slices") is None and statement is not None:
        text = f" on {', '.join(clause.slices)}"
        yield Hint(_end(statement, snapshot), text, "the slice of a clause that lists none")
    level, action = item.raw.scalar("level"), policy_action(analysis, item)
    if level is not None and action is not None:
        about = f"the escalation policy for {clause.family} clauses of level {clause.level}"
        yield Hint(level.span.end, f" → {action}", about)


def _end(scalar: Scalar, snapshot: Snapshot) -> int:
    """Return where a scalar ends on its line; a block scalar ends before its line break."""
    text = snapshot.source.text[scalar.span.start : scalar.span.end]
    return scalar.span.start + len(text.rstrip())


def _sorts(snapshot: Snapshot, require: Scalar) -> Iterator[Hint]:
    """Yield what each statistic of a requirement ranges over, and in which unit."""
    analysis = snapshot.analysis
    parsed = parse_expression(analysis.source, require, Sink())
    if parsed is None:
        return
    text = analysis.source.text
    for span, sort in sorts(parsed, scope_in(parsed, analysis.scope)):
        name = text[span.start : span.end].partition("(")[0].strip()
        if name not in STATISTICS and not PERCENTILE.fullmatch(name):
            continue
        if isinstance(sort, Real) and sort.relation:
            shown = f"{sort.unit} {sort.relation} {sort.counted}".strip()
            yield Hint(span.end, f": {shown}", f"the sort is {sort}")
