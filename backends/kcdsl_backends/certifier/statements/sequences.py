"""A block at any number of rows: its graph at two rows, shown to be the block at others too.

The graph at `SHOWN` rows stands for the block at every length (docs/proofs/any-length.md). A node
without a dimension of rows holds parameters; one with one dimension holds something of every row;
the scores of attention have two, that of the rows which ask and that of the rows which are asked.
What mixes rows in any other way has another meaning at every length and is refused.
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
"""The longest sequence at which a block is exported, to be compared and for tables of positions."""
_OTHER = 3
"""A second length, at which the block must be the one that its graph at two rows says it is."""


class FixedLength(NoBound):
    """A block whose graph at two rows says nothing of other lengths."""


class _NoPositions(FixedLength):
    """A block whose rotations are not known for the longest sequence."""


def sequence_graph(
    model: Model, block: str, longest: int, formats: Sequence[str]
) -> tuple[BlockGraph, dict[str, Axes], dict[str, NDArray[Any]]]:
    """Return a block's graph at two rows, its dimensions of rows, and its tables of positions.

    Refuse a block that is another one at another length, that mixes rows outside of attention, or
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
    """Refuse unless the graph of a block at two rows, read at `rows`, is its graph there.

    Raises:
        FixedLength: with the node at which they differ. Masks and tables of positions are not
            compared: any mask is covered, and tables are what they are at the longest sequence.
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

    Without tables of positions, for one of at most `MOST_COMPARED` rows, and of as many as the
    model takes.
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
    """Return what the block's tables of positions hold for every position below `longest`."""
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
    """Return what both kernels hold of the tables of positions of a graph."""

    def stored(name: str, numerics: Numerics) -> Tensor:
        table, format = torch.from_numpy(tables[name]), graph.node(name).format
        return stored_constant(table, format, numerics, name).to(device, torch.float64)

    return {name: Parameter(stored(name, train), stored(name, infer)) for name in tables}


SHOWN = 2
"""Rows in the graph: with 2, and not with 1, a dimension of rows differs from one of size 1."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A node with its operands and what is known of them."""

    node: Node
    operands: tuple[Node, ...]
    axes: tuple[Axes, ...]

    def refuse(self, reason: str) -> FixedLength:
        return FixedLength(self.node.name, reason)


def row_axes(graph: BlockGraph) -> dict[str, Axes]:
    """Return the dimensions of rows of every node of a graph at `SHOWN` rows.

    Raises:
        FixedLength: the node says nothing of other lengths, and why.
    """
    if graph.input_shape is None:
        raise FixedLength(graph.output, "the block reads token ids, not rows")
    nodes = {node.name: node for node in graph.nodes}
    found: dict[str, Axes] = {}
    for node in graph.nodes:
        operands = tuple(nodes[name] for name in node.inputs)
        seen = _Seen(node, operands, tuple(found[name] for name in node.inputs))
        rule = _same if node.op in POINTWISE else _RULES.get(node.op)
        if rule is None:
            raise seen.refuse(f"{node.op} is not read at any length")
        found[node.name] = rule(seen)
    output = nodes[graph.output]
    if len(found[graph.output]) != 1 or found[graph.output][0] == len(output.shape) - 1:
        raise FixedLength(graph.output, "the output is not one row for each row of the input")
    return found


def attrs_at(
    node: Node, graph: BlockGraph, axes: Mapping[str, Axes], rows: int
) -> Mapping[str, Any]:
    """Return the attributes of a node where the graph at `SHOWN` rows is read at `rows`."""
    if node.op != "view":
        return node.attrs
    view, source = View.of(node), graph.node(node.inputs[0])
    split, ranges, sizes = list(view.split), list(view.ranges), list(view.sizes)
    for axis in axes[source.name]:
        place = _moved(_Seen(node, (source,), ()), axis, source.shape, view.split)
        split[place], ranges[place], sizes[view.order.index(place)] = rows, (0, rows, 1), rows
    shape = tuple(rows if i in axes[node.name] else n for i, n in enumerate(view.shape))
    return View(tuple(split), tuple(ranges), view.order, tuple(sizes), shape).attrs


def _input(seen: _Seen) -> Axes:
    if len(seen.node.shape) != 2 or seen.node.shape[0] != SHOWN:
        raise seen.refuse(f"the graph must show {SHOWN} rows")
    return (0,)


