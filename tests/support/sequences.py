"""Proof documents about sequences of any length, and blocks for them at every length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.certifier.statements.sequences import row_axes, stored_tables
from kcdsl_backends.drift.boxes.state import Parameter, Rows
from tests.support import proofs, prover

Document = dict[str, Any]
Build = Callable[[np.random.Generator, int], Any]


def decoder(
    rng: np.random.Generator,
    rows: int,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    size: int = 4,
    louder: float = 1.0,
) -> Any:
    """Return norm, rope, grouped attention, projection and residual at a number of rows.

    The same generator gives the same parameters at every length; `louder` multiplies the scores.
    """
    graph = proofs.attention(rng, rows, heads, kv_heads, size)
    graph.tensors["q.weight"] *= np.float32(louder)
    graph.tensors["q.bias"] *= np.float32(louder)
    return graph


def tables_of(graph: Any, long: Any) -> dict[str, np.ndarray]:
    """Return the tables of a graph of two rows at another length, by node."""
    read = {name for node in graph.nodes if node["op"] == "rope" for name in node["inputs"][1:]}
    return {
        node["name"]: long.constants[node["attrs"]["key"]]
        for node in graph.nodes
        if node["name"] in read
    }


def document(
    graph: Any,
    tables: Mapping[str, np.ndarray],
    kernels: tuple[Document, Document],
    sha256: str,
    centre: np.ndarray,
    radius: np.ndarray | float,
    longest: int,
    functional: str = "inf",
) -> Document:
    """Return a proof document about 1 to `longest` rows with claims that are always true."""
    found = proofs.document(graph, *kernels, sha256, np.zeros((2, 1)), 0.0, functional)
    region = {
        "kind": "rows",
        "centre": proofs.array(np.asarray(centre, dtype=np.float64)),
        "radius": proofs.array(np.asarray(np.broadcast_to(radius, (1, np.size(radius))), float)),
        "longest": longest,
    }
    if tables:
        region["tables"] = {name: proofs.array(array) for name, array in tables.items()}
    found["cases"][0]["region"] = region
    return found


def problem(
    graph: Any, tables: Mapping[str, np.ndarray], kernels: tuple[Document, Document], longest: int
) -> BlockProblem:
    """Return the same document as the prover's type."""
    block, cpu = prover.block(graph), prover.parameters(graph, kernels[0]).device
    sides = [prover.parameters(graph, record) for record in kernels]
    train, infer = (prover.numerics(record) for record in kernels)
    known: dict[str, Parameter] = stored_tables(block, tables, train, infer, cpu)
    rows = Rows(longest, row_axes(block), known)
    return BlockProblem(block, *sides, rows=rows, tables=dict(tables))


def masks(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """Return masks [rows, rows] of several kinds; every row admits at least one column."""
    one = np.ones((rows, rows), dtype=bool)
    near = np.triu(np.tril(one), -3)
    padded = np.tril(one) & (rng.random(rows) < 0.6)[None] | np.eye(rows, dtype=bool)
    return {"causal": np.tril(one), "all": one, "sliding": near, "padded": padded}


def mutable_copy(value: Document) -> Document:
    """Return a mutable copy."""
    return copy.deepcopy(value)


WIDTH = 4
"""Numbers per row in hand-written graphs."""


def rows_of(rows: int = 2, width: int = WIDTH) -> tuple[Any, str]:
    """Return the graph of a number of rows, and the name of its input."""
    graph = proofs.Graph((rows, width))
    return graph, graph.add("input", [], (rows, width))


def scored(rows: int = 2) -> tuple[Any, str, str]:
    """Return a graph, its rows, and their scores with one another."""
    g, x = rows_of(rows)
    k = g.permute(x, [1, 0])
    return g, x, g.add("matmul", [x, k], (rows, rows), role="scores")
