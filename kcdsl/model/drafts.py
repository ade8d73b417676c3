"""Graphs under construction: the operations of `graph.py` plus a few that rewrites remove.

The extra operations are `mask` (x, bool constant: -inf where False), `power` (attr exponent),
`sqrt`, `rsqrt`, `reciprocal`, `sigmoid`, `quotient` (x / y), `mean` and `variance` (last dimension,
kept). A draft that still has one of them cannot become a block graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.graph import BlockGraph, Node, array_digest

OPERATIONS = frozenset({
    "input", "param", "constant", "embedding", "linear", "matmul", "add", "sub", "mul", "scale",
    "divide", "shift", "neg", "relu", "tanh", "silu", "gelu", "reshape", "expand", "permute",
    "slice", "concat", "softmax", "rms_norm", "layer_norm", "rope",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Draft:
    """A node before it has its final name; `origin` says which call of which module it is from."""

    name: str
    op: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    role: str = ""
    origin: str = ""


Rule = Callable[["Drafts", Draft], "Draft | None"]


@dataclass(slots=True)
class Drafts:
    """The nodes in order, by name, with the constants they refer to and the name of the output."""

    nodes: dict[str, Draft] = field(default_factory=dict)
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
    ) -> str:
        """Append a node and return its name."""
        name = f"%{len(self.nodes)}"
        self.nodes[name] = Draft(name, op, inputs, shape, attrs or {}, origin=origin)
        return name

    def param(self, key: str, shape: tuple[int, ...]) -> str:
        """Return the node of a parameter, made on its first use."""
        for node in self.nodes.values():
            if node.op == "param" and node.attrs["key"] == key:
                return node.name
        return self.add("param", (), shape, {"key": key})

    def constant(self, array: NDArray[Any]) -> str:
        """Return the node of a constant; equal arrays share one."""
        digest = array_digest(array)
        if digest not in self._by_digest:
            name = self.add("constant", (), array.shape, {})
            self.constants[name] = array
            self._by_digest[digest] = name
        return self._by_digest[digest]

    def value(self, name: str) -> NDArray[Any] | None:
        """Return the array of a constant node, None for any other node."""
        return self.constants.get(name)

    def users(self, name: str) -> list[Draft]:
        """Return the nodes that read a node."""
        return [n for n in self.nodes.values() if name in n.inputs]

    def rewrite(self, rule: Rule) -> None:
        """Offer every node, in order, to a rule that may replace it under the same name.

        A replacement reads only ancestors of the node and constants, so the order stays valid.
        """
        for name in list(self.nodes):
            new = rule(self, self.nodes[name])
            if new is not None:
                self.nodes[name] = replace(new, name=name)
        constants = [n for n in self.nodes if self.nodes[n].op in ("constant", "param", "input")]
        rest = [n for n in self.nodes if n not in set(constants)]
        self.nodes = {n: self.nodes[n] for n in (*constants, *rest)}


def remove_dead(drafts: Drafts) -> None:
    """Remove every node that the output does not depend on."""
    alive: set[str] = set()
    for node in reversed(list(drafts.nodes.values())):
        if node.name == drafts.output or node.name in alive:
            alive |= {node.name, *node.inputs}
    drafts.nodes = {n: d for n, d in drafts.nodes.items() if n in alive}


def finish(drafts: Drafts, block: str, input_shape: tuple[int, ...] | None) -> BlockGraph:
    """Return the block graph with its final names. Refuse an operation that it cannot hold."""
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    nodes: list[Node] = []
    constants: dict[str, NDArray[Any]] = {}
    for draft in drafts.nodes.values():
        if draft.op not in OPERATIONS:
            raise unsupported(draft.origin, f"as part of {draft.op!r}, outside a known pattern")
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
        nodes.append(Node(name, draft.op, inputs, draft.shape, attrs, draft.role))
    return BlockGraph(block, tuple(nodes), names[drafts.output], constants, input_shape)


def unsupported(origin: str, detail: str) -> Exception:
    """Build the refusal of an operation; `origin` names the aten operation and the module."""
    allowed = sorted(OPERATIONS - {"input", "param", "constant"})
    return refuse(
        codes.OPERATION_UNSUPPORTED,
        f"{origin} is not supported in a block graph" + (f" ({detail})" if detail else ""),
        help="write the module with operations of this list: " + ", ".join(allowed),
    )


def as_constant(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array as a constant of a graph: bool stays, numbers become exact float32.

    Raises ValueError where a number is no finite float32.
    """
    if array.dtype == np.bool_:
        return np.ascontiguousarray(array)
    if not np.isfinite(array).all():
        raise ValueError("a constant that is not finite")
    narrow = np.ascontiguousarray(array, dtype=np.float32)
    if not np.array_equal(narrow.astype(array.dtype), array):
        raise ValueError("a constant is not exactly representable in float32")
    return narrow
