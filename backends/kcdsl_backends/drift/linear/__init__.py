"""A walk in linear bounds: operands and entries of transfer functions, and bounds of single rows.

tape.py: deviations and drifts as a linear recurrence, and planes of ReLU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.error_bounds import on_row, rows, unit_functionals
from kcdsl_backends.drift.boxes import EPS, SAFE, Box, down, gamma, up
from kcdsl_backends.drift.boxes.rounding import ONCE, Apart, added, several
from kcdsl_backends.drift.boxes.state import Kernels, Known, State, Step
from kcdsl_backends.drift.linear.tape import (
    Functional,
    LinearEntry,
    LinearTape,
    LinearVJP,
    Noise,
    only_deviation,
)

Unknown = Literal["deviation", "drift"]


@dataclass(frozen=True, slots=True)
class LinearOperand:
    """An operand as a rule reads it: its entry, its reference and the boxes of its unknowns."""

    index: int
    reference: Tensor
    deviation: Box
    drift: Box


@dataclass(frozen=True, slots=True)
class LinearPart:
    """The constants of an operation in one unknown: |rest - centre| <= radius + loose, with the
    result less its linear part as rest. `loose` bounds the nonlinear part element by element.
    """

    centre: Tensor
    radius: Tensor
    loose: Tensor | None = None

    @property
    def widest(self) -> Tensor:
        """Return the radius element by element."""
        return self.radius if self.loose is None else up((self.radius + self.loose) * SAFE)


@dataclass(frozen=True, slots=True)
class LinearOrigin:
    """The linear of linear images (docs/proofs/difference-planes.md, Rule 3.5); its linear part is
    kept in all elements. `source` is the entry of its input, `entry` its own; `train` and `infer`
    are its matrices [out, in]."""

    source: int
    entry: int
    train: Tensor
    infer: Tensor


@dataclass(slots=True)
class LinearRun:
    """The state of a walk: the interval domain's states, the tape, and its entries by node."""

    graph: BlockGraph
    kernels: Kernels
    tape: LinearTape
    nodes: Mapping[str, Node]
    known: dict[str, Known] = field(default_factory=dict)
    index: dict[str, int] = field(default_factory=dict)
    origins: dict[str, LinearOrigin] = field(default_factory=dict)
    met: dict[tuple[str, Unknown], Tensor] = field(default_factory=dict)
    """Rows [..., 1] of nodes in which functionals of elements tightened boxes."""
    readings: dict[str, dict[tuple[str, int] | None, int]] = field(default_factory=dict)
    """The entries of the readings of a node: by reader and operand, None where it is stored."""
    several: frozenset[str] = field(init=False)
    """Nodes that are read more than once."""

    def __post_init__(self) -> None:
        self.several = several(self.graph)

    def step(self, node: Node) -> Step:
        """Return the step of the interval domain for a node."""
        return Step(node, self.kernels.at(node, self.nodes), self.nodes, self.known, self.several)

    def source(self, node: Node, position: int) -> Node:
        """Return the node that produces an input."""
        return self.nodes[node.inputs[position]]

    def operand(self, node: Node, position: int) -> LinearOperand:
        """Return an input of a node; parameters and constants are known, but kernels may differ."""
        name = node.inputs[position]
        if name not in self.index:
            known = self.kernels.plain(self.nodes[name])
            difference = known.difference
            zero = torch.zeros_like(known.train)
            middle, radius = difference.midpoint()
            entry = LinearEntry(
                name,
                known.train,
                Box(zero, zero),
                difference,
                lambda a: [],
                Noise(zero, radius, None, middle),
            )
            self.index[name] = self.tape.add(entry)
        index = self._reading(node, position)
        entry = self.tape.entries[index]
        return LinearOperand(index, entry.reference, entry.deviation, entry.drift)

    def _reading(self, node: Node, position: int) -> int:
        """Return the entry of one reading: the node's own for the first, else a new one near it."""
        name = node.inputs[position]
        first, state = self.index[name], self.known.get(name)
        train, infer = (None, None) if state is None else state.apart
        if train is None and infer is None:
            return first
        key = None if node.op in ONCE else (node.name, position)
        made = self.readings.setdefault(name, {})
        if key not in made:
            made[key] = self._again(first, train, infer) if made else first
        return made[key]

    def _again(self, index: int, train: Apart, infer: Apart) -> int:
        """Append another reading of an entry.

        Both are near their common value, and both lie in the boxes of the node.
        """
        entry = self.tape.entries[index]
        zero = torch.zeros_like(entry.reference)
        deviation = up((zero if train is None else 2 * train.expand(zero.shape)) * SAFE)
        both = added(train, infer)
        drift = up((zero if both is None else 2 * both.expand(zero.shape)) * SAFE)
        deviation = torch.minimum(deviation, _width(entry.deviation))
        drift = torch.minimum(drift, _width(entry.drift))
        return self.tape.add(
            replace(
                entry,
                vjp=lambda f: [(index, f)],
                noise=Noise(deviation.contiguous(), drift.contiguous()),
                planes=None,
            )
        )

    def state(self, node: Node) -> State:
        found = self.known[node.name]
        return found if isinstance(found, State) else found.collapse()

    def append(
        self,
        node: Node,
        reference: Tensor,
        vjp: LinearVJP,
        deviation: LinearPart,
        drift: LinearPart,
        nonlinear: Callable[[Functional], Tensor] | None = None,
    ) -> bool:
        """Append a computed node: its linear part, the operation's constants, and its rounding.

        An element whose box is no wider than its constants is bounded by the box alone, without a
        linear part: for instance a quantised result with one possible code. Return whether there
        are no such elements.
        """
        state = self.state(node)
        boxes = (state.train - Box.point(reference), state.drift)
        if state.errors is not None:
            train, infer = state.errors
            deviation, drift = _with_error(deviation, train), _with_error(drift, infer - train)
        kept_e, deviation = _box_or_linear(deviation, boxes[0])
        kept_d, drift = _box_or_linear(drift, boxes[1])
        whole = kept_e is None and kept_d is None

        def linear(functional: Functional) -> list[tuple[int, Functional]]:
            return [] if _nothing(functional) else list(vjp(_masked(functional, kept_e, kept_d)))

        def beyond(functional: Functional) -> Tensor:
            assert nonlinear is not None
            return nonlinear(_masked(functional, kept_e, kept_d))

        self.index[node.name] = self.tape.add(
            LinearEntry(
                node.name,
                reference,
                *boxes,
                vjp if whole else linear,
                Noise(
                    deviation.radius,
                    drift.radius,
                    deviation.centre,
                    drift.centre,
                    None if nonlinear is None else beyond,
                ),
            )
        )
        return whole

    def inexact(self, name: str, source: int, deviation: Tensor, drift: Tensor) -> int:
        """Append an operand with added errors: those of quantising the input of a linear."""
        entry = self.tape.entries[source]
        return self.tape.add(
            LinearEntry(
                name,
                entry.reference,
                entry.deviation.widen(deviation),
                entry.drift.widen(drift),
                lambda a: [(source, a)],
                Noise(deviation, drift),
            )
        )


