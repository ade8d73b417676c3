"""The table of all operations of the checker, joined from the tables of the operation modules."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TypeVar

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck import ops
from kcdsl_certs.recheck.affine.form import Operand
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval.state import Value
from kcdsl_certs.recheck.ops.operation import Operation

_Result = TypeVar("_Result", bound=Value | Operand)
_OPS_OF_ROLE = {"probabilities": "softmax", "context": "matmul"}


def _of_all_modules() -> dict[str, Operation]:
    found: dict[str, Operation] = {}
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        if module.name == __name__:
            continue
        own: Mapping[str, Operation] = getattr(import_module(module.name), "OPERATIONS", {})
        if twice := own.keys() & found:
            raise ValueError(f"{module.name} defines {sorted(twice)} again")
        found |= own
    return found


OPERATIONS: Mapping[str, Operation] = _of_all_modules()
POINTWISE = frozenset(name for name, found in OPERATIONS.items() if found.pointwise)


def operation_of(node: Node) -> Operation:
    """Return the operation of a node.

    Raises Rejected "rule/unknown-op"; "graph/field" for a wrong number of inputs or a wrong role.
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
    """Return the result of a rule for a node.

    Raises:
        Rejected: "graph/shape" if the shape is not that of the node, or operands do not fit.
    """
    try:
        value = rule()
    except IndexError:
        raise Rejected("graph/shape", "an operand has too few dimensions") from None
    except ValueError as error:  # numpy refuses shapes that do not fit
        raise Rejected("graph/shape", str(error)[:200]) from None
    if value.shape != node.shape:
        raise Rejected("graph/shape", f"the shape is {list(value.shape)}, not {list(node.shape)}")
    return value
