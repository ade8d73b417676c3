"""What transfer functions read: both kernels, boxes of each and of their difference (section 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node, weight_of
from kcdsl.model.numerics import held_formats
from kcdsl_backends.drift.boxes.any_length import Axes
from kcdsl_backends.drift.boxes.box import Box, NoBound, refuse_wide
from kcdsl_backends.drift.boxes.parameters import StoredParameters
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding, Stored, added
from kcdsl_backends.drift.boxes.weight_ball import BallTensor, at_rows


@dataclass(frozen=True, slots=True)
class State:
    """T holds the training value, I the inference value, D inference minus training.

    `apart` bounds how far a reading of either value may be from the one of which all are versions.
    """

    train: Box
    infer: Box
    drift: Box
    apart: tuple[Apart, Apart] = (None, None)

    @property
    def middle(self) -> Box:
        """Return a box around (training + inference) / 2."""
        return (self.train + self.drift.half()).meet((self.train + self.infer).half())


@dataclass(frozen=True, slots=True)
class SoftmaxState:
    """A softmax before its own rounding, which is kept apart (section 5).

    `exact` holds p* of both kernels and their drift, `variation` [..., rows] bounds the total
    variation of each row, `rounding_train` and `rounding_infer` bound |computed - p*|, `mask` is
    True where a column takes part (None: everywhere). Of any number of columns, `sums` bounds
    Σ|computed - p*| of each row [..., rows, 1] in the training and the inference kernel.
    """

    exact: State
    variation: Tensor
    rounding_train: Tensor
    rounding_infer: Tensor
    mask: Tensor | None
    sums: tuple[Tensor, Tensor] | None = None
    apart: tuple[Apart, Apart] = (None, None)

    def collapse(self) -> State:
        """Return the plain state of the computed probabilities."""
        return State(
            self.exact.train.widen(self.rounding_train),
            self.exact.infer.widen(self.rounding_infer),
            self.exact.drift.widen(self.rounding_train).widen(self.rounding_infer),
            self.apart,
        )


Known = State | SoftmaxState


def settle(
    node: str, train: Box, infer: Box, drift: Box, apart: tuple[Apart, Apart] = (None, None)
) -> State:
    """Intersect the three boxes with what each pair says about the third.

    Raises:
        NoBound: some end is not finite.
        AssertionError: an intersection is empty, which can only come from a defect.
    """
    for box in (train, infer, drift):
        if not bool((torch.isfinite(box.lo) & torch.isfinite(box.hi)).all()):
            raise NoBound(node, "a bound is not finite")
    drift = drift.meet(infer - train)
    infer = infer.meet(train + drift)
    train = train.meet(infer - drift)
    for box in (train, infer, drift):
        if not bool((box.lo <= box.hi).all()):
            raise AssertionError(f"empty intersection at {node}: a rule of the domain is wrong")
    return State(train, infer, drift, apart)


def combine(node: str, exact_drift: Box, train: Stored, infer: Stored) -> State:
    """Return the state of a stored result: D = D_exact + R_infer - R_train."""
    drift = exact_drift + infer.error - train.error
    return settle(node, train.value, infer.value, drift, (train.apart, infer.apart))


@dataclass(frozen=True, slots=True)
class Parameter:
    """The values both kernels hold for one parameter or float constant (float64, exact).

    `moved` encloses what they hold of all parameters in a region around the weights; None where
    the parameter is exactly that of the checkpoint, whose values `train` and `infer` are.
    """

    train: Tensor
    infer: Tensor
    moved: BallTensor | None = None

    @property
    def alike(self) -> bool:
        """Say whether both kernels hold the same known numbers."""
        return self.moved is None and self.train is self.infer

    @property
    def boxes(self) -> tuple[Box, Box]:
        """Return where the training and the inference kernel's values lie."""
        if self.moved is not None:
            return self.moved.train, self.moved.infer
        return Box.point(self.train), Box.point(self.infer)

    @property
    def difference(self) -> Box:
        """Return inference minus training; exact subtraction up to one outward ulp."""
        if self.moved is not None:
            return self.moved.difference
        if self.alike:
            zero = self.train * 0
            return Box(zero, zero)
        return Box.point(self.infer) - Box.point(self.train)

    def state(self) -> State:
        """Return the parameter as a node."""
        return State(*self.boxes, self.difference)

    def rows(self, ids: Tensor) -> Parameter:
        """Return the rows of a table."""
        moved = None if self.moved is None else at_rows(self.moved, ids)
        return Parameter(self.train[ids], self.infer[ids], moved)


