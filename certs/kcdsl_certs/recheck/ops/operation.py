"""The entries of the table of operations, one for each operation of a block graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kcdsl_certs.recheck.affine.form import Operand, Walk
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval.state import DriftProblem, Value
from kcdsl_certs.recheck.linear_bounds.context import Context


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: its least and greatest number of inputs, and its rule in each domain.

    `bounds` is None where linear bounds have no rule: for parameters and constants, and for caches,
    which they do not cover. `closely` are the operands whose boxes that rule reads. `pointwise`: it
    maps single numbers. `forms`: its result takes memory of its own.
    """

    least: int
    most: int
    interval: Callable[[DriftProblem, Node, list[Value]], Value]
    affine: Callable[[Walk, Node, list[Operand]], Operand]
    bounds: Callable[[Context, Node], None] | None
    closely: tuple[int, ...] = ()
    pointwise: bool = False
    forms: bool = True
