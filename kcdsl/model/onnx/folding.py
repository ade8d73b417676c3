"""Constant folding of ONNX graphs: nodes that depend neither on tokens nor on weights of operators.

They are computed by the reference implementation of the `onnx` package, in the formats of the
file; runtimes fold such constants too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.onnx.files import Array, OnnxNode

LARGEST = 1 << 26
"""The largest number of elements of a folded constant; more would exhaust the memory."""

_FAR = 2**31 - 1
"""The end of a slice from which on it is out of any dimension."""
FOLDED = frozenset({
    *("Abs", "Add", "And", "Cast", "Ceil", "Clip", "Concat", "Constant", "ConstantOfShape", "Cos"),
    *("CumSum", "Div", "Equal", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements"),
    *("GatherND", "Greater", "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual"),
    *("Log", "MatMul", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Range"),
    *("Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "ScatterND"),
    *("Shape", "Sign", "Sin", "Size", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tile"),
    *("Transpose", "Trilu", "Unsqueeze", "Where", "Xor"),
})  # fmt: skip
"""Operators that are folded where all operands are fixed."""


def folded(node: OnnxNode, operands: Sequence[Array | None], opset: int) -> list[Array]:
    """Return the results of a node whose operands are fixed. Refuse another operator, and a result
    that is too large."""
    if node.kind not in FOLDED:
        raise refuse(
            codes.OPERATION_UNSUPPORTED,
            f"{node.place} is not supported among constants",
            help="fold constants when the model is exported, or let onnxruntime write the file"
            " with basic optimisations",
        )
    if _size(node, operands) > LARGEST:
        raise refuse(
            codes.ONNX_FILE,
            f"the constant of {node.place} has more than {LARGEST} elements",
            help="export the file with the tensor as an initializer, or compute it from the inputs",
        )
    attributes = {
        name: numpy_helper.from_array(np.asarray(value)) if isinstance(value, np.ndarray) else value
        for name, value in node.attributes.items()
    }
    _refuse_disputed(node, operands)
    if node.kind == "GatherElements":
        data, indices = (v for v in operands if v is not None)
        return [_elements(data, indices, int(node.attributes.get("axis", 0)))]
    if node.kind == "Unsqueeze" and "axes" in attributes and operands[0] is not None:
        rank = operands[0].ndim + len(attributes["axes"])
        attributes["axes"] = sorted(axis % rank for axis in attributes["axes"])
    proto = helper.make_node(node.kind, node.inputs, node.outputs, node.name, **attributes)
    # without a model, the newest version of the operator would be used
    entries, results = (
        [helper.make_empty_tensor_value_info(n) for n in dict.fromkeys(names) if n]
        for names in (node.inputs, node.outputs)
    )
    graph = helper.make_graph([proto], "constant", entries, results)
    feeds = {
        name: value
        for name, value in zip(node.inputs, operands, strict=True)
        if name and value is not None
    }
    with np.errstate(all="ignore"):
        found = ReferenceEvaluator(graph, opsets={"": opset}).run(None, feeds)
    return [np.asarray(value) for value in found]


def _elements(data: Array, indices: Array, axis: int) -> Array:
    """Return GatherElements along an axis; the reference implementation fails on long axes."""
    axis %= data.ndim
    read = tuple(slice(None if d == axis else n) for d, n in enumerate(indices.shape))
    return np.take_along_axis(data[read], indices.astype(np.int64), axis)


def _refuse_disputed(node: OnnxNode, operands: Sequence[Array | None]) -> None:
    """Refuse operands for which the reference implementation differs from runtimes."""
    held = [*operands, *[None] * 5]
    what = ""
    if node.kind == "Squeeze" and held[1] is not None and not held[1].size:
        what = "its axes are empty, which runtimes take for all and others for none"
    if node.kind == "Slice" and held[0] is not None and held[1] is not None and held[4] is not None:
        axes = range(held[0].ndim) if held[3] is None else held[3].reshape(-1).tolist()
        each = zip(held[1].reshape(-1), axes, held[4].reshape(-1), strict=False)
        if any(step < 0 and start < -held[0].shape[axis] for start, axis, step in each):
            what = "it goes backward from before the first element"
        ends = [] if held[2] is None else held[2].reshape(-1).tolist()
        if any(
            step < 0 and end >= _FAR for end, step in zip(ends, held[4].reshape(-1), strict=False)
        ):
            what = "it goes backward to the greatest integer, which runtimes take for the beginning"
    if what:
        raise refuse(
            codes.OPERATION_UNSUPPORTED,
            f"{node.place} is not supported: {what}",
            help="export the model so that this node is another one; `kcdsl explain onnx` has "
            "what is read of it",
        )


def _size(node: OnnxNode, operands: Sequence[Array | None]) -> int:
    """Return an estimate of the number of elements of a result before it is computed."""
    held = [v for v in operands if v is not None]
    match node.kind:
        case "ConstantOfShape":
            return math.prod(int(n) for n in held[0].reshape(-1))
        case "Expand":
            sizes = tuple(int(n) for n in held[1].reshape(-1))
            return math.prod(np.broadcast_shapes(held[0].shape, sizes))
        case "Range":
            start, stop, step = (float(v.reshape(())) for v in held)
            return int(abs(stop - start) / abs(step)) if step else LARGEST + 1
        case "Tile":
            return int(held[0].size) * math.prod(int(n) for n in held[1].reshape(-1))
        case "MatMul":
            return int(int(held[0].size) * max(1, held[1].size // max(1, held[1].shape[0])))
        case "GatherElements":
            return int(held[-1].size)
        case "GatherND" | "Gather":
            return int(int(held[1].size) * max(1, held[0].size // max(1, held[0].shape[0])))
        case _ if len(held) > 1 and node.kind not in ("Concat", "Slice", "Reshape", "Split"):
            try:
                return math.prod(np.broadcast_shapes(*(v.shape for v in held)))
            except ValueError:
                return max(v.size for v in held)
        case _:
            return sum(v.size for v in held)
