"""Blocks at any number of rows (docs/proofs/any-length.md): which dimensions count the rows.

The graph is that of two rows. Every node gets a mark for each of its dimensions: "" if the size is
the same at every length, "row" for the rows of the sequence, "key" for the rows of keys that
attention reads. A graph without consistent marks is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import Array, Block, Node, View, parse_array
from kcdsl_certs.recheck.graphs.strict_json import Reader

SHOWN = 2
REASON = "graph/rows"
ROW, KEY = "row", "key"
Marks = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Given:
    """The inputs of a node: their nodes and marks."""

    nodes: tuple[Node, ...]
    marks: tuple[Marks, ...]


def marks_of(block: Block, pointwise: frozenset[str]) -> dict[str, Marks]:
    """Return the marks of every node; `pointwise` are the operations on single numbers.

    Raises Rejected "graph/rows", naming the node.
    """
    by_name = {node.name: node for node in block.nodes}
    found: dict[str, Marks] = {}
    for node in block.nodes:
        given = _Given(
            tuple(by_name[name] for name in node.inputs), tuple(found[name] for name in node.inputs)
        )
        marked = _same_marks if node.op in pointwise else _MARKING.get(node.op)
        formed = node.op not in _LEAVES
        if marked is None or (formed and not (given.marks and node.shape)):
            raise Rejected(REASON, f"{node.op[:80]!r} has no meaning at every length")
        try:
            found[node.name] = marked(node, given)
        except Rejected as rejection:
            raise rejection.at(f"node {node.name[:80]!r}") from None
        if len(found[node.name]) != len(node.shape):
            raise Rejected("graph/shape", f"node {node.name[:80]!r} has another rank")
    last = found[block.output]
    if last.count(ROW) != 1 or KEY in last or last[-1] == ROW:
        raise Rejected(REASON, "the output is not one row for every row of the input")
    return found


def tables_of(block: Block) -> frozenset[str]:
    """Return the constants that rotations read as tables of positions, by node."""
    return frozenset(name for node in block.nodes if node.op == "rope" for name in node.inputs[1:3])


def parse_tables(record: Reader, block: Block, longest: int) -> dict[str, Array]:
    """Return the tables of positions that a region of rows states, by the node of their constant.

    There is one for every constant that a rotation reads, and no other; its first rows are those of
    the constant. Raises Rejected "document/region".
    """
    stated = record.entries("tables") if record.has("tables") else {}
    wanted = tables_of(block)
    if set(stated) != wanted or (record.has("tables") and not wanted):
        raise record.fail("must have the tables that rotations read, and no others")
    found: dict[str, Array] = {}
    by_name = {node.name: node for node in block.nodes}
    for name in sorted(wanted):
        node, array = by_name[name], parse_array(stated[name], f"{record.place}.tables")
        known = block.constants.get(node.attrs.text("key")) if node.op == "constant" else None
        if known is None or known.dtype != "float32" or array.dtype != "float32":
            raise record.fail("must have tables of float32 for constants of float32")
        if array.shape != (longest, *known.shape[1:]) or known.shape[:1] != (SHOWN,):
            raise record.fail("must have tables with a row for every position")
        together = min(len(known.data), len(array.data))
        if known.data[:together] != array.data[:together]:
            raise record.fail("has a table that differs from the constant of the graph")
        found[name] = array
    return found


def _refusal(what: str) -> Rejected:
    return Rejected(REASON, what)


def _input_marks(node: Node, given: _Given) -> Marks:
    if len(node.shape) != 2 or node.shape[0] != SHOWN:
        raise _refusal(f"the input must be of {SHOWN} rows")
    return (ROW, "")


def _no_marks(node: Node, given: _Given) -> Marks:
    return ("",) * len(node.shape)


def _same_marks(node: Node, given: _Given) -> Marks:
    return given.marks[0]


def _broadcast_marks(node: Node, given: _Given) -> Marks:
    """Return the marks of broadcast operands; where they differ, the unmarked one has size 1."""
    found = [""] * len(node.shape)
    if any(len(marks) > len(found) for marks in given.marks):
        raise Rejected("graph/shape", "operands of more dimensions than their result")
    plain = []
    for operand, marks in zip(given.nodes, given.marks, strict=True):
        padded = ("",) * (len(found) - len(marks)) + marks
        if not any(marks):
            plain.append(operand)
        elif any(found) and tuple(found) != padded:
            raise _refusal("operands whose rows stand in different dimensions")
        else:
            found = list(padded)
    for operand in plain:
        sizes = (1,) * (len(found) - len(operand.shape)) + operand.shape
        if any(mark and size != 1 for mark, size in zip(found, sizes, strict=True)):
            raise _refusal(f"{operand.name[:80]!r} has numbers for single rows")
    return tuple(found)


def _row_marks(node: Node, given: _Given) -> Marks:
    """Return the marks of an operation along the last dimension; its parameters have no marks."""
    marks = given.marks[0]
    if any(any(more) for more in given.marks[1:]):
        raise _refusal("a parameter that depends on rows")
    if KEY in marks or not marks or marks[-1]:
        raise _refusal("rows are mixed outside of attention")
    return marks


def _matmul_marks(node: Node, given: _Given) -> Marks:
    if len(given.marks) != 2 or len(node.shape) < 2:
        raise Rejected("graph/field", "a product of other than two matrices")
    a, b = given.marks
    front = ("",) * (len(node.shape) - 2)
    if len(a) >= 2 and len(b) >= 2 and not any((*a[:-2], *b[:-2])):
        left, right = a[-2:], b[-2:]
        if node.role == "scores" and (left, right) == ((ROW, ""), ("", ROW)):
            return (*front, ROW, KEY)
        if (
            node.role == "context"
            and given.nodes[0].op == "softmax"
            and (left, right) == ((ROW, KEY), (ROW, ""))
        ):
            return (*front, ROW, "")
    if any(a) or any(b):
        raise _refusal("a product of rows outside of attention")
    return (*front, "", "")


def _softmax_marks(node: Node, given: _Given) -> Marks:
    marks = given.marks[0]
    if node.role == "probabilities" and marks[-2:] == (ROW, KEY) and not any(marks[:-2]):
        return marks
    if len(given.nodes) > 1:
        raise _refusal("a mask outside of attention")
    return _row_marks(node, given)


def _rope_marks(node: Node, given: _Given) -> Marks:
    marks = given.marks[0]
    if len(given.nodes) != 3 or marks[-2:] != (ROW, "") or any(marks[:-2]):
        raise _refusal("a rotation of something else than rows")
    for table in given.nodes[1:]:
        if table.op != "constant" or table.shape != (SHOWN, node.shape[-1]):
            raise _refusal("a rotation without a table of positions")
    return marks


def _view_marks(node: Node, given: _Given) -> Marks:
    """Follow the marks through a view; rows are neither cut nor repeated."""
    view = View.of(node, given.nodes[0].shape)
    marks = _reordered(given.marks[0], view.before, view.split)
    cut = zip(view.ranges, view.split, strict=True)
    if any(mark and each != (0, size, 1) for mark, (each, size) in zip(marks, cut, strict=True)):
        raise _refusal("a part of the rows, by their number")
    turned = tuple(marks[axis] for axis in view.order)
    return _reordered(turned, view.sizes, view.shape)


def _reordered(marks: Marks, before: tuple[int, ...], after: tuple[int, ...]) -> Marks:
    """Return the marks of another shape of the same elements in order.

    A dimension of rows keeps the number of elements before it.
    """
    found = [""] * len(after)
    for place, mark in enumerate(marks):
        if not mark:
            continue
        earlier = math.prod(before[:place])
        fitting = [
            k for k, size in enumerate(after) if size == SHOWN and math.prod(after[:k]) == earlier
        ]
        if len(fitting) != 1 or found[fitting[0]]:
            raise _refusal("a reshape that splits or merges the rows")
        found[fitting[0]] = mark
    return tuple(found)


def _along(node: Node, marks: Marks) -> str:
    """Return the mark of the dimension that a concat is along."""
    dim = node.attrs.integer("dim", -len(marks))
    if dim >= len(marks):
        raise Rejected("graph/field", "'dim' is beyond the dimensions")
    return marks[dim]


def _concat_marks(node: Node, given: _Given) -> Marks:
    first, *more = given.marks
    if any(other != first for other in more) or _along(node, first):
        raise _refusal("rows are put together")
    return first


_LEAVES = ("input", "param", "constant")
_MARKING: Mapping[str, Callable[[Node, _Given], Marks]] = {
    "input": _input_marks,
    **dict.fromkeys(("param", "constant"), _no_marks),
    **dict.fromkeys(("linear", "rms_norm", "layer_norm"), _row_marks),
    **dict.fromkeys(("add", "sub", "mul"), _broadcast_marks),
    **dict.fromkeys(("scale", "divide", "shift", "cast"), _same_marks),
    "matmul": _matmul_marks,
    "softmax": _softmax_marks,
    "rope": _rope_marks,
    "view": _view_marks,
    "concat": _concat_marks,
}
