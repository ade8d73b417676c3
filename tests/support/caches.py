"""Graphs with nodes of keys and values, and records of quantised caches."""

from __future__ import annotations

from typing import Any

import numpy as np


def static(format: str, keys: Any, values: Any) -> dict[str, Any]:
    """Return the record of a cache with static scales: one, a list or a mapping for each part."""

    def named(given: Any) -> dict[str, list[str]]:
        by_name = given if isinstance(given, dict) else {"*": given}
        lists = {k: v if isinstance(v, list) else [v] for k, v in by_name.items()}
        return {k: [float(np.float32(s)).hex() for s in v] for k, v in lists.items()}

    record = {"format": format, "scale": "static"}
    return {**record, "key_scale": named(keys), "value_scale": named(values)}


def dynamic(format: str, scale: str, least: float = 0.0) -> dict[str, Any]:
    """Return the record of a cache with scales computed from its values, or with none."""
    record: dict[str, Any] = {"format": format, "scale": scale}
    return record | ({"least_scale": float(np.float32(least)).hex()} if least else {})


CACHES: dict[str, dict[str, Any]] = {
    "e4m3 per token and head": dynamic("fp8_e4m3", "per_token_head"),
    "e4m3 per head": dynamic("fp8_e4m3", "per_head"),
    "e4m3 per tensor": dynamic("fp8_e4m3", "per_tensor"),
    "e4m3 static": static("fp8_e4m3", 0.0313, 0.02),
    "e4m3 static per head": static("fp8_e4m3", [0.03, 0.0517], [0.02, 0.025]),
    "e4m3 named": static("fp8_e4m3", {"k": 0.03, "*": 2.0}, {"v": [0.02, 0.03]}),
    "e5m2 without scales": dynamic("fp8_e5m2", "none"),
    "e4m3 without scales": dynamic("fp8_e4m3", "none"),
    "e5m2 per head": dynamic("fp8_e5m2", "per_head"),
    "int8 static": static("int8", 0.1, 0.0713),
    "int8 static per head": static("int8_full", [0.07, 0.1], [0.06, 0.08]),
    "int8 per token and head": dynamic("int8", "per_token_head", 1e-6),
    "int8 per head, never small": dynamic("int8", "per_head", 0.11),
    "int8 full per tensor": dynamic("int8_full", "per_tensor"),
    "fnuz per head": dynamic("fp8_e4m3fnuz", "per_head"),
}


def with_caches(graph: Any, sources: tuple[str, str] = ("k.weight", "v.weight")) -> Any:
    """Insert cache nodes before the products of an attention; return the graph."""
    nodes: list[dict[str, Any]] = []
    for node in graph.nodes:
        if node["op"] == "matmul":
            left, right = node["inputs"]
            keys = node["role"] == "scores"
            shape = next(n["shape"] for n in nodes if n["name"] == right)
            name = f"{node['name']}_cache"
            attrs = {"part": "keys" if keys else "values", "source": sources[0 if keys else 1]}
            nodes.append(
                {
                    "name": name,
                    "op": "cache",
                    "inputs": [right],
                    "shape": shape,
                    "attrs": attrs,
                    "role": "",
                    "format": "",
                }
            )
            node = {**node, "inputs": [left, name]}
        nodes.append(node)
    graph.nodes = nodes
    return graph