def _width(box: Box) -> Tensor:
    return torch.where(box.lo == box.hi, 0.0, up(box.hi - box.lo))


def _nothing(functional: Functional) -> bool:
    return all(not bool(part.values.any()) for part in functional.parts)


def _with_error(part: LinearPart, error: Box) -> LinearPart:
    middle, radius = error.midpoint()
    centre = part.centre + middle
    # the float64 error of the sum
    return replace(
        part, centre=centre, radius=up((part.radius + radius) * SAFE + 2.0**-52 * centre.abs(), 2)
    )


def _box_or_linear(part: LinearPart, box: Box) -> tuple[Tensor | None, LinearPart]:
    """Return where the linear part is kept (None: everywhere), and the constants."""
    middle, radius = box.midpoint()
    # where the constants fill the box exactly, the linear part is zero, and is kept
    kept = part.widest <= radius * (1 + 2.0**-20)
    if bool(kept.all()):
        return None, part
    return kept.to(torch.float64), LinearPart(
        torch.where(kept, part.centre.expand(kept.shape), middle),
        torch.where(kept, part.radius.expand(kept.shape), radius),
    )


def _masked(functional: Functional, kept_e: Tensor | None, kept_d: Tensor | None) -> Functional:
    def by(part: Adjoint | None, kept: Tensor | None) -> Adjoint | None:
        return part if part is None or kept is None else part.times(kept)

    return Functional(by(functional.deviation, kept_e), by(functional.drift, kept_d))


