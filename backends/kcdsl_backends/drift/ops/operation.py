"""The entries of the table of operations, one for each operation of a block graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.boxes.state import Known, Rows, Step
from kcdsl_backends.drift.linear import LinearRun


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An elementwise function, as simulated runs compute it in float64.

    Args:
        value: the result, from the operand.
        error: the error inside a kernel in units of u_f, from operand and result; None if the
            result is exact and not stored.
    """

    value: Callable[[Tensor, Node], Tensor]
    error: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """The transfer functions of an operation: boxes, affine forms of one kernel, linear bounds.

    `linear` is None for an operation without linear bounds. `read_closely` are the operands on
    whose boxes its linear bounds depend. `pointwise` is set for elementwise functions. `any_length`
    bounds it at any number of rows (None, or result None: the rule for the graph's rows holds).
    """

    interval: Callable[[Step], Known]
    affine: Callable[[KernelRun, Node], None]
    linear: Callable[[LinearRun, Node], None] | None = None
    read_closely: tuple[int, ...] = ()
    pointwise: Pointwise | None = None
    any_length: Callable[[Step, Rows], Known | None] | None = None
