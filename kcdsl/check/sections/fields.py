"""Fields of YAML mappings, and the sections that contracts and libraries share."""

from __future__ import annotations

import re
from collections import abc
from collections.abc import Collection, Iterator
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Fix
from kcdsl.diagnostics.report import Reporter, Suggestion, insertion, suggest
from kcdsl.diagnostics.spans import Span
from kcdsl.source.yaml_nodes import Mapping, MappingEntry, Node, Scalar, SequenceNode
from kcdsl_grammar.expression_table import KEYWORDS

Lines = abc.Mapping[str, str]

CLAUSE_ID = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
SLICE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXAMPLES = {
    "level": "add `level: L1`, `level: L2` or `level: L3`",
    "run": "add the adapter, such as `run: torch.sdpa`",
    "train": "add the kernel that trained the model, such as `train: {run: torch.eager}`",
    "infer": "add the kernel that answers requests, such as `infer: {run: torch.sdpa}`",
    "unit": "add the unit of the values, such as `unit: nats`",
    "values": "add `values: raw` or `values: processed`",
    "rows": "add `rows: [{where: PREDICATE, value: NUMBER}]`",
}
"""The help for a missing field that no fix can add."""

_FIRST_FIELDS = {
    "model": "checkpoint",
    "train": "run",
    "infer": "run",
    "guard": "run",
    "fallback": "run",
    "numerics": "preset",
    "weights": "format",
    "activations": "format",
    "kv_cache": "format",
}
"""Mappings and the field that is probably meant by a text in their place."""


class StructureReader(NamedTuple):
    """Reads fields of mappings and reports errors."""

    reporter: Reporter

    def fields(
        self,
        node: Mapping,
        what: str,
        allowed: Collection[str],
        required: Collection[str] = (),
        skeletons: Lines = MappingProxyType({}),
    ) -> None:
        """Report unknown fields, and missing ones that are not probably misspelt; `skeletons` has
        the lines that fixes add."""
        misspelt: set[str] = set()
        for entry in node.entries:
            if entry.key.text not in allowed:
                help = suggest(entry.key.text, allowed)
                if isinstance(help, Suggestion):
                    misspelt.add(help.nearest)
                    if node.get(help.nearest) is not None:
                        help = f"{help} It is there already"
                self.reporter.error(
                    codes.UNKNOWN_FIELD,
                    f"{what} has no field `{entry.key.text}`",
                    entry.key.span,
                    help,
                )
        for name in required:
            if node.get(name) is None and name not in misspelt:
                first = node.entries[0].key.span if node.entries else node.span
                line, order = skeletons.get(name), list(allowed)
                self.reporter.error(
                    codes.MISSING_FIELD,
                    f"{what} needs the field `{name}`",
                    first,
                    _EXAMPLES.get(name),
                    fix=None
                    if line is None
                    else self._line(node, line, order[order.index(name) :]),
                )

    def _line(self, node: Mapping, line: str, later: Collection[str]) -> Fix | None:
        """Return the fix that adds a line before the first of the later fields; None in flow style.
        It is safe only for the version of the language; all other lines are guesses."""
        source = self.reporter.source
        following = next((e.key.span.start for e in node.entries if e.key.text in later), None)
        if following is None or source.text[node.span.start] == "{":
            return None
        indent = " " * (source.position(following).column - 1)
        return insertion(following, f"{line}\n{indent}", safe=line.startswith("kcdsl:"))

    def mapping(
        self,
        parent: Mapping | None,
        name: str,
        allowed: Collection[str] | None = None,
        required: Collection[str] = (),
    ) -> Mapping | None:
        """Return the mapping under `name`; None where it is missing or of another kind."""
        node = parent.get(name) if parent is not None else None
        if node is None:
            return None
        if not isinstance(node, Mapping):
            field = _FIRST_FIELDS.get(name)
            named = field is not None and isinstance(node, Scalar) and isinstance(node.value, str)
            help = f"write {{{field}: {node.text}}}" if named and isinstance(node, Scalar) else None
            self.wrong_kind(node, name, "a mapping", help)
            return None
        if allowed is not None:
            self.fields(node, f"`{name}`", allowed, required)
        return node

    def text(self, parent: Mapping | None, name: str, numbers: bool = False) -> Scalar | None:
        """Return the text under `name` (or a number, if `numbers`); None for other kinds."""
        node = parent.get(name) if parent is not None else None
        return None if node is None else self.as_text(node, name, numbers)

    def as_text(self, node: Node, name: str, numbers: bool = False) -> Scalar | None:
        """Return the node if it is a text; report it otherwise."""
        if isinstance(node, Scalar):
            if node.broken:
                return None
            if isinstance(node.value, str) and node.text.strip():
                return node
            if numbers and not isinstance(node.value, bool) and node.kind == "a number":
                return node
        self.wrong_kind(node, name, "a text")
        return None

    def number(self, node: Node, name: str, help: str | None = None) -> Fraction | None:
        """Return the exact number of a node; report any other node."""
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, int | Fraction) and not isinstance(value, bool):
            return Fraction(value)
        self.reporter.error(codes.WRONG_KIND, f"`{name}` takes a number", node.span, help)
        return None

    def wrong_kind(self, node: Node, name: str, wanted: str, help: str | None = None) -> None:
        """Report a field with the wrong kind of node."""
        if isinstance(node, Scalar) and node.broken:
            return
        found = node.kind if not (isinstance(node, Scalar) and node.text == "") else "empty"
        self.reporter.error(
            codes.WRONG_KIND, f"`{name}` takes {wanted} and is {found}", node.span, help
        )

    def texts(self, node: Node, name: str) -> tuple[Scalar, ...] | None:
        """Return a list of texts; a single text is a list of one."""
        if isinstance(node, Scalar):
            only = self.as_text(node, name)
            return None if only is None else (only,)
        if not isinstance(node, SequenceNode):
            self.wrong_kind(node, name, "a list of names")
            return None
        items = [self.as_text(item, f"{name}[{i}]") for i, item in enumerate(node.items)]
        return None if None in items else tuple(item for item in items if item is not None)


