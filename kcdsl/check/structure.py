"""From YAML nodes to the raw contract: which fields there are, and of which kind.

Nothing is interpreted here beyond the structure; every field keeps its node, so that later passes
can point at it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from kcdsl.check.report import Reporter, suggest
from kcdsl.diagnostics.codes import (
    BAD_IDENTIFIER,
    CONFLICTING_FIELDS,
    DUPLICATE_IDENTIFIER,
    EMPTY_SECTION,
    MISSING_FIELD,
    UNKNOWN_FIELD,
    UNSUPPORTED_VERSION,
    WRONG_KIND,
)
from kcdsl.diagnostics.model import Label
from kcdsl.source.text import Span
from kcdsl.source.yaml_nodes import Entry, Mapping, Node, Scalar, Sequence

LANGUAGE_VERSION = 1
SECTIONS = (
    "kcdsl",
    "contract",
    "version",
    "model",
    "kernels",
    "data",
    "slices",
    "clauses",
    "escalation",
    "constants",
)
_REQUIRED_SECTIONS = ("kcdsl", "contract", "version", "model", "kernels", "slices", "clauses")
_MODEL_FIELDS = ("checkpoint", "architecture", "module", "config", "tokenizer")
_EXPRESSION_FIELDS = ("require", "budget")
_RECORD_FIELDS = ("metric", "threshold", "op", "delta", "over")
_ACTION_FIELDS = ("then", "remediation", "action")
_SHARED_FIELDS = ("family", "slices", "level", "evidence", "override")
CLAUSE_FIELDS = _EXPRESSION_FIELDS + _RECORD_FIELDS + _SHARED_FIELDS + _ACTION_FIELDS
CLAUSE_ID = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
SLICE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
KEYWORDS = frozenset(
    ("forall", "exists", "in", "of", "and", "or", "not", "implies", "true", "false")
)


@dataclass(frozen=True, slots=True)
class RawKernel:
    """One kernel as written."""

    run: Scalar
    numerics: Mapping | None
    span: Span


@dataclass(frozen=True, slots=True)
class RawSlice:
    """One slice as written."""

    name: Scalar
    data: Scalar | None
    where: Scalar | None
    span: Span


@dataclass(frozen=True, slots=True)
class RawClause:
    """One clause as written, in the expression form or the record form."""

    id: Scalar
    fields: tuple[Entry, ...]
    span: Span

    def scalar(self, name: str) -> Scalar | None:
        """Return the scalar under a field name, or None."""
        node = next((e.value for e in self.fields if e.key.text == name), None)
        return node if isinstance(node, Scalar) else None

    def node(self, name: str) -> Node | None:
        """Return the node under a field name; None where absent, or reported already."""
        node = next((e.value for e in self.fields if e.key.text == name), None)
        return None if isinstance(node, Scalar) and node.broken else node


@dataclass(frozen=True, slots=True)
class RawContract:
    """A contract as written; None stands for a section that is absent or was reported."""

    name: Scalar | None
    version: Scalar | None
    model: Mapping | None
    train: RawKernel | None
    infer: RawKernel | None
    data: Scalar | None
    slices: tuple[RawSlice, ...]
    clauses: tuple[RawClause, ...]
    escalation: Mapping | None
    constants: Mapping | None
    span: Span


def read_structure(root: Node, reporter: Reporter) -> RawContract | None:
    """Return the raw contract; None where the document is not a mapping at all."""
    reader = StructureReader(reporter)
    if not isinstance(root, Mapping):
        reporter.error(
            WRONG_KIND,
            f"a contract is a mapping, not {root.kind}",
            root.span,
            "start with kcdsl: 1",
        )
        return None
    version = root.get("kcdsl")
    if isinstance(version, Scalar) and version.value != LANGUAGE_VERSION:
        reporter.error(
            UNSUPPORTED_VERSION,
            f"language version {version.text!r} is not supported",
            version.span,
            f"this release reads kcdsl: {LANGUAGE_VERSION}",
        )
    reader.fields(root, "a contract", SECTIONS, _REQUIRED_SECTIONS)
    kernels = reader.mapping(root, "kernels", ("train", "infer"), ("train", "infer"))
    model = reader.mapping(root, "model", _MODEL_FIELDS, ("checkpoint",))
    return RawContract(
        name=_identifier(reader, reader.text(root, "contract"), CLAUSE_ID, "contract"),
        version=reader.text(root, "version", numbers=True),
        model=model,
        train=_kernel(reader, kernels, "train"),
        infer=_kernel(reader, kernels, "infer"),
        data=reader.text(root, "data"),
        slices=_slices(reader, root),
        clauses=_clauses(reader, root),
        escalation=reader.mapping(root, "escalation"),
        constants=reader.mapping(root, "constants"),
        span=root.span,
    )


@dataclass(frozen=True, slots=True)
class StructureReader:
    """Reads fields of mappings and reports what does not fit."""

    reporter: Reporter

    def fields(
        self, node: Mapping, what: str, allowed: Collection[str], required: Collection[str] = ()
    ) -> None:
        """Report unknown and missing fields of a mapping."""
        for entry in node.entries:
            if entry.key.text not in allowed:
                self.reporter.error(
                    UNKNOWN_FIELD,
                    f"{what} has no field `{entry.key.text}`",
                    entry.key.span,
                    suggest(entry.key.text, allowed),
                )
        for name in required:
            if node.get(name) is None:
                first = node.entries[0].key.span if node.entries else node.span
                self.reporter.error(MISSING_FIELD, f"{what} needs the field `{name}`", first)

    def mapping(
        self,
        parent: Mapping | None,
        name: str,
        allowed: Collection[str] | None = None,
        required: Collection[str] = (),
    ) -> Mapping | None:
        """Return the mapping under `name`; None where absent or of another kind."""
        node = parent.get(name) if parent is not None else None
        if node is None:
            return None
        if not isinstance(node, Mapping):
            self.wrong_kind(node, name, "a mapping")
            return None
        if allowed is not None:
            self.fields(node, f"`{name}`", allowed, required)
        return node

    def text(self, parent: Mapping | None, name: str, numbers: bool = False) -> Scalar | None:
        """Return the text under `name` (a number too, if `numbers`), None where it is not one."""
        node = parent.get(name) if parent is not None else None
        return None if node is None else self.as_text(node, name, numbers)

    def as_text(self, node: Node, name: str, numbers: bool = False) -> Scalar | None:
        """Return the node if it is a text, else report it."""
        if isinstance(node, Scalar):
            if node.broken:
                return None
            if isinstance(node.value, str) and node.text.strip():
                return node
            if numbers and not isinstance(node.value, bool) and node.kind == "a number":
                return node
        self.wrong_kind(node, name, "a text")
        return None

    def wrong_kind(self, node: Node, name: str, wanted: str, help: str | None = None) -> None:
        """Report that a field holds another kind of node than it takes."""
        if isinstance(node, Scalar) and node.broken:
            return
        found = node.kind if not (isinstance(node, Scalar) and node.text == "") else "empty"
        self.reporter.error(WRONG_KIND, f"`{name}` takes {wanted} and is {found}", node.span, help)

    def texts(self, node: Node, name: str) -> tuple[Scalar, ...] | None:
        """Return a list of texts; a single text counts as a list of one."""
        if isinstance(node, Scalar):
            only = self.as_text(node, name)
            return None if only is None else (only,)
        if not isinstance(node, Sequence):
            self.wrong_kind(node, name, "a list of names")
            return None
        items = [self.as_text(item, f"{name}[{i}]") for i, item in enumerate(node.items)]
        return None if None in items else tuple(item for item in items if item is not None)


def _identifier(
    reader: StructureReader, node: Scalar | None, pattern: re.Pattern[str], what: str
) -> Scalar | None:
    if node is None:
        return None
    if not pattern.fullmatch(node.text) or node.text in KEYWORDS:
        reader.reporter.error(
            BAD_IDENTIFIER,
            f"`{node.text}` cannot name a {what}",
            node.span,
            "start with a letter; go on with letters, digits and `_`"
            + ("" if what == "slice" else ", `-` or `.`"),
        )
        return None
    return node


def _kernel(reader: StructureReader, kernels: Mapping | None, name: str) -> RawKernel | None:
    node = reader.mapping(kernels, name, ("run", "numerics"), ("run",))
    run = reader.text(node, "run")
    if node is None or run is None:
        return None
    return RawKernel(run, reader.mapping(node, "numerics"), node.span)


def _slices(reader: StructureReader, root: Mapping) -> tuple[RawSlice, ...]:
    node = reader.mapping(root, "slices")
    if node is None:
        return ()
    if not node.entries:
        reader.reporter.error(EMPTY_SECTION, "`slices` declares no slice", node.span, "all: {}")
    found = []
    for entry in node.entries:
        if _identifier(reader, entry.key, SLICE_NAME, "slice") is None:
            continue
        data = where = None
        if isinstance(entry.value, Mapping):
            reader.fields(entry.value, f"the slice `{entry.key.text}`", ("data", "where"))
            data = reader.text(entry.value, "data")
            where = reader.text(entry.value, "where")
        else:
            reader.wrong_kind(
                entry.value, entry.key.text, "a mapping", "write {} for every request"
            )
        found.append(RawSlice(entry.key, data, where, entry.key.span))
    return tuple(found)


def _clauses(reader: StructureReader, root: Mapping) -> tuple[RawClause, ...]:
    node = root.get("clauses")
    if node is None:
        return ()
    found: list[RawClause | None] = []
    if isinstance(node, Mapping):
        found = [_clause(reader, entry.key, entry.value) for entry in node.entries]
    elif isinstance(node, Sequence):
        for item in node.items:
            found.extend(_listed(reader, item))
    else:
        reader.wrong_kind(node, "clauses", "a mapping from identifiers, or a list of records")
        return ()
    if not found:
        reader.reporter.error(EMPTY_SECTION, "`clauses` requires nothing", node.span)
    clauses = tuple(clause for clause in found if clause is not None)
    seen: dict[str, Span] = {}
    for clause in clauses:
        if clause.id.text in seen:
            reader.reporter.error(
                DUPLICATE_IDENTIFIER,
                f"two clauses are called `{clause.id.text}`",
                clause.id.span,
                labels=(Label(seen[clause.id.text], "first here"),),
            )
        seen.setdefault(clause.id.text, clause.id.span)
    return clauses


def _listed(reader: StructureReader, item: Node) -> list[RawClause | None]:
    """An item of the list form: a record with `id`, or one or more `ID: body` pairs."""
    if not isinstance(item, Mapping):
        reader.wrong_kind(item, "clauses", "records with `id`, or `ID: {...}`")
        return []
    id_node = item.get("id")
    if id_node is not None:
        key = reader.as_text(id_node, "id")
        return [] if key is None else [_clause(reader, key, item)]
    if item.entries and all(isinstance(entry.value, Mapping) for entry in item.entries):
        return [_clause(reader, entry.key, entry.value) for entry in item.entries]
    first = item.entries[0].key.span if item.entries else item.span
    reader.reporter.error(MISSING_FIELD, "a clause record needs the field `id`", first)
    return []


def _clause(reader: StructureReader, key: Scalar, body: Node) -> RawClause | None:
    if _identifier(reader, key, CLAUSE_ID, "clause") is None:
        return None
    what = f"the clause `{key.text}`"
    if not isinstance(body, Mapping):
        reader.wrong_kind(body, key.text, "a mapping", "{require: ..., level: L1}")
        return None
    known = (*CLAUSE_FIELDS, "id")
    reader.fields(body, what, known, ("level",))
    for group, partner in ((_RECORD_FIELDS[:1], "require"), (("delta", "over"), "budget")):
        clash = next((e for e in body.entries if e.key.text in group), None)
        other = next((e for e in body.entries if e.key.text == partner), None)
        if clash is not None and other is not None:
            reader.reporter.error(
                CONFLICTING_FIELDS,
                f"{what} has `{partner}` and `{clash.key.text}`, which say the same thing",
                clash.key.span,
                "keep one of them",
                (Label(other.key.span, "here too"),),
            )
    actions = [entry for entry in body.entries if entry.key.text in _ACTION_FIELDS]
    if len(actions) > 1:
        reader.reporter.error(
            CONFLICTING_FIELDS,
            f"{what} names its action twice",
            actions[1].key.span,
            "keep `then`",
            (Label(actions[0].key.span, "here too"),),
        )
    if body.get("require") is None and body.get("metric") is None:
        reader.reporter.error(
            MISSING_FIELD,
            f"{what} requires nothing",
            key.span,
            "add `require: EXPRESSION`, or `metric` and `threshold`",
        )
    return RawClause(key, body.entries, key.span)
