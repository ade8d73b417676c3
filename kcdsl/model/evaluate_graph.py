"""The reference meaning of block graphs: evaluation in float64 with numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from kcdsl.model.graph import BlockGraph, Node

Array = NDArray[Any]


def run_graph(graph: BlockGraph, params: Mapping[str, Array], x: Array | None) -> dict[str, Array]:
    """Return the value of every node, float64 (masks: bool).

    `params` holds the checkpoint tensors by key; `x` is the block input [T, D], None for a graph on
    token ids. Raises ValueError where an array has another shape than its node.
    """
    values: dict[str, Array] = {}
    for node in graph.nodes:
        value = _leaf(graph, node, params, x)
        if value is None:
            value = _OPERATIONS[node.op](node, *(values[i] for i in node.inputs))
        if value.shape != node.shape:
            raise ValueError(f"{node.name} has shape {value.shape}, the graph says {node.shape}")
        values[node.name] = value
    return values


def _leaf(
    graph: BlockGraph, node: Node, params: Mapping[str, Array], x: Array | None
) -> Array | None:
    match node.op:
        case "input":
            if x is None:
                raise ValueError("the graph has an input, and none was given")
            return np.asarray(x, dtype=np.float64)
        case "param":
            return np.asarray(params[node.attrs["key"]], dtype=np.float64)
        case "constant":
            array = graph.constants[node.attrs["key"]]
            return array if array.dtype == np.bool_ else array.astype(np.float64)
        case _:
            return None


def _linear(node: Node, x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
    product: Array = x @ weight.T + bias
    return product


def _slice(node: Node, x: Array) -> Array:
    a = node.attrs
    places = [slice(None)] * x.ndim
    places[a["dim"]] = slice(a["start"], a["stop"], a["step"])
    return x[tuple(places)]


def _softmax(node: Node, scores: Array, mask: Array | None = None) -> Array:
    shown = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(shown - shown.max(axis=-1, keepdims=True))
    normed: Array = weights / weights.sum(axis=-1, keepdims=True)
    return normed


def _rms_norm(node: Node, x: Array, weight: Array | float = 1.0) -> Array:
    mean_square = np.mean(x * x, axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean_square + node.attrs["eps"]) * weight
    return normed


def _layer_norm(
    node: Node, x: Array, weight: Array | float = 1.0, bias: Array | float = 0.0
) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    normed: Array = centred / np.sqrt(variance + node.attrs["eps"]) * weight + bias
    return normed


def _rope(node: Node, x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    turned = np.concatenate((-x[..., half:], x[..., :half]), axis=-1)
    rotated: Array = x * cos + turned * sin
    return rotated


_OPERATIONS: dict[str, Callable[..., Array]] = {
    "embedding": lambda n, w: w[np.asarray(n.attrs["ids"])],
    "cast": lambda n, x: x,
    "linear": _linear,
    "matmul": lambda n, a, b: a @ b,
    "add": lambda n, a, b: a + b,
    "sub": lambda n, a, b: a - b,
    "mul": lambda n, a, b: a * b,
    "scale": lambda n, x: x * n.attrs["factor"],
    "divide": lambda n, x: x / n.attrs["divisor"],
    "shift": lambda n, x: x + n.attrs["offset"],
    "neg": lambda n, x: -x,
    "relu": lambda n, x: np.maximum(x, 0.0),
    "tanh": lambda n, x: np.tanh(x),
    "silu": lambda n, x: x * np.exp(-np.logaddexp(0.0, -x)),
    "gelu": lambda n, x: 0.5 * x * (1.0 + erf(x / np.sqrt(2.0))),
    "reshape": lambda n, x: x.reshape(n.attrs["shape"]),
    "expand": lambda n, x: np.broadcast_to(x, tuple(n.attrs["shape"])),
    "permute": lambda n, x: x.transpose(n.attrs["dims"]),
    "slice": _slice,
    "concat": lambda n, *parts: np.concatenate(parts, axis=n.attrs["dim"]),
    "softmax": _softmax,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
}
