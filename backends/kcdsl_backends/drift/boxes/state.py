"""State of transfer functions: both kernels, boxes of each and of their difference (section 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.model.checkpoint.served import ServedWeights
from kcdsl.model.graph import Node, weight_of
from kcdsl.model.numerics import Numerics, held_formats
from kcdsl.model.numerics.weights import (
    linear_weight,
    plain_parameter,
    served_weight,
    stored_constant,
)
from kcdsl_backends.drift.boxes import Box, NoBound, refuse_wide
from kcdsl_backends.drift.boxes.matrices import KEPT_WIDE, narrowest, row_parts
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding, StoredResult, added
from kcdsl_backends.drift.boxes.weight_ball import BallTensor, WeightBall, at_rows


@dataclass(frozen=True, slots=True)
class State:
    """T holds the training value, I the inference value, D inference minus training.

    `apart` bounds the distance of readings of either value from their common value.
    """

    train: Box
    infer: Box
    drift: Box
    apart: tuple[Apart, Apart] = (None, None)
    errors: tuple[Box, Box] | None = None
    """Errors of both stored results against the exact operation; None where neither is stored."""

    def __neg__(self) -> State:
        return State(-self.train, -self.infer, -self.drift, self.apart)

    @property
    def middle(self) -> Box:
        """Return a box around (training + inference) / 2."""
        return (self.train + self.drift.half()).meet((self.train + self.infer).half())


@dataclass(frozen=True, slots=True)
class SoftmaxState:
    """A softmax before its own rounding, which is recorded separately (section 5).

    `exact` holds p* of both kernels and their drift, `variation` [..., rows] bounds the total
    variation of each row, `rounding_train` and `rounding_infer` bound |computed - p*|, `mask` is
    True for allowed columns (None: all). At any length, `sums` bounds Σ|computed - p*| of each row
    [..., rows, 1] in the training and the inference kernel.
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
    """Intersect each of the three boxes with the one that the other two imply.

    Raises:
        NoBound: some end is not finite.
        AssertionError: an intersection is empty, which is a defect of the program.
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


def combine(node: str, exact_drift: Box, train: StoredResult, infer: StoredResult) -> State:
    """Return the state of a stored result: D = D_exact + R_infer - R_train."""
    drift = exact_drift + infer.error - train.error
    found = settle(node, train.value, infer.value, drift, (train.apart, infer.apart))
    return replace(found, errors=(train.error, infer.error))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter or float constant as both kernels store it (float64, exact).

    `moved` encloses the stored values of all parameters in a region around the weights; None if the
    parameter is exactly that of the checkpoint, with the values `train` and `infer`.
    """

    train: Tensor
    infer: Tensor
    moved: BallTensor | None = None

    @property
    def alike(self) -> bool:
        """Return whether both kernels store the same known numbers."""
        return self.moved is None and self.train is self.infer

    @property
    def boxes(self) -> tuple[Box, Box]:
        """Return boxes of the training and the inference kernel's values."""
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
        return State(*self.boxes, self.difference)

    def rows(self, ids: Tensor) -> Parameter:
        moved = None if self.moved is None else at_rows(self.moved, ids)
        return Parameter(self.train[ids], self.infer[ids], moved)


