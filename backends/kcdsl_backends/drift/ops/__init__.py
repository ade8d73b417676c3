"""Operations: the transfer functions of every operation of a block graph in each domain.

A module has the transfer functions of related operations in all domains, and lists them in its
table `OPERATIONS`. The table here joins those of all modules.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from kcdsl.model.graph import Node
from kcdsl_backends.drift.ops.operation import Operation

__all__ = ["OPERATIONS", "POINTWISE", "Operation", "operation_of"]


def _of_all_modules() -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        own: Mapping[str, Operation] = getattr(import_module(module.name), "OPERATIONS", {})
        if twice := own.keys() & found:
            raise ValueError(f"{module.name} defines {sorted(twice)} again")
        found |= own
    return found


OPERATIONS: Mapping[str, Operation] = _of_all_modules()
"""Every operation by its name; "context" is a matmul of probabilities with values."""

POINTWISE = {name: found.pointwise for name, found in OPERATIONS.items() if found.pointwise}
"""The elementwise operations of one operand."""


def operation_of(node: Node) -> Operation:
    """Return the operation of a node that is computed."""
    context = node.op == "matmul" and node.role == "context"
    return OPERATIONS["context" if context else node.op]
