"""The context of the walk over a block: write operations on the tape, and bound their elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint, units
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import UNIT, Bools, Box, Floats, raised
from kcdsl_certs.recheck.interval.state import (
    SUMMED,
    DriftProblem,
    Mask,
    Own,
    State,
    Value,
    gamma,
    numeric,
    plus,
)
from kcdsl_certs.recheck.linear_bounds.tape import VJP, BoundsEntry, BoundsTape, FunctionalBatch

_KEPT = 1 + 2.0**-20  # a linear part is dropped where its constants exceed the box by this factor


@dataclass(frozen=True, slots=True)
class Added:
    """The constants of an operation beside its linear part in one unknown: centre ± (radius +
    loose). `loose` bounds the nonlinear part element by element.
    """

    centre: Floats
    radius: Floats
    loose: Floats | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """An operand as a rule reads it: entry, reference, and the boxes of its deviation and drift."""

    place: int
    reference: Floats
    e: Box
    d: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""
        return self.reference.shape


@dataclass(frozen=True, slots=True)
class PairOrigin:
    """The linear of which a view took elements: `index` is row·outputs + output of each element.

    `source` is the entry of its input, `entry` its own; weights are [outputs, inputs].
    """

    source: int
    entry: int
    train: Floats
    infer: Floats
    index: NDArray[np.int64]


@dataclass(slots=True)
class Context:
    """The state of a walk: values of the interval domain, the tape, entries and origins by node."""

    problem: DriftProblem
    errors: Mapping[str, tuple[Box, Box]]
    tape: BoundsTape = field(default_factory=BoundsTape)
    nodes: dict[str, Node] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    origins: dict[str, PairOrigin] = field(default_factory=dict)
    versions: dict[tuple[str, str, int], int] = field(default_factory=dict)
    first: set[str] = field(default_factory=set)  # nodes that were read before
    slopes: dict[str, tuple[Bools, Floats]] = field(default_factory=dict)
    """By ReLU: the mask of elements with given slopes, and these slopes [6, elements]."""

    def state(self, name: str) -> State:
        """Return the boxes of a node. Raises Rejected "rule/mask" for a mask."""
        return numeric(self.values[name])

    def operand(self, node: Node, position: int) -> Reading:
        """Return an operand; a parameter or constant gets an entry when it is first read."""
        name = node.inputs[position]
        if name not in self.places:
            state = self.state(name)
            if not (state.t.point and state.i.point):
                raise Rejected("rule/weight", f"{name[:80]!r} must be known")
            self.places[name] = self.tape.add(_known(state))
        place = self._version(node, position)
        entry = self.tape.entries[place]
        return Reading(place, entry.reference, entry.e, entry.d)

    def _version(self, node: Node, position: int) -> int:
        """Return the entry of one reading of an operand; the first reading is the node's entry."""
        name = node.inputs[position]
        place, own = self.places[name], self.state(name).own
        if own[0] is None and own[1] is None:
            return place
        key = (name, "", 0) if node.op in SUMMED else (name, node.name, position)
        if key not in self.versions:
            self.versions[key] = self._other(place, own) if name in self.first else place
            self.first.add(name)
        return self.versions[key]

    def _other(self, place: int, own: tuple[Own, Own]) -> int:
        """Write another reading: it and the first differ from their common value by at most `own`,
        and lie in the boxes of the node."""
        entry = self.tape.entries[place]
        shape, none = entry.reference.shape, np.zeros(entry.reference.shape)
        e, both = plus(own[0], none), plus(*own, none)
        assert e is not None
        assert both is not None
        wide = tuple(
            np.minimum(np.broadcast_to(raised(2 * part), shape), raised(inside.hi - inside.lo))
            for part, inside in ((e, entry.e), (both, entry.d))
        )
        return self.tape.add(
            BoundsEntry(
                entry.reference,
                entry.e,
                entry.d,
                lambda f: ((place, f),),
                (none, none),
                (wide[0], wide[1]),
            )
        )

    def write(
        self,
        node: Node,
        reference: Floats,
        vjp: VJP,
        e: Added,
        d: Added,
        nonlinear: Callable[[FunctionalBatch], Floats] | None = None,
    ) -> bool:
        """Write an operation with the rounding of its result; return whether it is all linear.

        An element whose box is narrower than the constants of its linear part gets the box alone.
        """
        state = self.state(node.name)
        boxes = box.sub(state.t, box.exact(reference)), state.d
        wrong = self.errors.get(node.name)
        if wrong is not None:
            e, d = _with_error(e, wrong[0]), _with_error(d, box.sub(wrong[1], wrong[0]))
        (e, kept_e), (d, kept_d) = _box_or_linear(e, boxes[0]), _box_or_linear(d, boxes[1])
        entry = BoundsEntry(
            np.ascontiguousarray(reference),
            *boxes,
            vjp,
            (e.centre, d.centre),
            (e.radius, d.radius),
            (kept_e, kept_d),
            nonlinear,
        )
        self.places[node.name] = self.tape.add(entry)
        return kept_e is None and kept_d is None

    def inexact(self, operand: Reading, e: Floats, d: Floats) -> Reading:
        """Write an operand with added errors: the quantised input of a linear."""
        none = np.zeros(operand.shape)
        boxes = box.widen(operand.e, e), box.widen(operand.d, d)
        entry = BoundsEntry(
            operand.reference,
            *boxes,
            lambda f: ((operand.place, f),),
            (none, none),
            (e, d),
        )
        return Reading(self.tape.add(entry), operand.reference, *boxes)


def nothing(shape: tuple[int, ...]) -> Added:
    """Return constants of zero."""
    return Added(np.zeros(shape), np.zeros(shape))


