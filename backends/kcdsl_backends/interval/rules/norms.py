"""RMSNorm and LayerNorm as one operation (section 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.interval.box import EPS, Box, exclusive_sums, gamma, up
from kcdsl_backends.interval.context import Parameter, Step
from kcdsl_backends.interval.errors import NoBound, overflow
from kcdsl_backends.interval.readings import Apart
from kcdsl_backends.interval.rounding import Rounding
from kcdsl_backends.interval.rules.written import parts_of, written
from kcdsl_backends.interval.state import State

LEAST_VARIANCE, MOST_SQUARES = 2.0**-100, 2.0**126
"""Outside, squares underflow or their sum overflows in the float32 inside of a norm."""


@dataclass(frozen=True, slots=True)
class _Normal:
    """One kernel: centred input c, variance v (eps included), r = v^-1/2 and y = c·r."""

    c: Box
    v: Box
    r: Box
    y: Box


def rms_norm(step: Step) -> State:
    """Bound x / sqrt(mean(x²) + eps) * weight."""
    return _norm(step, centre=False)


def layer_norm(step: Step) -> State:
    """Bound (x - mean) / sqrt(var + eps) * weight + bias."""
    return _norm(step, centre=True)


def _norm(step: Step, *, centre: bool) -> State:
    x, eps, inputs = step.operand(0), float(step.node.attrs["eps"]), step.node.inputs
    gain = step.kernels.plain(step.operand_node(1)) if len(inputs) > 1 else None
    bias = step.kernels.plain(step.operand_node(2)) if len(inputs) > 2 else None
    train = normalise(x.train, eps, centre, step.node.name)
    infer = normalise(x.infer, eps, centre, step.node.name)
    dc = _centred(x.drift) if centre else x.drift
    dy = _drift(train, infer, dc)
    name, (first, second) = step.node.name, x.apart
    exact = (
        _affine(train.y, gain, bias, train_side=True),
        _affine(infer.y, gain, bias, train_side=False),
        _affine_drift(train.y, dy, gain, bias),
    )
    apart = (
        _moved(first, train, gain, train_side=True),
        _moved(second, infer, gain, train_side=False),
    )
    if parts_of(step.node):
        return step.finish(
            *exact,
            _written(step, x, train, gain, bias, centre, train_side=True),
            _written(step, x, infer, gain, bias, centre, train_side=False),
            apart=apart,
        )
    error_train = _inside(x.train, train, step.kernels.train, centre, name, first)
    error_infer = _inside(x.infer, infer, step.kernels.infer, centre, name, second)
    return step.finish(
        *exact,
        _affine_error(
            x.train, train.y, error_train, gain, bias, step.kernels.train, train_side=True
        ),
        _affine_error(
            x.infer, infer.y, error_infer, gain, bias, step.kernels.infer, train_side=False
        ),
        apart=apart,
    )


def _moved(apart: Apart, normal: _Normal, gain: Parameter | None, *, train_side: bool) -> Apart:
    """Return how far results are apart that read x again: mean and root are those of the row."""
    if apart is None:
        return None
    scaled = apart * normal.r.hi
    return up(scaled if gain is None else scaled * _side(gain, train_side).mag(), 4)


def _written(
    step: Step,
    x: State,
    normal: _Normal,
    gain: Parameter | None,
    bias: Parameter | None,
    centre: bool,
    *,
    train_side: bool,
) -> Tensor:
    """Return E of a norm that is written out, whose sums may read x up to 2·apart beside."""
    kernel = step.kernels.train if train_side else step.kernels.infer
    own = x.train if train_side else x.infer
    again = x.apart[0 if train_side else 1]
    y, v, one = normal.y.mag(), normal.v, torch.ones_like(own.lo[..., :1])
    middle = own.mean().mag() if centre else 0 * one
    apart = torch.zeros_like(y) if again is None else 2 * again.expand(y.shape)
    found = written(step.node, kernel, own.mag(), normal.c.mag(), middle, v.lo, v.hi, apart)
    root = up(normal.r.hi * (1 + found.theta), 4)
    error = up(found.theta * y + found.mean * root + found.apart(y, root), 4)
    factor = one if gain is None else _side(gain, train_side).mag()
    shift = 0 * one if bias is None else _side(bias, train_side).mag()
    return found.result(step.node.name, y, error, error, factor, shift)


def _centred(x: Box) -> Box:
    """Return the range of x - mean(x); radius r(1 - 2/n) + mean(r) is sharper than a difference."""
    n = x.shape[-1]
    middle, radius = x.midpoint()
    centre = middle - middle.mean(-1, keepdim=True)
    off = gamma(n + 4) * (middle.abs() + middle.abs().mean(-1, keepdim=True))
    spread = (radius * (1 - 2 / n) + radius.mean(-1, keepdim=True)) * (1 + 2 * gamma(n + 8))
    return Box.point(centre).widen(up(off + spread, 4))


def normalise(x: Box, eps: float, centre: bool, node: str) -> _Normal:
    n = x.shape[-1]
    if centre and n < 2:
        raise NoBound(node, "a single element has no variance")
    c = _centred(x) if centre else x
    squares = c.square()
    mean = squares.mean()
    v = Box((mean.lo + eps) * (1 - 4 * EPS), (mean.hi + eps) * (1 + 4 * EPS))
    if not bool((v.lo >= LEAST_VARIANCE).all()):
        raise NoBound(node, "the variance may be zero")
    refuse_large_squares(node, x.mag(), eps)
    r = Box(torch.rsqrt(v.hi) * (1 - 16 * EPS), torch.rsqrt(v.lo) * (1 + 16 * EPS))
    least, most = exclusive_sums(squares.lo), exclusive_sums(squares.hi)
    relative = 2 * gamma(n + 16)

    def end(value: Tensor, others: Tensor) -> Tensor:
        return value / torch.sqrt((value * value + others) / n + eps)

    high = end(c.hi, torch.where(c.hi >= 0, least, most))
    low = end(c.lo, torch.where(c.lo >= 0, most, least))
    cap = math.sqrt(n - 1 if centre else n) * (1 + 8 * EPS)
    high = torch.where(high >= 0, high * (1 + relative), high * (1 - relative))
    low = torch.where(low <= 0, low * (1 + relative), low * (1 - relative))
    y = Box(low.clamp_min(-cap), high.clamp_max(cap)).meet(c * r)
    return _Normal(c, v, r, y)


def refuse_large_squares(node: str, size: Tensor, eps: float) -> None:
    """Refuse rows whose sum of squares may leave float32.

    Raises:
        NoBound: with the largest element.
    """
    if not bool((size.shape[-1] * size.amax(-1) ** 2 + eps <= MOST_SQUARES).all()):
        raise overflow(node, size, " may make the sum of squares of its row leave float32")


def _drift(train: _Normal, infer: _Normal, dc: Box) -> Box:
    """Return D(c·r) = Dc·r' + c·Dr with Dr = -Dv (r r')² / (r + r')."""
    n = dc.shape[-1]
    total = (train.c + train.c + dc).meet(train.c + infer.c)
    dv = (dc * total).mean()
    norms = _length(dc) * _length(total) / n
    dv = dv.meet(Box.around(up(norms * (1 + 2 * gamma(n + 8)), 2))).meet(infer.v - train.v)

    def omega(r: Tensor, s: Tensor, slack: float) -> Tensor:
        return (r * s) ** 2 / (r + s) * (1 + slack)

    weight = Box(omega(train.r.lo, infer.r.lo, -32 * EPS), omega(train.r.hi, infer.r.hi, 32 * EPS))
    dr = (-(dv * weight)).meet(infer.r - train.r)
    return (dc * infer.r + train.c * dr).meet(infer.y - train.y)


def _length(x: Box) -> Tensor:
    return up(torch.linalg.vector_norm(x.mag(), dim=-1, keepdim=True) * (1 + gamma(x.shape[-1])), 2)


def _inside(
    x: Box, normal: _Normal, kernel: Rounding, centre: bool, node: str, apart: Apart
) -> Tensor:
    """Return E_n: rounding of mean, variance, inverse root and the normalised value.

    Mean and variance are of a reading of x that may be off by 2·apart from the one normalised.
    """
    n, u, magnitude = x.shape[-1], kernel.u_function, x.mag()
    if centre:
        mean = magnitude.mean(-1, keepdim=True) * (1 + 2 * gamma(n + 4))
        mean_square = (magnitude * magnitude).mean(-1, keepdim=True) * (1 + 2 * gamma(n + 4))
        off = up(4 * u * magnitude + gamma(n + 6, u) * mean + (n + 6) * kernel.eta_function, 4)
        kappa = up(4 * gamma(n + 6, u) * mean_square / normal.v.lo, 4)
        if not bool((kappa < 1).all()):
            raise NoBound(
                node, "the mean is too large against the variance for a computed variance"
            )
        theta = up((1 + 8 * u) / torch.sqrt(1 - kappa) * (1 + 16 * EPS) - 1, 4)
    else:
        off = torch.zeros_like(magnitude)
        theta = torch.full_like(magnitude, gamma(n + 3, u) + 8 * u)
    if apart is not None:
        other = 2 * apart.expand(magnitude.shape)
        if centre:
            off = up(off + other.mean(-1, keepdim=True) * (1 + 2 * gamma(n + 4)), 2)
        length = torch.linalg.vector_norm(other, dim=-1, keepdim=True) / math.sqrt(n)
        moved = up(length * torch.rsqrt(normal.v.lo) * (1 + 4 * gamma(n + 8)), 2)
        theta = up((1 + theta) * (1 + moved) - 1, 4)
    theta = up((1 + theta) * (1 + u) * (1 + u) * (1 + 8 * EPS) - 1, 4)
    error = theta * normal.y.mag() + off * normal.r.hi * (1 + theta)
    if kernel.coarse:
        stored = kernel.compute
        error = error + (
            kernel.unit(stored) * (normal.y.mag() + error) * (1 + 8 * EPS) + kernel.faint(stored)
        )
    return up(error, 8)


def _side(parameter: Parameter, train_side: bool) -> Box:
    return parameter.boxes[0 if train_side else 1]


def _affine(y: Box, gain: Parameter | None, bias: Parameter | None, *, train_side: bool) -> Box:
    if gain is not None:
        y = y * _side(gain, train_side)
    return y if bias is None else y + _side(bias, train_side)


def _affine_drift(y: Box, dy: Box, gain: Parameter | None, bias: Parameter | None) -> Box:
    if gain is not None:
        dy = dy * _side(gain, False) + y * gain.difference
    return dy if bias is None else dy + bias.difference


def _affine_error(
    x: Box,
    y: Box,
    inside: Tensor,
    gain: Parameter | None,
    bias: Parameter | None,
    kernel: Rounding,
    *,
    train_side: bool,
) -> Tensor:
    one = torch.ones((), dtype=inside.dtype, device=inside.device)
    factor = one if gain is None else _side(gain, train_side).mag()
    shift = one * 0 if bias is None else _side(bias, train_side).mag()
    scaled = inside * factor
    rounding = 3 * kernel.u_function * (y.mag() * factor + scaled + shift)
    # c·r, or r·gain before it meets c (|c| <= 2 max|x|), may underflow.
    lost = kernel.eta_function * (1 + factor + 3 * x.mag().amax(-1, keepdim=True))
    return up(scaled + rounding + lost, 8)
