"""Names of libraries, in the library and in the documents that import it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from kcdsl.check.compile import Analysis
from kcdsl.check.fixing import edited
from kcdsl.check.sections.shared import RawImport
from kcdsl.diagnostics.model import Edit, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.canonical import digest, library_digest
from kcdsl.ir.terms import Program
from kcdsl.lsp.documents import Snapshot
from kcdsl.lsp.nodes import inner_span
from kcdsl.lsp.rename import CannotRename, rename, under_new_name
from kcdsl.lsp.symbols import Kind, Occurrence, at
from kcdsl.source.yaml_nodes import Scalar

_EXPORTED = {Kind.SLICE, Kind.TABLE, Kind.KERNEL}
Home = tuple[Path, Kind, str]
"""The library that a name is looked up in, the kind of the name, and the name."""


def references_across(
    snapshot: Snapshot, offset: int, others: Iterable[Snapshot], declaration: bool = True
) -> list[tuple[Snapshot, Span]]:
    """Return the places of a name of a library in it and in those that import it."""
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
    """Return the edits that give a thing another name, by document.

    The name of a library's part changes in the documents that import it as well, and so does the
    digest that they state. Raises CannotRename as `rename` does, and where a document that imports
    the part would mean something else.
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
            _check_user(other, here, name, ordered, {path: source})
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
    """Return where the name at a place is at home; None for what is no part of a library."""
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
    """Yield the places of a name of a library in a document: in the library, or in imports."""
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
    """Yield the edits of the names in imports; one imported under its own name changes wherever it
    is used."""
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
    """Yield the edits of the digests that imports state; one that was wrong before stays so."""
    for item in imports:
        if isinstance(item.digest, Scalar) and item.digest.text == old:
            yield Edit(inner_span(user.source, item.digest), new)


def _check_user(
    user: Snapshot,
    here: Occurrence,
    name: str,
    edits: tuple[Edit, ...],
    texts: dict[Path, SourceFile],
) -> None:
    """Raise CannotRename unless a document means the same after its edits."""
    source = SourceFile(user.source.name, edited(user.source.text, list(edits)))
    before, after = Sink(), Sink()
    old = user.read(user.source, before)
    new = user.importing(texts).read(source, after)
    if _errors(after) > _errors(before) or _lost(old, new):
        raise CannotRename(f"{_shown(user)} would not compile with the name `{name}`")
    if old.library is not None and new.library is not None:
        same = library_digest(old.library) == library_digest(new.library)
    elif old.program is not None and new.program is not None:
        same = digest(new.program) in {digest(p) for p in _expected(old.program, here, name)}
    else:
        return
    if not same:
        raise CannotRename(f"{_shown(user)} would mean something else with the name `{name}`")


def _errors(sink: Sink) -> int:
    return sum(found.severity is Severity.ERROR for found in sink)


def _lost(old: Analysis, new: Analysis) -> bool:
    lost_program = old.program is not None and new.program is None
    return lost_program or (old.library is not None and new.library is None)


def _expected(program: Program, here: Occurrence, name: str) -> tuple[Program, Program]:
    """Return what a contract may mean afterwards: the same, or the same under the new name."""
    return program, under_new_name(program, here, name)


def _shown(snapshot: Snapshot) -> str:
    path = snapshot.document.path
    return snapshot.document.uri if path is None else path.name
