"""Definition, references and highlights of the names of a document."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kcdsl.check.compile import Analysis
from kcdsl.check.sections.libraries import Import, Loaded
from kcdsl.check.user_metrics import declarations
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.documents import Snapshot
from kcdsl.lsp.nodes import Field, fields, inner_span
from kcdsl.lsp.symbols import Kind, Occurrence, at
from kcdsl.source.yaml_nodes import Scalar

_START = Span(0, 0)
_NAMES_FILES = {"file", "data", "checkpoint", "config", "tokenizer"}


@dataclass(frozen=True, slots=True)
class Target:
    """A range of a file; `path` is None for the document itself, and `source` the text that the
    range is in, where it is at hand."""

    span: Span
    path: Path | None = None
    source: SourceFile | None = None


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
    return link.span.start <= offset <= link.span.end


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
    for field in fields(snapshot.analysis.root):
        path = _file_of(field, folder)
        if path is not None and isinstance(field.value, Scalar):
            found.append(Link(inner_span(snapshot.source, field.value), path))
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
