"""Small block graphs, one for each rule of the affine domain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support import proofs

Build = Callable[[np.random.Generator], Any]
ROWS, WIDTH = 3, 6


def source() -> tuple[Any, str]:
    g = proofs.Graph((ROWS, WIDTH))
    return g, g.add("input", [], (ROWS, WIDTH))


def unary(op: str, **attrs: Any) -> Build:
    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        g.add(op, [x], (ROWS, WIDTH), **attrs)
        return g

    return build


def binary(op: str) -> Build:
    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        w = g.param("w", rng.standard_normal((WIDTH, WIDTH)) / 2)
        g.add(op, [x, g.add("linear", [x, w], (ROWS, WIDTH))], (ROWS, WIDTH))
        return g

    return build


def with_known(op: str) -> Build:
    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        table = g.constant("table", rng.standard_normal((ROWS, WIDTH)).astype(np.float32))
        g.add(op, [table, x], (ROWS, WIDTH))
        return g

    return build


def linear(outputs: int, bias: bool) -> Build:
    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        inputs = [x, g.param("w", rng.standard_normal((outputs, WIDTH)))]
        if bias:
            inputs.append(g.param("b", rng.standard_normal(outputs)))
        g.add("linear", inputs, (ROWS, outputs))
        return g

    return build


def linears(rng: np.random.Generator) -> Any:
    g, x = source()
    w, b = g.param("w", rng.standard_normal((24, WIDTH))), g.param("b", rng.standard_normal(24))
    y = g.add("linear", [x, w, b], (ROWS, 24))
    g.add("linear", [y, g.param("v", rng.standard_normal((4, 24)))], (ROWS, 4))
    return g


def norm(op: str, gain: bool, eps: float = 1e-5) -> Build:
    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        inputs = [x]
        if gain:
            inputs.append(g.param("g", 1 + 0.3 * rng.standard_normal(WIDTH)))
        if gain and op == "layer_norm":
            inputs.append(g.param("b", 0.3 * rng.standard_normal(WIDTH)))
        g.add(op, inputs, (ROWS, WIDTH), eps=eps)
        return g

    return build


def square(op: str, **attrs: Any) -> Build:
    """Return an operation on a square matrix, where a transposed result has the same shape."""

    def build(rng: np.random.Generator) -> Any:
        g = proofs.Graph((4, 4))
        w = g.param("w", rng.standard_normal((4, 4)))
        y = g.add("linear", [g.add("input", [], (4, 4)), w], (4, 4))
        g.add(op, [y], (4, 4), **attrs)
        return g

    return build


def data_movement(rng: np.random.Generator) -> Any:
    g, x = source()
    y = g.reshape(x, (ROWS, 2, 3))
    y = g.permute(y, [1, 0, 2])
    y = g.reshape(y, (2, 1, ROWS, 3))
    y = g.expand(y, (2, 2, ROWS, 3))
    y = g.reshape(y, (4, ROWS, 3))
    a = g.slice(y, dim=2, start=0, stop=3, step=2)
    b = g.slice(y, dim=-1, start=1, stop=3)
    g.add("neg", [g.add("concat", [a, b], (4, ROWS, 4), dim=2)], (4, ROWS, 4))
    return g


def rope(rng: np.random.Generator) -> Any:
    g, x = source()
    angles = rng.standard_normal((ROWS, WIDTH))
    cos = g.constant("cos", np.cos(angles).astype(np.float32))
    sin = g.constant("sin", np.sin(angles).astype(np.float32))
    g.add("rope", [x, cos, sin], (ROWS, WIDTH))
    return g


def heads(g: Any, x: str, rng: np.random.Generator, name: str) -> str:
    w = g.param(f"{name}.weight", rng.standard_normal((WIDTH, WIDTH)) / 2)
    y = g.add("linear", [x, w], (ROWS, WIDTH))
    y = g.reshape(y, (ROWS, 2, 3))
    return str(g.permute(y, [1, 0, 2]))


def scores(g: Any, x: str, rng: np.random.Generator) -> str:
    q, k = heads(g, x, rng, "q"), heads(g, x, rng, "k")
    k = g.permute(k, [0, 2, 1])
    return str(g.add("matmul", [q, k], (2, ROWS, ROWS), role="scores"))


def linear_scores(rng: np.random.Generator) -> Any:
    """Return scores whose operands are heads of a linear."""
    g, x = source()
    scores(g, x, rng)
    return g


def softmax(masked: bool) -> Build:
    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        inputs = [g.reshape(x, (2, ROWS, 3))]
        if masked:
            inputs.append(g.constant("mask", np.tril(np.ones((ROWS, 3), dtype=bool))))
        g.add("softmax", inputs, (2, ROWS, 3), role="probabilities")
        return g

    return build


def context(straight: bool) -> Build:
    """Return probabilities times values, which are heads of a linear or of an operation on it."""

    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        p = g.add("softmax", [scores(g, x, rng)], (2, ROWS, ROWS), role="probabilities")
        v = heads(g, x, rng, "v")
        if not straight:
            v = g.add("scale", [v], (2, ROWS, 3), factor=1.5)
        g.add("matmul", [p, v], (2, ROWS, 3), role="context")
        return g

    return build


def rotated_heads(g: Any, x: str, rng: np.random.Generator, name: str, count: int) -> str:
    """Append heads [count, T, 4] of a linear, rotated by position."""
    w = g.param(f"{name}.weight", rng.standard_normal((4 * count, WIDTH)) / 2)
    y = g.add("linear", [x, w], (ROWS, 4 * count))
    y = g.reshape(y, (ROWS, count, 4))
    y = g.permute(y, [1, 0, 2])
    angles = rng.standard_normal((ROWS, 4))
    cos = g.constant(f"{name}.cos", np.cos(angles).astype(np.float32))
    sin = g.constant(f"{name}.sin", np.sin(angles).astype(np.float32))
    return str(g.add("rope", [y, cos, sin], (count, ROWS, 4)))


def repeated_heads(g: Any, x: str, width: int) -> str:
    """Append each head [1, T, width] twice: [2, T, width]."""
    x = g.reshape(x, (1, 1, ROWS, width))
    x = g.expand(x, (1, 2, ROWS, width))
    return str(g.reshape(x, (2, ROWS, width)))


def shared_scores(g: Any, x: str, rng: np.random.Generator) -> str:
    q, k = rotated_heads(g, x, rng, "q", 2), repeated_heads(g, rotated_heads(g, x, rng, "k", 1), 4)
    k = g.permute(k, [0, 2, 1])
    return str(g.add("matmul", [q, k], (2, ROWS, ROWS), role="scores"))


def rotated_scores(groups: int) -> Build:
    """Return scores of two heads with rotated queries, with one key head each or one shared."""

    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        if groups == 1:
            shared_scores(g, x, rng)
            return g
        q, k = rotated_heads(g, x, rng, "q", 2), rotated_heads(g, x, rng, "k", 2)
        k = g.permute(k, [0, 2, 1])
        g.add("matmul", [q, k], (2, ROWS, ROWS), role="scores")
        return g

    return build


def shared_context(rng: np.random.Generator) -> Any:
    """Return causal attention of two heads that read the same keys and values."""
    g, x = source()
    mask = g.constant("mask", np.tril(np.ones((ROWS, ROWS), dtype=bool)))
    s = shared_scores(g, x, rng)
    p = g.add("softmax", [s, mask], (2, ROWS, ROWS), role="probabilities")
    w = g.param("v.weight", rng.standard_normal((3, WIDTH)) / 2)
    v = g.add("linear", [x, w], (ROWS, 3))
    v = g.reshape(v, (ROWS, 1, 3))
    v = repeated_heads(g, g.permute(v, [1, 0, 2]), 3)
    g.add("matmul", [p, v], (2, ROWS, 3), role="context")
    return g


ODDLY = ("values of one column", "rows and heads mixed", "heads of one row")
"""Kinds of operands that resemble the heads of a linear."""


def irregular_heads(kind: str) -> Build:
    """Return products whose operands come from a linear, but not as its heads."""

    def build(rng: np.random.Generator) -> Any:
        g, x = source()
        if kind == "values of one column":
            w = g.param("w", rng.standard_normal((1, 6)))
            v = g.add("linear", [x, w], (3, 1))
            s = g.add("concat", [x, x, x], (9, 6), dim=0)
            s = g.slice(s, dim=1, start=0, stop=6, step=2)
            p = g.add("softmax", [g.reshape(s, (3, 3, 3))], (3, 3, 3))
            g.add("matmul", [p, v], (3, 3, 1), role="context")
            return g
        parts = []
        for name in "qk":
            y = g.add("linear", [x, g.param(name, rng.standard_normal((6, 6)))], (3, 6))
            if kind == "rows and heads mixed":  # the heads are not columns of the linear
                parts.append(g.reshape(y, (2, 3, 3)))
            else:  # each head reads other rows of the input
                y = g.reshape(y, (3, 2, 3))
                parts.append(g.expand(y, (3, 2, 3)))
        heads, rows = (2, 3) if kind == "rows and heads mixed" else (3, 2)
        k = g.permute(parts[1], [0, 2, 1])
        g.add("matmul", [parts[0], k], (heads, rows, rows), role="scores")
        return g

    return build


RULES: dict[str, Build] = {
    "add": binary("add"),
    "sub": binary("sub"),
    "mul": binary("mul"),
    "add known": with_known("add"),
    "sub known": with_known("sub"),
    "mul known": with_known("mul"),
    "scale": unary("scale", factor=-0.3),
    "divide": unary("divide", divisor=1.7),
    "shift": unary("shift", offset=-0.7),
    "neg": unary("neg"),
    "relu": unary("relu"),
    "tanh": unary("tanh"),
    "silu": unary("silu"),
    "gelu": unary("gelu"),
    "gelu by tanh": unary("gelu", approximate="tanh"),
    "linear": linear(4, False),
    "linear with bias": linear(13, True),
    "rms_norm": norm("rms_norm", True),
    "rms_norm alone": norm("rms_norm", False),
    "layer_norm": norm("layer_norm", True),
    "layer_norm alone": norm("layer_norm", False),
    "moves": data_movement,
    "rope": rope,
    "scores straight from linears": linear_scores,
    "softmax": softmax(False),
    "masked softmax": softmax(True),
    "context straight from a linear": context(True),
    "context": context(False),
    **{
        kind: irregular_heads(kind) for kind in ODDLY[1:]
    },  # the prover does not implement products that broadcast
    "linears in a row": linears,
    "rms_norm of a square": square("rms_norm", eps=1e-5),
    "layer_norm of a square": square("layer_norm", eps=1e-5),
    "scores of turned keys": rotated_scores(2),
    "scores of turned and shared keys": rotated_scores(1),
    "context of shared heads": shared_context,
}
BEYOND: dict[str, Build] = {
    "rms_norm": norm("rms_norm", True, 1e39),
    "layer_norm": norm("layer_norm", True, 1e39),
}
"""Norms whose eps overflows float32: a kernel then divides by infinity."""