@dataclass(frozen=True, slots=True)
class Rows:
    """Any number of rows, up to `longest`: the dimensions of rows of every node, and what both
    kernels hold of the tables of positions, by the name of their constant (docs/any-length.md)."""

    longest: int
    axes: Mapping[str, Axes]
    tables: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Both kernels as the rules see them."""

    train: Rounding
    infer: Rounding
    plain: Callable[[Node], Parameter]
    """The stored value of a param or float constant node."""
    linear: Callable[[Node], Parameter]
    """The stored value of a param node used as the weight of a linear."""
    mask: Callable[[Node], Tensor]
    """The boolean array of a constant node."""
    rows: Rows | None = None
    """What is known beside where the graph stands for any number of rows."""
    handed: bool = False
    """Whether another block stored the input."""
    around_weights: bool = False
    """Whether parameters lie in a region around those of the checkpoint (`Parameter.moved`)."""

    def at(self, node: Node, nodes: Mapping[str, Node]) -> Kernels:
        """Return both kernels as they compute a node; see `Rounding.at`."""
        weight = weight_of(node, nodes)
        return replace(self, train=self.train.at(node, weight), infer=self.infer.at(node, weight))

    @staticmethod
    def of(train: StoredParameters, infer: StoredParameters) -> Kernels:
        """Return two kernels by what they store; their numerics are the kernels'."""
        return Kernels(
            Rounding(train.numerics),
            Rounding(infer.numerics),
            lambda node: _held(node, train, infer, linear=False),
            lambda node: _held(node, train, infer, linear=True),
            train.mask,
        )


def _held(
    node: Node, train: StoredParameters, infer: StoredParameters, *, linear: bool
) -> Parameter:
    """Return what both kernels hold of a parameter; one tensor where that is the same."""
    read = StoredParameters.linear if linear else StoredParameters.plain
    mine = read(train, node)
    same = infer.shares(node, train, linear=linear)
    return Parameter(mine, mine if same else read(infer, node))


@dataclass(frozen=True, slots=True)
class Step:
    """One node with everything its rule may read."""

    node: Node
    kernels: Kernels
    nodes: Mapping[str, Node]
    known: Mapping[str, Known]
    several: frozenset[str]
    """Nodes that are read more than once (`readings.several`)."""

    def operand(self, index: int) -> State:
        """Return the plain state of an input; parameters and constants are known numbers."""
        node = self.operand_node(index)
        if node.op in ("param", "constant"):
            return self.kernels.plain(node).state()
        state = self.known[node.name]
        return state if isinstance(state, State) else state.collapse()

    def promoted(self) -> None:
        """Refuse operands of formats that the result does not hold.

        Raises:
            NoBound: naming one.
        """
        for kernel in (self.kernels.train, self.kernels.infer):
            refuse_wide(self.nodes, self.node, kernel.numerics)

    def cast(self) -> State:
        """Return the operand in the format of the node: as it is where that holds all of it."""
        x, node, found = self.operand(0), self.node, []
        for kernel, own in ((self.kernels.train, x.train), (self.kernels.infer, x.infer)):
            held = held_formats(self.nodes, node.inputs[0], kernel.own, handed=self.kernels.handed)
            form = kernel.format_for(node.role, node.op)
            found.append(kernel.cast(own, held, form, node.name))
        if found == [None, None]:
            return x
        zero = torch.zeros_like(x.drift.lo)
        unchanged = (Stored(own, Box(zero, zero)) for own in (x.train, x.infer))
        stored = [now or same for now, same in zip(found, unchanged, strict=True)]
        each = zip(stored, x.apart, strict=True)
        both = (replace(now, apart=added(now.apart, before)) for now, before in each)
        return combine(node.name, x.drift, *both)

    def operand_node(self, index: int) -> Node:
        """Return the node that produces an input."""
        return self.nodes[self.node.inputs[index]]

    def finish(
        self,
        train: Box,
        infer: Box,
        drift: Box,
        error_train: Tensor,
        error_infer: Tensor,
        *,
        accumulates: bool = False,
        moved: tuple[Box, Box] | None = None,
        apart: tuple[Apart, Apart] = (None, None),
    ) -> State:
        """Store the exact results of both kernels and combine them.

        Args:
            train, infer: exact results on the operands of each kernel.
            drift: exact difference.
            error_train, error_infer: internal error of each kernel before storing (>= 0).
            accumulates: whether the results come out of the dot-product accumulator: then they are
                formed once, and what they are off by is the same for all that read them.
            moved: what a kernel may add to its exact result, in training and inference.
            apart: what other readings of the operands make of the exact result of either kernel.
        """
        found = self._stored((train, infer), (error_train, error_infer), accumulates, moved, apart)
        if accumulates and self.node.name not in self.several:
            found = [replace(stored, apart=None) for stored in found]
        return combine(self.node.name, drift, *found)

    def _stored(
        self,
        exact: tuple[Box, Box],
        errors: tuple[Tensor, Tensor],
        accumulates: bool,
        moved: tuple[Box, Box] | None,
        apart: tuple[Apart, Apart],
    ) -> list[Stored]:
        name, role, op, k = self.node.name, self.node.role, self.node.op, self.kernels
        return [
            kernel.store(
                value,
                error,
                kernel.format_for(role, op),
                name,
                kernel.inner(accumulates),
                beside,
                _privately(away, error, beside, accumulates=accumulates),
            )
            for kernel, value, error, away, beside in zip(
                (k.train, k.infer), exact, errors, apart, moved or (None, None), strict=True
            )
        ]


def _privately(away: Apart, error: Tensor, moved: Box | None, *, accumulates: bool) -> Apart:
    """Return how far a result may be in one reading from what it is in all, before it is cast."""
    return away if accumulates else added(away, error, None if moved is None else moved.mag())
