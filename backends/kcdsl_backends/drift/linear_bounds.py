"""Linear bounds of both kernels' difference (docs/proofs/difference-planes.md), the search for
slopes of ReLU by gradient descent, and the hints of a proof about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.drift.affine.error_bounds import on_row
from kcdsl_backends.drift.affine.kernel import runs_of
from kcdsl_backends.drift.boxes import Box, NoBound, up
from kcdsl_backends.drift.boxes.state import Kernels, State, settle
from kcdsl_backends.drift.interval import block_input
from kcdsl_backends.drift.linear import LinearPart, LinearRun, refine_output
from kcdsl_backends.drift.linear.tape import Functional, LinearTape, Slopes, in_single
from kcdsl_backends.drift.ops import operation_of
from kcdsl_backends.drift.ops.view import refuse_uncached

Enough = Callable[[State], bool]


@dataclass(frozen=True, slots=True)
class LinearFound:
    """The bounds of a block by planes: the output's boxes, sizes of nodes, and a proof's hints.

    `witness` has, for every computed node, (largest size, largest drift).
    """

    output: State
    witness: Mapping[str, tuple[float, float]]
    hints: Mapping[str, Any]

    @property
    def box(self) -> Box:
        return self.output.drift


def linear_bounds(
    graph: BlockGraph,
    kernels: Kernels,
    centre: Tensor | None,
    radius: Tensor,
    effort: SlopeEffort | None = None,
    enough: Enough | None = None,
) -> LinearFound:
    """Bound the drift of every output element for inputs in [centre - radius, centre + radius].

    Args:
        graph: the block.
        kernels: both kernels' rounding and stored parameters.
        centre: [T, D] float64; None for a block on token ids.
        radius: broadcastable to [T, D], float64, >= 0.
        effort: the effort of the search for slopes of elements of the output.
        enough: returns whether the output's boxes are small enough, so that no search is needed.

    Raises:
        NoBound: no finite bound exists.
    """
    run = linear_walk(graph, kernels, centre, radius)
    name = graph.output
    searched: tuple[ElementSlopes, ...] = ()
    if name in run.index and not (enough is not None and enough(run.state(run.nodes[name]))):
        moved, searched = search(run.tape, run.index[name], effort or SlopeEffort())
        _keep(run, name, run.tape.entries[run.index[name]].deviation, moved)
    return LinearFound(run.state(run.nodes[name]), _witness(run), hints_of(run, searched))


def linear_walk(
    graph: BlockGraph, kernels: Kernels, centre: Tensor | None, radius: Tensor
) -> LinearRun:
    """Bound every node and return the walk, whose tape bounds any functional."""
    if kernels.rows is not None:
        raise NoBound(graph.output, "planes do not cover sequences of any length")
    if kernels.ball is not None:
        raise NoBound(graph.output, "planes do not cover a region around the weights")
    if any(node.op == "cache" for node in graph.nodes):
        raise NoBound(graph.output, "planes do not cover a quantised kv_cache")
    if any(node.op == "quantise" for node in graph.nodes):
        raise NoBound(graph.output, "planes do not cover quantised tensors")
    refuse_uncached(graph, kernels.train.numerics, kernels.infer.numerics)
    run = LinearRun(graph, kernels, LinearTape(), {node.name: node for node in graph.nodes})
    for node in graph.nodes:
        if node.op in ("param", "constant"):
            continue
        for position in _read_closely(node):
            _sharpen(run, run.source(node, position))
        if node.op == "input":
            _input(run, node, centre, radius)
        else:
            _follow(run, node)
    _sharpen(run, run.nodes[graph.output])
    return run


def _read_closely(node: Node) -> tuple[int, ...]:
    """Return the operands of a node on whose boxes its linear bounds depend."""
    return () if node.op in ("input", "param", "constant") else operation_of(node).read_closely


def _follow(run: LinearRun, node: Node) -> None:
    """Bound a node by the interval domain on the operands' boxes, then append its planes."""
    operation = operation_of(node)
    run.known[node.name] = operation.interval(run.step(node))
    if operation.linear is None:
        raise NoBound(node.name, f"there are no linear bounds of {node.op}")
    operation.linear(run, node)


def _sharpen(run: LinearRun, node: Node) -> None:
    """Meet the boxes of a computed node with bounds of functionals of its elements, once."""
    if not isinstance(run.known.get(node.name), State) or (node.name, "drift") in run.met:
        return
    index = run.index[node.name]
    deviation, run.met[node.name, "deviation"] = refine_output(run.tape, index, "deviation")
    moved, run.met[node.name, "drift"] = refine_output(run.tape, index, "drift")
    _keep(run, node.name, deviation, moved)


def _keep(run: LinearRun, name: str, deviation: Box, moved: Box) -> None:
    """Keep smaller boxes of the unknowns of a computed node."""
    state = run.known[name]
    if not isinstance(state, State):
        return
    index = run.index[name]
    reference = Box.point(run.tape.entries[index].reference)
    train = state.train.meet(reference + deviation)
    sharper = settle(name, train, state.infer, state.drift.meet(moved), state.apart)
    run.known[name] = sharper
    run.tape.tighten(index, deviation.meet(sharper.train - reference), sharper.drift)


