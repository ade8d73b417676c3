"""The product of probabilities with values, and functionals of one row of attention (section 4)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.cases import Cases, choices, of_product, split
from kcdsl_backends.drift.affine.kernel import KernelRun, Operand
from kcdsl_backends.drift.affine.result_rounding import Result, round_result
from kcdsl_backends.drift.affine.tape import Nonlinear
from kcdsl_backends.drift.boxes.box import SAFE, Box, NoBound, magnitude_product, matmul, up
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.boxes.state import SoftmaxState, State, Step
from kcdsl_backends.drift.boxes.sums import summation_error
from kcdsl_backends.drift.ops.bilinear import Heads, heads
from kcdsl_backends.drift.ops.matmul import affine_product, linear_matmul
from kcdsl_backends.drift.ops.operation import Operation
from kcdsl_backends.drift.ops.single_row import row_of_values, through_values


def interval_context(step: Step) -> State:
    """Bound probabilities @ values with the caps that a generic product misses.

    Σ p' Δv is a convex combination of the drifts of the values; in Σ Δp v any constant may be
    subtracted from v, and the sum is at most (total variation) * (max v - min v).
    """
    left = step.known[step.node.inputs[0]]
    if not isinstance(left, SoftmaxState):
        raise NoBound(step.node.name, "a context product without its softmax")
    values, mask, p = step.operand(1), left.mask, left.exact
    by_values = matmul(p.infer, values.drift).meet(_hull_over_keys(values.drift, mask))
    error_bound = _hull_over_keys(values.train, mask)
    by_probabilities = Box.around(
        up(left.variation.unsqueeze(-1) * up(error_bound.hi - error_bound.lo))
    )
    for centre in _centres(values.train):
        centred = values.train - Box.point(centre.expand(values.train.shape))
        by_probabilities = by_probabilities.meet(matmul(p.drift, centred))
    train = matmul(p.train, values.train).meet(error_bound)
    infer = matmul(p.infer, values.infer).meet(_hull_over_keys(values.infer, mask))
    return step.finish(
        train,
        infer,
        by_values + by_probabilities,
        _context_error(p.train, left.rounding_train, values.train, train, step.kernels.train),
        _context_error(p.infer, left.rounding_infer, values.infer, infer, step.kernels.infer),
        accumulates=True,
    )


def _centres(values: Box) -> tuple[Tensor, Tensor]:
    """Return two constants per column that may be subtracted: the middle and the mean."""
    low, high = values.lo.amin(-2, keepdim=True), values.hi.amax(-2, keepdim=True)
    return low / 2 + high / 2, (values.lo / 2 + values.hi / 2).mean(-2, keepdim=True)


def _hull_over_keys(values: Box, mask: Tensor | None) -> Box:
    """Return [min, max] of the values over the keys that each query row may read."""
    if mask is None:
        return Box(values.lo.amin(-2, keepdim=True), values.hi.amax(-2, keepdim=True))
    lows, highs = [], []
    for row in range(mask.shape[-2]):
        readable = mask[..., row, :, None]
        lows.append(torch.where(readable, values.lo, torch.inf).amin(-2))
        highs.append(torch.where(readable, values.hi, -torch.inf).amax(-2))
    return Box(torch.stack(lows, -2), torch.stack(highs, -2))


def _context_error(p: Box, rounding: Tensor, values: Box, result: Box, kernel: Rounding) -> Tensor:
    extra = 2 * kernel.numerics.attention.tiles(p.shape[-1]) + 4
    magnitude = values.mag()
    wrong = magnitude_product(rounding, magnitude)
    weights = up(p.hi + rounding)
    total = magnitude_product(weights, magnitude)
    summed = summation_error(
        weights, magnitude, total, up(result.mag() + wrong), kernel, extra=extra
    )
    return up(wrong + summed, 4)


def affine_context(run: KernelRun, node: Node) -> None:
    """Append probabilities @ values."""
    p, v = run.operand(node, 0), run.operand(node, 1)
    keys = p.reference.shape[-1]
    steps = keys + 2 * run.rounding.numerics.attention.tiles(keys) + 4
    result = affine_product(run, p, v, steps, 2)
    second = p.error_bound @ v.error_bound * SAFE
    cases = _in_cases(run, p, v, result.internal)
    tight = bool((run.tape.radius > 0).any())
    values = heads(run, node, 1)
    matters = second.sum() > run.negligible * result.reference.abs().sum()
    rows = torch.ones_like(v.error_bound[..., :1], dtype=torch.bool) & matters
    nonlinear = None
    if values is not None and v.index is not None and run.passing(node, v.index, "product", rows):
        nonlinear = _second_order(p.error_bound, values)
    internal, parts = result.internal, result.roundings
    if nonlinear is None:
        internal = (internal + second) * SAFE
        parts = None if parts is None else parts.beside(second)
    one_row = None
    if values is not None:
        one_row = row_of_values(run, p, values, v.reference, second_order=nonlinear is not None)
    formed = Result(
        result.reference,
        result.vjp,
        result.linear,
        internal,
        nonlinear=nonlinear,
        extra=None if nonlinear is None else second,
        cases=cases,
        roundings=parts,
        one_row=one_row,
    )
    round_result(run, node, formed, accumulates=True, tight=tight)


def _in_cases(run: KernelRun, p: Operand, v: Operand, error: Tensor) -> Cases | None:
    """Return the product in cases of its probabilities, where these are steps."""
    ends = None if p.index is None else run.tape.entries[p.index].choices
    if ends is None:
        return None
    around = Box(v.reference - v.error_bound * SAFE, v.reference + v.error_bound * SAFE)
    room = choices(error.shape) - int(math.log2(ends.low.shape[0]))
    worth = v.reference.abs().sum(-1)[..., None, :]
    return of_product(split(ends, worth, room), around, error)


def _second_order(moved: Tensor, values: Heads) -> Nonlinear:
    """Bound Σ_j moved[h, t, j]·|a·e_v[h, j]| with e_v[h, j] = W_h e_x[j] + o[h, j]."""
    beyond = through_values(values)

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        (first, last), (row, end), (start, stop) = a.window
        total = a.values.new_zeros(a.values.shape[0])
        for h in range(first, last):
            size = a.values[:, h - first].abs() @ values.own[h, :, start:stop].T
            size = size + beyond(a, h)  # [B, rows, keys]
            total = total + (size * moved[h, row:end]).flatten(1).sum(-1)
        total = total * SAFE
        return -total, total

    return Nonlinear(between)


OPERATIONS = {"context": Operation(interval_context, affine_context, linear_matmul, (0, 1))}
