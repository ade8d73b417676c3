"""Renaming of slices, tables, clauses and bound variables, without a change of meaning.

The edited text is checked first: the contract must have the same meaning under the new name, and
every occurrence must still refer to the same declaration. Otherwise the rename is refused, with
the reason. A name of a library is also changed in the documents that import it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.names import BLOCK, FUNCTIONS
from kcdsl.check.fixing import edited
from kcdsl.check.sections.reading import CLAUSE_ID, SLICE_NAME, RawImport
from kcdsl.diagnostics.model import Edit, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import digest, library_digest
from kcdsl.lsp.text.documents import Snapshot
from kcdsl.lsp.text.nodes import NameKind, Occurrence, at, inner_span, occurrences
from kcdsl.source.yaml_nodes import Scalar
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


# --- libraries ------------------------------------------------------------------------------------


_EXPORTED = {NameKind.SLICE, NameKind.TABLE, NameKind.KERNEL}
Home = tuple[Path, NameKind, str]
"""The library that declares a name, the kind of the name, and the name."""


def references_across(
    snapshot: Snapshot, offset: int, others: Iterable[Snapshot], declaration: bool = True
) -> list[tuple[Snapshot, Span]]:
    """Return the spans of a library's name in the library and in its importers."""
    home = _home(snapshot, offset)
    if home is None:
        return []
    return [
        (item, found.span)
        for item in (snapshot, *others)
        for found in _occurrences(item, home)
        if declaration or not found.declares
    ]


def rename_across(
    snapshot: Snapshot, offset: int, name: str, others: Iterable[Snapshot]
) -> list[tuple[Snapshot, tuple[Edit, ...]]]:
    """Return the edits that rename a declaration, by document.

    The name of a library's part and the digest of the library are also changed in the documents
    that import it. Raises CannotRename as `rename` does, and where the meaning of an importing
    document would change.
    """
    own = rename(snapshot, offset, name)
    found = [(snapshot, own)] if own else []
    here, path = at(snapshot.occurrences, offset), _path(snapshot)
    if not own or here is None or path is None or snapshot.analysis.raw_library is None:
        return found
    source = SourceFile(snapshot.source.name, edited(snapshot.source.text, list(own)))
    old, new = snapshot.analysis.library, snapshot.read(source, Sink()).library
    for other in others:
        imports = _imports(other, path)
        if not imports:
            continue
        if old is None or new is None:
            raise CannotRename(f"{_shown(other)} imports this library, which has errors")
        edits = {
            *_name_edits(other, (path, here.kind, here.name), name),
            *_digest_edits(other, imports, library_digest(old), library_digest(new)),
        }
        if edits:
            ordered = tuple(sorted(edits, key=lambda edit: edit.span))
            _check_importer(other, here, name, ordered, {path: source})
            found.append((other, ordered))
    return found


# --- who imports what ----------------------------------------------------------------------------


def _path(snapshot: Snapshot) -> Path | None:
    path = snapshot.document.path
    return None if path is None else Path(os.path.normpath(path))


def _imports(snapshot: Snapshot, path: Path) -> list[RawImport]:
    """Return the imports of a document that name a library."""
    analysis = snapshot.analysis
    raw = analysis.raw or analysis.raw_library
    pairs = zip(raw.imports if raw is not None else (), analysis.imports, strict=False)
    return [r for r, item in pairs if item.loaded is not None and item.loaded.path == path]


def _home(snapshot: Snapshot, offset: int) -> Home | None:
    """Return the declaring library of the name at an offset; None if it is not in a library."""
    here = at(snapshot.occurrences, offset, foreign=True)
    if here is None:
        return None
    if here.foreign is None:
        path = _path(snapshot)
        exported = here.kind in _EXPORTED and snapshot.analysis.raw_library is not None
        return (path, here.kind, here.name) if exported and path is not None else None
    for item in snapshot.analysis.imports:
        if item.file == here.foreign and item.loaded is not None:
            return item.loaded.path, here.kind, here.name
    return None


def _occurrences(snapshot: Snapshot, home: Home) -> Iterator[Occurrence]:
    """Yield the occurrences of a library's name in a document: the library or an importer."""
    path, kind, name = home
    if _path(snapshot) == path:
        files: set[str | None] = {None}
    else:
        files = {r.file.text for r in _imports(snapshot, path) if r.file is not None}
    for found in snapshot.occurrences:
        if found.kind is kind and found.name == name and found.foreign in files:
            yield found


# --- what a rename changes -----------------------------------------------------------------------


def _name_edits(user: Snapshot, home: Home, name: str) -> Iterator[Edit]:
    """Yield the edits of the names in imports; a name without a local alias changes at all its
    uses."""
    spans = {found.span for found in _occurrences(user, home)}
    local = {found for found in user.occurrences if found.foreign is None and found.span in spans}
    if local and user.analysis.raw_library is not None:
        _, kind, old = home
        raise CannotRename(
            f"the library {_shown(user)} passes the {kind} `{old}` on under this name; "
            f"write {{{old}: {old}}} in its import first"
        )
    keys = {found.key for found in local}
    spans |= {found.span for found in user.occurrences if found.key in keys}
    yield from (Edit(span, name) for span in spans)


def _digest_edits(
    user: Snapshot, imports: Iterable[RawImport], old: str, new: str
) -> Iterator[Edit]:
    """Yield the edits of the digests in imports; a digest that was wrong before is not changed."""
    for item in imports:
        if isinstance(item.digest, Scalar) and item.digest.text == old:
            yield Edit(inner_span(user.source, item.digest), new)


def _check_importer(
    user: Snapshot,
    here: Occurrence,
    name: str,
    edits: tuple[Edit, ...],
    texts: dict[Path, SourceFile],
) -> None:
    """Raise CannotRename unless a document has the same meaning after its edits."""
    source = SourceFile(user.source.name, edited(user.source.text, list(edits)))
    before, after = Sink(), Sink()
    old = user.read(user.source, before)
    new = user.importing(texts).read(source, after)
    if _errors(after) > _errors(before) or _lost(old, new):
        raise CannotRename(f"{_shown(user)} would not compile with the name `{name}`")
    if old.library is not None and new.library is not None:
        same = library_digest(old.library) == library_digest(new.library)
    elif old.program is not None and new.program is not None:
        expected = (old.program, under_new_name(old.program, here, name))
        same = digest(new.program) in {digest(program) for program in expected}
    else:
        return
    if not same:
        raise CannotRename(f"{_shown(user)} would mean something else with the name `{name}`")


def _errors(sink: Sink) -> int:
    return sum(found.severity is Severity.ERROR for found in sink)


def _lost(old: Analysis, new: Analysis) -> bool:
    lost_program = old.program is not None and new.program is None
    return lost_program or (old.library is not None and new.library is None)


def _shown(snapshot: Snapshot) -> str:
    path = snapshot.document.path
    return snapshot.document.uri if path is None else path.name
