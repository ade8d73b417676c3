"""Build block graphs, checkpoints and proof documents without the package under test."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Document = dict[str, Any]
GRAPH_SCHEMA = "kcdsl.block-graph/3"


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> str:
    """Write float32 tensors and return the sha256 of the file."""
    header: dict[str, Any] = {}
    body = b""
    for name, value in tensors.items():
        data = value.astype("<f4").tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + body
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def array_digest(value: np.ndarray) -> str:
    """Return sha256 of "dtype|shape|" and the bytes."""
    head = f"{value.dtype.name}|{','.join(map(str, value.shape))}|".encode()
    return hashlib.sha256(head + value.tobytes()).hexdigest()


def array(value: np.ndarray) -> Document:
    """Return the array record of a proof."""
    data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"dtype": value.dtype.name, "shape": list(value.shape), "data": data}


def numerics(
    compute: str = "float32",
    casts: str = "any",
    *,
    accumulate: str = "float32",
    weights: tuple[str, str] | tuple[str, str, str] | None = None,
    activations: tuple[str, str] | Document = ("none", "none"),
    style: str = "composed",
    scores: str | None = None,
    probabilities: str | None = None,
    tile: int = 2,
    exp_ulps: int = 2,
    **other: Any,
) -> Document:
    """Return a numerics record; `other` holds its optional parts."""
    kind, scale, *rounding = weights or (compute, "none")
    stored = {"format": kind, "scale": scale, **({"rounding": rounding[0]} if rounding else {})}
    return {
        **other,
        "preset": "test",
        "compute": compute,
        "accumulate": accumulate,
        "casts": casts,
        "weights": stored,
        "activations": quantised(activations),
        "attention": {
            "style": style,
            "scores": scores or compute,
            "probabilities": probabilities or compute,
            "tile": tile,
            "exp_ulps": exp_ulps,
        },
    }


def override(
    weights: tuple[str, str], activations: tuple[str, str] | Document = ("none", "none")
) -> Document:
    """Return the record of numerics that some linears have in place of the kernel's."""
    stored = {"format": weights[0], "scale": weights[1]}
    return {"weights": stored, "activations": quantised(activations)}


def tensor_codes(scale: float, zero_point: int) -> Document:
    """Return the record of the quantiser of a tensor."""
    return {"scale": float(np.float32(scale)).hex(), "zero_point": zero_point}


def quantised(activations: tuple[str, str] | Document) -> Document:
    """Return the record of quantised activations: format and scale, or all of it."""
    if isinstance(activations, tuple):
        return {"format": activations[0], "scale": activations[1]}
    return dict(activations)


def static(format: str, scales: Any, zero_point: int | None = None) -> Document:
    """Return the record of activations with static scales: one, or a list or mapping of them."""
    by_name = scales if isinstance(scales, dict) else {"*": scales}
    lists = {k: v if isinstance(v, list) else [v] for k, v in by_name.items()}
    record: Document = {
        "format": format,
        "scale": "static",
        "input_scale": {k: [float(np.float32(s)).hex() for s in v] for k, v in lists.items()},
    }
    if zero_point is not None:
        record["input_zero_point"] = {"*": zero_point}
    return record


@dataclass
class Graph:
    """A block graph under construction; `add` returns the name of the new node."""

    input_shape: tuple[int, ...] | None
    nodes: list[Document] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    output: str = ""

    def add(
        self,
        op: str,
        inputs: list[str],
        shape: tuple[int, ...],
        /,
        role: str = "",
        format: str = "",
        **attrs: Any,
    ) -> str:
        name = f"n{len(self.nodes)}_{op}"
        plain = {k: v.hex() if isinstance(v, float) else v for k, v in attrs.items()}
        self.nodes.append(
            {
                "name": name,
                "op": op,
                "inputs": inputs,
                "shape": list(shape),
                "attrs": plain,
                "role": role,
                "format": format,
            }
        )
        self.output = name
        return name

    def shape_of(self, name: str) -> list[int]:
        return next(list(node["shape"]) for node in self.nodes if node["name"] == name)

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        return self.add("view", [x], tuple(shape), split=list(shape))

    def permute(self, x: str, dims: Sequence[int]) -> str:
        before = self.shape_of(x)
        order = [d % len(before) for d in dims]
        return self.add("view", [x], tuple(before[d] for d in order), split=before, order=order)

    def expand(self, x: str, shape: Sequence[int]) -> str:
        before = self.shape_of(x)
        split = [1] * (len(shape) - len(before)) + before
        return self.add("view", [x], tuple(shape), split=split, sizes=list(shape))

    def slice(self, x: str, dim: int, start: int, stop: int, step: int = 1) -> str:
        before = self.shape_of(x)
        ranges = [[0, size, 1] for size in before]
        ranges[dim] = [start, stop, step]
        shape = tuple(len(range(*each)) for each in ranges)
        return self.add("view", [x], shape, split=before, ranges=ranges)

    def param(self, key: str, value: np.ndarray) -> str:
        self.tensors[key] = value.astype(np.float32)
        return self.add("param", [], value.shape, key=key)

    def constant(self, key: str, value: np.ndarray, format: str = "") -> str:
        self.constants[key] = value
        return self.add("constant", [], value.shape, "", format, key=key)

    def json(self) -> Document:
        return {
            "schema": GRAPH_SCHEMA,
            "block": "block_0",
            "nodes": self.nodes,
            "output": self.output,
            "constants": {k: array_digest(v) for k, v in sorted(self.constants.items())},
            "input_shape": list(self.input_shape) if self.input_shape else None,
        }

    @property
    def digest(self) -> str:
        return graph_digest(self.json())