def _none(seen: _Seen) -> Axes:
    return ()


def _same(seen: _Seen) -> Axes:
    return seen.axes[0]


def _pairwise(seen: _Seen) -> Axes:
    """Rows meet themselves, or numbers that are the same for every row."""
    rank = len(seen.node.shape)
    placed = [
        tuple(axis + rank - len(operand.shape) for axis in axes)
        for operand, axes in zip(seen.operands, seen.axes, strict=True)
    ]
    with_rows = {axes for axes in placed if axes}
    if not with_rows:
        return ()
    if len(with_rows) > 1:
        raise seen.refuse("different dimensions of rows meet")
    (axes,) = with_rows
    for operand, own in zip(seen.operands, placed, strict=True):
        if not own:
            _without_rows(seen, operand, rank, axes)
    return axes


def _without_rows(seen: _Seen, operand: Node, rank: int, axes: Axes) -> None:
    for axis in axes:
        place = axis - (rank - len(operand.shape))
        if place >= 0 and operand.shape[place] != 1:
            raise seen.refuse(f"{operand.name} holds numbers of its own for single rows")


def _row_wise(seen: _Seen) -> Axes:
    """Return the axes of an operation on the last dimension of every row, parameters beside it."""
    axes = seen.axes[0]
    if any(seen.axes[1:]):
        raise seen.refuse("a parameter depends on the rows")
    if len(seen.node.shape) - 1 in axes:
        raise seen.refuse("it mixes the rows")
    if len(axes) > 1:
        raise seen.refuse("it mixes what belongs to pairs of rows")
    return axes


def _matmul(seen: _Seen) -> Axes:
    rank = len(seen.node.shape)
    (left, right), (a, b) = seen.operands, seen.axes
    a = tuple(axis - len(left.shape) for axis in a)
    b = tuple(axis - len(right.shape) for axis in b)
    match seen.node.role:
        case "scores" if (a, b) == ((-2,), (-1,)):
            return (rank - 2, rank - 1)
        case "context" if (a, b) == ((-2, -1), (-2,)) and left.op == "softmax":
            return (rank - 2,)
    if not a and not b:
        return ()
    raise seen.refuse("a product over or between rows outside of attention")


def _softmax(seen: _Seen) -> Axes:
    axes, last = seen.axes[0], len(seen.node.shape) - 1
    if len(axes) == 2 and axes == (last - 1, last) and seen.node.role == "probabilities":
        return axes
    if len(seen.operands) > 1:
        raise seen.refuse("a mask outside of attention")
    return _row_wise(seen)


def _rope(seen: _Seen) -> Axes:
    rank, axes = len(seen.node.shape), seen.axes[0]
    tables_known = all(
        table.op == "constant" and table.shape == (SHOWN, seen.node.shape[-1])
        for table in seen.operands[1:]
    )
    if axes != (rank - 2,) or not tables_known:
        raise seen.refuse("a rotation that is not by the positions of the rows")
    return axes


def _view(seen: _Seen) -> Axes:
    view, before = View.of(seen.node), seen.operands[0].shape
    found = []
    for axis in seen.axes[0]:
        place = _moved(seen, axis, before, view.split)
        if view.ranges[place] != (0, SHOWN, 1):
            raise seen.refuse("it picks rows by their number")
        found.append(_moved(seen, view.order.index(place), view.sizes, view.shape))
    return tuple(found)


def _moved(seen: _Seen, axis: int, old: Sequence[int], new: Sequence[int]) -> int:
    """Return where a dimension of rows goes: as many elements stand before it as did."""
    before = math.prod(old[:axis])
    for place, size in enumerate(new):
        if math.prod(new[:place]) == before and size == SHOWN:
            return place
    raise seen.refuse("the rows are merged with another dimension, or split")


def _concat(seen: _Seen) -> Axes:
    if len(set(seen.axes)) != 1:
        raise seen.refuse("different dimensions of rows are joined")
    if int(seen.node.attrs["dim"]) % len(seen.node.shape) in seen.axes[0]:
        raise seen.refuse("it adds rows")
    return seen.axes[0]


_RULES: Mapping[str, Callable[[_Seen], Axes]] = {
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
