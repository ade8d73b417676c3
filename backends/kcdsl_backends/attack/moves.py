"""Operations that only move numbers, on one run or on many beside each other.

Many runs are one run with one more dimension in front: a value has the shape of its node behind it.
What is the same for all of them may be without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.view import View

MOVES = frozenset({"view", "concat"})
"""The operations of `moved`."""
_LEAVES = frozenset({"param", "constant"})
_PAIRED = frozenset({"add", "sub", "mul", "matmul", "rope"})
"""Operations that broadcast one operand against another."""


def moved(node: Node, operands: Sequence[Tensor], sources: Sequence[Node]) -> Tensor:
    """Return the value of one of `MOVES`; `sources` are the nodes of its operands."""
    fronts = [x.dim() - len(source.shape) for x, source in zip(operands, sources, strict=True)]
    if node.op == "view":
        return View.of(node).moved(operands[0], fronts[0])
    most = operands[fronts.index(max(fronts))]
    count = most.shape[: max(fronts)]
    whole = [
        x.expand(*count, *x.shape[before:]) for x, before in zip(operands, fronts, strict=True)
    ]
    return torch.cat(whole, int(node.attrs["dim"]) % len(sources[0].shape) + len(count))


def side_by_side(graph: BlockGraph) -> bool:
    """Say whether many runs may stand beside each other: where values of two nodes are broadcast
    against each other, both have as many dimensions, so that the one in front stays in front."""
    nodes = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        if node.op not in _PAIRED:
            continue
        ranks = {len(nodes[name].shape) for name in node.inputs if nodes[name].op not in _LEAVES}
        leaves = [len(nodes[name].shape) for name in node.inputs if nodes[name].op in _LEAVES]
        if len(ranks) > 1 or any(rank > min(ranks, default=rank) for rank in leaves):
            return False
    return True
