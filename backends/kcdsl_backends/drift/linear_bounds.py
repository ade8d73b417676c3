"""Linear bounds of both kernels' difference (docs/difference-planes.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.drift.boxes.box import Box, NoBound
from kcdsl_backends.drift.boxes.state import Kernels, State, settle
from kcdsl_backends.drift.interval import block_input
from kcdsl_backends.drift.linear.run import LinearPart, LinearRun, refine_output, watched
from kcdsl_backends.drift.linear.search import Effort, Searched, hints_of, search
from kcdsl_backends.drift.linear.tape import LinearTape
from kcdsl_backends.drift.ops import operation_of
from kcdsl_backends.drift.ops.cache import refuse_uncached

Enough = Callable[[State], bool]


@dataclass(frozen=True, slots=True)
class LinearFound:
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


def linear_bounds(
    graph: BlockGraph,
    kernels: Kernels,
    centre: Tensor | None,
    radius: Tensor,
    effort: Effort | None = None,
    enough: Enough | None = None,
) -> LinearFound:
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
    run = linear_walk(graph, kernels, centre, radius)
    name = graph.output
    searched: tuple[Searched, ...] = ()
    if name in run.index and not (enough is not None and enough(run.state(run.nodes[name]))):
        moved, searched = search(run.tape, run.index[name], effort or Effort())
        _keep(run, name, run.tape.entries[run.index[name]].deviation, moved)
    return LinearFound(run.state(run.nodes[name]), _witness(run), hints_of(run, searched))


def linear_walk(
    graph: BlockGraph, kernels: Kernels, centre: Tensor | None, radius: Tensor
) -> LinearRun:
    """Bound every node and return the walk, whose tape bounds any functional; see `drift`."""
    if kernels.rows is not None:
        raise NoBound(graph.output, "planes do not cover sequences of any length")
    if kernels.around_weights:
        raise NoBound(graph.output, "planes do not cover a region around the weights")
    if any(node.op == "cache" for node in graph.nodes):
        raise NoBound(graph.output, "planes do not cover a quantised kv_cache")
    refuse_uncached(graph, kernels.train.numerics, kernels.infer.numerics)
    run = LinearRun(
        graph, watched(kernels), LinearTape(), {node.name: node for node in graph.nodes}
    )
    for node in graph.nodes:
        if node.op in ("param", "constant"):
            continue
        for position in _read_closely(node):
            _sharpen(run, run.source(node, position))
        if node.op == "input":
            _input(run, node, centre, radius)
        else:
            _follow(run, node)
    _sharpen(run, run.nodes[graph.output])
    return run


def _read_closely(node: Node) -> tuple[int, ...]:
    """Return the operands of a node on whose boxes its linear bounds depend."""
    return () if node.op in ("input", "param", "constant") else operation_of(node).read_closely


def _follow(run: LinearRun, node: Node) -> None:
    """Bound a node by the interval domain on the operands' boxes, then append its planes."""
    operation = operation_of(node)
    run.known[node.name] = operation.interval(run.step(node))
    if operation.linear is None:
        raise NoBound(node.name, f"there are no linear bounds of {node.op}")
    operation.linear(run, node)


def _sharpen(run: LinearRun, node: Node) -> None:
    """Meet the boxes of a computed node with what functionals of its elements show, once."""
    if not isinstance(run.known.get(node.name), State) or (node.name, "drift") in run.met:
        return
    index = run.index[node.name]
    deviation, run.met[node.name, "deviation"] = refine_output(run.tape, index, "deviation")
    moved, run.met[node.name, "drift"] = refine_output(run.tape, index, "drift")
    _keep(run, node.name, deviation, moved)


def _keep(run: LinearRun, name: str, deviation: Box, moved: Box) -> None:
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


def _input(run: LinearRun, node: Node, centre: Tensor | None, radius: Tensor) -> None:
    """Append the block input: the same numbers for both kernels, stored by coarse ones."""
    run.known[node.name] = block_input(node, run.kernels, centre, radius)
    assert centre is not None
    zero = torch.zeros_like(centre)
    part = LinearPart(zero, radius.expand(centre.shape).contiguous())
    run.append(node, centre, lambda a: [], part, LinearPart(zero, zero))


def _witness(run: LinearRun) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for name in run.known:
        state = run.state(run.nodes[name])
        value, moved = float(state.train.mag().amax()), float(state.drift.mag().amax())
        if not (value < torch.inf and moved < torch.inf):
            raise NoBound(name, "a bound is not finite")
        found[name] = (value, moved)
    return found


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
        for position in _read_closely(node):
            name = node.inputs[position]
            total += functionals(name, 0 if name in met else 2)
            met.add(name)
        total += functionals(node.inputs[0], _PASSES[node.op]) if node.op in _PASSES else 0
        if node.op == "linear":
            behind += math.prod(shapes[node.inputs[1]])
        mixed = mixed or node.op == "matmul"
    return total + functionals(graph.output, 2)
