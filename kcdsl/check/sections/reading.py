"""Reading fields of YAML mappings, and reporting what does not fit."""

from __future__ import annotations

import re
from collections import abc
from collections.abc import Collection
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

from kcdsl.diagnostics.codes import BAD_IDENTIFIER, MISSING_FIELD, UNKNOWN_FIELD, WRONG_KIND
from kcdsl.diagnostics.model import Fix
from kcdsl.diagnostics.report import Reporter, Suggestion, insertion, suggest
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, Sequence
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
"""Mappings and the field that people mean who write a text in their place."""


class StructureReader(NamedTuple):
    """Reads fields of mappings and reports what does not fit."""

    reporter: Reporter

    def fields(
        self,
        node: Mapping,
        what: str,
        allowed: Collection[str],
        required: Collection[str] = (),
        skeletons: Lines = MappingProxyType({}),
    ) -> None:
        """Report unknown fields, and missing ones that none of these seems to be; `skeletons` has
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
                    UNKNOWN_FIELD,
                    f"{what} has no field `{entry.key.text}`",
                    entry.key.span,
                    help,
                )
        for name in required:
            if node.get(name) is None and name not in misspelt:
                first = node.entries[0].key.span if node.entries else node.span
                line, order = skeletons.get(name), list(allowed)
                self.reporter.error(
                    MISSING_FIELD,
                    f"{what} needs the field `{name}`",
                    first,
                    _EXAMPLES.get(name),
                    fix=None
                    if line is None
                    else self._line(node, line, order[order.index(name) :]),
                )

    def _line(self, node: Mapping, line: str, later: Collection[str]) -> Fix | None:
        """Return the fix that adds a line before the first of the fields that come later; None in
        flow style. The number of the language is certain, all else a guess."""
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
        """Return the mapping under `name`; None where absent or of another kind."""
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

    def number(self, node: Node, name: str, help: str | None = None) -> Fraction | None:
        """Return the exact number that a node holds, else report it."""
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, int | Fraction) and not isinstance(value, bool):
            return Fraction(value)
        self.reporter.error(WRONG_KIND, f"`{name}` takes a number", node.span, help)
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


def identifier(
    reader: StructureReader, node: Scalar | None, pattern: re.Pattern[str], what: str
) -> Scalar | None:
    """Return a scalar that can name a contract, clause, slice …; None after an error."""
    if node is None:
        return None
    if not pattern.fullmatch(node.text) or node.text in KEYWORDS:
        reader.reporter.error(
            BAD_IDENTIFIER,
            f"`{node.text}` cannot name a {what}",
            node.span,
            "start with a letter; go on with letters, digits and `_`"
            + (", `-` or `.`" if pattern is CLAUSE_ID else ""),
        )
        return None
    return node
