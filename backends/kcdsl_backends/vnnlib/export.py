"""Goals of contracts as VNN-LIB queries: both kernels of a block as isomorphic ONNX networks.

Each network computes the block in real arithmetic with the weights that its kernel stores, and adds
to every result an error of the kernel: a further input with a known box (Definition 2 of
docs/reference/lirpa.md). `unsat` shows that the drift does not exceed its threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.diagnostics.model import at
from kcdsl.ir.terms import Program
from kcdsl.model.files import Artefacts
from kcdsl.model.graph import Node, View
from kcdsl.model.loader import load_model
from kcdsl.model.onnx.writer import OnnxBuilder
from kcdsl.model.presets import resolve
from kcdsl.route.goals import Goal
from kcdsl_backends.certifier.statements.cases import Case, cases_of, problem_of, slice_rows
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.rounding import ONCE
from kcdsl_backends.drift.boxes.state import Kernels
from kcdsl_backends.real_arithmetic.allowances import LEAVES, Allowances, allowances
from kcdsl_backends.vnnlib.query import (
    Junction,
    Kind,
    Query,
    QueryComparison,
    QueryNetwork,
    QueryVariable,
    decimal,
    written,
)

_STORED = "stored"
_MOST = 1 << 14
"""Limit of the elements of all error inputs of a case together."""
_GRID = 200
"""Boxes of errors are written as multiples of 2^-200, rounded outward."""
_SIDES = ("train", "infer")
_ELEMENTWISE = {"relu": "Relu", "neg": "Neg", "tanh": "Tanh", "cast": "Identity"}


@dataclass(frozen=True, slots=True)
class ExportedCase:
    """A case of a goal as files by their suffix, or the reason why there are none."""

    case: str
    reason: str
    files: tuple[tuple[str, bytes], ...] = ()


def exported(program: Program, files: Artefacts, goal: Goal) -> list[ExportedCase]:
    """Return the export of every case of a goal.

    Raises:
        Refusal: the model, the kernels, the data or the block cannot be used.
    """
    model = load_model(program.model, files)
    train, infer = resolve(program.train), resolve(program.infer)
    factory = ProblemFactory(model, train, infer, torch.device("cpu"))
    with at(goal.span):
        rows = slice_rows(program, model, goal.region.slice)
        cases = cases_of(factory, goal, rows) if rows else []
        return [_case(factory, goal, case) for case in cases]


def _case(factory: ProblemFactory, goal: Goal, case: Case) -> ExportedCase:
    if case.longest is not None or goal.weights or goal.states or case.centre is None:
        why = "a query is about hidden states of one length, one checkpoint and one state"
        return ExportedCase(case.name, why)
    limit = goal.threshold
    if goal.functional != "inf" or limit is None or decimal(limit) is None:
        return ExportedCase(case.name, "a query compares elements of the drift with a decimal")
    problem = problem_of(factory, goal, case)
    try:
        return case_files(problem, case.name, (case.centre, case.radius), limit, goal.op)
    except NoBound as no:
        return ExportedCase(case.name, str(no))


def case_files(
    problem: BlockProblem, name: str, region: tuple[Tensor, Tensor], limit: Fraction, op: str
) -> ExportedCase:
    """Return the query whether some drift breaks `op limit`, and both networks.

    Raises:
        NoBound: a node has no interval, or an operation is not exported.
    """
    centre, radius = region
    known, kernels = allowances(problem, centre, radius), problem.kernels()
    sides = [_Side(problem, kernels, known, side) for side in (0, 1)]
    models = [side.model() for side in sides]
    if sum(e[1].lo.numel() for side in sides for e in side.errors) > _MOST:
        return ExportedCase(name, f"the errors have more than {_MOST} elements")
    query = _query(sides, (centre, radius.expand(centre.shape)), limit, op)
    files = [(f"{s}.onnx", m.SerializeToString()) for s, m in zip(_SIDES, models, strict=True)]
    text = written(query).encode()
    count = len(query.networks[0].of("input")) - 1
    reason = f"two networks with {count} inputs of errors each"
    return ExportedCase(name, reason, (("vnnlib", text), *files))


def _query(
    sides: Sequence[_Side], region: tuple[Tensor, Tensor], limit: Fraction, op: str
) -> Query:
    networks, facts = list[QueryNetwork](), list[QueryComparison | Junction]()
    for side, letters in zip(sides, ("XEY", "UFV"), strict=True):
        shapes = [tuple(box.lo.shape) for _, box in side.errors]
        kinds: list[tuple[str, tuple[int, ...], Kind]] = [(letters[0], side.shape, "input")]
        kinds += [(f"{letters[1]}{i}", s, "input") for i, s in enumerate(shapes)]
        kinds.append((letters[2], side.output, "output"))
        variables = tuple(QueryVariable(n, "real", shape, kind) for n, shape, kind in kinds)
        relation = ("isomorphic-to", _SIDES[0]) if side.side else None
        networks.append(QueryNetwork(_SIDES[side.side], variables, relation))
        for i, (_, box) in enumerate(side.errors):
            for j, (lo, hi) in enumerate(_ends(box)):
                facts += _bounds_of((f"{letters[1]}{i}", j), lo, hi)
    one = Fraction(1)
    for j, (c, r) in enumerate(zip(*(t.flatten().tolist() for t in region), strict=True)):
        facts += _bounds_of(("X", j), Fraction(c) - Fraction(r), Fraction(c) + Fraction(r))
        facts.append(QueryComparison({(("X", j),): one, (("U", j),): -one}, "=="))
    parts = []
    for j in range(math.prod(sides[0].output)):
        for sign in (one, -one):  # sign (V - Y) > limit
            polynomial = {(("V", j),): -sign, (("Y", j),): sign, (): limit}
            kept = {k: v for k, v in polynomial.items() if v}
            parts.append(QueryComparison(kept, "<" if op == "<=" else "<="))
    facts.append(Junction(False, tuple(parts)))
    return Query((2, 0), tuple(networks), Junction(True, tuple(facts)))


def _bounds_of(element: tuple[str, int], lo: Fraction, hi: Fraction) -> list[QueryComparison]:
    low = {k: v for k, v in {(element,): Fraction(-1), (): lo}.items() if v}
    high = {k: v for k, v in {(element,): Fraction(1), (): -hi}.items() if v}
    return [QueryComparison(low, "<="), QueryComparison(high, "<=")]


def _ends(box: Box) -> list[tuple[Fraction, Fraction]]:
    """Round boxes outward to a grid, so that decimals stay short."""
    grid = 2**_GRID
    pairs = zip(box.lo.flatten().tolist(), box.hi.flatten().tolist(), strict=True)
    ends = ((math.floor(Fraction(a) * grid), math.ceil(Fraction(b) * grid)) for a, b in pairs)
    return [(Fraction(low, grid), Fraction(high, grid)) for low, high in ends]


# --- networks -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Side:
    """One kernel as a network. Both kernels have the same nodes: an error of only one of them is an
    input with box 0 in the other."""

    problem: BlockProblem
    kernels: Kernels
    known: Allowances
    side: int
    errors: list[tuple[str, Box]] = field(default_factory=list)
    _nodes: dict[str, Node] = field(init=False)
    _builder: OnnxBuilder = field(default_factory=OnnxBuilder)
    _found: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nodes = {node.name: node for node in self.problem.graph.nodes}

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the input of the block."""
        assert self.problem.graph.input_shape is not None
        return tuple(self.problem.graph.input_shape)

    @property
    def output(self) -> tuple[int, ...]:
        """Return the shape of the output of the block."""
        return self._nodes[self.problem.graph.output].shape

    def model(self) -> onnx.ModelProto:
        """Return the network; `errors` are its inputs after the first."""
        last = self._reading(self.problem.graph.output, _STORED)
        self._builder.nodes.append(onnx.helper.make_node("Identity", [last], ["output"]))
        inputs = [("input", self.shape), *((n, tuple(b.lo.shape)) for n, b in self.errors)]
        return self._builder.model(_SIDES[self.side], inputs, ("output", self.output), "float64")

    # --- readings and errors, as in kcdsl_backends.lirpa.network ----------------------------------

    def _cached(self, name: str, make: Callable[[], str]) -> str:
        if name not in self._found:
            self._found[name] = make()
        return self._found[name]

    def _add_error(self, value: str, boxes: Sequence[Box | None], shape: tuple[int, ...]) -> str:
        """Add an error input to a value if either kernel has an error there."""
        if not any(b is not None and bool((b.lo.abs() + b.hi.abs()).any()) for b in boxes):
            return value
        box = boxes[self.side] or Box.around(torch.zeros(shape, dtype=torch.float64))
        ends = (end.expand(shape).contiguous() for end in (box.lo, box.hi))
        name = f"error_{len(self.errors)}"
        self.errors.append((name, Box(*ends)))
        return self._node("Add", value, name)

    def _reading(self, name: str, use: str) -> str:
        apart = [side[name].apart for side in self.known.sides]
        if apart == [None, None]:
            return self._value(name)
        boxes = [None if a is None else Box.around(a) for a in apart]
        shape = self._nodes[name].shape
        return self._cached(
            f"{name} {use}", lambda: self._add_error(self._base(name), boxes, shape)
        )

    def _value(self, name: str) -> str:
        node, errors = self._nodes[name], [side[name].error for side in self.known.sides]
        return self._cached(
            name, lambda: self._add_error(self._exact(node, self._operand), errors, node.shape)
        )

    def _base(self, name: str) -> str:
        node = self._nodes[name]
        if node.op in ONCE or node.op == "input":
            return self._value(name)
        return self._cached(f"{name} base", lambda: self._exact(node, self._base_operand))

    def _operand(self, node: Node, index: int) -> str:
        use = _STORED if node.op in ONCE else f"{node.name} {index}"
        return self._reading(node.inputs[index], use)

    def _base_operand(self, node: Node, index: int) -> str:
        return self._base(node.inputs[index])

    # --- operations -------------------------------------------------------------------------------

    def _node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self._builder.node(kind, *inputs, **attributes)

    def _number(self, node: Node, value: float) -> str:
        return self._constant(f"number {node.name}", np.asarray(value, dtype=np.float64))

    def _constant(self, name: str, values: NDArray[np.generic]) -> str:
        return self._builder.constant(name, values)

    def _stored(self, node: Node, linear: bool = False) -> NDArray[np.float64]:
        held = self.kernels.linear(node) if linear else self.kernels.plain(node)
        values: NDArray[np.float64] = (held.infer if self.side else held.train).numpy()
        return values

    def _exact(self, node: Node, read: Callable[[Node, int], str]) -> str:
        if node.op == "input":
            return "input"

        def operand(index: int) -> str:
            source = self._nodes[node.inputs[index]]
            if source.op in LEAVES:
                return self._constant(f"held {source.name}", self._stored(source))
            return read(node, index)

        match node.op:
            case "linear":
                return self._linear(node, read(node, 0))
            case "add" | "sub" | "mul" | "matmul":
                kind = {"matmul": "MatMul"}.get(node.op, node.op.capitalize())
                return self._node(kind, operand(0), operand(1))
            case "scale":
                return self._node("Mul", operand(0), self._number(node, node.attrs["factor"]))
            case "divide":
                return self._node("Div", operand(0), self._number(node, node.attrs["divisor"]))
            case "shift":
                return self._node("Add", operand(0), self._number(node, node.attrs["offset"]))
            case "relu" | "neg" | "tanh" | "cast":
                return self._node(_ELEMENTWISE[node.op], operand(0))
            case "silu":
                x = operand(0)
                return self._node("Mul", x, self._node("Sigmoid", x))
            case "view":
                return self._builder.view(View.of(node), operand(0))
            case "concat":
                parts = [operand(i) for i in range(len(node.inputs))]
                return self._node("Concat", *parts, axis=int(node.attrs["dim"]))
            case op:
                raise NoBound(node.name, f"a query has no operation {op}")

    def _linear(self, node: Node, x: str) -> str:
        source, weight = (self._nodes[name] for name in node.inputs[:2])
        entering = [side[node.name].entering for side in self.known.sides]
        x = self._add_error(x, entering, source.shape)
        matrix = self._constant(f"held {weight.name} turned", self._stored(weight, True).T)
        y = self._node("MatMul", x, matrix)
        if len(node.inputs) < 3:
            return y
        bias = self._nodes[node.inputs[2]]
        return self._node("Add", y, self._constant(f"held {bias.name}", self._stored(bias)))
