"""Read the layers of a block that is a ReLU network, and bound its drift on boxes that are split.

Section 9 of docs/proofs/difference-planes.md. Roundings of the kernels are bounded on the whole
region, and these bounds are used in each box of a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import Block, Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Box, Floats, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Mask,
    State,
    StoredMatrix,
    numeric,
    pinned,
)
from kcdsl_certs.recheck.interval_walk import magnitudes, propagate
from kcdsl_certs.recheck.linear_bounds.constraints import Halfspace, Layer
from kcdsl_certs.recheck.linear_bounds.splits import recheck_split
from kcdsl_certs.recheck.ops.linear.quantised_inputs import quantisation

_KNOWN = ("param", "constant")


@dataclass(frozen=True, slots=True)
class RoundingBounds:
    """Bounds [R, n] of the training kernel's rounding error (`loose`), and of the difference of the
    errors of both kernels (`apart`)."""

    loose: Floats
    apart: Floats

    @staticmethod
    def nothing(rows: int, size: int) -> RoundingBounds:
        return RoundingBounds(np.zeros((rows, size)), np.zeros((rows, size)))

    def plus(self, train: Box, infer: Box) -> RoundingBounds:
        """Add an error of either kernel."""
        shape = self.loose.shape
        apart = box.magnitude(box.sub(infer, train)).reshape(shape)
        loose = box.magnitude(train).reshape(shape)
        return RoundingBounds(raised(self.loose + loose), raised(self.apart + apart))


@dataclass(slots=True)
class BlockLayers:
    """Layers of both kernels up to a node; a layer is open from its linear to its ReLU."""

    problem: DriftProblem
    errors: dict[str, tuple[Box, Box]]
    off: RoundingBounds
    """Errors after the last ReLU, or after the linear of the open layer."""
    train: list[Layer] = field(default_factory=list)
    infer: list[Layer] = field(default_factory=list)
    offs: list[RoundingBounds] = field(default_factory=list)
    open: bool = False

    def linear(self, node: Node, x: State, known: dict[str, State]) -> None:
        """Begin a layer; a kernel may quantise its input (Rule 3.2)."""
        problem = pinned(self.problem, node)
        key = problem.keys.get(node.inputs[1])
        if self.open or key is None:
            raise _no_network(node)
        by_train, by_infer = (
            quantisation(problem.train, x.t, key),
            quantisation(problem.infer, x.i, key),
        )
        before = self.off
        if by_train.any() or by_infer.any():
            before = before.plus(box.around(by_train), box.around(by_infer))
        w_t, w_i = (problem.parameters.linear(key, k) for k in (problem.train, problem.infer))
        change = box.magnitude(box.sub(box.exact(w_i), box.exact(w_t)))
        sizes = [box.lifted(size).T for size in (np.abs(w_t), np.abs(w_i), change)]
        loose, apart = box.lifted(before.loose), box.lifted(before.apart)
        self.off = RoundingBounds(
            box.product_up(loose, sizes[0]),
            raised(box.product_up(apart, sizes[1]) + box.product_up(loose, sizes[2])),
        )
        b_t = b_i = np.zeros(len(w_t))
        if len(node.inputs) > 2:
            bias = known[node.inputs[2]]
            b_t, b_i = bias.t.lo, bias.i.lo
        self.train.append((w_t, b_t))
        self.infer.append((w_i, b_i))
        self.open = True

    def shift(self, node: Node, known: dict[str, State]) -> None:
        """Add a parameter or constant to the bias of the open layer."""
        named = [known[name] for name in node.inputs if name in known]
        if not self.open or len(named) != 1:
            raise _no_network(node)
        for layers, part in ((self.train, named[0].t), (self.infer, named[0].i)):
            weight, bias = layers[-1]
            if part.shape[-1:] != bias.shape or part.lo.size != bias.size:
                raise _no_network(node)
            total = bias + part.lo.reshape(-1)
            # the float64 sum is rounded, in the worst case in opposite directions in both kernels
            lost = np.broadcast_to(2.0**-52 * np.abs(total), self.off.loose.shape)
            self.off = RoundingBounds(raised(self.off.loose + lost), raised(self.off.apart + lost))
            layers[-1] = weight, total

    def store(self, node: Node) -> None:
        """Add the error of storing the result of a node (Rule 2.4)."""
        self.off = self.off.plus(*self.errors[node.name])

    def close(self) -> None:
        """End the layer; one without a linear is the identity."""
        rows, size = self.off.loose.shape
        if not self.open:
            same = np.eye(size), np.zeros(size)
            self.train.append(same)
            self.infer.append(same)
        self.offs.append(self.off)
        self.off, self.open = RoundingBounds.nothing(rows, size), False


def _no_network(node: Node) -> Rejected:
    return Rejected("document/domain", f"node {node.name[:80]!r}: no chain of linears and ReLU")


def derive_splits(
    problem: DriftProblem, trees: Sequence[bytes], claim: float
) -> dict[str, tuple[float, float]]:
    """Derive that no drift of the output is above a claim, by one tree for each row of the input.

    Return the largest T and D of every node on the whole region. Raises Rejected "document/domain"
    for a block that is no ReLU network of each row, "document/splits" for a malformed tree and
    "claim/too-small" for a leaf on which the claim is not proved.
    """
    layers, sizes = walk(problem)
    assert problem.centre is not None
    assert problem.radius is not None
    radius = np.broadcast_to(problem.radius, problem.centre.shape)
    rows = len(layers.off.loose)
    if len(trees) != rows or problem.centre.shape[0] != rows:
        raise Rejected("document/splits", f"{len(trees)} trees of {rows} rows")
    networks = layers.train, layers.infer
    for row, tree in enumerate(trees):
        corners = [
            [Fraction(c) + sign * Fraction(r) for c, r in zip(*both, strict=True)]
            for sign, both in ((s, (problem.centre[row], radius[row])) for s in (-1, 1))
        ]
        off = [(one.loose[row], one.apart[row]) for one in layers.offs]
        unsafe = _larger(len(layers.train[-1][1]), problem.centre.shape[1], claim)
        try:
            recheck_split(networks, corners[0], corners[1], unsafe, tree, off)
        except Rejected as rejection:
            raise rejection.at(f"row {row}") from None
    return sizes


def _larger(outputs: int, inputs: int, limit: float) -> list[list[Halfspace]]:
    """Return the constraints "some output of the networks differs by at least `limit`"."""
    signed = np.concatenate([np.eye(outputs), -np.eye(outputs)])
    none = [0.0] * inputs
    return [[(none, own.tolist(), (-own).tolist(), -Fraction(limit))] for own in signed]


def walk(problem: DriftProblem) -> tuple[BlockLayers, dict[str, tuple[float, float]]]:
    """Walk the block in the interval domain; return its layers and the sizes of its nodes."""
    beside = problem.rows, problem.drift, problem.held
    if problem.rho or any(part is not None for part in beside):
        raise Rejected("document/domain", "splits: no rule for any length, weight balls, chains")
    if problem.centre is None:
        raise Rejected("document/domain", "splits: no rule for blocks on token ids")
    if problem.centre.ndim != 2:
        raise Rejected("document/domain", "splits: no rule for inputs other than [T, n]")
    _refuse_branches(problem.block)
    errors: dict[str, tuple[Box, Box]] = {}
    problem = replace(problem, errors=errors)
    known: dict[str, State] = {}
    sizes: dict[str, tuple[float, float]] = {}
    layers: BlockLayers | None = None
    x: State | None = None
    for node, value in propagate(problem):
        sizes[node.name] = magnitudes(value)
        if node.op in _KNOWN:
            if not isinstance(value, (Mask, StoredMatrix)):
                known[node.name] = numeric(value)
            continue
        state = numeric(value)
        if layers is None or x is None:
            if node.op != "input":
                raise _no_network(node)
            layers = BlockLayers(
                problem, errors, RoundingBounds.nothing(len(state.t.lo), node.shape[-1])
            )
            layers.store(node)
        else:
            _read(layers, node, x, known)
        x = state
    if layers is None:
        raise Rejected("document/domain", "the block has no input")
    layers.close()
    return layers, sizes


def _refuse_branches(block: Block) -> None:
    """Refuse a block unless every node reads the one before it and no other."""
    known = {node.name for node in block.nodes if node.op in _KNOWN}
    before: list[str] = []
    for node in block.nodes:
        if node.name in known:
            continue
        if [name for name in node.inputs if name not in known] != before:
            raise _no_network(node)
        before = [node.name]
    if before != [block.output]:
        raise Rejected("document/domain", "the output is not the last node")


def _read(layers: BlockLayers, node: Node, x: State, known: dict[str, State]) -> None:
    match node.op:
        case "linear":
            layers.linear(node, x, known)
            layers.store(node)
        case "add":
            layers.shift(node, known)
            layers.store(node)
        case "cast":
            layers.store(node)
        case "relu":
            layers.close()
        case "view" if set(node.attrs.value) == {"split"} and node.shape[-1] == x.shape[-1]:
            pass  # rows of the same elements
        case _:
            raise _no_network(node)