Axes = tuple[int, ...]
"""The dimensions of rows of a node: none, one, or those of the queries and of the keys."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Any number of rows up to `longest`: the dimensions of rows of every node, and the tables of
    positions as both kernels store them, by the name of their constant (docs/proofs/any-length.md).
    """

    longest: int
    axes: Mapping[str, Axes]
    tables: Mapping[str, Parameter]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Both kernels as the rules see them: their roundings and their stored parameters.

    `rows`: the graph is read at any number of rows. `ball`: a region around the weights.
    `handed`: another block stored the input.
    """

    train: Rounding
    infer: Rounding
    stored: tuple[StoredParameters, StoredParameters]
    rows: Rows | None = None
    ball: WeightBall | None = None
    handed: bool = False

    def at(self, node: Node, nodes: Mapping[str, Node]) -> Kernels:
        """Return both kernels as they compute a node; see `Rounding.at`."""
        weight = weight_of(node, nodes)
        return replace(self, train=self.train.at(node, weight), infer=self.infer.at(node, weight))

    @staticmethod
    def of(
        train: StoredParameters,
        infer: StoredParameters,
        *,
        rows: Rows | None = None,
        ball: WeightBall | None = None,
    ) -> Kernels:
        """Return the kernels of these stored parameters and their numerics."""
        rounding = Rounding(train.numerics), Rounding(infer.numerics)
        return Kernels(*rounding, (train, infer), rows, ball)

    def plain(self, node: Node) -> Parameter:
        """Return the stored value of a param or float constant node."""
        return self._held(node, linear=False)

    def linear(self, node: Node) -> Parameter:
        """Return the stored value of a param node used as the weight of a linear."""
        return self._held(node, linear=True)

    def linear_parts(self, node: Node) -> Iterator[Parameter]:
        """Yield the weight of a linear; a large one some rows at a time."""
        train, infer = (stored.kept(node) for stored in self.stored)
        if self.ball is not None or train.dtype == torch.float64:
            yield self.linear(node)
            return
        same = self.stored[1].shares(node, self.stored[0], linear=True)
        for mine, other in zip(row_parts(train), row_parts(infer), strict=True):
            yield Parameter(mine, mine if same else other)

    def mask(self, node: Node) -> Tensor:
        return self.stored[0].mask(node)

    def _held(self, node: Node, *, linear: bool) -> Parameter:
        train, infer = self.stored
        mine, moved = train.read(node, linear=linear), None
        same = infer.shares(node, train, linear=linear)
        if self.ball is not None and node.op == "param":
            moved = self.ball.held(node, linear=linear)
        return Parameter(mine, mine if same else infer.read(node, linear=linear), moved)


@dataclass(frozen=True, slots=True)
class InterfaceEllipsoids:
    """Ellipsoids around rows: row t is in middle[t] + {e: |a·e| <= √(aᵀ P[t] a) for all a}.

    `middle` is [T, n] and `shapes` [T, n, n], float64.
    """

    middle: Tensor
    shapes: Tensor


@dataclass(frozen=True, slots=True)
class Entering:
    """The interfaces of a block in a chain (docs/proofs/chains.md).

    `drift` is the box of inference minus training of the state that it reads, `ellipsoids` enclose
    its rows. `readings` bound the distance of readings of that state from their common value, in
    training and inference. `followed`: another block reads the output, any number of times.
    """

    drift: Box | None = None
    ellipsoids: InterfaceEllipsoids | None = None
    readings: tuple[Apart, Apart] = (None, None)
    followed: bool = False


ALONE = Entering()
"""A block outside of a chain: both kernels read the same state; it and the output are read once."""


@dataclass(frozen=True, slots=True)
class Step:
    """One node with everything its rule may read."""

    node: Node
    kernels: Kernels
    nodes: Mapping[str, Node]
    known: Mapping[str, Known]
    several: frozenset[str]
    """Nodes that are read more than once (`rounding.several`)."""

    def operand(self, index: int) -> State:
        """Return the plain state of an input, also of parameters and constants."""
        node = self.operand_node(index)
        if node.op in ("param", "constant"):
            return self.kernels.plain(node).state()
        state = self.known[node.name]
        return state if isinstance(state, State) else state.collapse()

    def promoted(self) -> None:
        """Refuse operands of formats that the result does not hold.

        Raises:
            NoBound: naming an operand.
        """
        for kernel in (self.kernels.train, self.kernels.infer):
            refuse_wide(self.nodes, self.node, kernel.numerics)

    def cast(self) -> State:
        """Return the operand cast to the format of the node, unchanged if that holds its values."""
        x, node, found = self.operand(0), self.node, []
        for kernel, own in ((self.kernels.train, x.train), (self.kernels.infer, x.infer)):
            held = held_formats(self.nodes, node.inputs[0], kernel.own, handed=self.kernels.handed)
            form = kernel.format_for(node.role, node.op)
            found.append(kernel.cast(own, held, form, node.name))
        if found == [None, None]:
            return replace(x, errors=None)
        zero = torch.zeros_like(x.drift.lo)
        unchanged = (StoredResult(own, Box(zero, zero)) for own in (x.train, x.infer))
        stored = [now or same for now, same in zip(found, unchanged, strict=True)]
        each = zip(stored, x.apart, strict=True)
        both = (replace(now, apart=added(now.apart, before)) for now, before in each)
        return combine(node.name, x.drift, *both)

    def operand_node(self, index: int) -> Node:
        return self.nodes[self.node.inputs[index]]

    def each(
        self, of: Callable[[Rounding, Box], Tensor], boxes: tuple[Box, Box]
    ) -> tuple[Tensor, Tensor]:
        """Return `of` for each kernel and its box."""
        return of(self.kernels.train, boxes[0]), of(self.kernels.infer, boxes[1])

    def finish(
        self,
        exact: tuple[Box, Box],
        drift: Box,
        errors: tuple[Tensor, Tensor],
        *,
        accumulates: bool = False,
        moved: tuple[Box, Box] | tuple[None, None] = (None, None),
        apart: tuple[Apart, Apart] = (None, None),
    ) -> State:
        """Store the exact results of both kernels and combine them.

        Args:
            exact: results on the operands of each kernel, training and inference.
            drift: exact difference.
            errors: internal error of each kernel before storing (>= 0).
            accumulates: whether the results come out of the dot-product accumulator: then they are
                computed once, and all readers read the same error.
            moved: box of a further error of each kernel's exact result.
            apart: the distance of readings of the operands, carried to each exact result.
        """
        node, found = self.node, []
        kernels = self.kernels.train, self.kernels.infer
        for kernel, value, error, beside, away in zip(
            kernels, exact, errors, moved, apart, strict=True
        ):
            if not accumulates:
                away = added(away, error, None if beside is None else beside.mag())
            form, inner = kernel.format_for(node.role, node.op), kernel.inner(accumulates)
            stored = kernel.store(value, error, form, node.name, inner, beside, away)
            if accumulates and node.name not in self.several:
                stored = replace(stored, apart=None)
            found.append(stored)
        return combine(node.name, drift, *found)


@dataclass(frozen=True, slots=True)
class StoredParameters:
    """The parameters as one kernel stores them, in float64 (exact), cached by tensor and use.

    A matrix of more than `KEPT_WIDE` numbers is kept in the narrowest format that holds them all,
    and converted to float64 only while it is read.

    Args:
        tensors: checkpoint tensors by key, float32.
        constants: arrays of the block graph by key.
        numerics: the kernel's specification.
        device: where the values are needed.
        served: whether the tensors are the dequantised ones of the kernel's own checkpoint.
    """

    tensors: Mapping[str, Tensor]
    constants: Mapping[str, NDArray[Any]]
    numerics: Numerics
    device: torch.device
    served: bool = False
    _cache: dict[tuple[str, str, str], Tensor] = field(default_factory=dict, repr=False)
    _beside: StoredParameters | None = field(default=None, repr=False)
    _shared: dict[tuple[str, str, str], bool] = field(default_factory=dict, repr=False)

    def under(
        self, numerics: Numerics, served: Mapping[str, Tensor] | None = None
    ) -> StoredParameters:
        """Return the same parameters as another kernel stores them; tensors that both store alike
        are shared. With `served` it reads these tensors instead."""
        if served is not None:
            return StoredParameters(
                served, self.constants, numerics, self.device, served=True, _beside=self
            )
        alike = _storage_numerics(numerics) == _storage_numerics(self.numerics)
        cache = self._cache if alike else {}
        return replace(self, numerics=numerics, _cache=cache, _beside=self, _shared={})

    def shares(self, node: Node, other: StoredParameters, *, linear: bool = False) -> bool:
        """Return whether another kernel stores the same numbers of a parameter or constant.

        Comparisons with the kernel from which this one was made by `under` are cached.
        """
        key = self._key(node, "linear" if linear and node.op == "param" else "plain")
        if other is self._beside and key in self._shared:
            return self._shared[key]
        mine, theirs = self._held(node, *key), other._held(node, *key)
        if mine.dtype != theirs.dtype:
            mine, theirs = mine.to(torch.float64), theirs.to(torch.float64)
        same = mine is theirs or torch.equal(mine, theirs)
        if other is self._beside:
            self._shared[key] = same
            if same:
                self._cache[key] = other._cache[key]
        return same

    def plain(self, node: Node) -> Tensor:
        """Return the value of a param or float constant node that is not a linear weight."""
        return self._value(node, "plain")

    def linear(self, node: Node) -> Tensor:
        """Return the value of a param node used as the weight of a linear [out, in]."""
        return self._value(node, "linear" if node.op == "param" else "plain")

    def read(self, node: Node, *, linear: bool) -> Tensor:
        """Return the value as the weight of a linear, or as anything else."""
        return self.linear(node) if linear else self.plain(node)

    def mask(self, node: Node) -> Tensor:
        return torch.from_numpy(self.constants[node.attrs["key"]]).to(self.device)

    def _value(self, node: Node, use: str) -> Tensor:
        return self._held(node, *self._key(node, use)).to(torch.float64)

    def kept(self, node: Node) -> Tensor:
        """Return the weight of a linear as it is kept: float64, or narrower for a large one."""
        return self._held(node, *self._key(node, "linear" if node.op == "param" else "plain"))

    def _held(self, node: Node, op: str, name: str, use: str) -> Tensor:
        key = op, name, use
        if key not in self._cache:
            if node.op == "param":
                stored = self.tensors[name].detach().to("cpu", torch.float32)
                if use == "linear":
                    stored = self._linear(stored, name)
                else:
                    stored = plain_parameter(stored, self.numerics, name)
            else:
                stored = torch.from_numpy(self.constants[name])
                stored = stored_constant(stored, node.format, self.numerics, name)
            if stored.numel() > KEPT_WIDE and stored.dim() == 2 and node.op == "param":
                self._cache[key] = narrowest(stored).to(self.device)
            else:
                self._cache[key] = stored.to(self.device, torch.float64)
        return self._cache[key]

    def _linear(self, source: Tensor, name: str) -> Tensor:
        numerics = self.numerics.serving(name)
        if not self.served:
            if source.dim() == 2 and source.numel() > KEPT_WIDE and numerics.weights.layout is None:
                parts = (linear_weight(part, numerics, name) for part in row_parts(source))
                return torch.cat([narrowest(part) for part in parts])
            return linear_weight(source, numerics, name)
        assert isinstance(self.tensors, ServedWeights)
        self.tensors.refuse_other_storage(name, numerics)
        return served_weight(source, numerics, name)

    @staticmethod
    def _key(node: Node, use: str) -> tuple[str, str, str]:
        if node.op not in ("param", "constant"):
            raise NoBound(node.name, f"{node.op} stands where a parameter or a constant must")
        return node.op, str(node.attrs["key"]), node.format or use


def _storage_numerics(numerics: Numerics) -> tuple[object, ...]:
    """Return the part of a kernel's numerics on which its stored values depend."""
    overrides = tuple(
        (each.pattern, each.weights, each.activations.quantised) for each in numerics.overrides
    )
    return numerics.weights, numerics.compute, numerics.by_codes, overrides
