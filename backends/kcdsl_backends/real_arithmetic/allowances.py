"""Errors of each kernel at every node of a block (Definition 2 of docs/reference/lirpa.md)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.quantisers import quantiser_steps, scale_steps, static_quantiser
from kcdsl_backends.drift.boxes.rounding import ONCE, Rounding, several
from kcdsl_backends.drift.boxes.state import Known, SoftmaxState, Step
from kcdsl_backends.drift.interval import block_input
from kcdsl_backends.drift.ops import operation_of
from kcdsl_backends.drift.ops.quantised.inputs import activation_error

LEAVES = frozenset({"param", "constant"})
"""Operations with constant results."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Errors of a kernel at one node.

    Args:
        error: the stored result minus the exact result for the operands; None: 0.
        apart: bound of the difference between a reading and the base value of a result with several
            readings; None: it has one.
        entering: the quantised input of a linear minus the input; None: it is not quantised.
        step: the scale of which the quantised input is an integer multiple up to a relative 2^-22;
            None: there is no such scale.
        shift: subtracted from the scores of a softmax before exp.
        floor: lower bound of the softmax sums after the shift.
    """

    error: Box | None
    apart: Tensor | None = None
    entering: Box | None = None
    step: Tensor | None = None
    shift: Tensor | None = None
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Allowances:
    """Errors of the training and the inference kernel by node, and the intervals of both."""

    sides: tuple[dict[str, Allowance], dict[str, Allowance]]
    states: dict[str, Known]


def allowances(problem: BlockProblem, centre: Tensor | None, radius: Tensor) -> Allowances:
    """Return the errors of both kernels at every node, for values in the boxes of intervals.

    Raises:
        NoBound: a node has no interval, or is a quantised kv_cache or tensor.
    """
    graph, kernels = problem.graph, problem.kernels()
    nodes = {node.name: node for node in graph.nodes}
    again, known = several(graph), dict[str, Known]()
    found: tuple[dict[str, Allowance], dict[str, Allowance]] = ({}, {})
    for node in graph.nodes:
        if node.op in LEAVES:
            continue
        step = Step(node, kernels.at(node, nodes), nodes, known, again)
        if node.op == "input":
            state: Known = block_input(node, kernels, centre, radius)
        elif node.op == "cache":
            raise NoBound(node.name, "errors of a quantised kv_cache are not followed")
        elif node.op == "quantise":
            raise NoBound(node.name, "errors of quantised tensors are not followed")
        else:
            state = operation_of(node).interval(step)
        known[node.name] = state
        for side in (0, 1):
            found[side][node.name] = _allowance(step, state, side)
    return Allowances(found, known)


def _allowance(step: Step, state: Known, side: int) -> Allowance:
    """Return the errors of a kernel at a node, given the states of its operands."""
    node, several_of = step.node, step.several
    if isinstance(state, SoftmaxState):
        rounding = (state.rounding_train, state.rounding_infer)[side]
        scores = step.operand(0)
        box = (scores.train, scores.infer)[side]
        highest = box.hi if state.mask is None else box.hi.where(state.mask, -torch.inf)
        shift = highest.amax(-1, keepdim=True)
        lowest = box.lo if state.mask is None else box.lo.where(state.mask, -torch.inf)
        floor = float((lowest - shift).exp().sum(-1).amin()) * (1 - 2.0**-30)
        apart = state.apart[side] if node.name in several_of else None
        return Allowance(Box.around(rounding), apart, shift=shift, floor=floor)
    error = None if state.errors is None else state.errors[side]
    apart = state.apart[side] if node.name in several_of else None
    if apart is not None and node.op in ONCE and error is not None:
        error = _less(error, apart)  # the sum alone: casts belong to each reading
    left = step.known.get(node.inputs[0]) if node.inputs else None
    if isinstance(left, SoftmaxState) and node.op == "matmul" and error is not None:
        values = step.operand(1)
        rounding = (left.rounding_train, left.rounding_infer)[side]
        error = _less(error, rounding @ (values.train, values.infer)[side].mag())
    entering = _entering(step, side) if node.op == "linear" else None
    return Allowance(error, apart, entering, None if entering is None else _scale(step, side))


def _less(error: Box, counted: Tensor) -> Box:
    """Return an error without a part that is counted elsewhere."""
    rest = counted - 2.0**-40 * (error.mag() + counted)
    return Box((error.lo + rest).clamp_max(0), (error.hi - rest).clamp_min(0))


def _entering(step: Step, side: int) -> Box | None:
    """Return the error of the quantiser of a linear's input; None without a quantiser."""
    key = str(step.operand_node(1).attrs["key"])
    x = step.operand(0)
    box = (x.train, x.infer)[side]
    kernel: Rounding = (step.kernels.train, step.kernels.infer)[side]
    error = activation_error(box, kernel, step.node.name, key)
    if error is None:
        return None
    known = quantiser_steps(box, error, kernel, key, step.node.name)
    return Box.around(error) if known is None else known.error


def _scale(step: Step, side: int) -> Tensor | None:
    """Return the static scale of integer codes to nearest; None for other quantisers."""
    kernel: Rounding = (step.kernels.train, step.kernels.infer)[side]
    spec, x = kernel.numerics.activations, step.operand(0)
    key = str(step.operand_node(1).attrs["key"])
    if not spec.static or not spec.codes.integer:
        return None
    known = scale_steps((x.train, x.infer)[side], kernel, key, step.node.name)
    if known is None or not bool(known[1].all()):
        return None
    return static_quantiser((x.train, x.infer)[side], spec, key, step.node.name).scale.lo