def halves(a: Box) -> tuple[Floats, Floats]:
    """Return the midpoint and the radius of a box."""
    middle, radius = box.midpoint(a)
    return middle, np.zeros(a.shape) if radius is None else radius


def _known(state: State) -> BoundsEntry:
    """Return the entry of a state whose boxes alone are known: a parameter or constant."""
    reference, none = state.t.lo, np.zeros(state.shape)
    middle, radius = halves(state.d)
    still = box.exact(none)
    return BoundsEntry(reference, still, state.d, lambda f: (), (none, middle), (none, radius))


def _with_error(part: Added, error: Box) -> Added:
    middle, radius = halves(error)
    centre = part.centre + middle
    wide = raised(part.radius + radius) + 2.0**-51 * np.abs(centre)
    return replace(part, centre=centre, radius=wide)


def _box_or_linear(part: Added, inside: Box) -> tuple[Added, Bools | None]:
    """Return the constants, and where the linear part is kept (None: everywhere)."""
    middle, radius = halves(inside)
    wide = part.radius if part.loose is None else raised(part.radius + part.loose)
    kept = np.broadcast_to(wide <= radius * _KEPT, radius.shape)
    if bool(kept.all()):
        return part, None
    return Added(np.where(kept, part.centre, middle), np.where(kept, part.radius, radius)), kept


def is_number(value: Value) -> bool:
    """Return whether a value has numbers, so is not a mask."""
    return not isinstance(value, Mask)


_NUMBERS = 2**22  # most numbers of a batch of adjoints at the largest node
DEVIATION, DRIFT = "deviation", "drift"


def of(unknown: str, adjoint: Adjoint) -> FunctionalBatch:
    """Return functionals of one unknown."""
    return (
        FunctionalBatch(adjoint, None) if unknown == DEVIATION else FunctionalBatch(None, adjoint)
    )


def elements(tape: BoundsTape, place: int, unknown: str, rows: Bools) -> Box:
    """Return the box of every element of one unknown in the rows of the mask `rows` [..., 1]."""
    entry = tape.entries[place]
    known = entry.e if unknown == DEVIATION else entry.d
    lo, hi = known.lo.copy(), known.hi.copy()
    shape, step = lo.shape, _step(tape)
    for row in _named(rows):
        for first in range(0, shape[-1], step):
            count = min(step, shape[-1] - first)
            where: tuple[int | slice, ...] = (*row, slice(first, first + count))
            low, high = tape.between(place, of(unknown, units(shape, row, first, count)))
            lo[where], hi[where] = np.maximum(lo[where], low), np.minimum(hi[where], high)
    return Box(lo, hi)


def less_mean(tape: BoundsTape, place: int, unknown: str, weights: Floats) -> Box:
    """Return the box of u_j - Σ_k weights_k u_k in every row of one unknown u."""
    entry = tape.entries[place]
    inside = entry.e if unknown == DEVIATION else entry.d
    middle, radius = halves(inside)
    n = middle.shape[-1]
    mean = (weights * middle).sum(axis=-1, keepdims=True)
    about = radius + (weights * radius).sum(axis=-1, keepdims=True)
    lost = 2 * gamma(n + 16, UNIT)
    about = about + lost * (np.abs(middle) + (weights * np.abs(middle)).sum(axis=-1, keepdims=True))
    known = box.widen(box.sub(box.exact(middle), box.exact(mean)), raised(about))
    lo, hi = known.lo.copy(), known.hi.copy()
    # The functionals are off by the rounding of 1 - weights.
    off = raised(4 * UNIT * (1 + weights) * box.magnitude(inside))
    step = _step(tape)
    for row in np.ndindex(*middle.shape[:-1]):
        for first in range(0, n, step):
            count = min(step, n - first)
            part = slice(first, first + count)
            values = np.eye(count, n, first) - weights[row]
            low, high = tape.between(place, of(unknown, _in_row(values, row)))
            where = (*row, part)
            lo[where] = np.maximum(lo[where], box.add_down(low, -off[where]))
            hi[where] = np.minimum(hi[where], box.add_up(high, off[where]))
    return Box(lo, hi)


def along(tape: BoundsTape, place: int, unknown: str, weights: Floats) -> Floats:
    """Return a bound of |Σ_j weights_j u_j| of every row of one unknown u, [..., 1]."""
    entry = tape.entries[place]
    size = box.magnitude(entry.e if unknown == DEVIATION else entry.d)
    found = raised((np.abs(weights) * size).sum(axis=-1, keepdims=True))
    for row in np.ndindex(*size.shape[:-1]):
        low, high = tape.between(place, of(unknown, _in_row(weights[row][None], row)))
        found[row] = np.minimum(found[row], np.maximum(-low, high))
    return found


def _in_row(values: Floats, row: tuple[int, ...]) -> Adjoint:
    ones = (1,) * len(row)
    return Adjoint(values.reshape(len(values), *ones, -1), (*row, 0))


def _named(rows: Bools) -> Iterator[tuple[int, ...]]:
    for row in np.ndindex(*rows.shape[:-1]):
        if rows[row].any():
            yield row


def _step(tape: BoundsTape) -> int:
    """Return the batch size of functionals."""
    largest = max(entry.reference.size for entry in tape.entries)
    return max(1, min(256, _NUMBERS // largest))


SPARE = 24  # roundings of adjoints and centres in addition to those of their sums


def flat_product(values: Floats, matrix: Floats) -> Floats:
    """Return values @ matrix as one product of two matrices."""
    found = values.reshape(-1, values.shape[-1]) @ matrix
    return np.asarray(found.reshape(*values.shape[:-1], matrix.shape[-1]))
