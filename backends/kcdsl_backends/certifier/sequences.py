"""A block at any number of rows: its graph at two rows, shown to be the block at others too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from kcdsl_backends.drift.boxes.any_length import SHOWN, Axes, FixedLength, attrs_at, row_axes
from kcdsl_backends.drift.boxes.state import Parameter
from kcdsl_backends.drift.ops import POINTWISE

MOST_COMPARED = 2**13
"""The longest sequence at which a block is exported, to be compared and for tables of positions."""
_OTHER = 3
"""A second length, at which the block must be the one that its graph at two rows says it is."""


class _NoPositions(FixedLength):
    """A block whose rotations are not known for the longest sequence."""


def sequence_graph(
    model: Model, block: str, longest: int, formats: Sequence[str]
) -> tuple[BlockGraph, dict[str, Axes], dict[str, NDArray[Any]]]:
    """Return a block's graph at two rows, its dimensions of rows, and its tables of positions.

    Refuse a block that is another one at another length, that mixes rows outside of attention, or
    whose positions do not reach `longest`.
    """
    graph = block_graph(model, block, SHOWN, formats=formats)
    try:
        axes = row_axes(graph, POINTWISE)
        compare(graph, axes, block_graph(model, block, _OTHER, formats=formats), _OTHER)
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
        return block_graph(model, graph.block, rows, formats=formats)
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
