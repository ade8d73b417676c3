"""The number of readings of each node of a graph where casts are free (section 2, Readings)."""

from __future__ import annotations

from typing import Any

ONCE = ("linear", "matmul")
"""Operations that are never recomputed; a context product is a matmul."""
TWICE = ("softmax", "rms_norm", "layer_norm")
"""Operations that read their first operand again, for sums over its rows."""


def counted(graph: Any) -> dict[str, int]:
    """Return the number of readings of each node.

    A node computed once ends a chain of operations that are recomputed for each reader: where a
    norm or a softmax begins the chain, all of its readings are equal.
    """
    each, same = _counted(graph, 2), _counted(graph, 1)
    return {n["name"]: (same if n["op"] in ONCE else each)[n["name"]] for n in graph.nodes}


def _counted(graph: Any, summed: int) -> dict[str, int]:
    """Count readings.

    The first operand of a norm or softmax counts as often as it is computed and once more (`summed`
    2), or once in all (1).
    """
    stored = {graph.output}
    others = dict.fromkeys((node["name"] for node in graph.nodes), 0)
    found: dict[str, int] = {}
    for node in reversed(graph.nodes):
        name, op = node["name"], node["op"]
        found[name] = others[name] + (name in stored)
        for place, read in enumerate(node["inputs"]):
            if op in ONCE:
                stored.add(read)
            elif op in TWICE and place == 0:
                others[read] += found[name] + 1 if summed == 2 else 1
            else:
                others[read] += found[name]
    return found
