"""Small block graphs for linear bounds: one per rule, and feed-forward blocks with ReLU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from tests.support import proofs
from tests.support.affine_rules import RULES as AFFINE
from tests.support.affine_rules import Build


def feed_forward(
    rng: np.random.Generator, rows: int = 3, width: int = 6, inner: int = 10, layers: int = 1
) -> Any:
    """Return layers of linear, ReLU, linear."""
    g = proofs.Graph((rows, width))
    y = g.add("input", [], (rows, width))
    for k in range(layers):
        up = g.param(f"up.{k}", rng.standard_normal((inner, width)) / width**0.5)
        bias = g.param(f"bias.{k}", 0.1 * rng.standard_normal(inner))
        y = g.add("linear", [y, up, bias], (rows, inner))
        y = g.add("relu", [y], (rows, inner))
        down = g.param(f"down.{k}", rng.standard_normal((width, inner)) / inner**0.5)
        y = g.add("linear", [y, down], (rows, width))
    return g


def perceptron(
    rng: np.random.Generator, sizes: tuple[int, ...] = (3, 7, 6, 2), rows: int = 2
) -> Any:
    """Return linears with biases, and ReLU between them."""
    g = proofs.Graph((rows, sizes[0]))
    y = g.add("input", [], (rows, sizes[0]))
    for k, (before, size) in enumerate(pairwise(sizes)):
        y = y if k == 0 else g.add("relu", [y], (rows, before))
        w = g.param(f"w.{k}", rng.standard_normal((size, before)) / before**0.5)
        b = g.param(f"b.{k}", 0.3 * rng.standard_normal(size))
        y = g.add("linear", [y, w, b], (rows, size))
    return g


def shaped(rng: np.random.Generator, *, casts: bool = False) -> Any:
    """Return a feed-forward block as exporters write it: views, sums with biases, and casts."""
    g = proofs.Graph((2, 3))
    y = g.reshape(g.add("input", [], (2, 3)), (1, 2, 3))
    for k, size in enumerate((7, 5)):
        w = g.param(f"w.{k}", rng.standard_normal((size, g.shape_of(y)[-1])))
        y = g.add("linear", [y, w], (1, 2, size))
        y = g.add("add", [y, g.param(f"b.{k}", 0.3 * rng.standard_normal(size))], (1, 2, size))
        y = g.add("cast", [y], (1, 2, size), format="bfloat16") if casts else y
        y = g.add("relu", [y], (1, 2, size))
        y = g.add("cast", [y], (1, 2, size), format="float16") if casts else y
    w, b = g.param("w", rng.standard_normal((2, 5))), g.param("b", rng.standard_normal(2))
    y = g.add("linear", [y, w, b], (1, 2, 2))
    more = g.constant("more", 0.1 * rng.standard_normal(2).astype(np.float32))
    y = g.add("relu", [g.add("add", [more, y], (1, 2, 2))], (1, 2, 2))
    g.reshape(y, (2, 2))
    return g


def embedded(rng: np.random.Generator) -> Any:
    """Return rows of a table through a linear: a block on token ids."""
    g = proofs.Graph(None)
    table = g.param("table", rng.standard_normal((7, 6)))
    x = g.add("embedding", [table], (3, 6), ids=[4, 0, 4])
    w = g.param("w", rng.standard_normal((5, 6)))
    g.add("linear", [x, w], (3, 5))
    return g


def shared(rng: np.random.Generator) -> Any:
    """Return a node with two readers: an activation, and a product with a sum."""
    g = proofs.Graph((3, 6))
    x = g.add("input", [], (3, 6))
    y = g.add("linear", [x, g.param("w", rng.standard_normal((6, 6)) / 2)], (3, 6))
    z = g.add("mul", [g.add("silu", [y], (3, 6)), y], (3, 6))
    z = g.add("concat", [z, y, x], (3, 18), dim=1)
    g.slice(z, dim=1, start=0, stop=18, step=2)
    return g


def activated(rng: np.random.Generator) -> Any:
    """Return every smooth activation of a linear, whose drift has a nonzero midpoint."""
    g = proofs.Graph((3, 6))
    x = g.add("input", [], (3, 6))
    y = g.add("linear", [x, g.param("w", rng.standard_normal((6, 6)))], (3, 6))
    parts = [g.add(op, [y], (3, 6)) for op in ("silu", "gelu", "tanh")]
    parts.append(g.add("gelu", [y], (3, 6), approximate="tanh"))
    g.add("concat", parts, (3, 24), dim=1)
    return g


def twice_activated(rng: np.random.Generator) -> Any:
    """Return every smooth activation of an activation, whose deviation has a nonzero midpoint."""
    g = proofs.Graph((3, 6))
    x = g.add("input", [], (3, 6))
    y = g.add("linear", [x, g.param("w", rng.standard_normal((6, 6)))], (3, 6))
    y = g.add("gelu", [y], (3, 6))
    parts = [g.add(op, [y], (3, 6)) for op in ("silu", "gelu", "tanh")]
    parts.append(g.add("gelu", [y], (3, 6), approximate="tanh"))
    g.add("concat", parts, (3, 24), dim=1)
    return g


def decoder(rng: np.random.Generator) -> Any:
    return proofs.attention(rng, rows=3, heads=2, kv_heads=1, size=4)


RULES: dict[str, Build] = {
    **AFFINE,
    "relu of a linear": feed_forward,
    "relu twice": lambda rng: feed_forward(rng, layers=2),
    "silu, gelu, tanh of a linear": activated,
    "embedding": embedded,
    "shared": shared,
    "attention": decoder,
    "piecewise": proofs.piecewise,
    "silu, gelu, tanh of gelu": twice_activated,
}
CHAINS: dict[str, Build] = {
    "relu of a linear": lambda rng: feed_forward(rng, rows=2, width=3, inner=6),
    "relu twice": perceptron,
    "as exported": shaped,
    "with casts": lambda rng: shaped(rng, casts=True),
}
"""Blocks that are ReLU networks of each row."""
