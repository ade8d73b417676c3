"""Block graphs as ONNX models: the program of a block with its weights, for other tools.

Every result has the format of its node; a Cast follows where the operator computes in a wider
format. Shapes are those of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node, View
from kcdsl.model.lowering.evaluate import NAMES, TYPES
from kcdsl.model.numerics import UNROUNDED

_OPSET = 18
_SINCE = {"Gelu": 20, "RMSNormalization": 23}
"""Operators with the operator set version that introduced them."""
_NUMPY: dict[str, Any] = {
    "float64": np.float64, "float32": np.float32, "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}  # fmt: skip
_PROTO = {
    "float64": TensorProto.DOUBLE, "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}  # fmt: skip
_ELEMENTWISE = {
    "relu": "Relu", "neg": "Neg", "tanh": "Tanh", "add": "Add", "sub": "Sub", "mul": "Mul",
    "matmul": "MatMul", "cast": "Identity", "cache": "Identity", "route": "Identity",
    "quantise": "Identity",
}  # fmt: skip
_BY_NUMBER = {"scale": ("Mul", "factor"), "divide": ("Div", "divisor"), "shift": ("Add", "offset")}

Array = NDArray[Any]


@dataclass(slots=True)
class OnnxBuilder:
    """Nodes and initializers of an ONNX graph under construction. Tensors are identified by
    name."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    held: dict[str, onnx.TensorProto] = field(default_factory=dict)

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one result; return the name of the result."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name, **attributes))
        return name

    def constant(self, name: str, values: Array) -> str:
        """Add an initializer, once for each name; return the name."""
        if name not in self.held:
            self.held[name] = numpy_helper.from_array(np.ascontiguousarray(values), name)
        return name

    def counts(self, values: Sequence[int]) -> str:
        """Add a list of integers for shapes, axes and ranges."""
        name = "counts " + " ".join(str(value) for value in values)
        return self.constant(name, np.asarray(values, dtype=np.int64))

    def view(self, view: View, x: str) -> str:
        """Add the operators of a view."""
        x = self.node("Reshape", x, self.counts(view.split))
        if any(cut != (0, size, 1) for cut, size in zip(view.ranges, view.split, strict=True)):
            starts, stops, steps = zip(*view.ranges, strict=True)
            ends = (self.counts(c) for c in (starts, stops, tuple(range(len(starts))), steps))
            x = self.node("Slice", x, *ends)
        x = self.node("Transpose", x, perm=list(view.order))
        return self.node(
            "Reshape", self.node("Expand", x, self.counts(view.sizes)), self.counts(view.shape)
        )

    def model(
        self,
        name: str,
        inputs: Sequence[tuple[str, Sequence[int]]],
        output: tuple[str, Sequence[int]],
        format: str,
    ) -> onnx.ModelProto:
        """Return the model, checked by the `onnx` package; inputs and output have one format.

        It has the least operator set version with all its operators, for solvers that support only
        old ones.
        """
        given = [helper.make_tensor_value_info(n, _PROTO[format], list(s)) for n, s in inputs]
        result = helper.make_tensor_value_info(output[0], _PROTO[format], list(output[1]))
        graph = helper.make_graph(self.nodes, name, given, [result], list(self.held.values()))
        opset = max((_SINCE.get(node.op_type, _OPSET) for node in self.nodes), default=_OPSET)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", opset)],
            ir_version=helper.find_min_ir_version_for([helper.make_opsetid("", opset)]),
        )
        onnx.checker.check_model(model)
        return model


def block_model(
    graph: BlockGraph, params: Mapping[str, Array | Tensor], own: str = "float32"
) -> onnx.ModelProto:
    """Return a block as an ONNX model: input `hidden` [T, D] if it has one, output `output`.

    `params` holds the tensors of the checkpoint by key, in the layout of the module. An initializer
    has the name of its key. `own` is the format, of `TYPES`, of results with the kernel's own
    format.

    Raises:
        KeyError: a parameter of the graph is not in `params`.
        ValueError: a parameter has another shape than its node.
    """
    return _BlockWriter(graph, params, own).model()


@dataclass(slots=True)
class _Stored:
    """A result: its tensor and its storage format; "" for a mask."""

    tensor: str
    format: str


