"""Operations: what each domain knows of each operation of a block graph.

The modules hold transfer functions of a close family of operations, those of all domains together;
`OPERATIONS` is the table through which walks of a graph dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.boxes.state import Known, Step
from kcdsl_backends.drift.linear.run import LinearRun
from kcdsl_backends.drift.ops import (
    activations,
    arithmetic,
    attention,
    cache,
    linear,
    matmul,
    rope,
    softmax,
    view,
)
from kcdsl_backends.drift.ops.norms import affine as affine_norms
from kcdsl_backends.drift.ops.norms import interval as interval_norms
from kcdsl_backends.drift.ops.norms import linear as linear_norms

__all__ = ["OPERATIONS", "Operation", "operation_of"]


@dataclass(frozen=True, slots=True)
class Operation:
    """The transfer functions of an operation: boxes, affine forms of one kernel, linear bounds.

    `linear` is None for an operation without linear bounds. `read_closely` are the operands on
    whose boxes its linear bounds depend.
    """

    interval: Callable[[Step], Known]
    affine: Callable[[KernelRun, Node], None]
    linear: Callable[[LinearRun, Node], None] | None = None
    read_closely: tuple[int, ...] = ()


OPERATIONS: Mapping[str, Operation] = {
    "embedding": Operation(view.interval_embedding, view.affine_embedding, view.linear_embedding),
    "cast": Operation(Step.cast, view.affine_cast, view.linear_cast),
    "cache": Operation(cache.interval_cache, cache.affine_cache),
    "linear": Operation(linear.interval_linear, linear.affine_linear, linear.linear_linear),
    "matmul": Operation(matmul.interval_matmul, matmul.affine_matmul, matmul.linear_matmul, (0, 1)),
    "context": Operation(
        attention.interval_context, attention.affine_context, matmul.linear_matmul, (0, 1)
    ),
    "add": Operation(
        arithmetic.interval_add,
        arithmetic.affine_add_or_sub(1.0),
        arithmetic.linear_add(1.0),
    ),
    "sub": Operation(
        arithmetic.interval_sub,
        arithmetic.affine_add_or_sub(-1.0),
        arithmetic.linear_add(-1.0),
    ),
    "mul": Operation(arithmetic.interval_mul, arithmetic.affine_mul, matmul.linear_mul, (0, 1)),
    "scale": Operation(arithmetic.interval_scale, arithmetic.affine_scale, arithmetic.linear_scale),
    "divide": Operation(
        arithmetic.interval_divide, arithmetic.affine_scale, arithmetic.linear_scale
    ),
    "shift": Operation(arithmetic.interval_shift, arithmetic.affine_shift, arithmetic.linear_shift),
    "neg": Operation(view.interval_neg, view.affine_neg, view.linear_neg),
    "relu": Operation(
        activations.interval_relu, activations.affine_relu, activations.linear_relu, (0,)
    ),
    **dict.fromkeys(
        ("tanh", "silu", "gelu"),
        Operation(
            activations.interval_activation,
            activations.affine_activation,
            activations.linear_activation,
            (0,),
        ),
    ),
    "view": Operation(view.interval_view, view.affine_view, view.linear_view),
    "concat": Operation(view.interval_concat, view.affine_concat, view.linear_concat),
    "softmax": Operation(
        softmax.interval_softmax, softmax.affine_softmax, softmax.linear_softmax, (0,)
    ),
    "rms_norm": Operation(
        interval_norms.interval_rms_norm,
        affine_norms.affine_rms_norm,
        linear_norms.linear_norm(centred=False),
        (0,),
    ),
    "layer_norm": Operation(
        interval_norms.interval_layer_norm,
        affine_norms.affine_layer_norm,
        linear_norms.linear_norm(centred=True),
        (0,),
    ),
    "rope": Operation(rope.interval_rope, rope.affine_rope, rope.linear_rope),
}
"""Every operation by its name; "context" is a matmul of probabilities with values."""


def operation_of(node: Node) -> Operation:
    """Return the operation of a node that is computed."""
    context = node.op == "matmul" and node.role == "context"
    return OPERATIONS["context" if context else node.op]
