"""Recognition of operators that exporters write as several nodes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kcdsl.model.onnx.files import Array, OnnxNode

_NEAR = 1e-6
"""Relative tolerance of the rounded constants of GELU."""


class _Graph:
    """Looks up the producer of a tensor, the number of its readers, and its value if it is
    fixed."""

    def __init__(self, nodes: Sequence[OnnxNode], tensors: Mapping[str, Array]) -> None:
        self._made = {name: node for node in nodes for name in node.outputs if name}
        self._tensors = tensors
        self._reads: dict[str, int] = {}
        for node in nodes:
            for name in node.inputs:
                self._reads[name] = self._reads.get(name, 0) + 1

    def node(self, name: str, kind: str) -> OnnxNode | None:
        """Return the node that computes a tensor if it is of this kind."""
        found = self._made.get(name)
        return found if found is not None and found.kind == kind else None

    def number(self, name: str) -> float | None:
        """Return a tensor that is one fixed number."""
        held: Any = self._tensors.get(name)
        if held is None and (node := self.node(name, "Constant")) is not None:
            held = constant(node)
        single = held is not None and held.size == 1 and held.dtype.kind == "f"
        return float(held.reshape(())) if single else None

    def is_number(self, name: str, value: float) -> bool:
        """Return whether a tensor equals this number up to the rounding of its format."""
        found = self.number(name)
        return found is not None and abs(found - value) <= _NEAR * abs(value)

    def pairs(self, name: str, kind: str) -> Iterator[tuple[str, str]]:
        """Yield the operands of a binary node, in both orders."""
        node = self.node(name, kind)
        if node is not None and len(node.inputs) == 2:
            yield node.inputs[0], node.inputs[1]
            yield node.inputs[1], node.inputs[0]

    def factors(self, name: str, *, first: bool = True) -> list[str]:
        """Return the factors of a nested product whose intermediate results nothing else reads."""
        node = self.node(name, "Mul")
        if node is None or (not first and self._reads.get(name, 0) != 1):
            return [name]
        return [f for each in node.inputs for f in self.factors(each, first=False)]


def constant(node: OnnxNode) -> Array | None:
    """Return the value of a node Constant; None for one that holds no numbers."""
    given = node.attributes
    for key, kind in (("value_float", np.float32), ("value_floats", np.float32),
                      ("value_int", np.int64), ("value_ints", np.int64)):  # fmt: skip
        if key in given:
            return np.asarray(given[key], dtype=kind)
    found = given.get("value")
    return found if isinstance(found, np.ndarray) else None


def fused(
    nodes: Sequence[OnnxNode], tensors: Mapping[str, Array], outputs: Collection[str] = ()
) -> tuple[OnnxNode, ...]:
    """Return the nodes with GELU as one operator, and without guards against NaN; those that
    compute `outputs` are kept.

    GELU by erf or by tanh is one rounded function, as in runtimes. `Where(IsNaN(x), 0, x)` is
    replaced by x, so that NaN remains NaN.
    """
    graph = _Graph(nodes, tensors)
    found = tuple(_gelu(graph, n) or _guarded(graph, n) or n for n in nodes)
    return _alive(found, nodes, outputs)


def _alive(
    found: tuple[OnnxNode, ...], before: Sequence[OnnxNode], outputs: Collection[str]
) -> tuple[OnnxNode, ...]:
    """Drop nodes whose results had readers before and have none now."""
    read_before = {name for node in before for name in node.inputs} - {*outputs}
    while True:
        reads = {name for node in found for name in node.inputs}
        kept = tuple(
            n for n in found
            if any(o in reads or o not in read_before for o in n.outputs if o)
        )  # fmt: skip
        if len(kept) == len(found):
            return kept
        found = kept


def _guarded(graph: _Graph, node: OnnxNode) -> OnnxNode | None:
    if node.kind != "Where":
        return None
    condition, instead, value = node.inputs
    test = graph.node(condition, "IsNaN")
    if test is None or test.inputs[0] != value or graph.number(instead) != 0.0:
        return None
    return replace(node, kind="Identity", inputs=(value,), attributes={})


def _gelu(graph: _Graph, node: OnnxNode) -> OnnxNode | None:
    """Return GELU(x) for 0.5 · x · (1 + erf(x/√2)), and for its form by tanh."""
    if node.kind != "Mul":
        return None
    factors = graph.factors(node.outputs[0])
    halves = [f for f in factors if graph.number(f) == 0.5]
    others = [f for f in factors if f not in halves]
    if len(factors) != 3 or len(halves) != 1 or len(others) != 2:
        return None
    for x, share in (others, others[::-1]):
        for one, inner in graph.pairs(share, "Add"):
            if graph.number(one) != 1.0:
                continue
            if (erf := graph.node(inner, "Erf")) and _over_root(graph, erf.inputs[0], x):
                return _as_gelu(node, x, "none")
            if (tanh := graph.node(inner, "Tanh")) and _cubic(graph, tanh.inputs[0], x):
                return _as_gelu(node, x, "tanh")
    return None


def _as_gelu(node: OnnxNode, x: str, form: str) -> OnnxNode:
    return replace(node, kind="Gelu", inputs=(x,), attributes={"approximate": form})


def _over_root(graph: _Graph, name: str, x: str) -> bool:
    """Return whether a tensor is x / √2."""
    divided = graph.node(name, "Div")
    if divided is not None:
        return divided.inputs[0] == x and graph.is_number(divided.inputs[1], math.sqrt(2.0))
    return any(
        one == x and graph.is_number(other, math.sqrt(0.5))
        for one, other in graph.pairs(name, "Mul")
    )


def _cubic(graph: _Graph, name: str, x: str) -> bool:
    """Return whether a tensor is √(2/π) · (x + 0.044715 · x³)."""
    for factor, total in graph.pairs(name, "Mul"):
        if not graph.is_number(factor, math.sqrt(2.0 / math.pi)):
            continue
        for one, other in graph.pairs(total, "Add"):
            if one == x and _cube(graph, other, x):
                return True
    return False


def _cube(graph: _Graph, name: str, x: str) -> bool:
    """Return whether a tensor is 0.044715 · x³, the power as one node or as products."""
    factors = graph.factors(name)
    numbers = [f for f in factors if graph.is_number(f, 0.044715)]
    rest = [f for f in factors if f not in numbers]
    power = graph.node(rest[0], "Pow") if len(rest) == 1 else None
    cubed = power is not None and power.inputs[0] == x and _is_three(graph, power.inputs[1])
    return len(numbers) == 1 and (cubed or rest == [x, x, x])


def _is_three(graph: _Graph, name: str) -> bool:
    return graph.number(name) == 3.0
