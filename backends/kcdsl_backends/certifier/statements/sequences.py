"""A block at any number of rows, represented by its graph at two rows.

The graph at `SHOWN` rows describes the block at every length (docs/proofs/any-length.md). A node
without a row dimension has parameters, one with a row dimension has values of every row, and
attention scores have two, for query rows and key rows. Operations that mix rows in any other way
depend on the length and are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.architecture import Model
from kcdsl.model.graph import BlockGraph, Node, View
from kcdsl.model.lowering import block_graph
from kcdsl.model.numerics import Numerics
from kcdsl.model.numerics.weights import stored_constant
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.boxes.state import Axes, Parameter
from kcdsl_backends.drift.ops import POINTWISE

MOST_COMPARED = 2**13
"""The longest sequence at which a block is exported for comparison and position tables."""
_OTHER = 3
"""A second length at which the graph is compared with the block."""


class FixedLength(NoBound):
    """A block whose graph at two rows does not describe other lengths."""


class _NoPositions(FixedLength):
    """A block whose position tables do not reach the longest sequence."""


def sequence_graph(
    model: Model, block: str, longest: int, formats: Sequence[str]
) -> tuple[BlockGraph, dict[str, Axes], dict[str, NDArray[Any]]]:
    """Return a block's graph at two rows, its row dimensions and its position tables.

    Refuse a block whose operations depend on the length, that mixes rows outside of attention, or
    whose positions do not reach `longest`.
    """
    graph = block_graph(model, block, SHOWN, formats=formats, any_length=True)
    try:
        axes = row_axes(graph)
        compare(
            graph, axes, block_graph(model, block, _OTHER, formats=formats, any_length=True), _OTHER
        )
        whole = _longest(model, graph, longest, formats)
        shape = whole.input_shape or (0,)
        compare(graph, axes, whole, shape[0])
        return graph, axes, _tables(graph, whole, longest)
    except _NoPositions as short:
        raise refuse(
            codes.FIXED_LENGTH,
            f"block {block!r} cannot be bounded at up to {longest} rows: {short}",
            help="name a longest sequence for which the model has positions",
        ) from short
    except FixedLength as fixed:
        raise refuse(
            codes.FIXED_LENGTH,
            f"block {block!r} cannot be bounded at any length: {fixed}",
            help="use hull(...), which bounds it at each length of the slice",
        ) from fixed


def compare(graph: BlockGraph, axes: Mapping[str, Axes], other: BlockGraph, rows: int) -> None:
    """Refuse unless the graph at two rows, extended to `rows`, equals the block's graph there.

    Raises:
        FixedLength: names the first node that differs. Masks and position tables are not compared:
            any mask is covered, and tables are taken from the longest sequence.
    """
    mine, theirs = _formed(graph), _formed(other)
    if [n.name for n in mine] != [n.name for n in theirs]:
        raise FixedLength(graph.output, f"other operations at {rows} rows")
    for one, two in zip(mine, theirs, strict=True):
        shape = tuple(rows if i in axes[one.name] else n for i, n in enumerate(one.shape))
        attrs = dict(attrs_at(one, graph, axes, rows))
        theirs_attrs = dict(View.of(two).attrs if two.op == "view" else two.attrs)
        same = (one.op, one.role, one.format) == (two.op, two.role, two.format)
        same = same and (shape, attrs) == (two.shape, theirs_attrs)
        if not same or len(one.inputs) != len(two.inputs):
            raise FixedLength(one.name, f"not the same at {rows} rows")
        for place, (a, b) in enumerate(zip(one.inputs, two.inputs, strict=True)):
            if not _same_operand(graph, other, (one, place), (a, b)):
                raise FixedLength(one.name, f"reads something else at {rows} rows")


def _formed(graph: BlockGraph) -> list[Node]:
    return [node for node in graph.nodes if node.op != "constant"]


def _same_operand(
    graph: BlockGraph, other: BlockGraph, at: tuple[Node, int], names: tuple[str, str]
) -> bool:
    mine, theirs = graph.constants.get(names[0]), other.constants.get(names[1])
    if mine is None or theirs is None:
        return names[0] == names[1] and mine is None and theirs is None
    if graph.node(names[0]).format != other.node(names[1]).format:
        return False
    free = at[0].op in ("softmax", "rope") and at[1] > 0
    return free or np.array_equal(mine, theirs)


def _longest(model: Model, graph: BlockGraph, longest: int, formats: Sequence[str]) -> BlockGraph:
    """Return the graph of the same block for the longest sequence.

    Without position tables, the length is limited to `MOST_COMPARED` and to the model's limit.
    """
    rotation, rows = next(_positions(graph), None), longest
    if rotation is not None and longest > MOST_COMPARED:
        raise _NoPositions(rotation[0], f"only {MOST_COMPARED} positions are read")
    if rotation is None:
        rows = min(longest, MOST_COMPARED, model.limits[1] or longest)
    try:
        return block_graph(model, graph.block, rows, formats=formats, any_length=True)
    except Refusal as refusal:
        if rotation is None:
            reason = refusal.diagnostics[0].message
            raise FixedLength(graph.output, f"no graph of {rows} rows: {reason}") from refusal
        raise _NoPositions(rotation[0], f"it has no {longest} positions") from refusal


def _tables(graph: BlockGraph, whole: BlockGraph, longest: int) -> dict[str, NDArray[Any]]:
    """Return the block's position tables for every position below `longest`."""
    found: dict[str, NDArray[Any]] = {}
    shown = min(SHOWN, longest)
    for name, place in _positions(graph):
        key = graph.node(name).inputs[place]
        short = graph.constants[key]
        array = whole.constants[whole.node(name).inputs[place]]
        known = found.setdefault(key, array)
        if not (np.array_equal(known, array) and np.array_equal(short[:shown], array[:shown])):
            raise FixedLength(name, "its tables depend on the length of the sequence")
    return found


