"""Rewriting of integer operators of ONNX files to dequantised ones: MatMulInteger, Gather of codes.

Quantisers write y = Cast (MatMulInteger (c, W, z, w_zero)) · s · w_scale, where c, s and z are
codes, scale and zero point of x by QuantizeLinear or DynamicQuantizeLinear. Numerics with quantised
inputs admit sums of codes, so this is rewritten to MatMul of DequantizeLinear (c, s, z) and
DequantizeLinear (W, w_scale, w_zero). An embedding DequantizeLinear (Gather (W, ids), scale, zero)
with one scale becomes Gather (DequantizeLinear (W, scale, zero), ids); likewise Transpose (W).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from kcdsl.model.onnx.files import OnnxFile, OnnxNode

PRODUCT = "MatMulInteger"
MOST_TERMS = 2**15
"""The largest number of terms of a sum of products of bytes that cannot overflow 32 bits."""


@dataclass(frozen=True, slots=True)
class _Graph:
    """The producer and the readers of each tensor."""

    file: OnnxFile
    makers: Mapping[str, OnnxNode]
    readers: Mapping[str, tuple[OnnxNode, ...]]

    @staticmethod
    def of(file: OnnxFile) -> _Graph:
        readers: dict[str, tuple[OnnxNode, ...]] = {}
        for node in file.nodes:
            for name in dict.fromkeys(node.inputs):
                readers[name] = (*readers.get(name, ()), node)
        makers = {name: node for node in file.nodes for name in node.outputs}
        return _Graph(file, makers, readers)

    def only_reader(self, name: str) -> OnnxNode | None:
        """Return the only reader of a tensor; None where there are others or it is an output."""
        readers = self.readers.get(name, ())
        return readers[0] if len(readers) == 1 and name not in self.file.outputs else None

    def quantised(self, name: str) -> tuple[str, str] | None:
        """Return scale and zero point ("": none) of codes; None for any other tensor."""
        node = self.makers.get(name)
        if node is None or name != node.outputs[0]:
            return None
        if node.kind == "DynamicQuantizeLinear":
            return node.outputs[1], node.outputs[2]
        if node.kind == "QuantizeLinear":
            return node.inputs[1], (*node.inputs, "")[2]
        return None

    def same(self, one: str, other: str) -> bool:
        """Return whether two zero points are equal; "" is 0."""
        if one == other:
            return True
        zero = np.zeros((), np.int64)
        first, second = (self.file.tensors.get(n) if n else zero for n in (one, other))
        return first is not None and second is not None and np.array_equal(first, second)


def as_dequantised(file: OnnxFile) -> OnnxFile:
    """Return the file with products of dequantised numbers; other nodes are unchanged."""
    rewritten = [node for node in file.nodes if node.kind in _REWRITTEN]
    if not rewritten:
        return file
    graph = _Graph.of(file)
    gone: set[str] = set()
    made: dict[str, tuple[OnnxNode, ...]] = {}
    for node in rewritten:
        found = _REWRITTEN[node.kind](graph, node)
        if found is not None:
            removed, last, added = found
            gone |= removed
            made[last] = added
    nodes: list[OnnxNode] = []
    for node in file.nodes:
        nodes += made.get(node.outputs[0], ())
        if node.outputs[0] not in gone:
            nodes.append(node)
    return replace(file, nodes=tuple(nodes))


_Rewritten = tuple[set[str], str, tuple[OnnxNode, ...]]


def _dequantised(graph: _Graph, node: OnnxNode) -> _Rewritten | None:
    """Return the removed results of a product and its scales, the last one, and the new nodes."""
    entering, weight, zero, weight_zero = (*node.inputs, "", "")[:4]
    own, held = graph.quantised(entering), graph.file.tensors.get(weight)
    if own is None or held is None or held.ndim != 2 or held.shape[0] > MOST_TERMS:
        return None
    if graph.file.types[weight] not in (TensorProto.INT8, TensorProto.UINT8):
        return None
    cast = graph.only_reader(node.outputs[0])
    if cast is None or cast.kind != "Cast" or cast.attributes.get("to") != TensorProto.FLOAT:
        return None
    gone, current, factors = {node.outputs[0], cast.outputs[0]}, cast, list[str]()
    while len(factors) < 2:
        name, multiplied = current.outputs[0], graph.only_reader(current.outputs[0])
        if multiplied is None or multiplied.kind != "Mul" or len(set(multiplied.inputs)) != 2:
            return None
        (other,) = set(multiplied.inputs) - {name}
        scales = _factors(graph, other, own[0])
        factors += scales
        gone.add(multiplied.outputs[0])
        if len(scales) == 2 and graph.only_reader(other) is not None:
            gone.add(other)
        current = multiplied
    scales = [name for name in factors if name in graph.file.tensors and name != own[0]]
    if len(factors) != 2 or own[0] not in factors or len(scales) != 1:
        return None
    if not graph.same(zero, own[1]) or weight_zero not in (*graph.file.tensors, ""):
        return None
    read, turned = cast.outputs[0], node.outputs[0]
    ends = (entering, own[0], own[1]), (weight, scales[0], weight_zero)
    return (
        gone,
        current.outputs[0],
        (
            OnnxNode(node.name, "DequantizeLinear", _without_end(ends[0]), (read,)),
            OnnxNode(node.name, "DequantizeLinear", _without_end(ends[1]), (turned,)),
            OnnxNode(node.name, "MatMul", (read, turned), (current.outputs[0],)),
        ),
    )


def _factors(graph: _Graph, name: str, scale: str) -> list[str]:
    """Return the factors of a tensor that is a product of scales."""
    node = graph.makers.get(name)
    known = {scale, *graph.file.tensors}
    if node is not None and node.kind == "Mul" and set(node.inputs) <= known:
        return list(node.inputs)
    return [name]


def _without_end(names: tuple[str, str, str]) -> tuple[str, ...]:
    return names if names[2] else names[:2]


def _moved(graph: _Graph, node: OnnxNode) -> _Rewritten | None:
    """Rewrite the dequantisation of a lookup in codes, or of their transpose, to the lookup in, or
    transpose of, the dequantised tensor."""
    read = graph.only_reader(node.outputs[0])
    held = graph.file.tensors
    if node.inputs[0] not in held or read is None or read.kind != "DequantizeLinear":
        return None
    if node.attributes.get("axis", 0) or read.inputs[0] != node.outputs[0]:
        return None
    if not all(name in held and held[name].size == 1 for name in read.inputs[1:] if name):
        return None
    moved, result = node.outputs[0], read.outputs[0]
    return (
        {moved, result},
        result,
        (
            replace(read, inputs=(node.inputs[0], *read.inputs[1:]), outputs=(moved,)),
            replace(node, inputs=(moved, *node.inputs[1:]), outputs=(result,)),
        ),
    )


_REWRITTEN = {PRODUCT: _dequantised, "Gather": _moved, "Transpose": _moved}
