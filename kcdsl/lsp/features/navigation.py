"""Definition and references of names, and the outline of a document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
    inner_span,
)
from kcdsl.lsp.text.positions import LinkTarget, Ranges
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, SequenceNode


def definition(snapshot: Snapshot, offset: int) -> list[LinkTarget]:
    """Return the declaration of the name at an offset."""
    analysis, found = snapshot.analysis, snapshot.occurrences
    here = at(found, offset, foreign=True)
    if here is None:
        return []
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


# --- other files ---------------------------------------------------------------------------------


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
