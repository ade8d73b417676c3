"""Walk a block graph in the interval domain and derive the state of every node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Mask,
    Probabilities,
    State,
    StoredMatrix,
    Value,
    numeric,
    pinned,
)
from kcdsl_certs.recheck.ops.attention import context
from kcdsl_certs.recheck.ops.table import computed, operation_of

# Reasons for which the interval domain has no bound, while other domains may still have one.
_BOUNDLESS = ("bound/not-finite", "bound/overflow", "bound/route")


def propagate(problem: DriftProblem) -> Iterator[tuple[Node, Value]]:
    """Yield every node with its value, in order; a value is dropped after its last reader.

    Raises Rejected, naming the node.
    """
    waiting = Counter(name for node in problem.block.nodes for name in node.inputs)
    values: dict[str, Value] = {}
    for node in problem.block.nodes:
        try:
            value = apply(problem, node, [values[name] for name in node.inputs])
        except Rejected as rejection:
            raise rejection.at(f"node {node.name[:80]!r}") from None
        values[node.name] = value
        yield node, value
        for name in node.inputs:
            waiting[name] -= 1
            if not waiting[name]:
                values.pop(name, None)


@dataclass(frozen=True, slots=True)
class Enclosed:
    """Boxes of the training and the inference value by node, up to the first node without a bound;
    `output` is None if the output has none."""

    train: Mapping[str, Box]
    infer: Mapping[str, Box]
    output: State | None


def enclosed(problem: DriftProblem) -> Enclosed:
    """Return the boxes of all nodes up to the first one without a bound.

    Raises Rejected for a node that no rule admits.
    """
    train: dict[str, Box] = {}
    infer: dict[str, Box] = {}
    output: State | None = None
    try:
        for node, value in propagate(problem):
            if isinstance(value, (Mask, StoredMatrix)):
                continue
            state = numeric(value)
            train[node.name], infer[node.name] = state.t, state.i
            if node.name == problem.block.output:
                output = state
    except Rejected as rejection:
        if rejection.reason not in _BOUNDLESS:
            raise
        output = None
    return Enclosed(train, infer, output)


def apply(problem: DriftProblem, node: Node, inputs: list[Value]) -> Value:
    """Return the value of one node.

    Raises Rejected for a node that no rule admits, or that has no bound.
    """
    operation, where = operation_of(node), pinned(problem, node)
    for kernel in (where.train, where.infer):
        kernel.refuse_wide(problem.block.named, node)

    def rule() -> Value:
        other = context.at_any_length(where, node, inputs)
        if other is not None:
            return other
        if node.role == "context" and isinstance(inputs[0], Probabilities):
            return context.context_interval(where, node, inputs[0], numeric(inputs[1]))
        return operation.interval(where, node, inputs)

    value = computed(node, rule)
    if not isinstance(value, (Mask, StoredMatrix)):
        state = numeric(value)
        for part, what in ((state.t, "T"), (state.i, "I"), (state.d, "D")):
            box.checked(part, what)
    return value


def magnitudes(value: Value) -> tuple[float, float]:
    """Return the largest magnitudes of T and D; (0, 0) for a mask."""
    if isinstance(value, Mask):
        return 0.0, 0.0
    if isinstance(value, StoredMatrix):
        return value.value, value.drift
    state: State = numeric(value)
    return float(np.max(box.magnitude(state.t))), float(np.max(box.magnitude(state.d)))