def _positions(graph: BlockGraph) -> Iterator[tuple[str, int]]:
    for node in graph.nodes:
        if node.op == "rope":
            yield from ((node.name, place) for place in (1, 2))


def stored_tables(
    graph: BlockGraph,
    tables: Mapping[str, NDArray[Any]],
    train: Numerics,
    infer: Numerics,
    device: torch.device,
) -> dict[str, Parameter]:
    """Return the position tables of a graph as both kernels store them."""

    def stored(name: str, numerics: Numerics) -> Tensor:
        table, format = torch.from_numpy(tables[name]), graph.node(name).format
        return stored_constant(table, format, numerics, name).to(device, torch.float64)

    return {name: Parameter(stored(name, train), stored(name, infer)) for name in tables}


SHOWN = 2
"""Rows in the graph; 2, since a row dimension of 1 is indistinguishable from other ones."""


@dataclass(frozen=True, slots=True)
class _NodeAxes:
    """A node with its operands and their row dimensions."""

    node: Node
    operands: tuple[Node, ...]
    axes: tuple[Axes, ...]

    def refuse(self, reason: str) -> FixedLength:
        return FixedLength(self.node.name, reason)


def row_axes(graph: BlockGraph) -> dict[str, Axes]:
    """Return the row dimensions of every node of a graph at `SHOWN` rows.

    Raises:
        FixedLength: names a node that does not describe other lengths, and the reason.
    """
    if graph.input_shape is None:
        raise FixedLength(graph.output, "the block reads token ids, not rows")
    nodes = {node.name: node for node in graph.nodes}
    found: dict[str, Axes] = {}
    for node in graph.nodes:
        operands = tuple(nodes[name] for name in node.inputs)
        known = _NodeAxes(node, operands, tuple(found[name] for name in node.inputs))
        rule = _same if node.op in POINTWISE else _RULES.get(node.op)
        if rule is None:
            raise known.refuse(f"{node.op} is not read at any length")
        found[node.name] = rule(known)
    output = nodes[graph.output]
    if len(found[graph.output]) != 1 or found[graph.output][0] == len(output.shape) - 1:
        raise FixedLength(graph.output, "the output is not one row for each row of the input")
    return found


def attrs_at(
    node: Node, graph: BlockGraph, axes: Mapping[str, Axes], rows: int
) -> Mapping[str, Any]:
    """Return the attributes of a node with the graph extended from `SHOWN` to `rows` rows."""
    if node.op != "view":
        return node.attrs
    view, source = View.of(node), graph.node(node.inputs[0])
    split, ranges, sizes = list(view.split), list(view.ranges), list(view.sizes)
    for axis in axes[source.name]:
        place = _moved(_NodeAxes(node, (source,), ()), axis, source.shape, view.split)
        split[place], ranges[place], sizes[view.order.index(place)] = rows, (0, rows, 1), rows
    shape = tuple(rows if i in axes[node.name] else n for i, n in enumerate(view.shape))
    return View(tuple(split), tuple(ranges), view.order, tuple(sizes), shape).attrs


def _input(known: _NodeAxes) -> Axes:
    if len(known.node.shape) != 2 or known.node.shape[0] != SHOWN:
        raise known.refuse(f"the graph must show {SHOWN} rows")
    return (0,)