def _input(run: LinearRun, node: Node, centre: Tensor | None, radius: Tensor) -> None:
    """Append the block input: the same numbers for both kernels, stored by coarse ones."""
    run.known[node.name] = block_input(node, run.kernels, centre, radius)
    assert centre is not None
    zero = torch.zeros_like(centre)
    part = LinearPart(zero, radius.expand(centre.shape).contiguous())
    run.append(node, centre, lambda a: [], part, LinearPart(zero, zero))


def _witness(run: LinearRun) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for name in run.known:
        state = run.state(run.nodes[name])
        value, moved = float(state.train.mag().amax()), float(state.drift.mag().amax())
        if not (value < torch.inf and moved < torch.inf):
            raise NoBound(name, "a bound is not finite")
        found[name] = (value, moved)
    return found


MOST = 2**36
"""Most multiplications for which planes are tried by default: half a minute of a core."""
_PASSES = {"softmax": 3, "layer_norm": 6, "rms_norm": 4}
"""Batches of functionals, one per element, that operations need besides those of section 5."""


def cheap(graph: BlockGraph) -> bool:
    """Return whether the cost of planes of a block is at most `MOST`."""
    return cost(graph) <= MOST


def cost(graph: BlockGraph) -> int:
    """Return an estimate of the multiplications that the functionals of all elements take.

    Each is propagated back through the linears before it: of its row, or of all rows before a
    product of rows.
    """
    shapes = {node.name: node.shape for node in graph.nodes}
    linears = [node.shape for node in graph.nodes if node.op == "linear"]
    rows = max((math.prod(shape[:-1]) for shape in linears), default=1)
    behind, mixed, total = 1, False, 0
    met: set[str] = set()

    def functionals(name: str, passes: int) -> int:
        return passes * math.prod(shapes[name]) * behind * (rows if mixed else 1)

    for node in graph.nodes:
        for position in _read_closely(node):
            name = node.inputs[position]
            total += functionals(name, 0 if name in met else 2)
            met.add(name)
        total += functionals(node.inputs[0], _PASSES[node.op]) if node.op in _PASSES else 0
        if node.op == "linear":
            behind += math.prod(shapes[node.inputs[1]])
        mixed = mixed or node.op == "matmul"
    return total + functionals(graph.output, 2)


Side = Literal["below", "above"]
_GAIN = 1 - 2.0**-10
"""An element's own slopes are kept if they lower its bound by this factor."""


@dataclass(frozen=True, slots=True)
class SlopeEffort:
    """The effort of the search for slopes of elements of the output.

    `steps` of the search (0: none), the `rate` of the first one, the `most` elements searched on
    both sides together, the most numbers of slopes `kept` in all, and optimised `at_once`. With
    `limit`, only elements whose |drift| may exceed it are searched, and none if there are more than
    `most`.
    """

    steps: int = 40
    rate: float = 0.1
    most: int = 64
    kept: int = 2**20
    at_once: int = 2**16
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class ElementSlopes:
    """Slopes for one element of the output, on one side: [6, bent elements of all ReLUs]."""

    element: int
    side: Side
    values: Tensor


