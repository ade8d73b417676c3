"""Definition, references and highlights of names; outline, folding and selection ranges."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path

from lsprotocol import types as lsp

from kcdsl.check.compile import Analysis
from kcdsl.check.sections.libraries import Import, Loaded
from kcdsl.check.user_metrics import declarations
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.documents import Snapshot
from kcdsl.lsp.knowledge import quoted
from kcdsl.lsp.nodes import Field, Kind, Occurrence, at, fields, fields_at, inner_span, language
from kcdsl.lsp.positions import Lines, Target
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, Sequence
from kcdsl.syntax.parser import parse_expression

_START = Span(0, 0)
_NAMES_FILES = {"file", "data", "checkpoint", "config", "tokenizer"}


@dataclass(frozen=True, slots=True)
class Link:
    """A range that names a file."""

    span: Span
    path: Path


def definition(snapshot: Snapshot, offset: int) -> list[Target]:
    """Return where the name at a place is declared."""
    analysis, found = snapshot.analysis, snapshot.occurrences
    here = at(found, offset, foreign=True)
    if here is None:
        return [Target(_START, link.path) for link in links(snapshot) if _holds(link, offset)]
    if here.foreign is not None:
        return _in_library(analysis, here)
    if here.kind is Kind.METRIC:
        return _user_metric(snapshot, here.name)
    declared = [o for o in found if o.declares and o.key == here.key]
    return [Target(o.span) for o in declared]


def _holds(link: Link, offset: int) -> bool:
    return link.span.holds(offset)


def references(snapshot: Snapshot, offset: int, declaration: bool = True) -> list[Span]:
    """Return every place of the name at a place, with that of its declaration if wanted."""
    found = snapshot.occurrences
    here = at(found, offset)
    if here is None:
        return []
    if here.kind is Kind.METRIC:
        metrics = snapshot.analysis.scope.metrics
        name = _canonical(here, snapshot.analysis)
        same = [o for o in found if o.kind is Kind.METRIC and metrics.find(o.name) is not None]
        return [o.span for o in same if _canonical(o, snapshot.analysis) == name]
    return [o.span for o in found if o.key == here.key and (declaration or not o.declares)]


def _canonical(occurrence: Occurrence, analysis: Analysis) -> str:
    metric = analysis.scope.metrics.find(occurrence.name)
    return occurrence.name if metric is None else metric.name


def highlights(snapshot: Snapshot, offset: int) -> list[tuple[Span, bool]]:
    """Return every place of the name at a place, and whether the name is declared there."""
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


def _in_library(analysis: Analysis, here: Occurrence) -> list[Target]:
    """Return where a library declares an imported name."""
    for item in analysis.imports:
        if item.file == here.foreign and item.loaded is not None:
            span = _declared_in(item, item.loaded, here)
            if span is not None:
                return [Target(span, item.loaded.path, item.loaded.source)]
    return []


def _declared_in(item: Import, loaded: Loaded, here: Occurrence) -> Span | None:
    library = loaded.library
    if library is None:
        return None
    if here.kind is Kind.SLICE:
        return next((s.span for s in library.slices if s.name == here.name), None)
    if here.kind is Kind.TABLE:
        return next((t.span for t in library.tables if t.name == here.name), None)
    return next((k.span for name, k in library.kernels if name == here.name), None)


def _user_metric(snapshot: Snapshot, name: str) -> list[Target]:
    """Return the Python function of a user's metric."""
    metric = snapshot.analysis.scope.metrics.find(name)
    if metric is None or metric.function is None:
        return []
    declared = declarations(snapshot.document.folder, Sink()).get(metric.name)
    if declared is None:
        return []
    return [Target(declared.span, Path(declared.source.name).absolute(), declared.source)]


def with_open_texts(targets: list[Target], snapshot: Snapshot) -> list[Target]:
    """Return the targets with the texts of open documents where the files are open."""
    return [
        replace(t, source=snapshot.texts.get(t.path, t.source)) if t.path is not None else t
        for t in targets
    ]


# --- outline --------------------------------------------------------------------------------------


_COMMENT = re.compile(r"[ \t]*#")
_SECTIONS = {"slices", "tables", "clauses", "kernels", "imports", "constants"}


@dataclass(frozen=True, slots=True)
class Symbol:
    """An entry of the outline: `span` covers all of it, `name_span` what is selected."""

    name: str
    kind: lsp.SymbolKind
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
        found.append(_symbol(section, lsp.SymbolKind.Namespace, detail, source, children))
    return tuple(found)


def _symbol(
    found: Field,
    kind: lsp.SymbolKind,
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
    "slices": lsp.SymbolKind.Module,
    "tables": lsp.SymbolKind.Array,
    "kernels": lsp.SymbolKind.Object,
    "constants": lsp.SymbolKind.Constant,
}


def _children(section: Field, source: SourceFile) -> Iterator[Symbol]:
    for child in fields(section.value, section.path):
        if section.name == "clauses":
            yield from _clause(child, source)
        elif len(child.path) == 2 and section.name == "imports":
            yield _symbol(child, lsp.SymbolKind.File, _text(child.value, "file"), source)
        elif len(child.path) == 2 and child.key is not None:
            kind = _CHILDREN[section.name]
            yield _symbol(child, kind, _detail(section.name, child.value), source)


def _clause(child: Field, source: SourceFile) -> Iterator[Symbol]:
    """Yield the symbol of a clause, in each of the forms that `clauses` may have."""
    detail = _requirement(child.value)
    if child.key is not None and len(child.path) == 2:
        yield _symbol(child, lsp.SymbolKind.Property, detail, source)
    elif child.key is None and len(child.path) == 2 and isinstance(child.value, Mapping):
        name = child.value.get("id")
        if isinstance(name, Scalar):
            yield _symbol(child, lsp.SymbolKind.Property, detail, source, name=name)
    elif (
        child.key is not None
        and len(child.path) == 3
        and isinstance(child.path[1], int)
        and isinstance(child.value, Mapping)
    ):
        yield _symbol(child, lsp.SymbolKind.Property, detail, source)


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


def folds(analysis: Analysis, lines: Lines) -> list[lsp.FoldingRange]:
    """Return the fields of more than one line, and blocks of comments."""
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
    """Return the ranges around a place, from the smallest to the whole document."""
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
