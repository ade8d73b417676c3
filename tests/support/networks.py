"""Random ONNX networks and queries about them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

KINDS = ("Relu", "Sigmoid", "Tanh", "Abs", "LeakyRelu", "Square", "Clip", "Softmax")


def perceptron(
    generator: np.random.Generator, sizes: tuple[int, ...], kinds: tuple[str, ...] = ("Relu",)
) -> onnx.ModelProto:
    """Return a network of dense layers separated by operators of `kinds`, in turn."""
    nodes, held, name = [], [], "x"
    for i, (n, m) in enumerate(pairwise(sizes)):
        weight = generator.standard_normal((n, m)) / np.sqrt(n)
        for key, value in ((f"w{i}", weight), (f"b{i}", generator.standard_normal(m) / 4)):
            held.append(numpy_helper.from_array(np.asarray(value, np.float32), key))
        last = i == len(sizes) - 2
        nodes.append(helper.make_node("Gemm", [name, f"w{i}", f"b{i}"], ["y" if last else f"z{i}"]))
        if not last:
            kind, name = kinds[i % len(kinds)], f"a{i}"
            inputs = [f"z{i}"]
            if kind == "Clip":
                ends = (("low", -0.5), ("high", 0.75))
                held += [
                    numpy_helper.from_array(np.asarray(v, np.float32), f"{k}{i}") for k, v in ends
                ]
                inputs += [f"{k}{i}" for k, _ in ends]
            if kind == "Square":
                held.append(numpy_helper.from_array(np.asarray(2.0, np.float32), f"two{i}"))
                kind, inputs = "Pow", [f"z{i}", f"two{i}"]
            nodes.append(helper.make_node(kind, inputs, [name]))
    return model_of(nodes, held, [1, sizes[0]], [1, sizes[-1]])


def model_of(
    nodes: list[onnx.NodeProto], held: list[onnx.TensorProto], shape: list[int], out: list[int]
) -> onnx.ModelProto:
    """Return a model from x to y."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, out)
    graph = helper.make_graph(nodes, "g", [x], [y], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def moved(model: onnx.ModelProto, generator: np.random.Generator, by: float) -> onnx.ModelProto:
    """Return the same graph with other weights."""
    found = onnx.ModelProto.FromString(model.SerializeToString())
    for one in found.graph.initializer:
        array = numpy_helper.to_array(one)
        other = array + by * generator.standard_normal(array.shape).astype(np.float32)
        one.CopyFrom(numpy_helper.from_array(other.astype(np.float32), one.name))
    return found


def saved(model: onnx.ModelProto, path: Path) -> Path:
    """Write a model."""
    onnx.save(model, str(path))
    return path


def box(name: str, count: int, low: float, high: float) -> str:
    """Return assertions that bound elements [0, i] of a variable by an interval."""
    return "\n".join(
        f"(assert (>= {name}[0,{i}] {low}))\n(assert (<= {name}[0,{i}] {high}))"
        for i in range(count)
    )


def declared(name: str, x: str, y: str, n: int, m: int, relation: str = "") -> str:
    """Return the declaration of a float32 network with inputs [1, n] and outputs [1, m]."""
    inner = f"{relation} (declare-input {x} float32 [1,{n}]) (declare-output {y} float32 [1,{m}])"
    return f"(declare-network {name} {inner})"
