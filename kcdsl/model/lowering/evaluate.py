"""Reference evaluation of block graphs with numpy: in float64, or rounded as a kernel rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import erf, expit
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node, View
from kcdsl.model.numerics import UNROUNDED

# --- formats of results: what type promotion gives where a module is converted to each format ----

TYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""The formats to which adapters can convert a module."""
NAMES = {dtype: name for name, dtype in TYPES.items()}

OWN = ""
"""Stored in the kernel's own format."""
HALF = ("bfloat16", "float16")
WIDE = "wide"
"""Stored in float32 by half-precision kernels, and in float64 by those of float64. Only a graph
under construction has it: inside an operation."""


def traced_format(compute: str) -> str:
    """Return the format to which a module is converted for a kernel that computes in `compute`."""
    return compute if compute in TYPES else "float32"


def stored_type(name: str, format: str) -> torch.dtype:
    """Return the type of a result with storage format `name`, in a module of format `format`."""
    if name == WIDE:
        return torch.promote_types(TYPES[format], torch.float32)
    return TYPES[name or format]


def stored_name(types: Mapping[str, torch.dtype]) -> str | None:
    """Return the storage format of a result from its type under each module format.

    This is OWN, a format of `TYPES` that is the same in all, or WIDE; None where none of them fits.
    """
    if all(dtype == TYPES[name] for name, dtype in types.items()):
        return OWN
    found = set(types.values())
    if len(found) == 1:
        return NAMES.get(found.pop())
    wide = all(
        dtype == torch.promote_types(TYPES[name], torch.float32) for name, dtype in types.items()
    )
    return WIDE if wide else None


# --- evaluation ----------------------------------------------------------------------------------

Array = NDArray[Any]
Round = Callable[[Array, str], Array]
"""Rounds a value to a format of `Node.format`."""
LARGE = 2**21
"""Size of a matrix above which linears convert it to float64 in blocks of rows."""
_AT_ONCE = 2**19
"""Approximate size of such a block."""


def graph_output(
    graph: BlockGraph,
    params: Mapping[str, Array | Tensor],
    x: Array | None,
    compute: str | None = None,
    change: Callable[[Array], Array] | None = None,
) -> Array:
    """Return the value of the output, float64; values are freed after their last reader.

    `params` holds the checkpoint tensors by key; `x` is the block input [T, D], None for a graph on
    token ids. With `compute`, a format of `TYPES`, every result is computed in float64 and
    rounded to its format in such a kernel; else nothing is rounded.
    Raises ValueError where an array has another shape than its node.

    `change` is applied to the input and to every stored result, to measure the effect of other
    roundings on the output.
    """
    last = {name: node.name for node in graph.nodes for name in node.inputs}
    values: dict[str, Array] = {}
    for name, value in each_node(graph, params, x, compute, values):
        node = graph.node(name)
        if change is not None and node.op not in UNROUNDED | {"param", "constant"}:
            values[name] = change(value)
        for read in graph.node(name).inputs:
            if last.get(read) == name and read != graph.output:
                values.pop(read, None)
    return values[graph.output]


def each_node(
    graph: BlockGraph,
    params: Mapping[str, Array | Tensor],
    x: Array | None,
    compute: str | None,
    values: dict[str, Array],
) -> Iterator[tuple[str, Array]]:
    """Yield the value of every node (masks: bool), parameters just before their first reader;
    `values` stores them for later nodes. A large matrix that only linears read has no value."""
    by_rows = _large_weights(graph)

    def rounded(value: Array, format: str) -> Array:
        return value if compute is None else round_to(value, format or compute)

    def in_order() -> Iterator[Node]:
        left = {n.name: n for n in graph.nodes if n.op == "param" and n.name not in by_rows}
        for node in graph.nodes:
            if node.op != "param":
                yield from (left.pop(name) for name in node.inputs if name in left)
                yield node
        yield from left.values()

    for node in in_order():
        value = _leaf(graph, node, params, x, compute)
        if value is None:
            with np.errstate(all="ignore"):
                operands = [values[i] for i in node.inputs if i not in by_rows]
                if len(operands) < len(node.inputs):
                    held = _held(by_rows[node.inputs[1]], params)
                    format = _stored_format(by_rows[node.inputs[1]], compute)
                    value = _linear_by_rows(held, format, *operands)
                else:
                    value = MEANING[node.op](node, rounded, *operands)
                del operands
        if value.dtype != np.bool_ and node.op not in UNROUNDED | {"param"}:
            value = rounded(value, node.format)
        if value.shape != node.shape:
            raise ValueError(f"{node.name} has shape {value.shape}, the graph says {node.shape}")
        values[node.name] = value
        yield node.name, value


