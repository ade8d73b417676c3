"""Where the walk over a block stands, and how an operation is written on the tape (section 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Bools, Box, Floats
from kcdsl_certs.recheck.planes.functional import Functional
from kcdsl_certs.recheck.planes.tape import Entry, Pull, Tape
from kcdsl_certs.recheck.rules.state import Mask, Scene, State, Value, numeric
from kcdsl_certs.recheck.versions import SUMMED, Own, plus
from kcdsl_certs.rejected import Rejected

_KEPT = 1 + 2.0**-20  # a linear part is given up only where a box is narrower than this


@dataclass(frozen=True, slots=True)
class Added:
    """What an operation adds to its linear part in one unknown: centre ± (radius + loose).

    `loose` bounds element by element what a curved bound stands for.
    """

    centre: Floats
    radius: Floats
    loose: Floats | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """What a rule reads of an operand."""

    place: int
    reference: Floats
    e: Box
    d: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Return its shape."""
        return self.reference.shape


@dataclass(frozen=True, slots=True)
class Origin:
    """The linear of which elements were moved: `index` holds row·outputs + output of each.

    `source` is the place of its input, `entry` its own; weights are [outputs, inputs].
    """

    source: int
    entry: int
    train: Floats
    infer: Floats
    index: NDArray[np.int64]


@dataclass(slots=True)
class Course:
    """The walk under way: values of the interval domain, the tape, and what is known beside."""

    scene: Scene
    errors: Mapping[str, tuple[Box, Box]]
    tape: Tape = field(default_factory=Tape)
    nodes: dict[str, Node] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    versions: dict[tuple[str, str, int], int] = field(default_factory=dict)
    first: set[str] = field(default_factory=set)  # nodes that were read

    def state(self, name: str) -> State:
        """Return the boxes of a node.

        Raises:
            Rejected: "rule/mask" for a mask.
        """
        return numeric(self.values[name])

    def operand(self, node: Node, position: int) -> Operand:
        """Return an operand; what is known of either kernel gets an entry when it is first read."""
        name = node.inputs[position]
        if name not in self.places:
            state = self.state(name)
            if not (state.t.point and state.i.point):
                raise Rejected("rule/weight", f"{name[:80]!r} must be known")
            self.places[name] = self.tape.add(_known(state))
        place = self._version(node, position)
        entry = self.tape.entries[place]
        return Operand(place, entry.reference, entry.e, entry.d)

    def _version(self, node: Node, position: int) -> int:
        """Return the place of one reading of an operand: the first is the node's own entry."""
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
        """Write another reading: it and the first are each near what both are versions of, and in
        the boxes of the node."""
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
            Entry(
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
        pull: Pull,
        e: Added,
        d: Added,
        curved: Callable[[Functional], Floats] | None = None,
    ) -> bool:
        """Write an operation with the rounding of its result; say whether all of it is linear.

        An element whose box is narrower than what is added to its linear part is that box alone.
        """
        state = self.state(node.name)
        boxes = box.sub(state.t, box.exact(reference)), state.d
        wrong = self.errors.get(node.name)
        if wrong is not None:
            e, d = _more(e, wrong[0]), _more(d, box.sub(wrong[1], wrong[0]))
        (e, kept_e), (d, kept_d) = _either(e, boxes[0]), _either(d, boxes[1])
        entry = Entry(
            np.ascontiguousarray(reference),
            *boxes,
            pull,
            (e.centre, d.centre),
            (e.radius, d.radius),
            (kept_e, kept_d),
            curved,
        )
        self.places[node.name] = self.tape.add(entry)
        return kept_e is None and kept_d is None

    def inexact(self, operand: Operand, e: Floats, d: Floats) -> Operand:
        """Write an operand with errors of its own: the quantised input of a linear."""
        none = np.zeros(operand.shape)
        boxes = box.widen(operand.e, e), box.widen(operand.d, d)
        entry = Entry(
            operand.reference,
            *boxes,
            lambda f: ((operand.place, f),),
            (none, none),
            (e, d),
        )
        return Operand(self.tape.add(entry), operand.reference, *boxes)


def raised(values: Floats) -> Floats:
    """Return an upper bound of a short sum of products of non-negative numbers."""
    return np.asarray(values * (1 + 2.0**-40))


def nothing(shape: tuple[int, ...]) -> Added:
    """Return what adds nothing."""
    return Added(np.zeros(shape), np.zeros(shape))


def halves(a: Box) -> tuple[Floats, Floats]:
    """Return the middle of a box and how far it reaches from there."""
    middle, radius = box.midpoint(a)
    return middle, np.zeros(a.shape) if radius is None else radius


def _known(state: State) -> Entry:
    """Return the entry of numbers that are known in either kernel."""
    reference, none = state.t.lo, np.zeros(state.shape)
    middle, radius = halves(state.d)
    return Entry(reference, box.exact(none), state.d, lambda f: (), (none, middle), (none, radius))


def _more(part: Added, error: Box) -> Added:
    middle, radius = halves(error)
    centre = part.centre + middle
    wide = raised(part.radius + radius) + 2.0**-51 * np.abs(centre)
    return replace(part, centre=centre, radius=wide)


def _either(part: Added, inside: Box) -> tuple[Added, Bools | None]:
    """Return what is added, and where the linear part is kept (None: everywhere)."""
    middle, radius = halves(inside)
    wide = part.radius if part.loose is None else raised(part.radius + part.loose)
    kept = np.broadcast_to(wide <= radius * _KEPT, radius.shape)
    if bool(kept.all()):
        return part, None
    return Added(np.where(kept, part.centre, middle), np.where(kept, part.radius, radius)), kept


def is_number(value: Value) -> bool:
    """Say whether a value is one of numbers, not a mask."""
    return not isinstance(value, Mask)
