"""Softmax as one operation, and the product of its probabilities with the values (section 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.formats import FORMATS
from kcdsl_backends.interval.box import (
    EPS,
    Box,
    down,
    exclusive_max,
    exclusive_sums,
    gamma,
    magnitude_product,
    matmul,
    up,
)
from kcdsl_backends.interval.context import Step
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.readings import Apart
from kcdsl_backends.interval.rounding import Rounding
from kcdsl_backends.interval.rules.linear import summation_error
from kcdsl_backends.interval.state import SoftmaxState, State, settle

_FAR = 700.0
"""Beyond this score drift a probability is taken to be 0 or 1 instead of forming exp."""
_NEAR = 2.0**-40
"""More than the relative error of an extremum's place."""


def softmax(step: Step) -> SoftmaxState:
    """Bound the masked softmax of the scores over the last dimension."""
    scores, name = step.operand(0), step.node.name
    mask = step.kernels.mask(step.operand_node(1)) if len(step.node.inputs) > 1 else None
    mask = None if mask is None else mask.expand(step.node.shape)
    if mask is not None and not bool(mask.any(-1).all()):
        raise NoBound(name, "a row of the attention mask admits no column")
    train, infer = _range(scores.train, mask), _range(scores.infer, mask)
    drift = _drift(train, scores.drift, mask)
    exact = settle(name, train, infer, drift)
    rounding_train = _rounding(scores.train, exact.train, mask, step.kernels.train, scores.apart[0])
    rounding_infer = _rounding(scores.infer, exact.infer, mask, step.kernels.infer, scores.apart[1])
    return SoftmaxState(
        exact,
        _variation(scores.drift, exact.drift, mask),
        rounding_train,
        rounding_infer,
        mask,
        apart=(
            up(exact.train.hi - exact.train.lo + rounding_train, 2)
            if step.kernels.train.free
            else None,
            up(exact.infer.hi - exact.infer.lo + rounding_infer, 2)
            if step.kernels.infer.free
            else None,
        ),
    )


def _zero_outside(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask, x, torch.zeros_like(x))


def _fill(x: Tensor, mask: Tensor | None, value: float) -> Tensor:
    return x if mask is None else torch.where(mask, x, torch.full_like(x, value))


def _range(scores: Box, mask: Tensor | None) -> Box:
    """Return the range of p_i = 1 / (1 + Σ_{j≠i} exp(s_j - s_i)) on a box of scores."""
    lo, hi = _fill(scores.lo, mask, -torch.inf), _fill(scores.hi, mask, -torch.inf)
    top = hi.amax(-1, keepdim=True)
    columns = scores.shape[-1]
    farthest = _fill(top - scores.lo, mask, 0.0).amax(-1, keepdim=True).clamp(0, 800)
    relative = up((farthest + columns + 64) * (4 * EPS))
    least = (torch.exp(lo - top) * (1 - relative)).clamp_min(0)
    most = _zero_outside(torch.exp(hi - top) * (1 + relative) + 1e-300, mask)
    above = most / (most + exclusive_sums(least) * (1 - relative))
    below = least / (least + exclusive_sums(most) * (1 + relative) + 1e-300)
    return Box(
        _zero_outside((below * (1 - 8 * EPS) - 1e-300).clamp_min(0), mask),
        _zero_outside((above * (1 + 8 * EPS)).clamp_max(1), mask),
    )


def _moved(p: Tensor, t: Tensor) -> Tensor:
    """Return p' - p = p(1 - p) expm1(t) / ((1 - p) + p exp(t)) for |t| <= 700."""
    t = t.clamp(-_FAR, _FAR)
    return p * (1 - p) * torch.expm1(t) / ((1 - p) + p * torch.exp(t))


def _drift(p: Box, scores: Box, mask: Tensor | None) -> Box:
    """Return the range of p' - p when the scores drift inside a box.

    logit(p'_i) = logit(p_i) + t_i with t_i between d_i - max_{j≠i} d_j and d_i - min_{j≠i} d_j.
    """
    high, low = _fill(scores.hi, mask, -torch.inf), _fill(-scores.lo, mask, -torch.inf)
    most_others, least_others = exclusive_max(high), -exclusive_max(low)
    alone = torch.isinf(most_others)
    t_lo = torch.where(alone, torch.zeros_like(most_others), down(scores.lo - most_others))
    t_hi = torch.where(alone, torch.zeros_like(most_others), up(scores.hi - least_others))
    t_lo, t_hi = torch.minimum(t_lo, t_hi), torch.maximum(t_lo, t_hi)

    def extreme(t: Tensor) -> Tensor:
        """Return f(p, t) at its extremum in p, tanh(t/4), or 0 where no p of the box attains it.

        Never formed as f(p°, t): next to 1, p° rounds to 1, and 1 - p° is lost.
        """
        place = 1 / (1 + torch.exp((t / 2).clamp(-_FAR, _FAR)))
        attained = (p.lo <= place * (1 + _NEAR)) & (place * (1 - _NEAR) <= p.hi)
        return torch.where(attained, torch.tanh(t / 4), torch.zeros_like(t))

    hi = torch.maximum(_moved(p.lo, t_hi), _moved(p.hi, t_hi))
    lo = torch.minimum(_moved(p.lo, t_lo), _moved(p.hi, t_lo))
    hi = torch.where(t_hi >= 0, torch.maximum(hi, extreme(t_hi)), hi)
    lo = torch.where(t_lo <= 0, torch.minimum(lo, extreme(t_lo)), lo)
    hi = torch.where(t_hi > _FAR, 1 - p.lo, hi)
    lo = torch.where(t_lo < -_FAR, -p.hi, lo)
    slack = 1.0 + 256 * EPS
    hi = torch.where(hi >= 0, hi * slack, hi / slack) + 1e-300
    lo = torch.where(lo <= 0, lo * slack, lo / slack) - 1e-300
    zero = torch.where(alone, 0.0, 1.0).to(hi.dtype)
    return Box(_zero_outside(lo * zero, mask), _zero_outside(hi * zero, mask))


