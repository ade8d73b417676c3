"""Places where a block stores keys and values: nodes of the op `cache` in block graphs.

A kernel with a quantised cache (`Numerics.kv_cache`) stores and reads back the values there; for
any other kernel the node is the identity. Only graphs for a pair with such a kernel have them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.numerics import Numerics

PARTS = {"scores": "keys", "context": "values"}
"""The second operand of the product of each role."""


def with_caches(graph: BlockGraph, kernels: Iterable[Numerics]) -> BlockGraph:
    """Return the graph with a node `cache` before every product that reads keys or values, if one
    of the kernels has a quantised cache.

    Refuse a block whose keys and values cannot be identified.
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
    """Return an operation that reads, or may read, keys or values without a cache; None: none.

    If nodes `cache` are not `marked`, operations with an attention role need no cache node.
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
    """Return the weight key of the only linear that a node depends on; "" for several."""
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