def identifier(
    reader: StructureReader, node: Scalar | None, pattern: re.Pattern[str], what: str
) -> Scalar | None:
    """Return a scalar that can name a contract, clause, slice …; None after an error."""
    if node is None:
        return None
    if not pattern.fullmatch(node.text) or node.text in KEYWORDS:
        reader.reporter.error(
            codes.BAD_IDENTIFIER,
            f"`{node.text}` cannot name a {what}",
            node.span,
            "start with a letter; go on with letters, digits and `_`"
            + (", `-` or `.`" if pattern is CLAUSE_ID else ""),
        )
        return None
    return node


KERNEL_FIELDS = (
    *("run", "numerics", "folder", "url", "model", "key", "tokens", "concurrency", "logprobs"),
    *("format", "columns", "file", "recomputed", "checkpoint"),
)
SLICE_FIELDS = ("data", "where")
TABLE_FIELDS = ("unit", "rows", "otherwise")
ROW_FIELDS = ("where", "value")
IMPORT_FIELDS = ("file", "digest", "slices", "kernels", "tables")
IMPORTED = ("slices", "kernels", "tables")
"""The kinds of imported parts."""
PAIR = ("train", "infer")
"""The kernels that a contract compares; both are required."""
ROLES = (*PAIR, "guard", "fallback")
"""Every kernel of a contract: the compared pair, and the targets of actions."""


class RawKernel(NamedTuple):
    """One kernel as written; `node` is its mapping."""

    run: Scalar
    numerics: Mapping | None
    node: Mapping

    @property
    def span(self) -> Span:
        """Return the span of the whole kernel."""
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
    """One table of thresholds as written; `entry` is its index in the section `tables`."""

    name: Scalar
    unit: Scalar | None
    rows: tuple[RawRow, ...]
    otherwise: MappingEntry | None
    entry: MappingEntry

    @property
    def span(self) -> Span:
        """Return the span of its name."""
        return self.name.span


class RawName(NamedTuple):
    """One imported name: the local name, and the name in the library."""

    local: Scalar
    theirs: Scalar