def search(
    tape: LinearTape, index: int, effort: SlopeEffort
) -> tuple[Box, tuple[ElementSlopes, ...]]:
    """Tighten bounds of elements of an entry's drift; return its box and the slopes for it."""
    drift = tape.entries[index].drift
    low, high = (end.clone(memory_format=torch.contiguous_format) for end in (drift.lo, drift.hi))
    planes = tape.split(index)
    numbers = sum(math.prod(tape.entries[i].shape) for i in planes)
    bent = sum(_bent(tape, i) for i in planes)
    if effort.steps == 0 or bent == 0:
        return drift, ()
    found: list[ElementSlopes] = []
    room = max(1, effort.at_once // numbers)
    for side, elements in _candidates(drift, effort, room):
        if (len(found) + len(elements)) * 6 * bent > effort.kept:
            break
        bounds, slopes = _descend(tape, index, _unit_functionals(drift, elements, side), effort)
        for k, element in enumerate(elements):
            end = high if side == "above" else -low
            if not float(bounds[k]) < float(end.view(-1)[element]) - _least(drift, element):
                continue
            found.append(ElementSlopes(element, side, _packed(tape, planes, slopes, k)))
            if side == "above":
                high.view(-1)[element] = bounds[k]
            else:
                low.view(-1)[element] = -bounds[k]
    return Box(low, high), tuple(found)


def _least(drift: Box, element: int) -> float:
    return float((drift.hi - drift.lo).view(-1)[element]) * (1 - _GAIN)


def _bent(tape: LinearTape, index: int) -> int:
    planes = tape.entries[index].planes
    return 0 if planes is None else int(planes.bent.sum())


def _candidates(drift: Box, effort: SlopeEffort, room: int) -> Iterator[tuple[Side, list[int]]]:
    """Yield elements of one row by side, at most `room`, those with the largest bounds first."""
    ends = torch.stack([drift.hi.flatten(), -drift.lo.flatten()])
    count, n = ends.shape[1], drift.lo.shape[-1]
    order = torch.argsort(ends.flatten(), descending=True, stable=True)
    if effort.limit is not None:
        order = order[ends.flatten()[order] > effort.limit]
        order = order[: 0 if len(order) > effort.most else None]
    found: dict[tuple[Side, int], list[int]] = {}
    for place in order[: effort.most].tolist():
        side: Side = "above" if place < count else "below"
        found.setdefault((side, place % count // n), []).append(place % count)
    for (side, _), elements in found.items():
        for first in range(0, len(elements), room):
            yield side, elements[first : first + room]


def _unit_functionals(drift: Box, elements: Sequence[int], side: Side) -> Functional:
    """Return the functionals of elements of one row, and of -drift below."""
    shape = tuple(drift.lo.shape)
    values = drift.lo.new_zeros(len(elements), shape[-1])
    columns = torch.tensor([element % shape[-1] for element in elements])
    values[torch.arange(len(elements)), columns] = 1.0 if side == "above" else -1.0
    row = torch.unravel_index(torch.tensor(elements[0] // shape[-1]), shape[:-1])
    return Functional(None, on_row(values, tuple(int(k) for k in row), shape))


def _descend(
    tape: LinearTape, index: int, functional: Functional, effort: SlopeEffort
) -> tuple[Tensor, Slopes]:
    """Return the least upper bounds [B] of the descent, and their slopes in float32."""
    count, planes = functional.count, tape.split(index)
    starts: dict[int, tuple[tuple[Tensor, Tensor], ...]] = {}
    moves: dict[int, list[Tensor]] = {}
    for i in planes:
        entry, these = tape.entries[i], tape.entries[i].planes
        assert these is not None
        starts[i] = tuple(zip(these.slopes(), these.scales(), strict=True))
        like = entry.reference
        moves[i] = [like.new_zeros((count, *entry.shape)).requires_grad_() for _ in starts[i]]

    def slopes() -> Slopes:
        return {
            i: tuple(s + scale * move for (s, scale), move in zip(starts[i], moves[i], strict=True))
            for i in planes
        }

    flat = [move for group in moves.values() for move in group]
    steps = torch.optim.Adam(flat, lr=effort.rate)
    best: Tensor | None = None
    chosen: Slopes = {}
    for step in range(effort.steps + 1):
        for group in steps.param_groups:
            group["lr"] = effort.rate * (1 - step / (effort.steps + 1))
        current = slopes()
        middle, spread = tape.walk(index, functional, current)
        total = middle + spread
        reached = total.detach()
        now = {i: tuple(in_single(slope.detach()) for slope in current[i]) for i in planes}
        better = torch.ones_like(reached, dtype=torch.bool) if best is None else reached < best
        best = reached if best is None else torch.where(better, reached, best)
        chosen = {i: _better_slopes(better, now[i], chosen.get(i, now[i])) for i in planes}
        if not total.requires_grad:  # the bounds depend on no slope
            break
        if step < effort.steps and total.requires_grad:
            gradients = torch.autograd.grad(total.sum(), flat, allow_unused=True)
            for move, gradient in zip(flat, gradients, strict=True):
                move.grad = torch.zeros_like(move) if gradient is None else gradient
            steps.step()
    with torch.no_grad():
        middle, spread = tape.walk(index, functional, chosen)
        return up(middle + spread), chosen


def _better_slopes(
    better: Tensor, now: tuple[Tensor, ...], before: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the slopes `now` where `better`, else those `before`."""
    wide = better.reshape(-1, *(1 for _ in now[0].shape[1:]))
    return tuple(torch.where(wide, a, b) for a, b in zip(now, before, strict=True))


def _packed(tape: LinearTape, planes: tuple[int, ...], slopes: Slopes, k: int) -> Tensor:
    """Return the slopes of one functional at elements of open sign, [6, elements]."""
    parts = []
    for i in planes:
        these = tape.entries[i].planes
        assert these is not None
        parts.append(torch.stack([slope[k][these.bent] for slope in slopes[i]]))
    return torch.cat(parts, 1)


def hints_of(run: LinearRun, searched: Sequence[ElementSlopes]) -> dict[str, Any]:
    """Return the hints of a walk as plain data; arrays are numpy's.

    They are the rows of nodes that functionals tightened, the slopes of every ReLU at elements of
    open sign, and those of single elements of the output.
    """
    met = [
        {"of": name, "unknown": unknown, "rows": rows}
        for (name, unknown), chosen in sorted(run.met.items())
        if (rows := list(runs_of(chosen)))
    ]
    slopes = []
    for entry in run.tape.entries:
        if entry.planes is None:
            continue
        at = entry.planes.bent
        values = torch.stack([slope[0][at] for slope in entry.planes.slopes()])
        slopes.append({"of": entry.name, "at": at.cpu().numpy(), "values": _single(values)})
    own = [
        {"element": one.element, "side": one.side, "values": _single(one.values)}
        for one in searched
    ]
    return {"met": met, "slopes": slopes, "searched": own}


def _single(values: Tensor) -> np.ndarray[Any, Any]:
    return values.cpu().numpy().astype(np.float32)
