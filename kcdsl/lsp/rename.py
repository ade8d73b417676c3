"""Renaming slices, tables, clauses and bound variables, without a change of meaning.

The edits are tried on the text first: the contract must mean the same under the new name, and every
occurrence must still be one of the same thing. Otherwise the rename is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from typing import Any

from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.names import BLOCK, FUNCTIONS
from kcdsl.check.fixing import edited
from kcdsl.check.sections.reading import CLAUSE_ID, KEYWORDS, SLICE_NAME
from kcdsl.diagnostics.model import Edit, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import digest
from kcdsl.lsp.documents import Snapshot
from kcdsl.lsp.symbols import Kind, Occurrence, at, occurrences

_RENAMED = {Kind.SLICE, Kind.TABLE, Kind.CLAUSE, Kind.VARIABLE}


class CannotRename(Exception):
    """Raised where a rename is refused; the message says why."""


def prepare(snapshot: Snapshot, offset: int) -> Span:
    """Return the range of the name at a place; raises CannotRename where none can be renamed."""
    return _target(snapshot.analysis, offset).span


def rename(snapshot: Snapshot, offset: int, name: str) -> tuple[Edit, ...]:
    """Return the edits that give the thing at a place another name.

    Raises CannotRename where the name is unsuitable, is taken, or would change the meaning.
    """
    analysis = snapshot.analysis
    target = _target(analysis, offset)
    if name == target.name:
        return ()
    _check_name(analysis, target, name)
    found = occurrences(analysis)
    spans = [o.span for o in found if o.key == target.key]
    edits = tuple(Edit(span, name) for span in sorted(set(spans)))
    _check_meaning(snapshot, target, name, edits)
    return edits


def _target(analysis: Analysis, offset: int) -> Occurrence:
    found = occurrences(analysis)
    here = at(found, offset)
    if here is None:
        raise CannotRename("there is no name here that can be changed")
    if here.kind not in _RENAMED:
        raise CannotRename(f"a {here.kind} of the language keeps its name")
    if here.foreign is not None:
        raise CannotRename(f"`{here.name}` is a name of the library {here.foreign}")
    if not any(o.declares and o.key == here.key for o in found):
        raise CannotRename(f"no {here.kind} `{here.name}` is declared")
    foreign = {o.span for o in found if o.foreign is not None}
    if any(o.key == here.key and o.span in foreign for o in found):
        raise CannotRename(
            f"`{here.name}` is imported under its own name; "
            f"write {{NEW: {here.name}}} in the import to change it here"
        )
    return here


def _check_name(analysis: Analysis, target: Occurrence, name: str) -> None:
    pattern = CLAUSE_ID if target.kind is Kind.CLAUSE else SLICE_NAME
    if not pattern.fullmatch(name) or name in KEYWORDS:
        raise CannotRename(f"`{name}` cannot name a {target.kind}")
    if target.kind is Kind.VARIABLE:
        known = analysis.scope.metrics.find(name) is not None
        if known or name in FUNCTIONS or BLOCK.fullmatch(name):
            raise CannotRename(f"`{name}` already has a meaning")
        return
    taken = {o.name for o in occurrences(analysis) if o.kind is target.kind and o.declares}
    if name in taken:
        raise CannotRename(f"there is a {target.kind} `{name}` already")


def _check_meaning(
    snapshot: Snapshot, target: Occurrence, name: str, edits: tuple[Edit, ...]
) -> None:
    """Raise CannotRename unless the edited contract means the same under the new name."""
    old, sink = snapshot.analysis, Sink()
    source = SourceFile(old.source.name, edited(old.source.text, list(edits)))
    new = snapshot.read(source, sink)
    if _shape(old, target.key, name) != _shape(new, None, name):
        raise CannotRename(f"the name `{name}` would be taken for something else")
    if old.program is None:
        before = sum(d.severity is Severity.ERROR for d in _findings(snapshot))
        if sum(d.severity is Severity.ERROR for d in sink) > before:
            raise CannotRename(f"the contract would have more errors with the name `{name}`")
        return
    if new.program is None:
        raise CannotRename(f"the contract would not compile with the name `{name}`")
    if digest(new.program) != digest(under_new_name(old.program, target, name)):
        raise CannotRename(f"the contract would mean something else with the name `{name}`")


def _findings(snapshot: Snapshot) -> Sink:
    sink = Sink()
    snapshot.read(snapshot.source, sink)
    return sink


def _shape(analysis: Analysis, key: object, name: str) -> list[tuple[Kind, str, int | None]]:
    """Return the occurrences in order, each with the number of what it refers to."""
    found = occurrences(analysis)
    binders = sorted({o.binder for o in found if o.binder is not None})
    return [
        (
            o.kind,
            name if key is not None and o.key == key else o.name,
            None if o.binder is None else binders.index(o.binder),
        )
        for o in found
    ]


# --- the old program under the new name ----------------------------------------------------------


def under_new_name(program: ir.Program, target: Occurrence, name: str) -> ir.Program:
    """Return the program with the name exchanged wherever the IR holds it."""
    old = target.name

    def change(value: Any) -> Any:
        match value, target.kind:
            case ir.Slice(name=n), Kind.SLICE if n == old:
                return replace(value, name=name)
            case ir.Region(slice=n), Kind.SLICE if n == old:
                return replace(value, slice=name)
            case ir.Clause(slices=slices), Kind.SLICE:
                return replace(value, slices=tuple(name if n == old else n for n in slices))
            case ir.Clause(id=n), Kind.CLAUSE if n == old:
                return replace(value, id=name)
            case ((ir.ThresholdTable(name=n) | ir.TableValue(name=n)), Kind.TABLE) if n == old:
                return replace(value, name=name)
            case _:
                return value

    found: ir.Program = _rebuilt(program, change)
    return found


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with a change made at every part of it, from the inside out."""
    if isinstance(value, tuple):
        return tuple(_rebuilt(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, Span):
            return value
        parts = {
            field.name: _rebuilt(getattr(value, field.name), change)
            for field in dataclass_fields(value)
        }
        return change(replace(value, **parts))
    return value
