"""Definition, references and highlights of names; outline, folding and selection ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path

from lsprotocol import types as lsp

from kcdsl.check.compile import Analysis
from kcdsl.check.sections.libraries import Import, Loaded
from kcdsl.check.user_metrics import declarations
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.features.knowledge import quoted
from kcdsl.lsp.text.documents import Snapshot
from kcdsl.lsp.text.nodes import (
    Field,
    NameKind,
    Occurrence,
    at,
    fields,
    fields_at,
    inner_span,
    language,
)
from kcdsl.lsp.text.positions import Lines, LinkTarget, Ranges
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, SequenceNode
from kcdsl.syntax.parser import parse_expression

_START = Span(0, 0)
_NAMES_FILES = {"file", "data", "checkpoint", "config", "tokenizer"}


@dataclass(frozen=True, slots=True)
class Link:
    """A range that names a file."""

    span: Span
    path: Path


def definition(snapshot: Snapshot, offset: int) -> list[LinkTarget]:
    """Return the declaration of the name at an offset."""
    analysis, found = snapshot.analysis, snapshot.occurrences
    here = at(found, offset, foreign=True)
    if here is None:
        here_linked = (link for link in links(snapshot) if link.span.holds(offset))
        return [LinkTarget(_START, link.path) for link in here_linked]
    if here.foreign is not None:
        return _in_library(analysis, here)
    if here.kind is NameKind.METRIC:
        return _user_metric(snapshot, here.name)
    declared = [o for o in found if o.declares and o.key == here.key]
    return [LinkTarget(o.span) for o in declared]


def references(snapshot: Snapshot, offset: int, declaration: bool = True) -> list[Span]:
    """Return every span of the name at an offset, with its declaration if wanted."""
    found = snapshot.occurrences
    here = at(found, offset)
    if here is None:
        return []
    if here.kind is NameKind.METRIC:
        if snapshot.analysis.scope.metrics.find(here.name) is None:
            return []
        return [o.span for o in found if o.kind is NameKind.METRIC and o.name == here.name]
    return [o.span for o in found if o.key == here.key and (declaration or not o.declares)]


def highlights(snapshot: Snapshot, offset: int) -> list[tuple[Span, bool]]:
    """Return every span of the name at an offset, and whether it is the declaration."""
    found = snapshot.occurrences
    declared = {o.span for o in found if o.declares}
    return [(span, span in declared) for span in references(snapshot, offset)]


# --- other files ---------------------------------------------------------------------------------


def links(snapshot: Snapshot) -> list[Link]:
    """Return the files that the document names and that exist."""
    folder = snapshot.document.folder
    if folder is None:
        return []
    found = []
    for item in fields(snapshot.analysis.root):
        path = _file_of(item, folder)
        if path is not None and isinstance(item.value, Scalar):
            found.append(Link(inner_span(snapshot.source, item.value), path))
    return found


def _file_of(field: Field, folder: Path) -> Path | None:
    if field.name not in _NAMES_FILES or not isinstance(field.value, Scalar):
        return None
    section, text = field.path[0], field.value.text
    known = section in {"data", "model", "slices"} or (
        section == "imports" and field.name == "file"
    )
    if not known or not text or "\0" in text or text.startswith("package:"):
        return None
    path = folder / text
    try:
        return path if path.is_file() else None
    except (OSError, ValueError):
        return None


def _in_library(analysis: Analysis, here: Occurrence) -> list[LinkTarget]:
    """Return the declaration of an imported name in its library."""
    for item in analysis.imports:
        if item.file == here.foreign and item.loaded is not None:
            span = _declared_in(item, item.loaded, here)
            if span is not None:
                return [LinkTarget(span, item.loaded.path, item.loaded.source)]
    return []


def _declared_in(item: Import, loaded: Loaded, here: Occurrence) -> Span | None:
    library = loaded.library
    if library is None:
        return None
    if here.kind is NameKind.SLICE:
        return next((s.span for s in library.slices if s.name == here.name), None)
    if here.kind is NameKind.TABLE:
        return next((t.span for t in library.tables if t.name == here.name), None)
    return next((k.span for name, k in library.kernels if name == here.name), None)


def _user_metric(snapshot: Snapshot, name: str) -> list[LinkTarget]:
    """Return the Python function of a user's metric."""
    metric = snapshot.analysis.scope.metrics.find(name)
    if metric is None or metric.function is None:
        return []
    declared = declarations(snapshot.document.folder, Sink()).get(metric.name)
    if declared is None:
        return []
    return [LinkTarget(declared.span, Path(declared.source.name).absolute(), declared.source)]


def with_open_texts(targets: list[LinkTarget], snapshot: Snapshot) -> list[LinkTarget]:
    """Return the targets with the texts of open documents, if the files are open."""
    return [
        replace(t, source=snapshot.texts.get(t.path, t.source)) if t.path is not None else t
        for t in targets
    ]


# --- outline --------------------------------------------------------------------------------------


_COMMENT = re.compile(r"[ \t]*#")
_SECTIONS = {"slices", "tables", "clauses", "kernels", "imports", "constants"}


def outline(analysis: Analysis, ranges: Ranges) -> list[lsp.DocumentSymbol]:
    """Return the sections of a document with their declarations."""
    return _Outline(analysis.source, ranges).sections(analysis.root)