def graph_digest(value: Document) -> str:
    """Return the digest of a graph record (ASCII keys: json.dumps sorts as RFC 8785 does)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def document(
    graph: Graph,
    train: Document,
    infer: Document,
    sha256: str,
    centre: np.ndarray,
    radius: float = 0.0,
    functional: str = "inf",
    ids: list[int] | None = None,
) -> Document:
    """Return a proof document of one case with claims that are always true."""
    large = (2.0**1000).hex()
    region: Document = {"kind": "points", "ids": ids}
    if ids is None:
        region = {
            "kind": "ball" if radius else "points",
            "centre": array(centre.astype(np.float64)),
            "radius": array(np.full((1, 1), radius)),
        }
    claim = "held" if functional == "no_flip" else large
    constants = {k: array(v) for k, v in graph.constants.items()}
    witness = [{"node": n["name"], "value": large, "drift": large} for n in graph.nodes]
    case = {
        "name": "case-0",
        "graph": graph.digest,
        "region": region,
        "claim": claim,
        "witness": witness,
    }
    return {
        "schema": "kcdsl.interval-proof/2",
        "block": "block_0",
        "checkpoint": {"sha256": sha256},
        "numerics": {"train": train, "infer": infer},
        "functional": {"kind": functional, "k": 1},
        "graphs": {graph.digest: {"graph": graph.json(), "constants": constants}},
        "parameters": {k: array_digest(v) for k, v in graph.tensors.items()},
        "cases": [case],
        "claim": claim,
    }


def dump(value: Document) -> bytes:
    """Return the bytes of a document."""
    return json.dumps(value).encode()


def unmasked_attention(
    g: Graph, x: Any, rng: np.random.Generator, rows: int, heads: int, size: int
) -> Any:
    """Add attention without a mask, biased and with scaled scores, as BERT's; return its node."""
    width = heads * size
    parts = {}
    for name in "qkv":
        w = g.param(f"{name}.weight", rng.standard_normal((width, width)) / width**0.5)
        b = g.param(f"{name}.bias", 0.1 * rng.standard_normal(width))
        y = g.add("linear", [x, w, b], (rows, width))
        y = g.reshape(y, (rows, heads, size))
        parts[name] = g.permute(y, [1, 0, 2])
    k = g.permute(parts["k"], [0, 2, 1])
    square = (heads, rows, rows)
    s = g.add("matmul", [parts["q"], k], square, role="scores")
    s = g.add("scale", [s], square, role="scores", factor=size**-0.5)
    p = g.add("softmax", [s], square, role="probabilities")
    c = g.add("matmul", [p, parts["v"]], (heads, rows, size), role="context")
    c = g.permute(c, [1, 0, 2])
    c = g.reshape(c, (rows, width))
    w = g.param("o.weight", rng.standard_normal((width, width)) / width**0.5)
    return g.add("linear", [c, w], (rows, width))


