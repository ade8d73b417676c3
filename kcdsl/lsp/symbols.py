"""The names of a document: where each is declared and where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kcdsl.check.compile import Analysis
from kcdsl.check.sections.shared import RawImport, RawSlice, RawTable
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.lexemes import Lexeme, Role, Start, lexemes
from kcdsl.lsp.nodes import Field, fields, inner_span, language
from kcdsl.source.scalar_map import ScalarMap, map_scalar
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, Sequence


class Kind(StrEnum):
    """What a name stands for."""

    SLICE = "slice"
    TABLE = "table"
    CLAUSE = "clause"
    VARIABLE = "variable"
    KERNEL = "kernel"
    CONSTANT = "constant"
    METRIC = "metric"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A name at a place. `binder` is the place of the quantified variable that is meant; `foreign`
    is the file of the library in which the name is looked up."""

    kind: Kind
    name: str
    span: Span
    declares: bool = False
    binder: int | None = None
    foreign: str | None = None

    @property
    def key(self) -> tuple[Kind, str, int | None, str | None]:
        """Return what two occurrences of one thing have in common."""
        return self.kind, self.name, self.binder, self.foreign


@dataclass(frozen=True, slots=True)
class Word:
    """A word of an expression with its place in the file."""

    lexeme: Lexeme
    span: Span


@dataclass(frozen=True, slots=True)
class Written:
    """An expression of the document: its scalar, its language and its words."""

    field: Field
    scalar: Scalar
    start: Start
    places: ScalarMap
    words: tuple[Word, ...]

    def at(self, offset: int) -> Word | None:
        """Return the word that holds or ends at a place, a name rather than a sign."""
        touching = [w for w in self.words if w.span.start <= offset <= w.span.end]
        named = [w for w in touching if w.lexeme.role not in {Role.BRACKET, Role.OPERATOR}]
        return next(iter(named or touching), None)


def written(analysis: Analysis, field: Field) -> Written | None:
    """Return the expression in a field; None where it holds none."""
    start = language(field.path, field.value)
    if start is None or not isinstance(field.value, Scalar):
        return None
    scalar = field.value
    is_metric = lambda name: analysis.scope.metrics.find(name) is not None  # noqa: E731
    places = map_scalar(analysis.source, scalar)
    words = tuple(
        Word(lexeme, places.span(lexeme.start, lexeme.end))
        for lexeme in (lexemes(scalar.text, start, is_metric) if places.pieces is not None else ())
    )
    return Written(field, scalar, start, places, words)


def expressions(analysis: Analysis) -> Iterator[Written]:
    """Yield every expression of the document in its order."""
    for field in fields(analysis.root):
        found = written(analysis, field)
        if found is not None:
            yield found


_KINDS = {
    Role.SLICE: Kind.SLICE,
    Role.TABLE: Kind.TABLE,
    Role.VARIABLE: Kind.VARIABLE,
    Role.METRIC: Kind.METRIC,
}


def occurrences(analysis: Analysis) -> tuple[Occurrence, ...]:
    """Return every occurrence of a name, in the order of the document."""
    found = [*_declared(analysis), *_listed(analysis)]
    for expression in expressions(analysis):
        for word in expression.words:
            kind = _KINDS.get(word.lexeme.role)
            if kind is None or (kind is Kind.VARIABLE and word.lexeme.binder is None):
                continue
            binder = None
            if word.lexeme.binder is not None:
                at = word.lexeme.binder
                binder = expression.places.span(at, at + 1).start
            declares = kind is Kind.VARIABLE and word.lexeme.binder == word.lexeme.start
            found.append(Occurrence(kind, word.lexeme.text, word.span, declares, binder))
    return tuple(sorted(found, key=lambda o: (o.span.start, o.span.end)))


def _declared(analysis: Analysis) -> Iterator[Occurrence]:
    source, raw = analysis.source, analysis.raw or analysis.raw_library
    if raw is None:
        return
    parts: list[RawSlice | RawTable] = [*raw.slices, *raw.tables]
    for part in parts:
        kind = Kind.SLICE if isinstance(part, RawSlice) else Kind.TABLE
        yield Occurrence(kind, part.name.text, inner_span(source, part.name), True)
    for item in raw.imports:
        yield from _imported(source, item)
    if analysis.raw is not None:
        for clause in analysis.raw.clauses:
            span = inner_span(source, clause.id)
            yield Occurrence(Kind.CLAUSE, clause.id.text, span, True)
    for name, kind in (("kernels", Kind.KERNEL), ("constants", Kind.CONSTANT)):
        node = analysis.root.get(name) if isinstance(analysis.root, Mapping) else None
        for entry in node.entries if isinstance(node, Mapping) else ():
            yield Occurrence(kind, entry.key.text, inner_span(source, entry.key), True)


_IMPORTED = {"slices": Kind.SLICE, "tables": Kind.TABLE, "kernels": Kind.KERNEL}


def _imported(source: SourceFile, item: RawImport) -> Iterator[Occurrence]:
    """Yield the names that an import brings; one under its own name stands for both."""
    file = item.file.text if item.file is not None else ""
    for what, names in item.names:
        for name in names:
            kind, local = _IMPORTED[what], inner_span(source, name.local)
            yield Occurrence(kind, name.local.text, local, True)
            theirs = inner_span(source, name.theirs)
            yield Occurrence(kind, name.theirs.text, theirs, False, None, file)


def _listed(analysis: Analysis) -> Iterator[Occurrence]:
    """Yield the slices that clauses list, and the metrics of records."""
    for clause in analysis.raw.clauses if analysis.raw is not None else ():
        for scalar in _scalars(clause.node("slices")):
            yield Occurrence(Kind.SLICE, scalar.text, inner_span(analysis.source, scalar))


def _scalars(node: Node | None) -> Iterator[Scalar]:
    match node:
        case Scalar():
            yield node
        case Sequence(items=items):
            yield from (item for item in items if isinstance(item, Scalar))
        case _:
            return


def at(found: tuple[Occurrence, ...], offset: int, foreign: bool = False) -> Occurrence | None:
    """Return the occurrence that holds or ends at a place.

    Of an imported name, which stands for two things, that of the library where `foreign` is set.
    """
    holding = [o for o in found if o.span.start <= offset <= o.span.end]
    wanted = [o for o in holding if (o.foreign is not None) is foreign]
    return next(iter(wanted or holding), None)
