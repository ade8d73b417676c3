"""Where things stand in the tree of a document: fields by their path, and expressions in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.lexemes import Start
from kcdsl.source.scalar_map import map_scalar
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, Sequence

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
    """Yield every entry and item, those that hold others before them."""
    if isinstance(node, Mapping):
        for entry in node.entries:
            found = Field((*path, entry.key.text), entry.key, entry.value)
            yield found
            yield from fields(entry.value, found.path)
    elif isinstance(node, Sequence):
        for number, item in enumerate(node.items):
            found = Field((*path, number), None, item)
            yield found
            yield from fields(item, found.path)


def fields_at(node: Node | None, offset: int) -> list[Field]:
    """Return the fields that hold a place, outermost first."""
    found: list[Field] = []
    path: Path = ()
    while node is not None:
        inner = _child_at(node, path, offset)
        if inner is None:
            break
        found.append(inner)
        if inner.key is not None and inner.key.span.start <= offset <= inner.key.span.end:
            break
        node, path = inner.value, inner.path
    return found


def _child_at(node: Node, path: Path, offset: int) -> Field | None:
    if isinstance(node, Mapping):
        entries = [Field((*path, e.key.text), e.key, e.value) for e in node.entries]
    elif isinstance(node, Sequence):
        entries = [Field((*path, i), None, item) for i, item in enumerate(node.items)]
    else:
        return None
    # Of two that touch, the later one begins at the place.
    holding = [f for f in entries if f.span.start <= offset <= f.span.end]
    return holding[-1] if holding else None


def language(path: Path, node: Node | None = None) -> Start | None:
    """Return in which language the scalar at a path is written; None for plain YAML."""
    if not path or not isinstance(path[-1], str) or isinstance(node, Mapping | Sequence):
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
    """Return the identifier of the clause that a path lies in, where the path names it."""
    if len(path) < 2 or path[0] != "clauses":
        return None
    return next((step for step in path[1:3] if isinstance(step, str)), None)
