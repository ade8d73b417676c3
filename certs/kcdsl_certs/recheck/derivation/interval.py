"""Walk a block graph in the interval domain and derive the state of every node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.interval.state import (
    Mask,
    Probabilities,
    Scene,
    State,
    Value,
    numeric,
    pinned,
)
from kcdsl_certs.recheck.ops.attention import cache, context, rope, softmax
from kcdsl_certs.recheck.ops.elementwise import activations, arithmetic, pointwise
from kcdsl_certs.recheck.ops.linear import linear, matmul
from kcdsl_certs.recheck.ops.moves import leaves, view
from kcdsl_certs.recheck.ops.norms import norms
from kcdsl_certs.rejected import Rejected

Rule = Callable[[Scene, Node, list[Value]], Value]

# Reasons to have no bound, beside which other domains stand by themselves.
_BOUNDLESS = ("bound/not-finite", "bound/overflow")

_OPS_OF_ROLE = {"probabilities": ("softmax",), "context": ("matmul",)}

# Each operation with its least and greatest number of inputs.
_RULES: dict[str, tuple[Rule, int, int]] = {
    "input": (leaves.source_interval, 0, 0),
    "param": (leaves.parameter_interval, 0, 0),
    "constant": (leaves.constant_interval, 0, 0),
    "embedding": (leaves.embedding_interval, 1, 1),
    "cast": (pointwise.cast_interval, 1, 1),
    "cache": (cache.cache_interval, 1, 1),
    "linear": (linear.linear_interval, 2, 3),
    "matmul": (matmul.matmul_interval, 2, 2),
    "add": (arithmetic.add_interval, 2, 2),
    "sub": (arithmetic.sub_interval, 2, 2),
    "mul": (arithmetic.mul_interval, 2, 2),
    "scale": (arithmetic.scale_interval, 1, 1),
    "divide": (arithmetic.divide_interval, 1, 1),
    "shift": (arithmetic.shift_interval, 1, 1),
    "neg": (pointwise.neg_interval, 1, 1),
    "relu": (pointwise.relu_interval, 1, 1),
    "tanh": (activations.tanh_interval, 1, 1),
    "silu": (activations.silu_interval, 1, 1),
    "gelu": (activations.gelu_interval, 1, 1),
    "view": (view.view_interval, 1, 1),
    "concat": (view.concat_interval, 1, 10_000),
    "softmax": (softmax.softmax_interval, 1, 2),
    "rms_norm": (norms.rms_norm_interval, 1, 2),
    "layer_norm": (norms.layer_norm_interval, 1, 3),
    "rope": (rope.rope_interval, 3, 3),
}


def propagate(scene: Scene) -> Iterator[tuple[Node, Value]]:
    """Yield every node with its value, in order; a value is dropped after its last reader.

    Raises:
        Rejected: naming the node.
    """
    waiting = Counter(name for node in scene.block.nodes for name in node.inputs)
    values: dict[str, Value] = {}
    for node in scene.block.nodes:
        try:
            value = apply(scene, node, [values[name] for name in node.inputs])
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
    """Where the results of the training and the inference kernel lie, by node, from the first to
    the last before one without a bound; `output` is None where that is one of these."""

    train: Mapping[str, Box]
    infer: Mapping[str, Box]
    output: State | None


def enclosed(scene: Scene) -> Enclosed:
    """Return the boxes of all nodes as far as there are any.

    Raises:
        Rejected: for what no rule admits.
    """
    train: dict[str, Box] = {}
    infer: dict[str, Box] = {}
    output: State | None = None
    try:
        for node, value in propagate(scene):
            if isinstance(value, Mask):
                continue
            state = numeric(value)
            train[node.name], infer[node.name] = state.t, state.i
            if node.name == scene.block.output:
                output = state
    except Rejected as rejection:
        if rejection.reason not in _BOUNDLESS:
            raise
        output = None
    return Enclosed(train, infer, output)


def apply(scene: Scene, node: Node, inputs: list[Value]) -> Value:
    """Return the value of one node.

    Raises:
        Rejected: for what no rule admits, or what has no bound.
    """
    if node.op not in _RULES:
        raise Rejected("rule/unknown-op", f"there is no rule for {node.op[:80]!r}")
    rule, least, most = _RULES[node.op]
    if not least <= len(inputs) <= most:
        raise Rejected("graph/field", f"{node.op} with {len(inputs)} inputs")
    if node.role in ("probabilities", "context") and node.op not in _OPS_OF_ROLE[node.role]:
        raise Rejected("graph/field", f"{node.op} in the role {node.role!r}")
    scene = pinned(scene, node)
    for kernel in (scene.train, scene.infer):
        kernel.refuse_wide(scene.block.named, node)
    try:
        other = context.at_any_length(scene, node, inputs)
        if other is not None:
            value: Value = other
        elif node.role == "context" and isinstance(inputs[0], Probabilities):
            value = context.context_interval(scene, node, inputs[0], numeric(inputs[1]))
        else:
            value = rule(scene, node, inputs)
    except ValueError as error:  # numpy refuses shapes that do not fit
        raise Rejected("graph/shape", str(error)[:200]) from None
    if value.shape != node.shape:
        raise Rejected("graph/shape", f"the shape is {list(value.shape)}, not {list(node.shape)}")
    if not isinstance(value, Mask):
        state = numeric(value)
        for part, what in ((state.t, "T"), (state.i, "I"), (state.d, "D")):
            box.checked(part, what)
    return value


def magnitudes(value: Value) -> tuple[float, float]:
    """Return the largest magnitudes of T and D; (0, 0) for a mask."""
    if isinstance(value, Mask):
        return 0.0, 0.0
    state: State = numeric(value)
    return float(np.max(box.magnitude(state.t))), float(np.max(box.magnitude(state.d)))
