"""The tree of a document: fields by path, their expressions, and names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kcdsl.check.compile import Analysis
from kcdsl.check.sections.fields import RawImport, RawSlice, RawTable
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.text.lexemes import Lexeme, Role, Start, lexemes
from kcdsl.source.scalar_map import ScalarMap, map_scalar
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, SequenceNode

Path = tuple[str | int, ...]
"""Keys and list positions from the root."""


@dataclass(frozen=True, slots=True)
class Field:
    """An entry of a mapping or an item of a list (then without key), with its path."""

    path: Path
    key: Scalar | None
    value: Node

    @property
    def span(self) -> Span:
        """Return the range from the key to the end of the value."""
        return self.value.span if self.key is None else self.key.span.hull(self.value.span)

    @property
    def name(self) -> str:
        """Return the last key of the path."""
        return next((step for step in reversed(self.path) if isinstance(step, str)), "")


def fields(node: Node | None, path: Path = ()) -> Iterator[Field]:
    """Yield every entry and item, parents first."""
    if isinstance(node, Mapping):
        for entry in node.entries:
            found = Field((*path, entry.key.text), entry.key, entry.value)
            yield found
            yield from fields(entry.value, found.path)
    elif isinstance(node, SequenceNode):
        for number, item in enumerate(node.items):
            found = Field((*path, number), None, item)
            yield found
            yield from fields(item, found.path)


def fields_at(node: Node | None, offset: int) -> list[Field]:
    """Return the fields around an offset, outermost first."""
    found: list[Field] = []
    path: Path = ()
    while node is not None:
        inner = _child_at(node, path, offset)
        if inner is None:
            break
        found.append(inner)
        if inner.key is not None and inner.key.span.holds(offset):
            break
        node, path = inner.value, inner.path
    return found


def _child_at(node: Node, path: Path, offset: int) -> Field | None:
    if isinstance(node, Mapping):
        entries = [Field((*path, e.key.text), e.key, e.value) for e in node.entries]
    elif isinstance(node, SequenceNode):
        entries = [Field((*path, i), None, item) for i, item in enumerate(node.items)]
    else:
        return None
    # Of two adjacent ones, the later one begins at the offset.
    holding = [f for f in entries if f.span.holds(offset)]
    return holding[-1] if holding else None


def language(path: Path, node: Node | None = None) -> Start | None:
    """Return the language of the scalar at a path; None for plain YAML."""
    if not path or not isinstance(path[-1], str) or isinstance(node, Mapping | SequenceNode):
        return None
    section, name = path[0], path[-1]
    if section == "clauses" and len(path) > 1:
        if name == "require":
            return "requirement"
        if name == "budget":
            return "budget"
        if name == "threshold":
            is_table = isinstance(node, Scalar) and node.text.lstrip().startswith("t")
            return "requirement" if is_table else "quantity"
    if name == "where" and section in {"slices", "tables"}:
        return "predicate"
    return None


def inner_span(source: SourceFile, scalar: Scalar) -> Span:
    """Return the range of the text of a scalar, without quotation marks."""
    return map_scalar(source, scalar).span(0, len(scalar.text))


def clause_of(path: Path) -> str | None:
    """Return the identifier of the clause that contains a path, if the path has it."""
    if len(path) < 2 or path[0] != "clauses":
        return None
    return next((step for step in path[1:3] if isinstance(step, str)), None)


# --- names ----------------------------------------------------------------------------------------


class NameKind(StrEnum):
    """Kinds of names."""

    SLICE = "slice"
    TABLE = "table"
    CLAUSE = "clause"
    VARIABLE = "variable"
    KERNEL = "kernel"
    CONSTANT = "constant"
    METRIC = "metric"


@dataclass(frozen=True, slots=True)
class Occurrence:
    """An occurrence of a name. `binder` is the offset of its quantified variable; `foreign` is the
    file of the library that declares the name."""

    kind: NameKind
    name: str
    span: Span
    declares: bool = False
    binder: int | None = None
    foreign: str | None = None

    @property
    def key(self) -> tuple[NameKind, str, int | None, str | None]:
        """Return a key that is equal for all occurrences of one declaration."""
        return self.kind, self.name, self.binder, self.foreign


@dataclass(frozen=True, slots=True)
class Word:
    """A word of an expression with its span in the file."""

    lexeme: Lexeme
    span: Span


@dataclass(frozen=True, slots=True)
class DocumentExpression:
    """An expression of the document: its scalar, its language and its words."""

    field: Field
    scalar: Scalar
    start: Start
    places: ScalarMap
    words: tuple[Word, ...]

    def at(self, offset: int) -> Word | None:
        """Return the word that contains or ends at an offset, preferring names to operators."""
        touching = [w for w in self.words if w.span.holds(offset)]
        named = [w for w in touching if w.lexeme.role not in {Role.BRACKET, Role.OPERATOR}]
        return next(iter(named or touching), None)


def written(analysis: Analysis, field: Field) -> DocumentExpression | None:
    """Return the expression in a field; None without one."""
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
    return DocumentExpression(field, scalar, start, places, words)


def expressions(analysis: Analysis) -> Iterator[DocumentExpression]:
    """Yield every expression of the document in order."""
    for field in fields(analysis.root):
        found = written(analysis, field)
        if found is not None:
            yield found


_KINDS = {
    Role.SLICE: NameKind.SLICE,
    Role.TABLE: NameKind.TABLE,
    Role.VARIABLE: NameKind.VARIABLE,
    Role.METRIC: NameKind.METRIC,
}


def occurrences(analysis: Analysis) -> tuple[Occurrence, ...]:
    """Return every occurrence of a name, in the order of the document."""
    found = [*_declared(analysis), *_listed(analysis)]
    for expression in expressions(analysis):
        for word in expression.words:
            kind = _KINDS.get(word.lexeme.role)
            if kind is None or (kind is NameKind.VARIABLE and word.lexeme.binder is None):
                continue
            binder = None
            if word.lexeme.binder is not None:
                at = word.lexeme.binder
                binder = expression.places.span(at, at + 1).start
            declares = kind is NameKind.VARIABLE and word.lexeme.binder == word.lexeme.start
            found.append(Occurrence(kind, word.lexeme.text, word.span, declares, binder))
    return tuple(sorted(found, key=lambda o: (o.span.start, o.span.end)))


def _declared(analysis: Analysis) -> Iterator[Occurrence]:
    source, raw = analysis.source, analysis.raw or analysis.raw_library
    if raw is None:
        return
    parts: list[RawSlice | RawTable] = [*raw.slices, *raw.tables]
    for part in parts:
        kind = NameKind.SLICE if isinstance(part, RawSlice) else NameKind.TABLE
        yield Occurrence(kind, part.name.text, inner_span(source, part.name), True)
    for item in raw.imports:
        yield from _imported(source, item)
    if analysis.raw is not None:
        for clause in analysis.raw.clauses:
            span = inner_span(source, clause.id)
            yield Occurrence(NameKind.CLAUSE, clause.id.text, span, True)
    for name, kind in (("kernels", NameKind.KERNEL), ("constants", NameKind.CONSTANT)):
        node = analysis.root.get(name) if isinstance(analysis.root, Mapping) else None
        for entry in node.entries if isinstance(node, Mapping) else ():
            yield Occurrence(kind, entry.key.text, inner_span(source, entry.key), True)


_IMPORTED = {"slices": NameKind.SLICE, "tables": NameKind.TABLE, "kernels": NameKind.KERNEL}


def _imported(source: SourceFile, item: RawImport) -> Iterator[Occurrence]:
    """Yield the names of an import; a name without an alias is both the local and library name."""
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
            yield Occurrence(NameKind.SLICE, scalar.text, inner_span(analysis.source, scalar))


def _scalars(node: Node | None) -> Iterator[Scalar]:
    match node:
        case Scalar():
            yield node
        case SequenceNode(items=items):
            yield from (item for item in items if isinstance(item, Scalar))
        case _:
            return


def at(found: tuple[Occurrence, ...], offset: int, foreign: bool = False) -> Occurrence | None:
    """Return the occurrence that contains or ends at an offset.

    For an imported name, `foreign` selects the name of the library instead of the local one.
    """
    holding = [o for o in found if o.span.holds(offset)]
    wanted = [o for o in holding if (o.foreign is not None) is foreign]
    return next(iter(wanted or holding), None)
