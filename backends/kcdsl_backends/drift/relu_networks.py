"""Blocks that are ReLU networks of each row: their layers in both kernels, and trees of boxes
(section 9 of docs/proofs/difference-planes.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl_backends.drift.boxes import Box, NoBound, magnitude_product, up
from kcdsl_backends.drift.boxes.state import Kernels, Parameter, State
from kcdsl_backends.drift.interval import states
from kcdsl_backends.drift.linear.constraints import LinearConstraint
from kcdsl_backends.drift.linear.splitting import SplitDecision, split
from kcdsl_backends.drift.ops.quantised.inputs import activation_error
from kcdsl_backends.process import threads_for

MOST_BOXES = 2**16
"""Most boxes that are bounded for one case."""
MOST = 2**36
"""Most multiplications for one case that is split by default: half a minute of a core."""
FEWEST = 64
"""A case is not split by default if `MOST` allows fewer boxes."""


@dataclass(frozen=True, slots=True)
class LayerRoundings:
    """Bounds [R, n] of the training kernel's rounding error (`loose`), and of the difference of the
    errors of both kernels (`apart`)."""

    loose: Tensor
    apart: Tensor

    def plus(self, train: Box, infer: Box) -> LayerRoundings:
        """Add errors of the training and the inference kernel."""
        rows = self.loose.shape
        loose, apart = train.mag().reshape(rows), (infer - train).mag().reshape(rows)
        return LayerRoundings(up(self.loose + loose), up(self.apart + apart))

    def through(self, weight: Parameter) -> LayerRoundings:
        """Return the errors after a linear."""
        loose = magnitude_product(self.loose, weight.train.abs().T)
        apart = magnitude_product(self.apart, weight.infer.abs().T)
        across = magnitude_product(self.loose, weight.difference.mag().T)
        return LayerRoundings(loose, up(apart + across))


@dataclass(frozen=True, slots=True)
class KernelLayer:
    """A linear in the training and the inference kernel, and the roundings up to its ReLU."""

    train: tuple[Tensor, Tensor]
    """Weight [out, in] and bias [out], float64."""
    infer: tuple[Tensor, Tensor]
    roundings: LayerRoundings


@dataclass(frozen=True, slots=True)
class ReluNetwork:
    """A block that maps each row [D] of its input by the same layers, with ReLU between them.

    `low` and `high` are the corners of its rows [R][D]. `witness` has, for every computed node,
    (largest size, largest drift).
    """

    layers: tuple[KernelLayer, ...]
    low: tuple[tuple[Fraction, ...], ...]
    high: tuple[tuple[Fraction, ...], ...]
    witness: Mapping[str, tuple[float, float]]

    @property
    def cost(self) -> int:
        """Return an estimate of the multiplications that the bounds of one box take."""
        total, behind = 0, 0
        for layer in self.layers:
            behind += layer.train[0].numel()
            total += 4 * len(layer.train[1]) * behind
        return total

    def shares(self, row: int, point: Sequence[Fraction]) -> tuple[float, ...]:
        """Return the input with `point` as its row, and the centre in all others; elements are
        given relative to the centre, in units of the radius."""
        found: list[float] = []
        for k, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            if k != row:
                found += [0.0] * len(low)
                continue
            for least, value, most in zip(low, point, high, strict=True):
                wide = most - least
                found.append(float(2 * (value - least) / wide - 1) if wide else 0.0)
        return tuple(found)

    def split(self, limit: float, factor: float, most: int) -> tuple[SplitDecision, ...]:
        """Split the box of each row in turn until every drift in it is below a limit.

        If a row fails, the last decision is not "proved".

        Args:
            limit: above 0.
            factor: multiplies roundings, as the checker's bounds of them may be larger.
            most: limit of the boxes for all rows together.
        """
        networks = [layer.train for layer in self.layers], [layer.infer for layer in self.layers]
        outputs, inputs = self.layers[-1].train[0].shape[0], len(self.low[0])
        unsafe = []
        for k in range(outputs):
            for sign in (1.0, -1.0):
                own = tuple(sign * (j == k) for j in range(outputs))
                other = tuple(-value for value in own)
                unsafe.append([LinearConstraint((0.0,) * inputs, own, other, -Fraction(limit))])
        found: list[SplitDecision] = []
        for row, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            roundings = [
                (up(part.loose[row] * factor), up(part.apart[row] * factor))
                for part in (layer.roundings for layer in self.layers)
            ]
            left = most - sum(one.boxes for one in found)
            device = str(networks[0][0][0].device)
            with threads_for(max(weight.numel() for weight, _ in networks[0])):
                one = split(
                    *(networks, low, high, unsafe), roundings=roundings, most=left, device=device
                )
            found.append(one)
            if found[-1].verdict != "proved":
                break
        return tuple(found)


def relu_network(
    graph: BlockGraph, kernels: Kernels, centre: Tensor | None, radius: Tensor
) -> ReluNetwork:
    """Return the layers of a block, with the roundings of both kernels on a box of its input.

    The interval domain bounds the roundings on the whole box, so on each part of it (Rule 9.7).

    Args:
        graph: the block.
        kernels: both kernels' rounding and stored parameters.
        centre: [T, D] float64; None for a block on token ids, which is refused.
        radius: broadcastable to [T, D], float64, >= 0.

    Raises:
        NoBound: the block is no ReLU network of rows, or the interval domain has no bound.
    """
    if centre is None:
        raise NoBound(graph.output, "token ids are no box that can be split")
    nodes = {node.name: node for node in graph.nodes}
    _refuse_branches(graph)
    reading: _Reading | None = None
    witness: dict[str, tuple[float, float]] = {}
    before: State | None = None
    for node, state in states(graph, kernels, centre, radius):
        witness[node.name] = float(state.train.mag().amax()), float(state.drift.mag().amax())
        if reading is None:
            if node.op != "input":
                raise NoBound(node.name, "the block is no chain of linears and ReLU")
            nothing = torch.zeros_like(centre).reshape(-1, node.shape[-1])
            reading = _Reading(kernels, nodes, LayerRoundings(nothing, nothing))
            reading.store(node, state)
        else:
            assert before is not None
            reading.read(node, before, state)
        before = state
    assert reading is not None
    reading.close()
    spread = radius.expand(centre.shape)
    low, high = (
        tuple(
            tuple(Fraction(c) + sign * Fraction(r) for c, r in zip(*both, strict=True))
            for both in zip(centre.tolist(), spread.tolist(), strict=True)
        )
        for sign in (-1, 1)
    )
    return ReluNetwork(tuple(reading.layers), low, high, witness)


def _refuse_branches(graph: BlockGraph) -> None:
    """Refuse a graph unless every node reads the one before it and no other."""
    before, known = None, {node.name for node in graph.nodes if node.op in _KNOWN}
    for node in graph.nodes:
        if node.name in known:
            continue
        computed = [name for name in node.inputs if name not in known]
        if computed != ([] if before is None else [before]):
            raise NoBound(node.name, "the block is no chain of linears and ReLU")
        before = node.name
    if before != graph.output:
        raise NoBound(graph.output, "results follow that nothing reads")


@dataclass(slots=True)
class _Reading:
    """The layers up to a node; the last is open until a ReLU follows it."""

    kernels: Kernels
    nodes: Mapping[str, Node]
    before: LayerRoundings
    """Errors of the results after the last ReLU."""
    layers: list[KernelLayer] = field(default_factory=list)
    open: bool = False

    def read(self, node: Node, operand: State, state: State) -> None:
        match node.op:
            case "linear" if not self.open:
                self.before = self._quantised(node, operand)
                self._linear(node)
                self.store(node, state)
            case "add" if self.open:
                self._add(node)
                self.store(node, state)
            case "cast":
                self.store(node, state)
            case "relu":
                self.close()
                nothing = torch.zeros_like(self.layers[-1].roundings.loose)
                self.before, self.open = LayerRoundings(nothing, nothing), False
            case "view" if set(node.attrs) == {"split"} and node.shape[-1] == _size(operand):
                pass
            case _:
                raise NoBound(node.name, "the block is no chain of linears and ReLU")

    def store(self, node: Node, state: State) -> None:
        """Add the error of storing the result of a node (Rule 2.4)."""
        if state.errors is None:
            assert node.op in ("input", "cast"), node.op  # which no kernel may store
            return
        if self.open:
            last = self.layers[-1]
            self.layers[-1] = replace(last, roundings=last.roundings.plus(*state.errors))
        else:
            self.before = self.before.plus(*state.errors)

    def close(self) -> None:
        """End a layer; one without a linear is the identity."""
        if not self.open:
            size = self.before.loose.shape[1]
            eye = torch.eye(size, dtype=torch.float64, device=self.before.loose.device)
            same = eye, torch.zeros_like(eye[0])
            self.layers.append(KernelLayer(same, same, self.before))
        self.open = False

    def _quantised(self, node: Node, operand: State) -> LayerRoundings:
        """Return the roundings of the input of a linear with those of its quantisers (Rule 3.2)."""
        key, here = str(self.nodes[node.inputs[1]].attrs["key"]), self.kernels.at(node, self.nodes)
        train = activation_error(operand.train, here.train, node.name, key)
        infer = activation_error(operand.infer, here.infer, node.name, key)
        if train is None and infer is None:
            return self.before
        zero = torch.zeros_like(operand.drift.lo)
        errors = (zero if part is None else part.expand(zero.shape) for part in (train, infer))
        first, second = (Box.around(error) for error in errors)
        return self.before.plus(first, second)

    def _linear(self, node: Node) -> None:
        weight = self.kernels.linear(self.nodes[node.inputs[1]])
        zero = weight.train.new_zeros(weight.train.shape[0])
        biases = zero, zero
        if len(node.inputs) > 2:
            bias = self.kernels.plain(self.nodes[node.inputs[2]])
            biases = bias.train, bias.infer
        train, infer = ((w, b) for w, b in zip((weight.train, weight.infer), biases, strict=True))
        self.layers.append(KernelLayer(train, infer, self.before.through(weight)))
        self.open = True

    def _add(self, node: Node) -> None:
        """Add a parameter or constant [out] to the bias of a linear."""
        known = [name for name in node.inputs if self.nodes[name].op in _KNOWN]
        last = self.layers[-1]
        size = len(last.train[1])
        more = self.kernels.plain(self.nodes[known[0]]).state() if len(known) == 1 else None
        if more is None or tuple(more.train.shape)[-1:] != (size,) or more.train.lo.numel() != size:
            raise NoBound(node.name, "what is added is no bias")
        sums = [
            Box.point(own[1]) + Box.point(part.lo.flatten())
            for own, part in ((last.train, more.train), (last.infer, more.infer))
        ]
        middle = [part.midpoint() for part in sums]
        wide = last.roundings.loose.shape
        errors = [Box.around(radius).expand(wide) for _, radius in middle]
        self.layers[-1] = KernelLayer(
            (last.train[0], middle[0][0]),
            (last.infer[0], middle[1][0]),
            last.roundings.plus(errors[0], errors[1]),
        )


_KNOWN = ("param", "constant")


def _size(state: State) -> int:
    return int(state.train.shape[-1])
