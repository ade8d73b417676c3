"""Structure of the raw contract: the fields of YAML mappings and their kinds.

Values are not interpreted here; every field keeps its node, so that later passes can report its
span.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Collection
from typing import NamedTuple

from kcdsl.check.sections.fields import (
    CLAUSE_ID,
    PAIR,
    ROLES,
    RawImport,
    RawKernel,
    RawSlice,
    RawTable,
    StructureReader,
    identifier,
    read_imports,
    read_kernel_fields,
    read_slices,
    read_tables,
)
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Fix, Label
from kcdsl.diagnostics.report import Reporter, nearest, replacement
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.removal import without
from kcdsl.source.yaml_nodes import Mapping, MappingEntry, Node, Scalar, SequenceNode

LANGUAGE_VERSION = 1
SECTIONS = (
    "kcdsl",
    "contract",
    "version",
    "model",
    "kernels",
    "data",
    "imports",
    "slices",
    "tables",
    "clauses",
    "escalation",
    "constants",
)
LIBRARY_SECTIONS = (
    "kcdsl",
    "library",
    "version",
    "data",
    "imports",
    "slices",
    "kernels",
    "tables",
)
_REQUIRED_SECTIONS = ("kcdsl", "contract", "version", "model", "kernels", "slices", "clauses")
_SKELETONS = {
    "kcdsl": f"kcdsl: {LANGUAGE_VERSION}",
    "contract": "contract: unnamed",
    "version": "version: 0.1.0",
    "model": "model: {checkpoint: model.safetensors, architecture: llama}",
    "kernels": "kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}",
    "slices": "slices: {all: {}}",
}
"""The text that a fix writes for a missing section; no clause can be guessed."""
MODEL_FIELDS = ("checkpoint", "architecture", "module", "onnx", "blocks", "config", "tokenizer")
_EXPRESSION_FIELDS = ("require", "budget")
_RECORD_FIELDS = ("metric", "threshold", "op", "delta", "over")
ACTION_FIELDS = ("then", "remediation", "action")
_SHARED_FIELDS = ("family", "slices", "level", "evidence", "override", "holdout")
CLAUSE_FIELDS = _EXPRESSION_FIELDS + _RECORD_FIELDS + _SHARED_FIELDS + ACTION_FIELDS


class RawClause(NamedTuple):
    """One clause as written, in the expression form or the record form."""

    id: Scalar
    fields: tuple[MappingEntry, ...]
    span: Span
    body: Mapping | None = None

    def scalar(self, name: str) -> Scalar | None:
        """Return the scalar under a field name, or None."""
        node = next((e.value for e in self.fields if e.key.text == name), None)
        return node if isinstance(node, Scalar) else None

    def without(self, source: SourceFile, names: Collection[str]) -> Fix | None:
        """Return the fix that removes fields; None where that is impossible."""
        return without(source, self.body, fields_named(self.fields, names))

    def node(self, name: str) -> Node | None:
        """Return the node under a field name; None where it is missing or already reported."""
        node = next((e.value for e in self.fields if e.key.text == name), None)
        return None if isinstance(node, Scalar) and node.broken else node


class RawContract(NamedTuple):
    """A contract as written; None for a section that is missing or was reported."""

    name: Scalar | None
    version: Scalar | None
    model: Mapping | None
    kernels: abc.Mapping[str, RawKernel]
    """The well-formed kernels, by role."""
    data: Scalar | None
    slices: tuple[RawSlice, ...]
    clauses: tuple[RawClause, ...]
    escalation: Mapping | None
    constants: Mapping | None
    span: Span
    tables: tuple[RawTable, ...] = ()
    imports: tuple[RawImport, ...] = ()


class RawLibrary(NamedTuple):
    """A library as written."""

    name: Scalar | None
    version: Scalar | None
    data: Scalar | None
    slices: tuple[RawSlice, ...]
    kernels: tuple[tuple[Scalar, RawKernel], ...]
    tables: tuple[RawTable, ...]
    imports: tuple[RawImport, ...]
    span: Span


def fields_named(entries: tuple[MappingEntry, ...], names: Collection[str]) -> list[int]:
    """Return the indices of the entries that have one of the names."""
    return [index for index, entry in enumerate(entries) if entry.key.text in names]


def is_library(root: Node | None) -> bool:
    """Return whether a document declares itself a library, even if the word is misspelt."""
    if not isinstance(root, Mapping) or root.get("contract") is not None:
        return False
    if root.get("library") is not None:
        return True
    unknown = (e.key.text for e in root.entries if e.key.text not in SECTIONS)
    return any(nearest(name, ("contract", "library")) == "library" for name in unknown)


def stored_schema(root: Node | None) -> Scalar | None:
    """Return the schema of a document that kcdsl wrote, such as a compiled contract; None for a
    contract, which names a version of the language."""
    if not isinstance(root, Mapping) or root.get("kcdsl") is not None:
        return None
    schema = root.get("schema")
    if isinstance(schema, Scalar) and schema.text.startswith("kcdsl."):
        return schema
    return None


def read_library(root: Mapping, reporter: Reporter) -> RawLibrary:
    """Return the raw library."""
    reader = StructureReader(reporter)
    _check_version(root, reporter)
    reader.fields(root, "a library", LIBRARY_SECTIONS, ("kcdsl", "library", "version"))
    section = reader.mapping(root, "kernels")
    kernels = []
    for entry in section.entries if section is not None else ():
        kernel = read_kernel_fields(reader, section, entry.key.text)
        if identifier(reader, entry.key, CLAUSE_ID, "kernel") is not None and kernel is not None:
            kernels.append((entry.key, kernel))
    return RawLibrary(
        name=identifier(reader, reader.text(root, "library"), CLAUSE_ID, "library"),
        version=reader.text(root, "version", numbers=True),
        data=reader.text(root, "data"),
        slices=read_slices(reader, root),
        kernels=tuple(kernels),
        tables=read_tables(reader, root),
        imports=read_imports(reader, root),
        span=root.span,
    )


def read_structure(root: Node, reporter: Reporter) -> RawContract | None:
    """Return the raw contract; None where the document is not a mapping at all."""
    reader = StructureReader(reporter)
    if not isinstance(root, Mapping):
        reporter.error(
            codes.WRONG_KIND,
            f"a contract is a mapping, not {root.kind}",
            root.span,
            "start with kcdsl: 1",
        )
        return None
    _check_version(root, reporter)
    imports = read_imports(reader, root, ROLES)
    roles = {name.local.text for item in imports for name in item.brought("kernels")}
    own = tuple(role for role in PAIR if role not in roles)
    imported = {"slices"} & {what for item in imports for what, _ in item.names}
    imported |= set() if own else {"kernels"}
    required = [name for name in _REQUIRED_SECTIONS if name not in imported]
    reader.fields(root, "a contract", SECTIONS, required, _SKELETONS)
    kernels = reader.mapping(root, "kernels", ROLES, own)
    found = [(role, read_kernel_fields(reader, kernels, role)) for role in ROLES]
    written = root.get("model")
    in_graph = isinstance(written, Mapping) and written.get("onnx") is not None
    model = reader.mapping(root, "model", MODEL_FIELDS, () if in_graph else ("checkpoint",))
    return RawContract(
        name=identifier(reader, reader.text(root, "contract"), CLAUSE_ID, "contract"),
        version=reader.text(root, "version", numbers=True),
        model=model,
        kernels={role: kernel for role, kernel in found if kernel is not None},
        data=reader.text(root, "data"),
        slices=read_slices(reader, root),
        clauses=_clauses(reader, root),
        escalation=reader.mapping(root, "escalation"),
        constants=reader.mapping(root, "constants"),
        span=root.span,
        tables=read_tables(reader, root),
        imports=imports,
    )


def _check_version(root: Mapping, reporter: Reporter) -> None:
    version = root.get("kcdsl")
    value = version.value if isinstance(version, Scalar) else None
    if version is not None and (value is True or value != LANGUAGE_VERSION):
        text = version.text if isinstance(version, Scalar) else version.kind
        quoted = value == str(LANGUAGE_VERSION)
        reporter.error(
            codes.UNSUPPORTED_VERSION,
            f"language version {text!r} is not supported",
            version.span,
            f"this release reads kcdsl: {LANGUAGE_VERSION}"
            + (", a number without quotation marks" if quoted else ""),
            fix=replacement(version.span, text, safe=True) if quoted else None,
        )


def _clauses(reader: StructureReader, root: Mapping) -> tuple[RawClause, ...]:
    node = root.get("clauses")
    if node is None:
        return ()
    found: list[RawClause | None] = []
    if isinstance(node, Mapping):
        found = [_clause(reader, entry.key, entry.value) for entry in node.entries]
    elif isinstance(node, SequenceNode):
        for item in node.items:
            found.extend(_listed(reader, item))
    else:
        reader.wrong_kind(node, "clauses", "a mapping from identifiers, or a list of records")
        return ()
    if not found:
        reader.reporter.error(
            codes.EMPTY_SECTION,
            "`clauses` requires nothing",
            node.span,
            help="add a clause, such as `N-KL: {require: p99(kl) <= 0.02, level: L2}`",
        )
    clauses = tuple(clause for clause in found if clause is not None)
    seen: dict[str, Span] = {}
    for clause in clauses:
        if clause.id.text in seen:
            reader.reporter.error(
                codes.DUPLICATE_IDENTIFIER,
                f"two clauses are called `{clause.id.text}`",
                clause.id.span,
                labels=(Label(seen[clause.id.text], "first here"),),
                help="rename one of them",
            )
        seen.setdefault(clause.id.text, clause.id.span)
    return clauses


def _listed(reader: StructureReader, item: Node) -> list[RawClause | None]:
    """Return the clauses of a list item: a record with `id`, or one or more `ID: body` pairs."""
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
    reader.reporter.error(
        codes.MISSING_FIELD,
        "a clause record needs the field `id`",
        first,
        help="add `id: N-KL`, or another name of the clause",
    )
    return []


def _clause(reader: StructureReader, key: Scalar, body: Node) -> RawClause | None:
    if identifier(reader, key, CLAUSE_ID, "clause") is None:
        return None
    what = f"the clause `{key.text}`"
    if not isinstance(body, Mapping):
        reader.wrong_kind(body, key.text, "a mapping", "{require: ..., level: L1}")
        return None
    known = (*CLAUSE_FIELDS, "id")
    reader.fields(body, what, known, ("level",))
    stated = body.get("id")
    if stated is not None and (not isinstance(stated, Scalar) or stated.text != key.text):
        reader.reporter.error(
            codes.CONFLICTING_FIELDS,
            f"{what} has another name in `id`",
            stated.span,
            "keep one of the names",
            (Label(key.span, "here too"),),
        )
    for group, partner in ((_RECORD_FIELDS[:3], "require"), (_RECORD_FIELDS[3:], "budget")):
        clash = next((e for e in body.entries if e.key.text in group), None)
        other = next((e for e in body.entries if e.key.text == partner), None)
        if clash is not None and other is not None:
            reader.reporter.error(
                codes.CONFLICTING_FIELDS,
                f"{what} has `{partner}` and `{clash.key.text}`, which say the same thing",
                clash.key.span,
                "keep one of them",
                (Label(other.key.span, "here too"),),
            )
    actions = [entry for entry in body.entries if entry.key.text in ACTION_FIELDS]
    if len(actions) > 1:
        reader.reporter.error(
            codes.CONFLICTING_FIELDS,
            f"{what} names its action twice",
            actions[1].key.span,
            "keep `then`",
            (Label(actions[0].key.span, "here too"),),
            fix=_one_action(reader.reporter.source, body, actions),
        )
    _require_something(reader, key, body)
    return RawClause(key, body.entries, key.span, body)


def _one_action(source: SourceFile, body: Mapping, actions: list[MappingEntry]) -> Fix | None:
    """Return the fix that keeps one action; safe where both are equal."""
    kept = next((entry for entry in actions if entry.key.text == "then"), actions[0])
    texts = {e.value.text if isinstance(e.value, Scalar) else "" for e in actions}
    others = [body.entries.index(entry) for entry in actions if entry is not kept]
    return without(source, body, others, safe=len(texts) == 1)


def _require_something(reader: StructureReader, key: Scalar, body: Mapping) -> None:
    strange = [e.key.text for e in body.entries if e.key.text not in (*CLAUSE_FIELDS, "id")]
    if {nearest(name, CLAUSE_FIELDS) for name in strange} & {"require", "metric"}:
        return  # already reported as misspelt
    if body.get("require") is None and body.get("metric") is None:
        reader.reporter.error(
            codes.MISSING_FIELD,
            f"the clause `{key.text}` requires nothing",
            key.span,
            "add `require: EXPRESSION`, or `metric` and `threshold`",
        )
