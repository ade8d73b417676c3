"""Tensors that a program may quantise: nodes of the op `quantise` in block graphs.

A kernel with a quantiser of that tensor (`Numerics.quantisers`) quantises there; for any other the
node is the identity. Graphs of proofs have these nodes only where a kernel of the pair quantises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph
from kcdsl.model.numerics import Numerics, StaticQuantiser


@torch.library.custom_op("kcdsl::quantise", mutates_args=())
def quantised(x: Tensor, tensor: str) -> Tensor:
    """Return x; records in exports that kernels may quantise it, and its name."""
    return x.clone()


@quantised.register_fake
def _(x: Tensor, tensor: str) -> Tensor:
    return torch.empty_like(x)


quantised.register_autograd(lambda context, gradient: (gradient, None))


def with_quantisers(graph: BlockGraph, kernels: Iterable[Numerics]) -> BlockGraph:
    """Return the graph without the nodes `quantise` that are the identity in all kernels.

    Either no kernel names their tensor, or their operand comes from the same quantiser through
    views and relu only: quantising it again gives the same codes."""
    kernels = tuple(kernels)
    sources: dict[str, str] = {}
    made: dict[str, tuple[StaticQuantiser | None, ...]] = {}
    nodes = []
    for node in graph.nodes:
        inputs = tuple(sources.get(name, name) for name in node.inputs)
        if node.op in ("view", "relu") and inputs[0] in made:
            made[node.name] = made[inputs[0]]
        if node.op == "quantise":
            own = tuple(kernel.quantiser(node) for kernel in kernels)
            if own in (made.get(inputs[0]), (None,) * len(kernels)):
                sources[node.name] = inputs[0]
                continue
            made[node.name] = own
        nodes.append(node if inputs == node.inputs else replace(node, inputs=inputs))
    if not sources:
        return graph
    output = sources.get(graph.output, graph.output)
    return replace(graph, nodes=tuple(nodes), output=output)