def attention(
    rng: np.random.Generator, rows: int = 5, heads: int = 2, kv_heads: int = 1, size: int = 4
) -> Graph:
    """Return norm, rope, grouped-query attention under a causal mask, projection, residual."""
    width = heads * size
    g = Graph((rows, width))
    x = g.add("input", [], (rows, width))
    weight = g.param("norm.weight", 1 + 0.1 * rng.standard_normal(width))
    h = g.add("rms_norm", [x, weight], (rows, width), eps=1e-6)
    angles = np.arange(rows)[:, None] * 0.3 ** np.arange(size // 2)[None]
    angles = np.concatenate([angles, angles], axis=-1)
    cos = g.constant("cos", np.cos(angles).astype(np.float32))
    sin = g.constant("sin", np.sin(angles).astype(np.float32))
    parts = {}
    for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        w = g.param(f"{name}.weight", rng.standard_normal((count * size, width)) / width**0.5)
        b = g.param(f"{name}.bias", 0.1 * rng.standard_normal(count * size))
        y = g.add("linear", [h, w, b], (rows, count * size))
        y = g.reshape(y, (rows, count, size))
        y = g.permute(y, [1, 0, 2])
        if name != "v":
            y = g.add("rope", [y, cos, sin], (count, rows, size))
        if count != heads:
            y = g.expand(y, (heads, rows, size))
        parts[name] = y
    k = g.permute(parts["k"], [0, 2, 1])
    square = (heads, rows, rows)
    s = g.add("matmul", [parts["q"], k], square, role="scores")
    s = g.add("divide", [s], square, role="scores", divisor=float(size**0.5))
    mask = g.constant("mask", np.tril(np.ones((rows, rows), dtype=bool)))
    p = g.add("softmax", [s, mask], square, role="probabilities")
    c = g.add("matmul", [p, parts["v"]], (heads, rows, size), role="context")
    c = g.permute(c, [1, 0, 2])
    c = g.reshape(c, (rows, width))
    w = g.param("o.weight", rng.standard_normal((width, width)) / width**0.5)
    y = g.add("linear", [c, w], (rows, width))
    g.add("add", [x, y], (rows, width))
    return g


def mlp(rng: np.random.Generator, activation: str, rows: int = 3, width: int = 8) -> Graph:
    """Return layer norm, a (gated, for silu) MLP and the residual."""
    inner = 2 * width
    g = Graph((rows, width))
    x = g.add("input", [], (rows, width))
    weight = g.param("norm.weight", 1 + 0.1 * rng.standard_normal(width))
    bias = g.param("norm.bias", 0.1 * rng.standard_normal(width))
    h = g.add("layer_norm", [x, weight, bias], (rows, width), eps=1e-5)
    up = g.param("up.weight", rng.standard_normal((inner, width)) / width**0.5)
    up_bias = g.param("up.bias", 0.1 * rng.standard_normal(inner))
    y = g.add("linear", [h, up, up_bias], (rows, inner))
    y = g.add(activation, [y], (rows, inner))
    if activation == "silu":
        gate = g.param("gate.weight", rng.standard_normal((inner, width)) / width**0.5)
        y = g.add("mul", [y, g.add("linear", [h, gate], (rows, inner))], (rows, inner))
    down = g.param("down.weight", rng.standard_normal((width, inner)) / inner**0.5)
    y = g.add("linear", [y, down], (rows, width))
    g.add("add", [x, y], (rows, width))
    return g


def piecewise(rng: np.random.Generator, rows: int = 3, width: int = 4) -> Graph:
    """Return a graph with every piecewise linear operation."""
    g = Graph((rows, width))
    x = g.add("input", [], (rows, width))
    w = g.param("a.weight", rng.standard_normal((2 * width, width)))
    b = g.param("a.bias", rng.standard_normal(2 * width))
    y = g.add("linear", [x, w, b], (rows, 2 * width))
    y = g.add("relu", [y], (rows, 2 * width))
    left = g.slice(y, dim=1, start=0, stop=width)
    right = g.slice(y, dim=-1, start=width, stop=2 * width)
    y = g.add("mul", [left, right], (rows, width))
    y = g.add("scale", [y], (rows, width), factor=0.3)
    y = g.add("shift", [y], (rows, width), offset=-0.7)
    y = g.add("divide", [y], (rows, width), divisor=-1.7)
    z = g.add("neg", [left], (rows, width))
    y = g.add("sub", [y, z], (rows, width))
    turned = g.permute(y, [1, 0])
    y = g.add("matmul", [y, turned], (rows, rows))
    table = g.constant("table", rng.standard_normal((1, rows)).astype(np.float32))
    y = g.add("add", [y, table], (rows, rows))
    y = g.add("concat", [y, right], (rows, rows + width), dim=1)
    shape = (1, rows * (rows + width))
    y = g.reshape(y, shape)
    g.expand(y, (2, shape[1]))
    return g