def _none(known: _NodeAxes) -> Axes:
    return ()


def _same(known: _NodeAxes) -> Axes:
    return known.axes[0]


def _pairwise(known: _NodeAxes) -> Axes:
    """Return the row dimensions of an elementwise operation; operands without rows must not have
    different numbers for single rows."""
    rank = len(known.node.shape)
    placed = [
        tuple(axis + rank - len(operand.shape) for axis in axes)
        for operand, axes in zip(known.operands, known.axes, strict=True)
    ]
    with_rows = {axes for axes in placed if axes}
    if not with_rows:
        return ()
    if len(with_rows) > 1:
        raise known.refuse("different dimensions of rows meet")
    (axes,) = with_rows
    for operand, own in zip(known.operands, placed, strict=True):
        if not own:
            _without_rows(known, operand, rank, axes)
    return axes


def _without_rows(known: _NodeAxes, operand: Node, rank: int, axes: Axes) -> None:
    for axis in axes:
        place = axis - (rank - len(operand.shape))
        if place >= 0 and operand.shape[place] != 1:
            raise known.refuse(f"{operand.name} holds numbers of its own for single rows")


def _row_wise(known: _NodeAxes) -> Axes:
    """Return the row dimensions of an operation along the last dimension of each row."""
    axes = known.axes[0]
    if any(known.axes[1:]):
        raise known.refuse("a parameter depends on the rows")
    if len(known.node.shape) - 1 in axes:
        raise known.refuse("it mixes the rows")
    if len(axes) > 1:
        raise known.refuse("it mixes what belongs to pairs of rows")
    return axes


def _matmul(known: _NodeAxes) -> Axes:
    rank = len(known.node.shape)
    (left, right), (a, b) = known.operands, known.axes
    a = tuple(axis - len(left.shape) for axis in a)
    b = tuple(axis - len(right.shape) for axis in b)
    match known.node.role:
        case "scores" if (a, b) == ((-2,), (-1,)):
            return (rank - 2, rank - 1)
        case "context" if (a, b) == ((-2, -1), (-2,)) and left.op == "softmax":
            return (rank - 2,)
    if not a and not b:
        return ()
    raise known.refuse("a product over or between rows outside of attention")


def _softmax(known: _NodeAxes) -> Axes:
    axes, last = known.axes[0], len(known.node.shape) - 1
    if len(axes) == 2 and axes == (last - 1, last) and known.node.role == "probabilities":
        return axes
    if len(known.operands) > 1:
        raise known.refuse("a mask outside of attention")
    return _row_wise(known)


def _rope(known: _NodeAxes) -> Axes:
    rank, axes = len(known.node.shape), known.axes[0]
    tables_known = all(
        table.op == "constant" and table.shape == (SHOWN, known.node.shape[-1])
        for table in known.operands[1:]
    )
    if axes != (rank - 2,) or not tables_known:
        raise known.refuse("a rotation that is not by the positions of the rows")
    return axes


def _view(known: _NodeAxes) -> Axes:
    view, before = View.of(known.node), known.operands[0].shape
    found = []
    for axis in known.axes[0]:
        place = _moved(known, axis, before, view.split)
        if view.ranges[place] != (0, SHOWN, 1):
            raise known.refuse("it picks rows by their number")
        found.append(_moved(known, view.order.index(place), view.sizes, view.shape))
    return tuple(found)


def _moved(known: _NodeAxes, axis: int, old: Sequence[int], new: Sequence[int]) -> int:
    """Return the new index of a row dimension, by the number of elements before it."""
    before = math.prod(old[:axis])
    for place, size in enumerate(new):
        if math.prod(new[:place]) == before and size == SHOWN:
            return place
    raise known.refuse("the rows are merged with another dimension, or split")


def _concat(known: _NodeAxes) -> Axes:
    if len(set(known.axes)) != 1:
        raise known.refuse("different dimensions of rows are joined")
    if int(known.node.attrs["dim"]) % len(known.node.shape) in known.axes[0]:
        raise known.refuse("it adds rows")
    return known.axes[0]


_RULES: Mapping[str, Callable[[_NodeAxes], Axes]] = {
    "input": _input,
    "param": _none,
    "constant": _none,
    "linear": _row_wise,
    "matmul": _matmul,
    "add": _pairwise,
    "sub": _pairwise,
    "mul": _pairwise,
    "scale": _same,
    "divide": _same,
    "shift": _same,
    "cast": _same,
    "view": _view,
    "concat": _concat,
    "softmax": _softmax,
    "rms_norm": _row_wise,
    "layer_norm": _row_wise,
    "rope": _rope,
}
