"""The outline of a document: symbols, folding ranges and selection ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from dataclasses import fields as dataclass_fields
from enum import StrEnum

from kcdsl.check.compile import Analysis
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.knowledge import quoted
from kcdsl.lsp.nodes import Field, fields, fields_at, inner_span, language
from kcdsl.lsp.positions import Lines
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, Sequence
from kcdsl.syntax.parser import parse_expression

_COMMENT = re.compile(r"[ \t]*#")
_SECTIONS = {"slices", "tables", "clauses", "kernels", "imports", "constants"}


class SymbolKind(StrEnum):
    """What a symbol is, for the sign beside it."""

    SECTION = "section"
    SLICE = "slice"
    TABLE = "table"
    CLAUSE = "clause"
    KERNEL = "kernel"
    IMPORT = "import"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Symbol:
    """An entry of the outline: `span` covers all of it, `name_span` what is selected."""

    name: str
    kind: SymbolKind
    detail: str
    span: Span
    name_span: Span
    children: tuple[Symbol, ...] = field(default=())


def outline(analysis: Analysis) -> tuple[Symbol, ...]:
    """Return the sections of a document with what they declare."""
    root, source = analysis.root, analysis.source
    if not isinstance(root, Mapping):
        return ()
    found = []
    for section in fields(root):
        if len(section.path) != 1 or section.key is None:
            continue
        children = tuple(_children(section, source)) if section.name in _SECTIONS else ()
        detail = quoted(section.value) if isinstance(section.value, Scalar) else ""
        found.append(_symbol(section, SymbolKind.SECTION, detail, source, children))
    return tuple(found)


def _symbol(
    found: Field,
    kind: SymbolKind,
    detail: str,
    source: SourceFile,
    children: tuple[Symbol, ...] = (),
    name: Scalar | None = None,
) -> Symbol:
    key = name or found.key
    span = _trimmed(found.span, source)
    if key is None:
        return Symbol(detail or found.name, kind, "", span, Span(span.start, span.start), children)
    name_span = inner_span(source, key)
    return Symbol(key.text or "?", kind, detail, span.hull(name_span), name_span, children)


def _trimmed(span: Span, source: SourceFile) -> Span:
    """Return a range without the white space at its end."""
    text = source.text[span.start : span.end]
    return Span(span.start, span.start + max(len(text.rstrip()), 0))


_CHILDREN = {
    "slices": SymbolKind.SLICE,
    "tables": SymbolKind.TABLE,
    "kernels": SymbolKind.KERNEL,
    "constants": SymbolKind.CONSTANT,
}


def _children(section: Field, source: SourceFile) -> Iterator[Symbol]:
    for child in fields(section.value, section.path):
        if section.name == "clauses":
            yield from _clause(child, source)
        elif len(child.path) == 2 and section.name == "imports":
            yield _symbol(child, SymbolKind.IMPORT, _text(child.value, "file"), source)
        elif len(child.path) == 2 and child.key is not None:
            kind = _CHILDREN[section.name]
            yield _symbol(child, kind, _detail(section.name, child.value), source)


def _clause(child: Field, source: SourceFile) -> Iterator[Symbol]:
    """Yield the symbol of a clause, in each of the forms that `clauses` may have."""
    detail = _requirement(child.value)
    if child.key is not None and len(child.path) == 2:
        yield _symbol(child, SymbolKind.CLAUSE, detail, source)
    elif child.key is None and len(child.path) == 2 and isinstance(child.value, Mapping):
        name = child.value.get("id")
        if isinstance(name, Scalar):
            yield _symbol(child, SymbolKind.CLAUSE, detail, source, name=name)
    elif (
        child.key is not None
        and len(child.path) == 3
        and isinstance(child.path[1], int)
        and isinstance(child.value, Mapping)
    ):
        yield _symbol(child, SymbolKind.CLAUSE, detail, source)


def _requirement(node: Node) -> str:
    """Return what a clause requires, on one line."""
    if not isinstance(node, Mapping):
        return ""
    require = node.get("require")
    if isinstance(require, Scalar):
        return quoted(require)
    if isinstance(require, Sequence):
        names = [item.text for item in require.items if isinstance(item, Scalar)]
        return f"has(trace, [{', '.join(names)}])"
    return " ".join(filter(None, (_text(node, name) for name in ("metric", "op", "threshold"))))


def _detail(section: str, node: Node) -> str:
    if isinstance(node, Scalar):
        return quoted(node)
    return _text(node, {"slices": "where", "tables": "unit", "kernels": "run"}.get(section, ""))


def _text(node: Node, name: str) -> str:
    value = node.get(name) if isinstance(node, Mapping) else None
    return quoted(value) if isinstance(value, Scalar) else ""


# --- folding -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fold:
    """Lines, from 0, that fold together."""

    first: int
    last: int
    comment: bool = False


def folds(analysis: Analysis, lines: Lines) -> list[Fold]:
    """Return the fields of more than one line, and blocks of comments."""
    found: dict[tuple[int, int], Fold] = {}
    for item in fields(analysis.root):
        span = _trimmed(item.span, analysis.source)
        first, last = lines.number(span.start), lines.number(span.end)
        if last > first:
            found.setdefault((first, last), Fold(first, last))
    return sorted([*found.values(), *_comments(lines)], key=lambda fold: (fold.first, -fold.last))


def _comments(lines: Lines) -> Iterator[Fold]:
    first: int | None = None
    for number in range(len(lines) + 1):
        span = lines.span(number) if number < len(lines) else None
        is_comment = span is not None and _COMMENT.match(lines.text, span.start, span.end)
        if is_comment and first is None:
            first = number
        elif not is_comment and first is not None:
            if number - 1 > first:
                yield Fold(first, number - 1, True)
            first = None


# --- selection -----------------------------------------------------------------------------------


def selection(analysis: Analysis, offset: int) -> list[Span]:
    """Return the ranges around a place, from the smallest to the whole document."""
    spans = {Span(0, len(analysis.source.text))}
    for item in fields_at(analysis.root, offset):
        spans.add(_trimmed(item.span, analysis.source))
        on_key = item.key is not None and item.key.span.start <= offset <= item.key.span.end
        node = item.key if on_key and item.key is not None else item.value
        spans.add(_trimmed(node.span, analysis.source))
        if not on_key and isinstance(item.value, Scalar):
            spans.add(inner_span(analysis.source, item.value))
            if language(item.path, item.value) in {"requirement", "predicate"}:
                parsed = parse_expression(analysis.source, item.value, Sink())
                spans |= set(_spans(parsed))
    holding = [span for span in spans if span.start <= offset <= span.end]
    chain: list[Span] = []
    for span in sorted(holding, key=lambda s: s.end - s.start):
        if not chain or (span != chain[-1] and span.hull(chain[-1]) == span):
            chain.append(span)
    return chain


def _spans(value: object) -> Iterator[Span]:
    """Yield the range of every part of a syntax tree."""
    if isinstance(value, tuple):
        for item in value:
            yield from _spans(item)
    elif isinstance(value, Span):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for part in dataclass_fields(value):
            yield from _spans(getattr(value, part.name))
