"""Renaming of slices, tables, clauses and bound variables, without a change of meaning.

The edited text is checked first: the contract must have the same meaning under the new name, and
every occurrence must still refer to the same declaration. Otherwise the rename is refused, with
the reason. Only the document itself is edited: documents that import a library name its digest,
and have to be changed with it in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from typing import Any

from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.names import BLOCK, FUNCTIONS
from kcdsl.check.fixes import edited
from kcdsl.check.sections.fields import CLAUSE_ID, SLICE_NAME
from kcdsl.diagnostics.model import Edit, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import digest
from kcdsl.lsp.text.documents import Snapshot
from kcdsl.lsp.text.nodes import NameKind, Occurrence, at, occurrences
from kcdsl_grammar.expression_table import KEYWORDS

_RENAMED = {NameKind.SLICE, NameKind.TABLE, NameKind.CLAUSE, NameKind.VARIABLE}


class CannotRename(Exception):
    """Raised where a rename is refused; the message is the reason."""


def prepare(snapshot: Snapshot, offset: int) -> Span:
    """Return the range of the name at an offset; raises CannotRename where there is none."""
    return _target(snapshot.analysis, offset).span


def rename(snapshot: Snapshot, offset: int, name: str) -> tuple[Edit, ...]:
    """Return the edits that rename the declaration of the name at an offset.

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
    pattern = CLAUSE_ID if target.kind is NameKind.CLAUSE else SLICE_NAME
    if not pattern.fullmatch(name) or name in KEYWORDS:
        raise CannotRename(f"`{name}` cannot name a {target.kind}")
    if target.kind is NameKind.VARIABLE:
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
    """Raise CannotRename unless the edited contract has the same meaning under the new name."""
    old, sink = snapshot.analysis, Sink()
    source = SourceFile(old.source.name, edited(old.source.text, list(edits)))
    new = snapshot.read(source, sink)
    if _shape(old, target.key, name) != _shape(new, None, name):
        raise CannotRename(f"the name `{name}` would be taken for something else")
    if old.program is None:
        before = Sink()
        snapshot.read(snapshot.source, before)
        if _errors(sink) > _errors(before):
            raise CannotRename(f"the contract would have more errors with the name `{name}`")
        return
    if new.program is None:
        raise CannotRename(f"the contract would not compile with the name `{name}`")
    if digest(new.program) != digest(under_new_name(old.program, target, name)):
        raise CannotRename(f"the contract would mean something else with the name `{name}`")


def _shape(analysis: Analysis, key: object, name: str) -> list[tuple[NameKind, str, int | None]]:
    """Return the occurrences in order, each with the number of its declaration."""
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
    """Return the program with the name replaced everywhere in the IR."""
    old = target.name

    def change(value: Any) -> Any:
        match value, target.kind:
            case ir.Slice(name=n), NameKind.SLICE if n == old:
                return replace(value, name=name)
            case ir.Region(slice=n), NameKind.SLICE if n == old:
                return replace(value, slice=name)
            case ir.Clause(slices=slices), NameKind.SLICE:
                return replace(value, slices=tuple(name if n == old else n for n in slices))
            case ir.Clause(id=n), NameKind.CLAUSE if n == old:
                return replace(value, id=name)
            case ((ir.ThresholdTable(name=n) | ir.TableValue(name=n)), NameKind.TABLE) if n == old:
                return replace(value, name=name)
            case _:
                return value

    found: ir.Program = _rebuilt(program, change)
    return found


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value after applying a function to all its parts, innermost first."""
    if type(value) is tuple:  # not named tuples, such as spans
        return tuple(_rebuilt(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {
            field.name: _rebuilt(getattr(value, field.name), change)
            for field in dataclass_fields(value)
        }
        return change(replace(value, **parts))
    return value


def _errors(sink: Sink) -> int:
    return sum(found.severity is Severity.ERROR for found in sink)
