"""Graphs under construction: the operations of `graph.py` plus a few that rewrites remove.

The extra operations are `mask` (x, bool constant: -inf where False), `power` (attr exponent),
`sqrt`, `rsqrt`, `reciprocal`, `sigmoid`, `quotient` (x / y), `mean` and `variance` (last dimension,
kept). A draft that still has one of them cannot become a block graph. `format` is that of
`graph.py`, or WIDE.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.graph import BlockGraph, Node, array_digest
from kcdsl.model.lowering.evaluate import MEANING, OWN, WIDE
from kcdsl.model.numerics import UNROUNDED as STORE_NOTHING

LEAVES = frozenset({"input", "param", "constant"})
OPERATIONS = LEAVES | MEANING.keys() - {"cache"}
"""Operations of a lowered block graph."""
UNROUNDED = STORE_NOTHING | {"input", "param", "mask"}
"""Operations that store nothing: in a block graph their format is not read."""


@dataclass(frozen=True, slots=True)
class DraftNode:
    """A node before it has its final name; `origin` names the call and the module it comes from."""

    name: str
    op: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    role: str = ""
    origin: str = ""
    format: str = OWN


Rule = Callable[["Drafts", DraftNode], "DraftNode | None"]


@dataclass(slots=True)
class Drafts:
    """The nodes in order, by name, with the constants they refer to and the name of the output.

    `formats` are those in which the program was traced.
    """

    formats: tuple[str, ...] = ("float32",)
    nodes: dict[str, DraftNode] = field(default_factory=dict)
    constants: dict[str, NDArray[Any]] = field(default_factory=dict)
    output: str = ""
    _by_digest: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        op: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        attrs: Mapping[str, Any] | None = None,
        origin: str = "",
        format: str = OWN,
        role: str = "",
    ) -> str:
        """Append a node and return its name."""
        name = f"%{len(self.nodes)}"
        self.nodes[name] = DraftNode(name, op, inputs, shape, attrs or {}, role, origin, format)
        return name

    def param(self, key: str, shape: tuple[int, ...], transposed: bool = False) -> str:
        """Return the node of a parameter, made on its first use."""
        for node in self.nodes.values():
            if node.op == "param" and node.attrs["key"] == key:
                return node.name
        attrs = {"key": key, "transposed": True} if transposed else {"key": key}
        return self.add("param", (), shape, attrs)

    def constant(self, array: NDArray[Any], format: str = OWN) -> str:
        """Return the node of a constant; equal arrays of one format share one."""
        key = f"{array_digest(array)}|{format}"
        if key not in self._by_digest:
            name = self.add("constant", (), array.shape, {}, format=format)
            self.constants[name] = array
            self._by_digest[key] = name
        return self._by_digest[key]

    def value(self, name: str) -> NDArray[Any] | None:
        """Return the array of a constant node, None for any other node."""
        return self.constants.get(name)

    def users(self, name: str) -> list[DraftNode]:
        """Return the nodes that read a node."""
        return [n for n in self.nodes.values() if name in n.inputs]

    def rewrite(self, rule: Rule) -> None:
        """Apply a rule to every node, in order; it may return a replacement of the same name.

        A replacement reads only ancestors of the node and constants, so the order stays valid.
        """
        for name in list(self.nodes):
            new = rule(self, self.nodes[name])
            if new is not None:
                self.nodes[name] = replace(new, name=name)
        leaves = [n for n in self.nodes if self.nodes[n].op in LEAVES]
        rest = [n for n in self.nodes if self.nodes[n].op not in LEAVES]
        self.nodes = {n: self.nodes[n] for n in (*leaves, *rest)}

    @property
    def halves(self) -> bool:
        """Return whether the program was traced in a half-precision format."""
        return not {"float16", "bfloat16"}.isdisjoint(self.formats)

    def is_inside(self, format: str) -> bool:
        """Return whether a format is that of intermediate results inside an operation: float32, or
        float64 in kernels of float64."""
        if format == WIDE:
            return True
        if format == "float32":
            return "float64" not in self.formats
        return format == OWN and not self.halves

    def before_casts(self, name: str) -> str:
        """Return the node before all exact casts of this node."""
        node = self.nodes[name]
        while node.op == "cast":
            source = self.nodes[node.inputs[0]]
            if not self.is_wider(node.format, source.format):
                break
            node = source
        return node.name

    def is_wider(self, format: str, than: str) -> bool:
        """Return whether a format holds every number of another, in every kernel."""
        if format == than:
            return True
        if format == WIDE:
            return than != "float64"
        if format == "float64":
            return True
        if format == "float32":
            return than in ("float16", "bfloat16") or (
                than in (OWN, WIDE) and "float64" not in self.formats
            )
        return False


def remove_dead(drafts: Drafts) -> None:
    """Remove every node that the output does not depend on."""
    alive: set[str] = set()
    for node in reversed(list(drafts.nodes.values())):
        if node.name == drafts.output or node.name in alive:
            alive |= {node.name, *node.inputs}
    drafts.nodes = {n: d for n, d in drafts.nodes.items() if n in alive}


def finish(drafts: Drafts, block: str, input_shape: tuple[int, ...] | None) -> BlockGraph:
    """Return the block graph with its final names. Refuse an operation that it does not have."""
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    nodes: list[Node] = []
    constants: dict[str, NDArray[Any]] = {}
    for draft in drafts.nodes.values():
        if draft.op not in OPERATIONS:
            raise unsupported(draft.origin, f"as part of {draft.op!r}, outside a known pattern")
        format = OWN if draft.op in UNROUNDED else draft.format
        if format == WIDE:
            raise unsupported(
                draft.origin, "a result stored in float32, and in float64 where the module is that"
            )
        number = counts.get(draft.op, 0)
        counts[draft.op] = number + 1
        attrs = dict(draft.attrs)
        match draft.op:
            case "input":
                name = "input"
            case "param":
                name = f"param:{attrs['key']}"
            case "constant":
                name = f"constant:{number}"
                attrs["key"] = name
                constants[name] = drafts.constants[draft.name]
            case _:
                name = f"{draft.op}:{number}"
        names[draft.name] = name
        inputs = tuple(names[i] for i in draft.inputs)
        nodes.append(Node(name, draft.op, inputs, draft.shape, attrs, draft.role, format))
    return BlockGraph(block, tuple(nodes), names[drafts.output], constants, input_shape)


def unsupported(origin: str, detail: str) -> Exception:
    """Build the refusal of an operation; `origin` names the aten operation and the module."""
    allowed = sorted(OPERATIONS - {"input", "param", "constant"})
    return refuse(
        codes.OPERATION_UNSUPPORTED,
        f"{origin} is not supported in a block graph" + (f" ({detail})" if detail else ""),
        help="write the module with operations of this list: " + ", ".join(allowed),
    )


def as_constant(value: Tensor) -> NDArray[Any]:
    """Return a tensor as a constant of a graph: bool stays, numbers become exact float32.

    Raises ValueError where a number is no finite float32.
    """
    if value.dtype == torch.bool:
        return np.ascontiguousarray(value.numpy())
    if not bool(torch.isfinite(value).all()):
        raise ValueError("a constant that is not finite")
    narrow = value.to(torch.float32)
    if not torch.equal(narrow.to(value.dtype), value):
        raise ValueError("a constant is not exactly representable in float32")
    return np.ascontiguousarray(narrow.numpy())