def _variation(scores: Box, probabilities: Box, mask: Tensor | None) -> Tensor:
    """Return a bound of the total variation of every row: min(tanh(R/4), half the l1 norm)."""
    span = up(
        _fill(scores.hi, mask, -torch.inf).amax(-1) - _fill(scores.lo, mask, torch.inf).amin(-1)
    )
    cap = torch.tanh(span / 4) * (1 + 32 * EPS)
    l1 = probabilities.mag().sum(-1) * (0.5 * (1 + 2 * gamma(scores.shape[-1] + 4)))
    return up(torch.minimum(cap, l1) + 1e-300, 2)


def log_error(columns: int, argument: Tensor, kernel: Rounding) -> Tensor:
    """Return Λ: how far the logarithm of a computed probability may be off (section 5).

    `argument` bounds the size of the numbers that are rounded on the way to the argument of exp.
    """
    attention = kernel.numerics.attention
    tiles = attention.tiles(columns)
    u = kernel.u_function
    exp_error = 2 * attention.exp_ulps * u
    exp_log = exp_error / (1 - exp_error)
    one = u / (1 - u)
    total = 2 * tiles * (u * argument + exp_log + one) + (columns + 8) * one
    stored = FORMATS[attention.probabilities]
    if attention.fused and stored.coarse:
        u_stored = kernel.unit(stored)
        lost = (1 + u_stored) * columns * kernel.faint(stored)
        if lost >= 1:
            return torch.full_like(argument, torch.inf)
        total = total + u_stored / (1 - u_stored) + lost / (1 - lost)
    return up(total, 4)


def _rounding(
    scores: Box, p: Box, mask: Tensor | None, kernel: Rounding, apart: Apart = None
) -> Tensor:
    """Return B: how far a computed and stored probability may lie from the softmax."""
    theta = relative_error(scores, mask, kernel, scores.shape[-1], apart)
    return _zero_outside(stored_error(theta, p.hi, kernel), mask)


def relative_error(
    scores: Box, mask: Tensor | None, kernel: Rounding, columns: int, apart: Apart = None
) -> Tensor:
    """Return Θ [..., rows, 1]: the relative error of a probability before it is stored.

    `apart` bounds how far readings of a score are from the one of which they are versions: that of
    the sum of a row may be off by twice as much from that of the result.
    """
    spread = up(
        _fill(scores.hi, mask, -torch.inf).amax(-1, keepdim=True)
        - _fill(scores.lo, mask, torch.inf).amin(-1, keepdim=True)
    )
    argument = spread
    if kernel.numerics.attention.fused:
        largest = _fill(scores.mag(), mask, 0.0).amax(-1, keepdim=True)
        argument = up(spread + 2 * largest, 2)
    log = log_error(columns, argument, kernel)
    if apart is not None:
        log = up(log + 2 * _fill(apart, mask, 0.0).amax(-1, keepdim=True), 2)
    return up(torch.expm1(log) * (1 + 32 * EPS), 2)


def stored_error(theta: Tensor, size: Tensor, kernel: Rounding, columns: int = 1) -> Tensor:
    """Return how far this many computed and stored probabilities, `size` in all, may be off."""
    stored = FORMATS[kernel.numerics.attention.probabilities]
    faint = columns * 2.0**-120
    formed = size * (1 + theta) + faint
    error = theta * size + faint + kernel.unit(stored) * formed + columns * kernel.faint(stored)
    return up(error, 8)


def context(step: Step) -> State:
    """Bound probabilities @ values with the caps that a generic product misses.

    Σ p' Δv is a convex combination of the drifts of the values; in Σ Δp v any constant may be
    subtracted from v, and the sum is at most (total variation) * (max v - min v).
    """
    left = step.known[step.node.inputs[0]]
    if not isinstance(left, SoftmaxState):
        raise NoBound(step.node.name, "a context product without its softmax")
    values, mask, p = step.operand(1), left.mask, left.exact
    by_values = matmul(p.infer, values.drift).meet(_hull_over_keys(values.drift, mask))
    reach = _hull_over_keys(values.train, mask)
    by_probabilities = Box.around(up(left.variation.unsqueeze(-1) * up(reach.hi - reach.lo)))
    for centre in _centres(values.train):
        centred = values.train - Box.point(centre.expand(values.train.shape))
        by_probabilities = by_probabilities.meet(matmul(p.drift, centred))
    train = matmul(p.train, values.train).meet(reach)
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