def round_to(value: Array, format: str) -> Array:
    """Return a float64 array, rounded to nearest even in a format of `TYPES`; overflow gives
    infinity."""
    return _stored(torch.from_numpy(np.array(value, dtype=np.float64, order="C")), format)


def _stored(value: Tensor, format: str) -> Array:
    return np.asarray(value.to(TYPES[format]).to(torch.float64).numpy())


def _leaf(
    graph: BlockGraph,
    node: Node,
    params: Mapping[str, Array | Tensor],
    x: Array | None,
    compute: str | None,
) -> Array | None:
    """Return the value of an input, a constant or a (rounded) parameter; None for other nodes."""
    match node.op:
        case "input":
            if x is None:
                raise ValueError("the graph has an input, and none was given")
            return np.asarray(x, dtype=np.float64)
        case "param":
            return _stored(_held(node, params), _stored_format(node, compute))
        case "constant":
            array = graph.constants[node.attrs["key"]]
            return array if array.dtype == np.bool_ else array.astype(np.float64)
        case _:
            return None


def _large_weights(graph: BlockGraph) -> dict[str, Node]:
    """Return the nodes of large matrices that only linears read, by name."""
    found = {
        node.name: node
        for node in graph.nodes
        if node.op == "param" and len(node.shape) == 2 and math.prod(node.shape) > LARGE
    }
    found.pop(graph.output, None)
    for node in graph.nodes:
        for place, name in enumerate(node.inputs):
            if name in found and (node.op, place) != ("linear", 1):
                del found[name]
    return found


def _held(node: Node, params: Mapping[str, Array | Tensor]) -> Tensor:
    held = torch.as_tensor(params[node.attrs["key"]])
    if tuple(held.shape) != node.shape:
        raise ValueError(f"{node.name} has shape {tuple(held.shape)}, the graph says {node.shape}")
    return held


def _stored_format(node: Node, compute: str | None) -> str:
    """Return the format in which a parameter is held, by the name of its type."""
    return "float64" if compute is None else node.format or compute


