"""Which nodes of a block are keys and values that a kernel caches."""

from __future__ import annotations

from collections import Counter

from kcdsl_certs.recheck.block import Block
from kcdsl_certs.recheck.spec import Kernel
from kcdsl_certs.rejected import Rejected

_PARTS = {"scores": "keys", "context": "values"}


def refuse_uncached(block: Block, *kernels: Kernel) -> None:
    """Refuse a block in which a kernel with a cache might read keys or values beside it.

    Every product of two results must be one of scores or a context, and read its second factor from
    a node of its own; every softmax must be that of an attention.

    Raises:
        Rejected: "rule/cache".
    """
    marked = [node for node in block.nodes if node.op == "cache"]
    if not marked and all(kernel.cache is None for kernel in kernels):
        return
    nodes, reads = block.named, Counter(name for node in block.nodes for name in node.inputs)
    serving = set()
    for node in block.nodes:
        if node.op == "softmax" and node.role != "probabilities":
            raise Rejected("rule/cache", f"softmax {node.name[:80]!r} is of no attention")
        if node.op != "matmul":
            continue
        if node.role not in _PARTS or len(node.inputs) != 2:
            raise Rejected("rule/cache", f"product {node.name[:80]!r} is of no attention")
        second = nodes[node.inputs[1]]
        if second.op != "cache" or second.attrs.text("part") != _PARTS[node.role]:
            raise Rejected("rule/cache", f"{node.name[:80]!r} reads keys or values past a cache")
        serving.add(second.name)
    for node in marked:
        if node.name not in serving or reads[node.name] != 1 or node.name == block.output:
            raise Rejected("rule/cache", f"cache {node.name[:80]!r} is not read by one product")
        if node.format or node.role or len(node.shape) < 2 or len(node.inputs) != 1:
            raise Rejected("rule/cache", f"cache {node.name[:80]!r} is none of keys or values")
        if node.attrs.text("source") != _source(block, node.inputs[0]):
            raise Rejected("rule/cache", f"cache {node.name[:80]!r} names another linear")


def _source(block: Block, start: str) -> str:
    """Return the weight of the one linear behind a node; "" where there are more, or inputs."""
    found, seen, waiting = set(), {start}, [start]
    while waiting:
        node = block.named[waiting.pop()]
        if node.op in ("input", "embedding"):
            return ""
        if node.op == "linear":
            if len(node.inputs) < 2:
                raise Rejected("graph/field", f"{node.name[:80]!r} is linear in no weight")
            weight = block.named[node.inputs[1]]
            found.add(weight.attrs.text("key") if weight.op == "param" else "")
            continue
        waiting += [name for name in node.inputs if name not in seen]
        seen |= set(node.inputs)
    return found.pop() if len(found) == 1 else ""