class RawImport(NamedTuple):
    """One import as written; `node` is its mapping."""

    file: Scalar | None
    digest: Node | None
    names: tuple[tuple[str, tuple[RawName, ...]], ...]
    """Imported names by kind, in the order of `IMPORTED`."""
    node: Mapping

    @property
    def span(self) -> Span:
        """Return the span of the file, or of the first field."""
        if self.file is not None:
            return self.file.span
        return self.node.entries[0].key.span if self.node.entries else self.node.span

    def brought(self, what: str) -> tuple[RawName, ...]:
        """Return the imported names of one kind."""
        return dict(self.names).get(what, ())


def read_slices(reader: StructureReader, root: Mapping) -> tuple[RawSlice, ...]:
    """Return the section `slices`."""
    found = []
    for entry in _declared(reader, reader.mapping(root, "slices"), "slice", "all: {}"):
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


def _declared(
    reader: StructureReader, section: Mapping | None, what: str, help: str | None = None
) -> Iterator[MappingEntry]:
    """Yield the entries of a section with valid names; report an empty section."""
    if section is not None and not section.entries:
        message = f"`{what}s` declares no {what}"
        reader.reporter.error(codes.EMPTY_SECTION, message, section.span, help)
    for entry in section.entries if section is not None else ():
        if identifier(reader, entry.key, SLICE_NAME, what) is not None:
            yield entry


def _mappings(
    reader: StructureReader,
    parent: Mapping,
    name: str,
    form: tuple[str, str],
    empty: str,
    item_form: str,
) -> Iterator[Mapping]:
    """Yield the items of a list of mappings; `form` describes the list, with an example."""
    node = parent.get(name)
    if node is None:
        return
    if not isinstance(node, SequenceNode):
        reader.wrong_kind(node, name, f"a list of {form[0]}", form[1])
        return
    if not node.items:
        reader.reporter.error(codes.EMPTY_SECTION, f"`{name}` {empty}", node.span, help=form[1])
    for position, item in enumerate(node.items):
        if isinstance(item, Mapping):
            yield item
        else:
            reader.wrong_kind(item, f"{name}[{position}]", "a mapping", item_form)


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
    node, found = reader.mapping(root, "tables"), []
    for entry in _declared(reader, node, "table"):
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
    found, row = [], "{where: PREDICATE, value: NUMBER}"
    for item in _mappings(reader, table, "rows", ("rows", f"- {row}"), "has no row", row):
        reader.fields(item, "a row", ROW_FIELDS, ROW_FIELDS)
        where, value = reader.text(item, "where"), _value(reader, item, "value")
        found.append(RawRow(where, value, item.span))
    return tuple(found)


def _value(reader: StructureReader, node: Mapping, name: str) -> Scalar | None:
    return reader.text(node, name, numbers=True)


def read_imports(
    reader: StructureReader, root: Mapping, roles: Collection[str] | None = None
) -> tuple[RawImport, ...]:
    """Return the section `imports`; `roles` are the allowed local names of kernels."""
    found, form = [], ("files", "- {file: ..., slices: [...]}")
    for item in _mappings(reader, root, "imports", form, "names no file", "{file: ..., ...}"):
        reader.fields(item, "an import", IMPORT_FIELDS, ("file",))
        names = tuple(
            (entry.key.text, _names(reader, entry, roles))
            for entry in item.entries
            if entry.key.text in IMPORTED
        )
        found.append(RawImport(reader.text(item, "file"), item.get("digest"), names, item))
    return tuple(found)


def _names(
    reader: StructureReader, entry: MappingEntry, roles: Collection[str] | None
) -> tuple[RawName, ...]:
    """Return the names of a field of an import: a list, or a mapping from local names."""
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
    if not found and isinstance(entry.value, Mapping | SequenceNode) and _is_empty(entry.value):
        reader.reporter.error(
            codes.EMPTY_SECTION,
            f"`{what}` imports nothing",
            entry.value.span,
            help="name what is imported, or leave it out",
        )
    return tuple(found)


def _is_empty(node: Mapping | SequenceNode) -> bool:
    return not (node.entries if isinstance(node, Mapping) else node.items)
