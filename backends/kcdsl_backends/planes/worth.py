"""Whether planes of a block are cheap enough to be asked for without being named."""

from __future__ import annotations

import math

from kcdsl.model.graph import BlockGraph
from kcdsl_backends.planes.propagate import READ_CLOSELY

MOST = 2**36
"""Multiplications up to which planes are tried unasked: half a minute of a core."""
_PASSES = {"softmax": 3, "layer_norm": 6, "rms_norm": 4}
"""Batches of functionals, one for each element, that operations make beside those of section 5."""


def cheap(graph: BlockGraph) -> bool:
    """Say whether planes of a block take seconds rather than many minutes."""
    return cost(graph) <= MOST


def cost(graph: BlockGraph) -> int:
    """Return about how many multiplications the functionals of all elements take.

    Each goes back through the linears before it: of one row, or behind a product of all rows.
    """
    shapes = {node.name: node.shape for node in graph.nodes}
    linears = [node.shape for node in graph.nodes if node.op == "linear"]
    rows = max((math.prod(shape[:-1]) for shape in linears), default=1)
    behind, mixed, total = 1, False, 0
    met: set[str] = set()

    def functionals(name: str, passes: int) -> int:
        return passes * math.prod(shapes[name]) * behind * (rows if mixed else 1)

    for node in graph.nodes:
        for position in READ_CLOSELY.get(node.op, ()):
            name = node.inputs[position]
            total += functionals(name, 0 if name in met else 2)
            met.add(name)
        total += functionals(node.inputs[0], _PASSES[node.op]) if node.op in _PASSES else 0
        if node.op == "linear":
            behind += math.prod(shapes[node.inputs[1]])
        mixed = mixed or node.op == "matmul"
    return total + functionals(graph.output, 2)
