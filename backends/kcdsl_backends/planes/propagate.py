"""Walk a block graph: the interval domain and the planes together, node by node (section 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.interval.box import Box
from kcdsl_backends.interval.context import Kernels
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.propagate import RULES as INTERVAL
from kcdsl_backends.interval.propagate import block_input
from kcdsl_backends.interval.rules import softmax as interval_softmax
from kcdsl_backends.interval.rules.cache import refuse_uncached
from kcdsl_backends.interval.state import State, settle
from kcdsl_backends.planes.hints import hints_of
from kcdsl_backends.planes.refine import refine
from kcdsl_backends.planes.rules import attention, elementwise, linear, norms, structural
from kcdsl_backends.planes.run import Part, Rule, Run, watched
from kcdsl_backends.planes.search import Effort, Searched, search
from kcdsl_backends.planes.tape import Tape

RULES: Mapping[str, Rule] = {
    "embedding": structural.embedding,
    "cast": structural.cast,
    "linear": linear.linear,
    "matmul": linear.matmul,
    "add": elementwise.add(1.0),
    "sub": elementwise.add(-1.0),
    "mul": linear.product_of_elements,
    "scale": elementwise.scale,
    "divide": elementwise.scale,
    "shift": elementwise.shift,
    "neg": structural.neg,
    "relu": elementwise.relu,
    "tanh": elementwise.activation,
    "silu": elementwise.activation,
    "gelu": elementwise.activation,
    "view": structural.view,
    "concat": structural.concat,
    "softmax": attention.softmax,
    "rms_norm": norms.norm(centred=False),
    "layer_norm": norms.norm(centred=True),
    "rope": elementwise.rope,
}

_ACTIVATIONS = ("relu", "tanh", "silu", "gelu")
_ROWS = ("softmax", "layer_norm", "rms_norm")
READ_CLOSELY: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys((*_ACTIVATIONS, *_ROWS), (0,)),
    **dict.fromkeys(("matmul", "mul"), (0, 1)),
}
"""Operands on whose boxes the planes of an operation depend."""


Enough = Callable[[State], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """What planes say of a block: the output's boxes, sizes of nodes, and the hints of a proof.

    `witness` has, for every computed node, (largest size, largest drift).
    """

    output: State
    witness: Mapping[str, tuple[float, float]]
    hints: Mapping[str, Any]

    @property
    def box(self) -> Box:
        """Return the box of the output's drift."""
        return self.output.drift


def drift(
    graph: BlockGraph,
    kernels: Kernels,
    centre: Tensor | None,
    radius: Tensor,
    effort: Effort | None = None,
    enough: Enough | None = None,
) -> Found:
    """Bound the drift of every output element for inputs in [centre - radius, centre + radius].

    Args:
        graph: the block.
        kernels: both kernels' rounding and stored parameters.
        centre: [T, D] float64; None for a block on token ids.
        radius: broadcastable to [T, D], float64, >= 0.
        effort: how much is spent on slopes of elements of the output.
        enough: says of the output's boxes that smaller ones are of no use.

    Raises:
        NoBound: no finite bound exists.
    """
    run = walk(graph, kernels, centre, radius)
    name = graph.output
    searched: tuple[Searched, ...] = ()
    if name in run.index and not (enough is not None and enough(run.state(run.nodes[name]))):
        moved, searched = search(run.tape, run.index[name], effort or Effort())
        _keep(run, name, run.tape.entries[run.index[name]].deviation, moved)
    return Found(run.state(run.nodes[name]), _witness(run), hints_of(run, searched))


def walk(graph: BlockGraph, kernels: Kernels, centre: Tensor | None, radius: Tensor) -> Run:
    """Bound every node and return the walk, whose tape bounds any functional; see `drift`."""
    if kernels.rows is not None:
        raise NoBound(graph.output, "planes do not cover sequences of any length")
    if kernels.around_weights:
        raise NoBound(graph.output, "planes do not cover a region around the weights")
    if any(node.op == "cache" for node in graph.nodes):
        raise NoBound(graph.output, "planes do not cover a quantised kv_cache")
    refuse_uncached(graph, kernels.train.numerics, kernels.infer.numerics)
    run = Run(graph, watched(kernels), Tape(), {node.name: node for node in graph.nodes})
    for node in graph.nodes:
        if node.op in ("param", "constant"):
            continue
        for position in READ_CLOSELY.get(node.op, ()):
            _sharpen(run, run.source(node, position))
        if node.op == "input":
            _input(run, node, centre, radius)
        else:
            _follow(run, node)
    _sharpen(run, run.nodes[graph.output])
    return run


def _follow(run: Run, node: Node) -> None:
    """Bound a node by the interval domain on the operands' boxes, then append its planes."""
    if node.op == "matmul" and node.role == "context":
        run.known[node.name] = interval_softmax.context(run.step(node))
    else:
        run.known[node.name] = INTERVAL[node.op](run.step(node))
    RULES[node.op](run, node)


def _sharpen(run: Run, node: Node) -> None:
    """Meet the boxes of a computed node with what functionals of its elements show, once."""
    if not isinstance(run.known.get(node.name), State) or (node.name, "drift") in run.met:
        return
    index = run.index[node.name]
    deviation, run.met[node.name, "deviation"] = refine(run.tape, index, "deviation")
    moved, run.met[node.name, "drift"] = refine(run.tape, index, "drift")
    _keep(run, node.name, deviation, moved)


def _keep(run: Run, name: str, deviation: Box, moved: Box) -> None:
    """Keep smaller boxes of the unknowns of a computed node."""
    state = run.known[name]
    if not isinstance(state, State):
        return
    index = run.index[name]
    reference = Box.point(run.tape.entries[index].reference)
    train = state.train.meet(reference + deviation)
    sharper = settle(name, train, state.infer, state.drift.meet(moved), state.apart)
    run.known[name] = sharper
    run.tape.tighten(index, deviation.meet(sharper.train - reference), sharper.drift)


def _input(run: Run, node: Node, centre: Tensor | None, radius: Tensor) -> None:
    """Append the block input: the same numbers for both kernels, stored by coarse ones."""
    run.known[node.name] = block_input(node, run.kernels, centre, radius)
    assert centre is not None
    zero = torch.zeros_like(centre)
    part = Part(zero, radius.expand(centre.shape).contiguous())
    run.append(node, centre, lambda a: [], part, Part(zero, zero))


def _witness(run: Run) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for name in run.known:
        state = run.state(run.nodes[name])
        value, moved = float(state.train.mag().amax()), float(state.drift.mag().amax())
        if not (value < torch.inf and moved < torch.inf):
            raise NoBound(name, "a bound is not finite")
        found[name] = (value, moved)
    return found
