"""Attention over any number of rows, and rotation at any position (docs/any-length.md)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kcdsl_backends.drift.boxes.box import EPS, Box, NoBound, up
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding
from kcdsl_backends.drift.boxes.state import (
    Known,
    Parameter,
    Rows,
    SoftmaxState,
    State,
    Step,
    settle,
)
from kcdsl_backends.drift.boxes.sums import summation_error
from kcdsl_backends.drift.ops.rope import rotated, turned_apart
from kcdsl_backends.drift.ops.softmax import relative_error, stored_error

_POSITIONS = 256
"""Positions whose rotations are formed at a time."""


def at_any_length(step: Step, rows: Rows) -> Known | None:
    """Return what a node holds at any length, or None where its rule for one length says so."""
    node = step.node
    if node.op == "softmax" and len(rows.axes[node.name]) == 2:
        return softmax_at_any_length(step, rows.longest)
    if node.op == "matmul" and node.role == "context":
        return context_at_any_length(step, rows.longest)
    if node.op == "rope":
        return rope_at_any_length(step, rows)
    return None


def softmax_at_any_length(step: Step, longest: int) -> SoftmaxState:
    """Bound the softmax over any columns, up to `longest`, whose scores lie in one box.

    Nothing is known of a probability but 0 <= p <= 1 and that those of a row sum to 1; its drift
    and the total variation of the row are at most tanh(R/4), R the range of the score drift.
    """
    scores, kernels = step.operand(0), step.kernels
    if len(step.node.inputs) > 1 and not bool(kernels.mask(step.operand_node(1)).any(-1).all()):
        raise NoBound(step.node.name, "a row of the attention mask admits no column")
    span = up(scores.drift.hi.amax(-1) - scores.drift.lo.amin(-1))
    variation = up(torch.tanh(span / 4) * (1 + 32 * EPS) + 1e-300, 2).clamp_max(1)
    zero = torch.zeros_like(scores.drift.lo)
    whole = Box(zero, zero + 1)
    drift = Box.around(variation.unsqueeze(-1).expand(zero.shape))
    rounded = [
        relative_error(box, None, kernel, longest, apart)
        for box, kernel, apart in (
            (scores.train, kernels.train, scores.apart[0]),
            (scores.infer, kernels.infer, scores.apart[1]),
        )
    ]
    one = torch.ones_like(rounded[0])
    single, sums = (
        [
            stored_error(theta, one, kernel, columns)
            for theta, kernel in zip(rounded, (kernels.train, kernels.infer), strict=True)
        ]
        for columns in (1, longest)
    )
    return SoftmaxState(
        settle(step.node.name, whole, whole, drift),
        variation,
        single[0].expand(zero.shape),
        single[1].expand(zero.shape),
        None,
        (sums[0], sums[1]),
        (
            up(whole.hi + single[0], 2) if kernels.train.free else None,
            up(whole.hi + single[1], 2) if kernels.infer.free else None,
        ),
    )


def context_at_any_length(step: Step, longest: int) -> State:
    """Bound the product of such probabilities with the values, all of which lie in one box.

    Σ p' Δv is a convex combination of drifts of values, Σ p v one of values, and Σ Δp v is at most
    (total variation) * (max v - min v), whatever the number of columns.
    """
    left = step.known[step.node.inputs[0]]
    if not isinstance(left, SoftmaxState) or left.sums is None:
        raise NoBound(step.node.name, "a context product without its softmax")
    values, shape = step.operand(1), step.node.shape
    train, infer, drift = (
        Box(box.lo.amin(-2, keepdim=True), box.hi.amax(-2, keepdim=True))
        for box in (values.train, values.infer, values.drift)
    )
    moved = Box.around(up(left.variation.unsqueeze(-1) * up(train.hi - train.lo)))
    errors = [
        _context_error_at_any_length(wrong, box, kernel, longest).expand(shape)
        for wrong, box, kernel in (
            (left.sums[0], train, step.kernels.train),
            (left.sums[1], infer, step.kernels.infer),
        )
    ]
    return step.finish(
        _spread(train, shape),
        _spread(infer, shape),
        _spread(drift + moved, shape),
        errors[0],
        errors[1],
        accumulates=True,
    )


def _spread(box: Box, shape: tuple[int, ...]) -> Box:
    return Box(box.lo.expand(shape), box.hi.expand(shape))


def _context_error_at_any_length(
    wrong: Tensor, values: Box, kernel: Rounding, longest: int
) -> Tensor:
    """Return E of a context product [..., rows, n]; `wrong` is Σ|computed p - p| of every row."""
    extra = 2 * kernel.numerics.attention.tiles(longest) + 4
    magnitude = values.mag()
    weights = up(1 + wrong)
    off, total = up(wrong * magnitude), up(weights * magnitude)
    summed = summation_error(
        weights,
        magnitude,
        total,
        up(magnitude + off),
        kernel,
        extra=extra,
        columns=longest,
    )
    return up(off + summed, 4)


def rope_at_any_length(step: Step, rows: Rows) -> State:
    """Bound the rotation at whichever position: the hull over all positions of the tables."""
    cos, sin = (rows.tables[step.operand_node(place).name] for place in (1, 2))
    found: tuple[Box, Box, Box] | None = None
    errors: tuple[Tensor, Tensor] | None = None
    one, apart = _first_row(step.operand(0)), list[Apart]([None, None])
    for here in _places(cos, sin):
        c, s = here
        for side, tables in enumerate(((c.train, s.train), (c.infer, s.infer))):
            turned = turned_apart(one.apart[side], *tables)
            if turned is not None:
                most, before = turned.amax(-2, keepdim=True), apart[side]
                apart[side] = most if before is None else torch.maximum(before, most)
        boxes, wrong = rotated(step, one, *here)
        some = _hull(boxes[0]), _hull(boxes[1]), _hull(boxes[2])
        worst = wrong[0].amax(-2, keepdim=True), wrong[1].amax(-2, keepdim=True)
        if found is None or errors is None:
            found, errors = some, worst
        else:
            found = found[0].hull(some[0]), found[1].hull(some[1]), found[2].hull(some[2])
            errors = torch.maximum(errors[0], worst[0]), torch.maximum(errors[1], worst[1])
    if found is None or errors is None:
        raise NoBound(step.node.name, "the tables of positions are empty")
    shape = step.node.shape
    train, infer, drift = (_spread(box, shape) for box in found)
    wrong = errors[0].expand(shape), errors[1].expand(shape)
    return step.finish(train, infer, drift, *wrong, apart=(apart[0], apart[1]))


def _first_row(state: State) -> State:
    """Return the state of one row: that of every row is the same."""
    boxes = (state.train, state.infer, state.drift)
    train, infer, drift = (Box(b.lo[..., :1, :], b.hi[..., :1, :]) for b in boxes)
    return State(train, infer, drift, (_row(state.apart[0]), _row(state.apart[1])))


def _row(apart: Apart) -> Apart:
    return None if apart is None else apart[..., :1, :]


def _hull(box: Box) -> Box:
    return Box(box.lo.amin(-2, keepdim=True), box.hi.amax(-2, keepdim=True))


def _places(cos: Parameter, sin: Parameter) -> Iterator[tuple[Parameter, Parameter]]:
    """Yield both tables, some positions at a time."""
    for first in range(0, cos.train.shape[0], _POSITIONS):
        some = slice(first, first + _POSITIONS)
        yield (
            Parameter(cos.train[some], cos.infer[some]),
            Parameter(sin.train[some], sin.infer[some]),
        )
