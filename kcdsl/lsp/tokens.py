"""Semantic tokens: what each word of the expressions is, for colours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.names import Scope
from kcdsl.check.layout import layout
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.documents import LARGE, Snapshot
from kcdsl.lsp.lexemes import Lexeme, Role
from kcdsl.lsp.nodes import Field, fields, inner_span
from kcdsl.lsp.positions import Encoding, Lines, units
from kcdsl.lsp.symbols import written
from kcdsl.metrics import BUILT_IN, Registry
from kcdsl.source.yaml_nodes import Scalar, parse_yaml

TYPES = (
    "function",
    "variable",
    "parameter",
    "property",
    "number",
    "string",
    "operator",
    "keyword",
    "type",
    "namespace",
    "enumMember",
    "class",
)
"""Token types in the order of the legend. A metric is a variable, a bound variable a parameter, a
field a property, a slice a namespace, a table a type, a block a class, a unit an enumMember."""

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


@dataclass(frozen=True, slots=True)
class Token:
    """A range with its type and modifiers."""

    span: Span
    type: str
    modifiers: tuple[str, ...] = ()


def tokens(snapshot: Snapshot, within: Span | None = None) -> list[Token]:
    """Return the tokens of a document, or of those expressions that touch a range, in order.

    Those of a clause follow from its text alone and are kept by it, so that an edit of a long
    document costs little. Clauses beyond the first `_MOST` have none.
    """
    text = snapshot.source.text
    found = layout(text) if len(text) > LARGE and within is None else None
    if found is None:
        return _tokens(snapshot.analysis, within)
    begin, end = found.clauses[0].start, found.clauses[-1].end
    around = snapshot.near(Span(begin, begin), reduce=True).settled[0].analysis
    metrics = around.scope.metrics
    own = frozenset(metrics.own)
    result = [t for t in _tokens(around, None) if not begin <= t.span.start < end]
    for clause in found.clauses[:_MOST]:
        for token in _of_clause(text[clause.start : clause.end], own):
            start = token.span.start + clause.start
            span = Span(start, start + token.span.end - token.span.start)
            result.append(replace(token, span=span))
    return sorted(result, key=lambda token: token.span)


_HEAD = "clauses:\n"
_MOST = 5_000
"""Clauses that are read one by one; a contract with more has too many keys and values anyway."""


@lru_cache(maxsize=8192)
def _of_clause(text: str, metrics: frozenset[str]) -> tuple[Token, ...]:
    """Return the tokens of one clause, relative to its beginning."""
    source = SourceFile("", _HEAD + text)
    root = parse_yaml(source, Sink())
    known = Scope({}, {}, metrics=Registry(dict.fromkeys(metrics, next(BUILT_IN.definitions()))))
    found = _tokens(Analysis(source, root, scope=known), None)
    return tuple(
        replace(t, span=Span(t.span.start - len(_HEAD), t.span.end - len(_HEAD))) for t in found
    )


def _tokens(analysis: Analysis, within: Span | None) -> list[Token]:
    found: list[Token] = []
    for field in fields(analysis.root):
        if within is not None and not _touches(field.span, within):
            continue
        found += _names(analysis.source, field)
        expression = written(analysis, field)
        for word in expression.words if expression is not None else ():
            kind = _TYPES.get(word.lexeme.role)
            if kind is not None and word.span.end > word.span.start:
                found.append(Token(word.span, kind, _modifiers(word.lexeme)))
    return sorted(found, key=lambda token: token.span)


def _names(source: SourceFile, field: Field) -> Iterator[Token]:
    """Yield the names of slices and tables that stand in plain YAML."""
    kind = {"slices": "namespace", "tables": "type"}.get(str(field.path[0]))
    if kind is not None and len(field.path) == 2 and field.key is not None:
        yield Token(inner_span(source, field.key), kind, ("declaration",))
    elif (
        field.path[0] == "clauses"
        and field.name == "slices"
        and isinstance(field.value, Scalar)
        and field.value.text
    ):
        yield Token(inner_span(source, field.value), "namespace")


def _touches(span: Span, other: Span) -> bool:
    return span.start <= other.end and other.start <= span.end


def _modifiers(word: Lexeme) -> tuple[str, ...]:
    if word.role is Role.VARIABLE:
        return ("declaration",) if word.binder == word.start else ()
    return ("defaultLibrary",) if word.role is Role.FUNCTION else ()


def encode(found: list[Token], lines: Lines, encoding: Encoding) -> list[int]:
    """Return tokens as the protocol wants them: five numbers each, relative to the one before.

    A token of several lines (a word cannot be, a folded text may) becomes one for each line.
    """
    data: list[int] = []
    last_line = last_character = 0
    for token in found:
        for line, character, length in _pieces(token, lines, encoding):
            same = line == last_line
            data += [line - last_line, character - last_character if same else character, length]
            data += [TYPES.index(token.type), _bits(token.modifiers)]
            last_line, last_character = line, character
    return data


def _bits(modifiers: tuple[str, ...]) -> int:
    return sum(1 << MODIFIERS.index(name) for name in modifiers)


def _pieces(token: Token, lines: Lines, encoding: Encoding) -> Iterator[tuple[int, int, int]]:
    first, last = lines.number(token.span.start), lines.number(token.span.end)
    for number in range(first, last + 1):
        whole = lines.span(number)
        start, end = max(token.span.start, whole.start), min(token.span.end, whole.end)
        if end > start:
            character = lines.place(start, encoding).character
            yield number, character, units(lines.text[start:end], encoding)