def zero_part(like: Tensor) -> LinearPart:
    """Return constants of zero."""
    zero = torch.zeros_like(like)
    return LinearPart(zero, zero)


def inside(box: Box, reference: Tensor) -> Box:
    """Return a box relative to a reference point, rounded outward."""
    return Box(down(box.lo - reference), up(box.hi - reference))


LinearRule = Callable[[LinearRun, Node], None]
WORTH = 1 - 2.0**-8
"""Functionals of a row are used if they make one of its boxes narrower by this factor."""


def refine_output(tape: LinearTape, index: int, unknown: Unknown) -> tuple[Box, Tensor]:
    """Bound every element of an unknown of an entry; return its box, and the rows [..., 1] met.

    Rows in which no box becomes narrower by the factor `WORTH` keep their boxes.
    """
    entry = tape.entries[index]
    before = entry.deviation if unknown == "deviation" else entry.drift
    low = torch.empty_like(entry.reference, memory_format=torch.contiguous_format)
    high = torch.empty_like(low)
    for i, start, stop, adjoint in unit_functionals(entry.shape, low.device):
        least, most = tape.bound(index, only_deviation(unknown, adjoint))
        low[i].view(-1)[start:stop] = down(_known(least, -torch.inf))
        high[i].view(-1)[start:stop] = up(_known(most, torch.inf))
    found = before.meet(Box(low, high))
    narrower = found.hi - found.lo < (before.hi - before.lo) * WORTH
    met = narrower.any(-1, keepdim=True)
    return Box(torch.where(met, found.lo, before.lo), torch.where(met, found.hi, before.hi)), met


def linear_deviations(tape: LinearTape, index: int, weights: Tensor, unknown: Unknown) -> Box:
    """Bound u_j - Σ_k weights_k u_k in every row of one unknown u of an entry [..., n]."""
    entry = tape.entries[index]
    n, box = entry.shape[-1], entry.deviation if unknown == "deviation" else entry.drift
    middle, radius = box.midpoint()
    about = up((radius + (weights.abs() * radius).sum(-1, keepdim=True)) * SAFE, 2)
    mean = (weights * middle).sum(-1, keepdim=True)
    inexact = 2 * gamma(n + 8) * (middle.abs() + (weights * middle).abs().sum(-1, keepdim=True))
    wide = Box.point(middle - mean).widen(up(about + inexact, 2))
    unit = torch.eye(n, dtype=torch.float64, device=weights.device)
    low = torch.empty_like(wide.lo, memory_format=torch.contiguous_format)
    high = torch.empty_like(low)
    for row in rows(entry.shape):
        adjoint = on_row(unit - weights[row], row, entry.shape)
        least, most = tape.bound(index, only_deviation(unknown, adjoint))
        low[row], high[row] = down(least), up(most)
    # the functionals have the float64 error of 1 - weights
    lost = 4 * EPS * (1 + weights.abs()) * box.mag()
    return Box(low, high).widen(up(lost, 2)).meet(wide)


def linear_directions(tape: LinearTape, index: int, along: Tensor, unknown: Unknown) -> Tensor:
    """Bound |Σ_j along_j u_j| in every row of one unknown u of an entry [..., n] -> [..., 1]."""
    entry = tape.entries[index]
    box = entry.deviation if unknown == "deviation" else entry.drift
    found: Tensor = (along.abs() * box.mag()).sum(-1, keepdim=True) * SAFE
    for row in rows(entry.shape):
        adjoint = on_row(along[row].reshape(1, -1), row, entry.shape)
        least, most = tape.bound(index, only_deviation(unknown, adjoint))
        found[row] = torch.minimum(found[row], torch.maximum(-least, most))
    return found


def _known(bound: Tensor, otherwise: float) -> Tensor:
    """Return a bound with NaN replaced by `otherwise`."""
    return bound.masked_fill(torch.isnan(bound), otherwise)
