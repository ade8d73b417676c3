"""Every operation that the checker knows, with its rule in each domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from kcdsl_certs.recheck.affine.form import Operand, Walk
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval.state import Scene, Value
from kcdsl_certs.recheck.linear_bounds.context import Context
from kcdsl_certs.recheck.ops.attention import cache, rope, softmax
from kcdsl_certs.recheck.ops.elementwise import activations, arithmetic, pointwise
from kcdsl_certs.recheck.ops.linear import linear, matmul
from kcdsl_certs.recheck.ops.moves import leaves, view
from kcdsl_certs.recheck.ops.norms import forms, norms
from kcdsl_certs.rejected import Rejected

_Result = TypeVar("_Result", bound=Value | Operand)
_OPS_OF_ROLE = {"probabilities": "softmax", "context": "matmul"}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: its least and greatest number of inputs, and its rule in each domain.

    `bounds` is None where linear bounds write nothing: of known numbers, and of caches, which they
    do not cover. `closely` are the operands whose boxes that rule reads.
    """

    least: int
    most: int
    interval: Callable[[Scene, Node, list[Value]], Value]
    affine: Callable[[Walk, Node, list[Operand]], Operand]
    bounds: Callable[[Context, Node], None] | None
    closely: tuple[int, ...] = ()


OPERATIONS: Mapping[str, Operation] = {
    "input": Operation(0, 0, leaves.source_interval, leaves.source_affine, leaves.source_bounds),
    "param": Operation(0, 0, leaves.parameter_interval, leaves.leaf_affine, None),
    "constant": Operation(0, 0, leaves.constant_interval, leaves.leaf_affine, None),
    "embedding": Operation(
        1, 1, leaves.embedding_interval, leaves.leaf_affine, leaves.embedding_bounds
    ),
    "view": Operation(1, 1, view.view_interval, view.view_affine, view.view_bounds),
    "concat": Operation(1, 10_000, view.concat_interval, view.concat_affine, view.concat_bounds),
    "cast": Operation(1, 1, pointwise.cast_interval, pointwise.cast_affine, pointwise.cast_bounds),
    "neg": Operation(1, 1, pointwise.neg_interval, pointwise.neg_affine, pointwise.neg_bounds),
    "relu": Operation(
        1, 1, pointwise.relu_interval, pointwise.relu_affine, pointwise.relu_bounds, (0,)
    ),
    "add": Operation(2, 2, arithmetic.add_interval, arithmetic.add_affine, arithmetic.add_bounds),
    "sub": Operation(2, 2, arithmetic.sub_interval, arithmetic.sub_affine, arithmetic.sub_bounds),
    "mul": Operation(
        2, 2, arithmetic.mul_interval, arithmetic.mul_affine, matmul.mul_bounds, (0, 1)
    ),
    "scale": Operation(
        1, 1, arithmetic.scale_interval, arithmetic.scale_affine, arithmetic.scale_bounds
    ),
    "divide": Operation(
        1, 1, arithmetic.divide_interval, arithmetic.divide_affine, arithmetic.divide_bounds
    ),
    "shift": Operation(
        1, 1, arithmetic.shift_interval, arithmetic.shift_affine, arithmetic.shift_bounds
    ),
    "tanh": Operation(
        1,
        1,
        activations.tanh_interval,
        activations.tanh_affine,
        activations.activation_bounds,
        (0,),
    ),
    "silu": Operation(
        1,
        1,
        activations.silu_interval,
        activations.silu_affine,
        activations.activation_bounds,
        (0,),
    ),
    "gelu": Operation(
        1,
        1,
        activations.gelu_interval,
        activations.gelu_affine,
        activations.activation_bounds,
        (0,),
    ),
    "linear": Operation(2, 3, linear.linear_interval, linear.linear_affine, linear.linear_bounds),
    "matmul": Operation(
        2, 2, matmul.matmul_interval, matmul.matmul_affine, matmul.matmul_bounds, (0, 1)
    ),
    "softmax": Operation(
        1, 2, softmax.softmax_interval, softmax.softmax_affine, softmax.softmax_bounds, (0,)
    ),
    "cache": Operation(1, 1, cache.cache_interval, cache.cache_affine, None),
    "rope": Operation(3, 3, rope.rope_interval, rope.rope_affine, rope.rope_bounds),
    "rms_norm": Operation(
        1, 2, norms.rms_norm_interval, forms.rms_norm_affine, norms.rms_norm_bounds, (0,)
    ),
    "layer_norm": Operation(
        1, 3, norms.layer_norm_interval, forms.layer_norm_affine, norms.layer_norm_bounds, (0,)
    ),
}


def operation_of(node: Node) -> Operation:
    """Return the operation of a node.

    Raises:
        Rejected: "rule/unknown-op"; "graph/field" for inputs or a role that it cannot have.
    """
    if node.op not in OPERATIONS:
        raise Rejected("rule/unknown-op", f"there is no rule for {node.op[:80]!r}")
    found = OPERATIONS[node.op]
    if not found.least <= len(node.inputs) <= found.most:
        raise Rejected("graph/field", f"{node.op} with {len(node.inputs)} inputs")
    if _OPS_OF_ROLE.get(node.role, node.op) != node.op:
        raise Rejected("graph/field", f"{node.op} in the role {node.role!r}")
    return found


def computed(node: Node, rule: Callable[[], _Result]) -> _Result:
    """Return what a rule gives for a node.

    Raises:
        Rejected: "graph/shape" where that has another shape than the node, or operands do not fit.
    """
    try:
        value = rule()
    except ValueError as error:  # numpy refuses shapes that do not fit
        raise Rejected("graph/shape", str(error)[:200]) from None
    if value.shape != node.shape:
        raise Rejected("graph/shape", f"the shape is {list(value.shape)}, not {list(node.shape)}")
    return value
