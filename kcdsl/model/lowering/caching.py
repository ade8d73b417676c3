"""Places where a block stores keys and values: nodes of the op `cache` in block graphs.

A kernel with a quantised cache (`Numerics.kv_cache`) stores there and reads back; to any other it
is nothing. Graphs have these nodes only where a kernel of the pair has such a cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.numerics import Numerics

PARTS = {"scores": "keys", "context": "values"}
"""What the second operand of a product of each role is."""


def with_caches(graph: BlockGraph, kernels: Iterable[Numerics]) -> BlockGraph:
    """Return the graph with a node `cache` before every product that reads keys or values, if one
    of the kernels has a quantised cache.

    Refuse a block of which is not known what are keys and values.
    """
    if all(kernel.kv_cache is None for kernel in kernels):
        return graph
    unknown = uncached(graph, marked=False)
    if unknown is not None:
        raise refuse(
            codes.OPERATION_UNSUPPORTED,
            f"block {graph.block!r} of a kernel with a kv_cache: {unknown}",
            help="leave out `kv_cache`, or let the block be softmax(q @ k.T ...) @ v, or call"
            " scaled_dot_product_attention",
        )
    nodes: list[Node] = []
    named = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.op == "matmul" and named[node.inputs[1]].op != "cache":
            left, right = node.inputs
            part, name = PARTS[node.role], _free(f"{node.name}_cache", named)
            attrs = {"part": part, "source": source_of(graph, right)}
            nodes.append(Node(name, "cache", (right,), named[right].shape, attrs))
            node = replace(node, inputs=(left, name))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _free(name: str, taken: Iterable[str]) -> str:
    while name in taken:
        name += "_"
    return name


def uncached(graph: BlockGraph, *, marked: bool = True) -> str | None:
    """Say which operation reads keys or values, or may do so, and not from a cache; None: none.

    Unless nodes `cache` are `marked`, it is enough that roles say what keys and values are.
    """
    named = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.op == "softmax" and node.role != "probabilities":
            return f"{node.name} is a softmax that belongs to no attention that is known"
        if node.op != "matmul":
            continue
        if node.role not in PARTS:
            return f"{node.name} multiplies two results and belongs to no attention that is known"
        if marked and named[node.inputs[1]].op != "cache":
            return f"{node.name} does not read its {PARTS[node.role]} from the cache"
    return None


def source_of(graph: BlockGraph, name: str) -> str:
    """Return the key of the weight of the one linear of which a node is made; "" for several."""
    named = {node.name: node for node in graph.nodes}
    found: set[str] = set()
    waiting, seen = [name], {name}
    while waiting:
        node = named[waiting.pop()]
        if node.op == "linear":
            found.add(str(named[node.inputs[1]].attrs["key"]))
            continue
        if node.op in ("input", "embedding"):
            return ""
        waiting += [source for source in node.inputs if source not in seen]
        seen.update(node.inputs)
    return found.pop() if len(found) == 1 else ""