def _linear_by_rows(weight: Tensor, format: str, x: Array, bias: Array | float = 0.0) -> Array:
    """Return x @ weight.T + bias of a large weight, which is stored in a format."""
    step = max(1, _AT_ONCE // weight.shape[1])
    parts = [
        x @ _stored(weight[start : start + step], format).T for start in range(0, len(weight), step)
    ]
    product: Array = np.concatenate(parts, axis=-1) + bias
    return product


def _linear(node: Node, store: Round, x: Array, weight: Array, bias: Array | float = 0.0) -> Array:
    product: Array = x @ weight.T + bias
    return product


def _gelu_share(n: Node, x: Array) -> Array:
    """Return g with GELU(x) = x/2 · (1 + g): erf(x/√2), or its approximation by tanh."""
    if n.attrs.get("approximate") != "tanh":
        return np.asarray(erf(x / np.sqrt(2.0)))
    return np.asarray(np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def _view(node: Node, store: Round, x: Array) -> Array:
    view = View.of(node)
    taken = x.reshape(view.split)[view.slices].transpose(view.order)
    return np.broadcast_to(taken, view.sizes).reshape(view.shape)


def _softmax(node: Node, store: Round, scores: Array, mask: Array | None = None) -> Array:
    shown = scores if mask is None else np.where(mask, scores, -np.inf)
    weights = np.exp(shown - shown.max(axis=-1, keepdims=True))
    normed: Array = weights / weights.sum(axis=-1, keepdims=True)
    return normed


def _norm(node: Node, store: Round, x: Array, *affine: Array) -> Array:
    """Return either norm; the parts of a written norm are rounded one by one."""
    parts = dict(node.attrs.get("parts", ()))
    centre = node.op == "layer_norm"

    def stored(part: str, value: Array) -> Array:
        return store(value, parts[part]) if part in parts else value

    centred = stored("centred", x - stored("mean", _mean(x))) if centre else x
    if "variance" in parts:
        spread = stored("variance", np.var(x, axis=-1, keepdims=True))
    else:
        second = "mean2" if centre else "mean"
        spread = stored(second, _mean(stored("square", centred * centred)))
    shifted = stored("shift", spread + node.attrs["eps"])
    if "sqrt" in parts:
        root = stored("sqrt", np.sqrt(shifted))
        inverse = stored("reciprocal", 1.0 / root)
        normed = centred * inverse if "reciprocal" in parts else centred / root
    else:
        normed = centred * stored("root", 1.0 / np.sqrt(shifted))
    normed = stored("quotient" if "quotient" in parts else "normed", normed)
    for part, value in zip(("weighted", "biased"), affine, strict=False):
        normed = stored(part, normed * value if part == "weighted" else normed + value)
    return normed


def _mean(x: Array) -> Array:
    return np.asarray(x.mean(axis=-1, keepdims=True))


def _silu(node: Node, store: Round, x: Array) -> Array:
    gate = expit(x)
    product: Array = x * (store(gate, node.format) if _written(node) else gate)
    return np.where(np.isneginf(x) & ~np.bool_(_written(node)), 0.0, product)


def _rope(node: Node, store: Round, x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    turned = np.concatenate((-x[..., half:], x[..., :half]), axis=-1)
    products = [x * cos, turned * sin]
    if _written(node):
        products = [store(product, node.format) for product in products]
    rotated: Array = products[0] + products[1]
    return rotated


def _written(node: Node) -> bool:
    return bool(node.attrs.get("form") == "written")


POINTWISE: dict[str, Callable[..., Array]] = {
    "neg": lambda n, s, x: -x,
    "relu": lambda n, s, x: np.maximum(x, 0.0),
    "tanh": lambda n, s, x: np.tanh(x),
    "silu": _silu,
    "gelu": lambda n, s, x: 0.5 * x * (1.0 + _gelu_share(n, x)),
}
"""Elementwise functions, by their PyTorch names."""

MEANING: dict[str, Callable[..., Array]] = POINTWISE | {
    "cast": lambda n, s, x: x,
    "cache": lambda n, s, x: x,
    "route": lambda n, s, x: x,
    "quantise": lambda n, s, x: x,
    "embedding": lambda n, s, w: w[np.asarray(n.attrs["ids"])],
    "linear": _linear,
    "matmul": lambda n, s, a, b: a @ b,
    "add": lambda n, s, a, b: a + b,
    "sub": lambda n, s, a, b: a - b,
    "mul": lambda n, s, a, b: a * b,
    "scale": lambda n, s, x: x * n.attrs["factor"],
    "divide": lambda n, s, x: x / n.attrs["divisor"],
    "shift": lambda n, s, x: x + n.attrs["offset"],
    "view": _view,
    "concat": lambda n, s, *parts: np.concatenate(parts, axis=n.attrs["dim"]),
    "softmax": _softmax,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "rope": _rope,
}
"""The value of every computed operation, from the node, a rounding function and the operands."""