@dataclass(slots=True)
class _BlockWriter:
    graph: BlockGraph
    params: Mapping[str, Array | Tensor]
    own: str
    builder: OnnxBuilder = field(default_factory=OnnxBuilder)
    found: dict[str, _Stored] = field(default_factory=dict)

    def model(self) -> onnx.ModelProto:
        for node in self.graph.nodes:
            self.found[node.name] = self._result(node)
        last = self.found[self.graph.output]
        self.builder.nodes.append(
            helper.make_node("Identity", [self._as(last, self.own)], ["output"], "output")
        )
        shape = self.graph.input_shape
        inputs = [] if shape is None else [("hidden", shape)]
        output = ("output", self.graph.node(self.graph.output).shape)
        return self.builder.model(self.graph.block, inputs, output, self.own)

    # --- formats ----------------------------------------------------------------------------------

    def _format(self, name: str) -> str:
        return name or self.own

    def _as(self, value: _Stored, format: str) -> str:
        """Return the tensor of a result in another format; a mask is unchanged."""
        if value.format in ("", format):
            return value.tensor
        return self.builder.node("Cast", value.tensor, to=_PROTO[format])

    def _number(self, value: float, format: str) -> str:
        return self.builder.constant(f"{value!r} {format}", np.asarray(value, _NUMPY[format]))

    # --- leaves -----------------------------------------------------------------------------------

    def _result(self, node: Node) -> _Stored:
        match node.op:
            case "input":
                return _Stored("hidden", self.own)
            case "param":
                return self._param(node)
            case "constant":
                values = self.graph.constants[node.attrs["key"]]
                format = "" if values.dtype == np.bool_ else self._format(node.format)
                held = values if not format else values.astype(_NUMPY[format])
                return _Stored(self.builder.constant(f"constant {node.name}", held), format)
            case _:
                return self._computed(node)

    def _param(self, node: Node) -> _Stored:
        values, key = torch.as_tensor(self.params[node.attrs["key"]]), node.attrs["key"]
        format = self._format(node.format)
        if tuple(values.shape) != node.shape:
            raise ValueError(f"{key} has shape {tuple(values.shape)}, the graph says {node.shape}")
        name = key if format == self.own else f"{key} {format}"
        stored = values.to(TYPES[format])
        # NumPy has no bfloat16 of its own; float32 holds each of its numbers.
        wide = stored.to(torch.float32) if format == "bfloat16" else stored
        tensor = self.builder.constant(name, wide.numpy().astype(_NUMPY[format], copy=False))
        return _Stored(tensor, format)

    # --- operations -------------------------------------------------------------------------------

    def _computed(self, node: Node) -> _Stored:
        operands = [self.found[name] for name in node.inputs]
        types = [TYPES[o.format] for o in operands if o.format]
        stored = "" if node.op in UNROUNDED else self._format(node.format)
        if stored:
            types.append(TYPES[stored])
        types += [TYPES[self._format(part)] for _, part in node.attrs.get("parts", ())]
        dtype = types[0]
        for other in types[1:]:
            dtype = torch.promote_types(dtype, other)
        wide = NAMES[dtype]
        result = self._operation(node, wide, [self._as(o, wide) for o in operands])
        return _Stored(self._as(_Stored(result, wide), stored or wide), stored or wide)

    def _operation(self, node: Node, wide: str, x: list[str]) -> str:
        make, attrs = self.builder.node, node.attrs
        if node.op in _ELEMENTWISE:
            return make(_ELEMENTWISE[node.op], *x)
        if node.op in _BY_NUMBER:
            kind, attribute = _BY_NUMBER[node.op]
            return make(kind, x[0], self._number(attrs[attribute], wide))
        match node.op:
            case "linear":
                if len(self.graph.node(node.inputs[0]).shape) == 2:
                    return make("Gemm", *x, transB=1)
                product = make("MatMul", x[0], make("Transpose", x[1], perm=[1, 0]))
                return make("Add", product, x[2]) if len(x) > 2 else product
            case "embedding":
                return make("Gather", x[0], self.builder.counts(attrs["ids"]), axis=0)
            case "view":
                return self.builder.view(View.of(node), x[0])
            case "concat":
                return make("Concat", *x, axis=int(attrs["dim"]))
            case "gelu":
                return self._gelu(x[0], attrs.get("approximate", "none"), wide)
            case "silu":
                gate = make("Sigmoid", x[0])
                return make("Mul", x[0], self._part(node, gate, wide))
            case "softmax":
                scores = x[0]
                if len(x) > 1:
                    scores = make("Where", x[1], scores, self._number(float("-inf"), wide))
                return make("Softmax", scores, axis=-1)
            case "rope":
                return self._rope(node, wide, x)
            case _:
                return self._norm(node, wide, x)

    def _part(self, node: Node, tensor: str, wide: str, stored: str | None = None) -> str:
        """Return a part of a written operation, rounded to its storage format."""
        if stored is None:
            if node.attrs.get("form") != "written":
                return tensor
            stored = node.format
        kept = self._as(_Stored(tensor, wide), self._format(stored))
        return self._as(_Stored(kept, self._format(stored)), wide)

    def _gelu(self, x: str, form: str, wide: str) -> str:
        """Return GELU as one operator; in float64, which runtimes do not support, as several."""
        make = self.builder.node
        if wide != "float64":
            return make("Gelu", x, approximate=form)

        def times(tensor: str, number: float) -> str:
            return make("Mul", tensor, self._number(number, wide))

        if form == "tanh":
            cube = times(make("Mul", x, make("Mul", x, x)), 0.044715)
            share = make("Tanh", times(make("Add", x, cube), math.sqrt(2.0 / math.pi)))
        else:
            share = make("Erf", make("Div", x, self._number(math.sqrt(2.0), wide)))
        return make("Mul", times(x, 0.5), make("Add", share, self._number(1.0, wide)))

    def _rope(self, node: Node, wide: str, x: list[str]) -> str:
        make, size, axis = self.builder.node, node.shape[-1], len(node.shape) - 1
        half, counts = size // 2, self.builder.counts
        low = make("Slice", x[0], counts([0]), counts([half]), counts([axis]))
        high = make("Slice", x[0], counts([half]), counts([size]), counts([axis]))
        turned = make("Concat", make("Neg", high), low, axis=axis)
        products = (make("Mul", x[0], x[1]), make("Mul", turned, x[2]))
        return make("Add", *(self._part(node, product, wide) for product in products))

    def _norm(self, node: Node, wide: str, x: list[str]) -> str:
        """Return a norm as one operator, or part by part if its form is "written" or in float64:
        the operators have a float32 epsilon."""
        make, attrs, centre = self.builder.node, node.attrs, node.op == "layer_norm"
        parts = dict(attrs.get("parts", ()))
        if not parts and wide != "float64":
            kind = "LayerNormalization" if centre else "RMSNormalization"
            if len(x) == 1:
                x = [*x, self.builder.constant(
                    f"ones {node.name}", np.ones(node.shape[-1:], _NUMPY[wide])
                )]  # fmt: skip
            return make(kind, *x, axis=-1, epsilon=attrs["eps"])
        axes = self.builder.counts([-1])

        def stored(part: str, tensor: str) -> str:
            return self._part(node, tensor, wide, parts[part]) if part in parts else tensor

        def mean(tensor: str) -> str:
            return make("ReduceMean", tensor, axes, keepdims=1)

        centred = x[0]
        if centre:
            centred = stored("centred", make("Sub", x[0], stored("mean", mean(x[0]))))
        if "variance" in parts:
            apart = make("Sub", x[0], mean(x[0]))
            spread = stored("variance", mean(make("Mul", apart, apart)))
        else:
            square = stored("square", make("Mul", centred, centred))
            spread = stored("mean2" if centre else "mean", mean(square))
        root = make("Sqrt", stored("shift", make("Add", spread, self._number(attrs["eps"], wide))))
        if "sqrt" in parts and "reciprocal" not in parts:
            normed = make("Div", centred, stored("sqrt", root))
        else:
            last = "reciprocal" if "sqrt" in parts else "root"
            inverse = stored(last, make("Reciprocal", stored("sqrt", root)))
            normed = make("Mul", centred, inverse)
        normed = stored("quotient" if "quotient" in parts else "normed", normed)
        for part, kind, by in zip(("weighted", "biased"), ("Mul", "Add"), x[1:], strict=False):
            normed = stored(part, make(kind, normed, by))
        return normed
