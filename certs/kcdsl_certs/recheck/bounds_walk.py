"""Walk a block graph in linear bounds of deviation and drift, node by node (sections 2 and 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import units
from kcdsl_certs.recheck.documents.hints import ElementSlopes, PlaneHints, ReluSlopes
from kcdsl_certs.recheck.graphs.graph import Array
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Bools, Box, Floats
from kcdsl_certs.recheck.interval.state import DriftProblem, State, reduce
from kcdsl_certs.recheck.interval_walk import apply, magnitudes
from kcdsl_certs.recheck.linear_bounds.context import DEVIATION, DRIFT, Context, elements, is_number
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch, Slopes
from kcdsl_certs.recheck.ops.table import operation_of

_KNOWN = ("param", "constant")


@dataclass(frozen=True, slots=True)
class Derived:
    """The boxes of the output, and by node the largest |T| and |D|."""

    output: State
    sizes: Mapping[str, tuple[float, float]]


def derive(problem: DriftProblem, hints: PlaneHints | None = None) -> Derived:
    """Return the output's boxes by planes, met with those of the interval domain.

    With hints only the functionals that they name are bounded, with the slopes that they name;
    without hints all elements of operands in `Operation.closely`. Raises Rejected, naming the node.
    """
    context = walk(problem, hints)
    sizes = {name: magnitudes(value) for name, value in context.values.items()}
    return Derived(context.state(problem.block.output), sizes)


def walk(problem: DriftProblem, hints: PlaneHints | None = None) -> Context:
    """Write the whole tape; see `derive`."""
    beside = problem.rows, problem.drift, problem.held
    if problem.rho or any(part is not None for part in beside):
        raise Rejected("document/domain", "planes: no rule for any length, weight balls, chains")
    if any(node.op == "cache" for node in problem.block.nodes):
        raise Rejected("document/domain", "planes do not cover a quantised cache")
    if any(node.op == "quantise" for node in problem.block.nodes):
        raise Rejected("document/domain", "planes do not cover quantised tensors")
    if any(node.op == "route" for node in problem.block.nodes):
        raise Rejected("document/domain", "planes do not cover routes of experts")
    if any(not node.shape and node.op not in _KNOWN for node in problem.block.nodes):
        raise Rejected("document/domain", "planes do not cover numbers without dimensions")
    errors: dict[str, tuple[Box, Box]] = {}
    context = Context(replace(problem, errors=errors), errors)
    if hints is not None:
        context.slopes |= {
            name: (_mask_of(one), _slope_values(one.values)) for name, one in hints.slopes.items()
        }
    sharp = _Sharpener(context, hints)
    for node in problem.block.nodes:
        context.nodes[node.name] = node
        try:
            operation = operation_of(node)
            for position in operation.closely:
                sharp.sharpen(node.inputs[position])
            inputs = [context.values[name] for name in node.inputs]
            value = context.values[node.name] = apply(context.problem, node, inputs)
            if operation.bounds is not None and is_number(value):
                operation.bounds(context, node)
        except Rejected as rejection:
            raise rejection.at(f"node {node.name[:80]!r}") from None
    sharp.sharpen(problem.block.output)
    if hints is not None:
        for searched in hints.searched:
            sharp.search(searched)
    return context


class _Sharpener:
    """Meets the boxes of nodes with bounds of functionals of their elements (section 5)."""

    def __init__(self, context: Context, hints: PlaneHints | None) -> None:
        self._context, self._hints = context, hints
        self._done: set[str] = set()

    def sharpen(self, name: str) -> None:
        """Bound the elements of a computed node once, in the rows that the hints name."""
        context, state = self._context, self._context.values[name]
        known = context.nodes[name].op in _KNOWN
        if name in self._done or known or not isinstance(state, State):
            return
        self._done.add(name)
        place = context.places[name]
        made = [
            elements(context.tape, place, unknown, self._rows(name, unknown, state.shape))
            for unknown in (DEVIATION, DRIFT)
        ]
        self._meet(name, state, made[0], made[1])

    def search(self, searched: ElementSlopes) -> None:
        """Bound one element of the output's drift with slopes of its own."""
        context, name = self._context, self._context.problem.block.output
        if name not in context.places:  # a parameter or constant
            return
        state, place = context.state(name), context.places[name]
        row = np.unravel_index(searched.element, state.shape)
        where = tuple(int(k) for k in row)
        one = FunctionalBatch(None, units(state.shape, where[:-1], where[-1], 1))
        sign = 1.0 if searched.side == "above" else -1.0
        middle, wide = context.tape.walk(place, one.times(sign), self._own(searched))
        most = float(box.above(middle + wide)[0])
        lo, hi = state.d.lo.copy(), state.d.hi.copy()
        if sign > 0:
            hi[where] = min(hi[where], most)
        else:
            lo[where] = max(lo[where], -most)
        entry = context.tape.entries[place]
        self._meet(name, state, entry.e, Box(lo, hi))

    def _meet(self, name: str, state: State, e: Box, d: Box) -> None:
        context, place = self._context, self._context.places[name]
        reference = box.exact(context.tape.entries[place].reference)
        t = box.meet(state.t, box.add(reference, e))
        sharper = reduce(t, state.i, box.meet(state.d, d), state.own)
        context.values[name] = sharper
        context.tape.sharpen(place, box.meet(e, box.sub(sharper.t, reference)), sharper.d)

    def _rows(self, name: str, unknown: str, shape: tuple[int, ...]) -> Bools:
        """Return the mask [..., 1] of the rows of a node whose elements are bounded."""
        chosen = np.ones((*shape[:-1], 1), dtype=np.bool_)
        if self._hints is None:
            return chosen
        chosen[...] = False
        runs = self._hints.met.get((name, unknown), ())
        for start, stop in zip(runs[::2], runs[1::2], strict=True):
            chosen.reshape(-1)[start:stop] = True
        return chosen

    def _own(self, searched: ElementSlopes) -> dict[int, Slopes]:
        """Return the slopes that the hints give for one element, by the entry of the ReLU."""
        if self._hints is None:
            return {}
        values, found, first = _slope_values(searched.values), {}, 0
        for name, bent in self._hints.slopes.items():
            place = self._context.places[name]
            relu = self._context.tape.entries[place].relu
            if relu is not None:
                part = values[:, first : first + bent.count]
                found[place] = relu.slopes.replaced(_mask_of(bent), part)
            first += bent.count
        return found


def _mask_of(bent: ReluSlopes) -> Bools:
    return np.frombuffer(bent.at.data, dtype=np.bool_).reshape(bent.at.shape)


def _slope_values(values: Array) -> Floats:
    return np.frombuffer(values.data, dtype="<f4").astype(np.float64).reshape(values.shape)
