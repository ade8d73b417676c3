"""Walk a block graph and bound every node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.formats import FORMATS
from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.interval.box import Box
from kcdsl_backends.interval.context import Kernels, Step
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.rounding import Rounding, Stored
from kcdsl_backends.interval.rules import elementwise, linear, norms, softmax, structural
from kcdsl_backends.interval.state import Known, State, combine

Rule = Callable[[Step], Known]
FLOAT32 = FORMATS["float32"]

RULES: Mapping[str, Rule] = {
    "embedding": structural.embedding,
    "linear": linear.linear,
    "matmul": linear.product,
    "add": elementwise.add,
    "sub": elementwise.sub,
    "mul": elementwise.mul,
    "scale": elementwise.scale,
    "divide": elementwise.divide,
    "shift": elementwise.shift,
    "neg": structural.neg,
    "relu": elementwise.relu,
    "tanh": elementwise.activation(elementwise.TANH),
    "silu": elementwise.activation(elementwise.SILU),
    "gelu": elementwise.activation(elementwise.GELU),
    "reshape": structural.reshape,
    "expand": structural.expand,
    "permute": structural.permute,
    "slice": structural.slice_,
    "concat": structural.concat,
    "softmax": softmax.softmax,
    "rms_norm": norms.rms_norm,
    "layer_norm": norms.layer_norm,
    "rope": elementwise.rope,
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What was found: the state of the output, and for every computed node the largest magnitudes.

    `witness` maps a node to (largest |training value|, largest |drift|).
    """

    output: State
    witness: Mapping[str, tuple[float, float]]


def propagate(graph: BlockGraph, kernels: Kernels, centre: Tensor | None, radius: Tensor) -> Bounds:
    """Bound every node of the graph for inputs in [centre - radius, centre + radius].

    Args:
        graph: the block.
        kernels: both kernels' rounding and stored parameters.
        centre: [T, D] float64, the values of a float32 tensor; None for a block on token ids.
        radius: broadcastable to [T, D], float64, >= 0.

    Raises:
        NoBound: no finite bound exists (overflow reachable, variance may vanish, ...).
    """
    nodes = {node.name: node for node in graph.nodes}
    known: dict[str, Known] = {}
    witness: dict[str, tuple[float, float]] = {}
    last_use = _last_uses(graph)
    for position, node in enumerate(graph.nodes):
        if node.op in ("param", "constant"):
            continue
        if node.op == "input":
            state: Known = block_input(node, kernels, centre, radius)
        elif node.op == "matmul" and node.role == "context":
            state = softmax.context(Step(node, kernels, nodes, known))
        else:
            state = RULES[node.op](Step(node, kernels, nodes, known))
        known[node.name] = state
        witness[node.name] = _magnitudes(node, state)
        for name in last_use.get(position, ()):
            known.pop(name, None)
    output = known[graph.output]
    return Bounds(output if isinstance(output, State) else output.collapse(), witness)


def _last_uses(graph: BlockGraph) -> dict[int, tuple[str, ...]]:
    """Return, for each position, the nodes that nobody reads after it."""
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in node.inputs:
            last[name] = position
    last.pop(graph.output, None)
    at: dict[int, tuple[str, ...]] = {}
    for name, position in last.items():
        at[position] = (*at.get(position, ()), name)
    return at


def block_input(node: Node, kernels: Kernels, centre: Tensor | None, radius: Tensor) -> State:
    """Return the state of the block input: the same float32 tensor for both kernels."""
    if centre is None:
        raise NoBound(node.name, "the block reads hidden states but the region holds token ids")
    if tuple(centre.shape) != tuple(node.shape):
        raise NoBound(
            node.name, f"the region has shape {list(centre.shape)}, not {list(node.shape)}"
        )
    spread = radius.expand(centre.shape)
    exact = Box.point(centre) if not bool(spread.any()) else Box.point(centre).widen(spread)
    zero = torch.zeros_like(centre)

    def taken(kernel: Rounding) -> Stored:
        form = kernel.format_for(node.role, node.op)
        if form.precision >= FLOAT32.precision:
            return Stored(exact, Box(zero, zero))
        return kernel.store(exact, zero, form, node.name, kernel.inner(False))

    return combine(node.name, Box(zero, zero), taken(kernels.train), taken(kernels.infer))


def _magnitudes(node: Node, state: Known) -> tuple[float, float]:
    plain = state if isinstance(state, State) else state.collapse()
    value, drift = float(plain.train.mag().amax()), float(plain.drift.mag().amax())
    if not (value < torch.inf and drift < torch.inf):
        raise NoBound(node.name, "a bound is not finite")
    return value, drift