class _Outline:
    """Makes the symbols of one document."""

    def __init__(self, source: SourceFile, ranges: Ranges) -> None:
        self._source = source
        self._ranges = ranges

    def sections(self, root: Node | None) -> list[lsp.DocumentSymbol]:
        found = []
        for section in fields(root if isinstance(root, Mapping) else None):
            if len(section.path) != 1 or section.key is None:
                continue
            detail = quoted(section.value) if isinstance(section.value, Scalar) else ""
            symbol = self._symbol(section, lsp.SymbolKind.Namespace, detail)
            if section.name in _SECTIONS:
                symbol.children = list(self._children(section)) or None
            found.append(symbol)
        return found

    def _symbol(
        self, found: Field, kind: lsp.SymbolKind, detail: str, name: Scalar | None = None
    ) -> lsp.DocumentSymbol:
        key, of = name or found.key, self._ranges.of
        span = _trimmed(found.span, self._source)
        if key is None:
            start = of(Span(span.start, span.start))
            return lsp.DocumentSymbol(detail or found.name, kind, of(span), start)
        own = inner_span(self._source, key)
        return lsp.DocumentSymbol(
            key.text or "?", kind, of(span.hull(own)), of(own), detail=detail or None
        )

    def _children(self, section: Field) -> Iterator[lsp.DocumentSymbol]:
        for child in fields(section.value, section.path):
            if section.name == "clauses":
                yield from self._clause(child)
            elif len(child.path) == 2 and section.name == "imports":
                yield self._symbol(child, lsp.SymbolKind.File, _text(child.value, "file"))
            elif len(child.path) == 2 and child.key is not None:
                yield self._symbol(
                    child, _CHILDREN[section.name], _detail(section.name, child.value)
                )

    def _clause(self, child: Field) -> Iterator[lsp.DocumentSymbol]:
        """Yield the symbol of a clause, in any form of `clauses`."""
        detail, body = _requirement(child.value), isinstance(child.value, Mapping)
        name = child.value.get("id") if isinstance(child.value, Mapping) else None
        if child.key is None:
            if len(child.path) == 2 and isinstance(name, Scalar):
                yield self._symbol(child, lsp.SymbolKind.Property, detail, name)
        elif len(child.path) == 2 or (
            len(child.path) == 3 and isinstance(child.path[1], int) and body
        ):
            yield self._symbol(child, lsp.SymbolKind.Property, detail)


def _trimmed(span: Span, source: SourceFile) -> Span:
    """Return a range without trailing white space."""
    text = source.text[span.start : span.end]
    return Span(span.start, span.start + max(len(text.rstrip()), 0))


_CHILDREN = {
    "slices": lsp.SymbolKind.Module,
    "tables": lsp.SymbolKind.Array,
    "kernels": lsp.SymbolKind.Object,
    "constants": lsp.SymbolKind.Constant,
}


def _requirement(node: Node) -> str:
    """Return the requirement of a clause, on one line."""
    if not isinstance(node, Mapping):
        return ""
    require = node.get("require")
    if isinstance(require, Scalar):
        return quoted(require)
    if isinstance(require, SequenceNode):
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


def folds(analysis: Analysis, lines: Lines) -> list[lsp.FoldingRange]:
    """Return folding ranges of multi-line fields and of blocks of comments."""
    found: dict[tuple[int, int], lsp.FoldingRange] = {}
    for item in fields(analysis.root):
        span = _trimmed(item.span, analysis.source)
        first, last = lines.number(span.start), lines.number(span.end)
        if last > first:
            found[first, last] = _fold(first, last, lsp.FoldingRangeKind.Region)
    every = [*found.values(), *_comments(lines)]
    return sorted(every, key=lambda fold: (fold.start_line, -fold.end_line))


def _fold(first: int, last: int, kind: lsp.FoldingRangeKind) -> lsp.FoldingRange:
    return lsp.FoldingRange(start_line=first, end_line=last, kind=kind)


def _comments(lines: Lines) -> Iterator[lsp.FoldingRange]:
    first: int | None = None
    for number in range(len(lines) + 1):
        span = lines.span(number) if number < len(lines) else None
        is_comment = span is not None and _COMMENT.match(lines.text, span.start, span.end)
        if is_comment and first is None:
            first = number
        elif not is_comment and first is not None:
            if number - 1 > first:
                yield _fold(first, number - 1, lsp.FoldingRangeKind.Comment)
            first = None


# --- selection -----------------------------------------------------------------------------------


def selection(analysis: Analysis, offset: int) -> list[Span]:
    """Return the ranges around an offset, from the smallest to the whole document."""
    spans = {Span(0, len(analysis.source.text))}
    for item in fields_at(analysis.root, offset):
        spans.add(_trimmed(item.span, analysis.source))
        on_key = item.key is not None and item.key.span.holds(offset)
        node = item.key if on_key and item.key is not None else item.value
        spans.add(_trimmed(node.span, analysis.source))
        if not on_key and isinstance(item.value, Scalar):
            spans.add(inner_span(analysis.source, item.value))
            if language(item.path, item.value) in {"requirement", "predicate"}:
                parsed = parse_expression(analysis.source, item.value, Sink())
                spans |= set(_spans(parsed))
    holding = [span for span in spans if span.holds(offset)]
    chain: list[Span] = []
    for span in sorted(holding, key=lambda s: s.end - s.start):
        if not chain or (span != chain[-1] and span.hull(chain[-1]) == span):
            chain.append(span)
    return chain


def _spans(value: object) -> Iterator[Span]:
    """Yield the range of every part of a syntax tree."""
    if isinstance(value, Span):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _spans(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in dataclass_fields(value):
            yield from _spans(getattr(value, part.name))
