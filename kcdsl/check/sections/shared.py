"""The sections that contracts and libraries share: slices, kernels, tables, imports, as written."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kcdsl.check.sections.reading import CLAUSE_ID, SLICE_NAME, StructureReader, identifier
from kcdsl.diagnostics.codes import EMPTY_SECTION
from kcdsl.diagnostics.spans import Span
from kcdsl.source.yaml_nodes import Entry, Mapping, Node, Scalar, Sequence

KERNEL_FIELDS = (
    *("run", "numerics", "folder", "url", "model", "key", "tokens", "concurrency", "logprobs"),
    *("format", "columns", "file", "recomputed"),
)
SLICE_FIELDS = ("data", "where")
TABLE_FIELDS = ("unit", "rows", "otherwise")
ROW_FIELDS = ("where", "value")
IMPORT_FIELDS = ("file", "digest", "slices", "kernels", "tables")
IMPORTED = ("slices", "kernels", "tables")
"""The kinds of parts that an import may bring."""
PAIR = ("train", "infer")
"""The kernels that a contract compares; both are required."""
ROLES = (*PAIR, "guard", "fallback")
"""Every kernel that a contract can name: the compared pair, and what actions route to."""


class RawKernel(NamedTuple):
    """One kernel as written; `node` is its mapping."""

    run: Scalar
    numerics: Mapping | None
    node: Mapping

    @property
    def span(self) -> Span:
        """Return the place of the whole."""
        return self.node.span


class RawSlice(NamedTuple):
    """One slice as written."""

    name: Scalar
    data: Scalar | None
    where: Scalar | None
    span: Span


class RawRow(NamedTuple):
    """One row of a table as written."""

    where: Scalar | None
    value: Scalar | None
    span: Span


class RawTable(NamedTuple):
    """One table of thresholds as written; `entry` is its place in the section `tables`."""

    name: Scalar
    unit: Scalar | None
    rows: tuple[RawRow, ...]
    otherwise: Entry | None
    entry: Entry

    @property
    def span(self) -> Span:
        """Return the place of its name."""
        return self.name.span


class RawName(NamedTuple):
    """One imported name: what it is called here, and what the library calls it."""

    local: Scalar
    theirs: Scalar


class RawImport(NamedTuple):
    """One import as written; `node` is its mapping."""

    file: Scalar | None
    digest: Node | None
    names: tuple[tuple[str, tuple[RawName, ...]], ...]
    """For each of `IMPORTED` that is given, what is imported."""
    node: Mapping

    @property
    def span(self) -> Span:
        """Return the place of the file, or of the first field."""
        if self.file is not None:
            return self.file.span
        return self.node.entries[0].key.span if self.node.entries else self.node.span

    def brought(self, what: str) -> tuple[RawName, ...]:
        """Return the names of one kind that the import brings."""
        return dict(self.names).get(what, ())


def read_slices(reader: StructureReader, root: Mapping) -> tuple[RawSlice, ...]:
    """Return the section `slices`."""
    node = reader.mapping(root, "slices")
    if node is None:
        return ()
    if not node.entries:
        reader.reporter.error(EMPTY_SECTION, "`slices` declares no slice", node.span, "all: {}")
    found = []
    for entry in node.entries:
        if identifier(reader, entry.key, SLICE_NAME, "slice") is None:
            continue
        data = where = None
        if isinstance(entry.value, Mapping):
            reader.fields(entry.value, f"the slice `{entry.key.text}`", SLICE_FIELDS)
            data = reader.text(entry.value, "data")
            where = reader.text(entry.value, "where")
        else:
            reader.wrong_kind(
                entry.value, entry.key.text, "a mapping", "write {} for every request"
            )
        found.append(RawSlice(entry.key, data, where, entry.key.span))
    return tuple(found)


def read_kernel_fields(
    reader: StructureReader, kernels: Mapping | None, name: str
) -> RawKernel | None:
    """Return one kernel of the section `kernels`."""
    node = reader.mapping(kernels, name, KERNEL_FIELDS, ("run",))
    run = reader.text(node, "run")
    if node is None or run is None:
        return None
    return RawKernel(run, reader.mapping(node, "numerics"), node)


def read_tables(reader: StructureReader, root: Mapping) -> tuple[RawTable, ...]:
    """Return the section `tables`."""
    node = reader.mapping(root, "tables")
    if node is None:
        return ()
    if not node.entries:
        reader.reporter.error(EMPTY_SECTION, "`tables` declares no table", node.span)
    found = []
    for entry in node.entries:
        if identifier(reader, entry.key, SLICE_NAME, "table") is None:
            continue
        table = reader.mapping(node, entry.key.text, TABLE_FIELDS, ("unit", "rows"))
        if table is None:
            continue
        otherwise = next((e for e in table.entries if e.key.text == "otherwise"), None)
        if otherwise is not None and _value(reader, table, "otherwise") is None:
            otherwise = None
        unit = reader.text(table, "unit", numbers=True)
        found.append(RawTable(entry.key, unit, _rows(reader, table), otherwise, entry))
    return tuple(found)


def _rows(reader: StructureReader, table: Mapping) -> tuple[RawRow, ...]:
    node = table.get("rows")
    if node is None:
        return ()
    if not isinstance(node, Sequence):
        reader.wrong_kind(node, "rows", "a list of rows", "- {where: PREDICATE, value: NUMBER}")
        return ()
    if not node.items:
        reader.reporter.error(EMPTY_SECTION, "`rows` has no row", node.span)
    found = []
    for position, item in enumerate(node.items):
        name = f"rows[{position}]"
        if not isinstance(item, Mapping):
            reader.wrong_kind(item, name, "a mapping", "{where: PREDICATE, value: NUMBER}")
            continue
        reader.fields(item, "a row", ROW_FIELDS, ROW_FIELDS)
        where, value = reader.text(item, "where"), _value(reader, item, "value")
        found.append(RawRow(where, value, item.span))
    return tuple(found)


def _value(reader: StructureReader, node: Mapping, name: str) -> Scalar | None:
    return reader.text(node, name, numbers=True)


def read_imports(
    reader: StructureReader, root: Mapping, roles: Collection[str] | None = None
) -> tuple[RawImport, ...]:
    """Return the section `imports`; `roles` are the only names that kernels may have here."""
    node = root.get("imports")
    if node is None:
        return ()
    if not isinstance(node, Sequence):
        reader.wrong_kind(node, "imports", "a list of files", "- {file: ..., slices: [...]}")
        return ()
    if not node.items:
        reader.reporter.error(EMPTY_SECTION, "`imports` names no file", node.span)
    found = []
    for position, item in enumerate(node.items):
        if not isinstance(item, Mapping):
            reader.wrong_kind(item, f"imports[{position}]", "a mapping", "{file: ..., ...}")
            continue
        reader.fields(item, "an import", IMPORT_FIELDS, ("file",))
        names = tuple(
            (entry.key.text, _names(reader, entry, roles))
            for entry in item.entries
            if entry.key.text in IMPORTED
        )
        found.append(RawImport(reader.text(item, "file"), item.get("digest"), names, item))
    return tuple(found)


def _names(
    reader: StructureReader, entry: Entry, roles: Collection[str] | None
) -> tuple[RawName, ...]:
    """Return what a field of an import names: a list, or a mapping from names used here."""
    what = entry.key.text
    kinds = {"slices": "slice", "kernels": "kernel", "tables": "table"}
    pattern = CLAUSE_ID if what == "kernels" else SLICE_NAME
    only_roles = what == "kernels" and roles is not None
    if isinstance(entry.value, Mapping):
        found = []
        if only_roles and roles is not None:
            reader.fields(entry.value, "`kernels`", roles)
        for pair in entry.value.entries:
            if only_roles and roles is not None and pair.key.text not in roles:
                continue
            theirs = reader.as_text(pair.value, pair.key.text)
            local = identifier(reader, pair.key, pattern, kinds[what])
            if theirs is not None and local is not None:
                found.append(RawName(local, theirs))
    elif only_roles:
        reader.wrong_kind(entry.value, what, "a mapping from train or infer to a kernel")
        return ()
    else:
        listed = reader.texts(entry.value, what) or ()
        found = [RawName(n, n) for n in listed if identifier(reader, n, pattern, kinds[what])]
    if not found and isinstance(entry.value, Mapping | Sequence) and _is_empty(entry.value):
        reader.reporter.error(EMPTY_SECTION, f"`{what}` imports nothing", entry.value.span)
    return tuple(found)


def _is_empty(node: Mapping | Sequence) -> bool:
    return not (node.entries if isinstance(node, Mapping) else node.items)
