"""Walk a block graph in the interval domain and bound every node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.rounding import Apart, StoredResult, several
from kcdsl_backends.drift.boxes.state import (
    ALONE,
    Entering,
    Kernels,
    Known,
    State,
    Step,
    combine,
    settle,
)
from kcdsl_backends.drift.ops import operation_of
from kcdsl_backends.drift.ops.view import refuse_uncached


@dataclass(frozen=True, slots=True)
class Bounds:
    """The state of the output, and `witness`: (largest |training value|, largest |drift|) of every
    computed node.
    """

    output: State
    witness: Mapping[str, tuple[float, float]]


def propagate(
    graph: BlockGraph,
    kernels: Kernels,
    centre: Tensor | None,
    radius: Tensor,
    entering: Entering = ALONE,
) -> Bounds:
    """Bound every node of the graph for inputs in [centre - radius, centre + radius].

    Args:
        graph: the block.
        kernels: both kernels' rounding and stored parameters.
        centre: [T, D] float64, the values of a float32 tensor; None for a block on token ids.
            [1, D] if `kernels.rows` is given, and the graph is read at any number of rows.
        radius: broadcastable to [T, D], float64, >= 0.
        entering: the difference of the states that both kernels read.

    Raises:
        NoBound: no finite bound exists (overflow reachable, variance may vanish, ...).
    """
    witness: dict[str, tuple[float, float]] = {}
    output: State | None = None
    for node, state in states(graph, kernels, centre, radius, entering):
        witness[node.name] = _magnitudes(node, state)
        if node.name == graph.output:
            output = state
    assert output is not None
    return Bounds(output, witness)


def kernel_boxes(
    graph: BlockGraph,
    kernels: Kernels,
    centre: Tensor | None,
    radius: Tensor,
    entering: Entering = ALONE,
) -> tuple[dict[str, Box], dict[str, Box]]:
    """Return the boxes of the training and the inference kernel's results, by node.

    They end before the first node without a bound; arguments are those of `propagate`.
    """
    train: dict[str, Box] = {}
    infer: dict[str, Box] = {}
    try:
        for node, state in states(graph, kernels, centre, radius, entering):
            _magnitudes(node, state)
            train[node.name], infer[node.name] = state.train, state.infer
    except NoBound:
        pass
    return train, infer


def states(
    graph: BlockGraph,
    kernels: Kernels,
    centre: Tensor | None,
    radius: Tensor,
    entering: Entering = ALONE,
) -> Iterator[tuple[Node, State]]:
    """Yield every computed node with its state; arguments and errors are those of `propagate`.

    A state is dropped after its last reader."""
    refuse_uncached(graph, kernels.train.numerics, kernels.infer.numerics)
    nodes = {node.name: node for node in graph.nodes}
    kernels = replace(kernels, handed=entering.drift is not None)
    known: dict[str, Known] = {}
    last_use, again = _last_uses(graph), several(graph, followed=entering.followed)
    for position, node in enumerate(graph.nodes):
        if node.op in ("param", "constant"):
            continue
        if node.op == "input":
            found: Known = _input(node, kernels, centre, radius, entering)
        else:
            found = _result(Step(node, kernels.at(node, nodes), nodes, known, again))
        known[node.name] = found
        yield node, found if isinstance(found, State) else found.collapse()
        for name in last_use.get(position, ()):
            known.pop(name, None)


def _result(step: Step) -> Known:
    operation, rows, found = operation_of(step.node), step.kernels.rows, None
    if rows is not None and operation.any_length is not None:
        found = operation.any_length(step, rows)
    return operation.interval(step) if found is None else found


def _input(
    node: Node, kernels: Kernels, centre: Tensor | None, radius: Tensor, entering: Entering
) -> State:
    if entering.drift is None:
        return block_input(node, kernels, _all_rows(node, kernels, centre), radius)
    if kernels.rows is not None:
        raise NoBound(node.name, "states that drift have one length")
    train, infer = entering.readings
    apart = train if kernels.train.free else None, infer if kernels.infer.free else None
    return stage_input(node, centre, radius, entering.drift, apart)


def stage_input(
    node: Node,
    centre: Tensor | None,
    radius: Tensor,
    drift: Box,
    apart: tuple[Apart, Apart] = (None, None),
) -> State:
    """Return the state of a block input that another block computed. The training kernel's input
    lies in the region, the inference kernel's differs from it by `drift`; neither stores it again.
    Readings of either are up to `apart` from their common value.
    """
    if centre is None or not tuple(centre.shape) == tuple(node.shape) == tuple(drift.shape):
        raise NoBound(node.name, "the region does not have the shape of the block's input")
    train = Box.point(centre).widen(radius.expand(centre.shape))
    return settle(node.name, train, train + drift, drift, apart)


def _all_rows(node: Node, kernels: Kernels, centre: Tensor | None) -> Tensor | None:
    """Return the centre of every row of the graph; at any length all rows have the same one."""
    if kernels.rows is None or centre is None:
        return centre
    if tuple(centre.shape) != (1, node.shape[-1]):
        raise NoBound(node.name, f"the region has shape {list(centre.shape)}, not one row")
    return centre.expand(node.shape)


def _last_uses(graph: BlockGraph) -> dict[int, tuple[str, ...]]:
    """Return for each position the nodes whose last reader is there."""
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
    exact = Box.point(centre) if not bool(spread.any()) else Box.point(centre).reaching(spread)
    zero, found = torch.zeros_like(centre), []
    forms = [k.format_for(node.role, node.op) for k in (kernels.train, kernels.infer)]
    for kernel, form in zip((kernels.train, kernels.infer), forms, strict=True):
        stored = StoredResult(exact, Box(zero, zero))
        if form.coarse:
            stored = kernel.store(exact, zero, form, node.name, kernel.inner(False))
        found.append(replace(stored, apart=None))  # stored once, before the first reader
    state = combine(node.name, Box(zero, zero), *found)
    return state if any(form.coarse for form in forms) else replace(state, errors=None)


def _magnitudes(node: Node, state: State) -> tuple[float, float]:
    value, drift = float(state.train.mag().amax()), float(state.drift.mag().amax())
    if not (value < torch.inf and drift < torch.inf):
        raise NoBound(node.name, "a bound is not finite")
    return value, drift
