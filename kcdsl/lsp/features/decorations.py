"""Semantic tokens, inlay hints and code lenses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from lsprotocol import types as lsp
from lsprotocol.types import PositionEncodingKind as Encoding

from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.names import PERCENTILE, STATISTICS, Scope
from kcdsl.check.expressions.sorts import Real, sorts
from kcdsl.check.layout import layout
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.features.knowledge import (
    KnownClause,
    is_formal,
    known_clauses,
    mark,
    policy_action,
    scope_in,
    verdicts_of,
)
from kcdsl.lsp.text.documents import LARGE, Snapshot
from kcdsl.lsp.text.lexemes import Lexeme, Role
from kcdsl.lsp.text.nodes import Field, fields, inner_span, written
from kcdsl.lsp.text.positions import Lines, Ranges, units
from kcdsl.metrics import BUILT_IN, Registry
from kcdsl.source.yaml_nodes import Scalar, parse_yaml
from kcdsl.syntax.parser import parse_expression

MODIFIERS = ("declaration", "defaultLibrary")
"""Token modifiers in the order of the legend."""

_TYPES = {
    Role.FUNCTION: "function",
    Role.METRIC: "variable",
    Role.VARIABLE: "parameter",
    Role.FIELD: "property",
    Role.NUMBER: "number",
    Role.TEXT: "string",
    Role.OPERATOR: "operator",
    Role.KEYWORD: "keyword",
    Role.TABLE: "type",
    Role.SLICE: "namespace",
    Role.UNIT: "enumMember",
    Role.BLOCK: "class",
}
TYPES = tuple(_TYPES.values())
"""Token types in the order of the legend."""


@dataclass(frozen=True, slots=True)
class SemanticToken:
    """A range with its type and modifiers."""

    span: Span
    type: str
    modifiers: tuple[str, ...] = ()


def tokens(snapshot: Snapshot) -> list[SemanticToken]:
    """Return the tokens of a document in order.

    The tokens of a clause depend only on its text and are cached by it, so that edits of long
    documents are cheap. Clauses beyond the first `_MOST` have none.
    """
    text = snapshot.source.text
    found = layout(text) if len(text) > LARGE else None
    if found is None:
        return _tokens(snapshot.analysis)
    begin, end = found.clauses[0].start, found.clauses[-1].end
    around = snapshot.near(Span(begin, begin), reduce=True).settled[0].analysis
    metrics = around.scope.metrics
    own = frozenset(metrics.own)
    result = [t for t in _tokens(around) if not begin <= t.span.start < end]
    for clause in found.clauses[:_MOST]:
        for token in _of_clause(text[clause.start : clause.end], own):
            start = token.span.start + clause.start
            span = Span(start, start + token.span.end - token.span.start)
            result.append(replace(token, span=span))
    return sorted(result, key=lambda token: token.span)


_HEAD = "clauses:\n"
_MOST = 5_000
"""The largest number of clauses with tokens; contracts with more exceed the limit on nodes."""


@lru_cache(maxsize=8192)
def _of_clause(text: str, metrics: frozenset[str]) -> tuple[SemanticToken, ...]:
    """Return the tokens of one clause, relative to its beginning."""
    source = SourceFile("", _HEAD + text)
    root = parse_yaml(source, Sink())
    known = Scope({}, {}, metrics=Registry(dict.fromkeys(metrics, next(BUILT_IN.definitions()))))
    found = _tokens(Analysis(source, root, scope=known))
    return tuple(
        replace(t, span=Span(t.span.start - len(_HEAD), t.span.end - len(_HEAD))) for t in found
    )


def _tokens(analysis: Analysis) -> list[SemanticToken]:
    found: list[SemanticToken] = []
    for field in fields(analysis.root):
        found += _names(analysis.source, field)
        expression = written(analysis, field)
        for word in expression.words if expression is not None else ():
            kind = _TYPES.get(word.lexeme.role)
            if kind is not None and word.span.end > word.span.start:
                found.append(SemanticToken(word.span, kind, _modifiers(word.lexeme)))
    return sorted(found, key=lambda token: token.span)


def _names(source: SourceFile, field: Field) -> Iterator[SemanticToken]:
    """Yield the names of slices and tables in plain YAML."""
    kind = {"slices": "namespace", "tables": "type"}.get(str(field.path[0]))
    if kind is not None and len(field.path) == 2 and field.key is not None:
        yield SemanticToken(inner_span(source, field.key), kind, ("declaration",))
    elif (
        field.path[0] == "clauses"
        and field.name == "slices"
        and isinstance(field.value, Scalar)
        and field.value.text
    ):
        yield SemanticToken(inner_span(source, field.value), "namespace")


def _modifiers(word: Lexeme) -> tuple[str, ...]:
    if word.role is Role.VARIABLE:
        return ("declaration",) if word.binder == word.start else ()
    return ("defaultLibrary",) if word.role is Role.FUNCTION else ()


def encode(found: list[SemanticToken], lines: Lines, encoding: Encoding) -> list[int]:
    """Return tokens in protocol form: five numbers each, relative to the preceding token.

    A token on several lines, such as a folded text, is split by line.
    """
    data: list[int] = []
    last_line = last_character = 0
    for token in found:
        for line, character, length in _pieces(token, lines, encoding):
            same = line == last_line
            data += [line - last_line, character - last_character if same else character, length]
            bits = sum(1 << MODIFIERS.index(name) for name in token.modifiers)
            data += [TYPES.index(token.type), bits]
            last_line, last_character = line, character
    return data


def _pieces(
    token: SemanticToken, lines: Lines, encoding: Encoding
) -> Iterator[tuple[int, int, int]]:
    first, last = lines.number(token.span.start), lines.number(token.span.end)
    for number in range(first, last + 1):
        whole = lines.span(number)
        start, end = max(token.span.start, whole.start), min(token.span.end, whole.end)
        if end > start:
            character = lines.place(start, encoding).character
            yield number, character, units(lines.text[start:end], encoding)


# --- inlay hints ----------------------------------------------------------------------------------


Hint = tuple[int, str, str]
"""The offset of a hint, its text, and its tooltip."""


def hints(snapshot: Snapshot, within: Span, ranges: Ranges) -> list[lsp.InlayHint]:
    """Return the hints of the clauses that overlap a range."""
    found: list[Hint] = []
    for item in known_clauses(snapshot.analysis):
        end = max([item.raw.span.end, *(e.value.span.end for e in item.raw.fields)])
        if item.raw.id.span.start <= within.end and within.start <= end:
            found += _hints_of(snapshot, item)
    return [
        lsp.InlayHint(ranges.at(offset), text, lsp.InlayHintKind.Type, tooltip=about)
        for offset, text, about in sorted(found, key=lambda hint: hint[0])
        if within.start <= offset <= within.end
    ]


def _hints_of(snapshot: Snapshot, item: KnownClause) -> Iterator[Hint]:
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
        yield end, f" → {chosen.backend or 'nobody'}", about
    statement = require or item.raw.scalar("metric")
    if clause.slices and item.raw.node("slices") is None and statement is not None:
        text = f" on {', '.join(clause.slices)}"
        yield _end(statement, snapshot), text, "the slice of a clause that lists none"
    level, action = item.raw.scalar("level"), policy_action(analysis, item)
    if level is not None and action is not None:
        about = f"the escalation policy for {clause.family} clauses of level {clause.level}"
        yield level.span.end, f" → {action}", about


def _end(scalar: Scalar, snapshot: Snapshot) -> int:
    """Return the end offset of a scalar on its line; a block scalar ends before its line break."""
    text = snapshot.source.text[scalar.span.start : scalar.span.end]
    return scalar.span.start + len(text.rstrip())


def _sorts(snapshot: Snapshot, require: Scalar) -> Iterator[Hint]:
    """Yield hints with the range and the unit of each statistic of a requirement."""
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
            yield span.end, f": {shown}", f"the sort is {sort}"


# --- code lenses ----------------------------------------------------------------------------------


def lenses(snapshot: Snapshot, ranges: Ranges) -> list[lsp.CodeLens]:
    """Return a lens for each decidable clause, with the `kcdsl` command that decides it."""
    if snapshot.analysis.program is None or snapshot.document.path is None:
        return []
    found = []
    for item in known_clauses(snapshot.analysis):
        if item.clause is None:
            continue
        name = item.raw.id.text
        formal = is_formal(item.clause)
        title = "verify this clause" if formal else "evaluate this contract"
        shown = verdicts_of(snapshot, name)
        if shown:
            worst = next((v for v, _ in shown if v.verdict != "held"), shown[0][0])
            stale = " (stale)" if any(old for _, old in shown) else ""
            title = f"{mark(worst.verdict)} {worst.verdict}{stale} · {title}"
        run = f"kcdsl.{'verify' if formal else 'evaluate'}"
        command = lsp.Command(title, run, arguments=[ranges.uri, name])
        found.append(lsp.CodeLens(ranges.of(item.raw.id.span), command))
    return found
