"""Norms in boxes: fused, and written out part by part (section 6)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics.formats import FORMATS, Format
from kcdsl_backends.drift.boxes.box import (
    EPS,
    Box,
    NoBound,
    exclusive_sums,
    gamma,
    overflow,
    refuse_overflow,
    up,
)
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding
from kcdsl_backends.drift.boxes.state import Parameter, State, Step

_SAFE = 1.0 + 2.0**-40
_ROOT = 8
"""Roundings inside of a root."""


@dataclass(frozen=True, slots=True)
class Part:
    """What storing a part does to it, α = (1 + k·u)(1 + u_F) - 1 and β; and its format."""

    form: Format
    unit: float
    faint: float

    def relative(self, inside: float) -> float:
        """Return α, where the part is off by `inside` before it is stored."""
        return ((1 + inside) * (1 + self.unit) - 1) * _SAFE + 2.0**-60 * inside


@dataclass(frozen=True, slots=True)
class Written:
    """The roundings of a norm that is written out, before its gain.

    `theta` [..., 1] is the relative error of the inverse root, `mean` [..., 1] that of the mean;
    what is centred is off by α and β of `centred` beside, the normalised number by `normed` and its
    product with the gain by `weighted`, where that is stored before a bias is added. `u` and `eta`
    are of the arithmetic inside.
    """

    theta: Tensor
    mean: Tensor
    centred: tuple[float, float]
    normed: tuple[float, float]
    weighted: tuple[float, float]
    forms: Mapping[str, Format]
    u: float
    eta: float

    def apart(self, y: Tensor, root: Tensor) -> Tensor:
        """Return how far normalised numbers of size y are off beside what the mean and the root do,
        where computed inverse roots are at most `root`."""
        (alpha, beta), (last, least) = self.centred, self.normed
        size = (y * (1 + self.theta) + self.mean * root) * _SAFE
        own = alpha * size + beta * root
        return up(own + last * (size + own) + least, 8)

    def result(
        self, node: str, y: Tensor, error: Tensor, own: Tensor, gain: Tensor, bias: Tensor
    ) -> Tensor:
        """Return E of the result: of y with an error times the gain, plus the bias; `own` is the
        part of the error that it is to count.

        Raises:
            NoBound: a normalised number or its product with the gain may overflow.
        """
        refuse_overflow(node, up(y + error, 4), self.forms["normed"], ", normalised,")
        product = up((y + error) * gain, 4)
        rounded = self.weighted[0] * product + self.weighted[1]
        refuse_overflow(node, up(product + rounded, 4), self.forms["weighted"], ", times the gain,")
        return up(own * gain + rounded + self.u * (product + rounded + bias) + self.eta, 8)


def parts_of(node: Node) -> dict[str, str]:
    """Return the parts of a norm that is written out, with their formats; none otherwise."""
    return {str(part): str(form) for part, form in node.attrs.get("parts", ())}


def written(
    node: Node,
    kernel: Rounding,
    size: Tensor,
    centred: Tensor,
    middle: Tensor,
    least: Tensor,
    most: Tensor,
    apart: Tensor,
) -> Written:
    """Return the roundings of a norm that is written out.

    Args:
        node: the norm.
        kernel: the kernel as it computes the node.
        size: magnitudes of the input.
        centred: magnitudes of the input less its mean (rms_norm: of the input).
        middle: magnitudes of the mean [..., 1].
        least, most: bounds of the variance with eps (or of the mean square) [..., 1].
        apart: how far readings of the input that sums over a row are of may be from it.

    Raises:
        NoBound: a part may overflow, or the variance may be lost in the roundings of the parts.
    """
    parts, n, eps = parts_of(node), size.shape[-1], float(node.attrs["eps"])
    wide = all((form or kernel.own.compute) == "float64" for form in parts.values())
    u, eta = (2.0**-53, 2.0**-1074) if wide else (2.0**-24, 2.0**-149)
    final = list(parts)[-1]

    def part(name: str) -> Part:
        form = FORMATS[parts[name] or kernel.own.compute]
        exact = not kernel.free and form.precision >= (53 if wide else 24)
        if name == final or exact:
            return Part(form, 0.0, eta)
        return Part(form, kernel.unit(form), kernel.faint(form) + 2 * eta)

    def fits(name: str, magnitude: Tensor) -> None:
        refuse_overflow(node.name, up(magnitude * _SAFE), part(name).form, f", the {name},")

    off = torch.zeros_like(least)
    own = (0.0, 0.0)
    length = up(torch.linalg.vector_norm(apart, dim=-1, keepdim=True) * _SAFE, 4)
    turned = up(length * torch.rsqrt(least * n) * _SAFE, 4)
    size, centred = up(size + apart), up(centred + apart)
    count = gamma(n + 6, u)
    if "mean" in parts and node.op == "layer_norm":
        first, second = part("mean"), part("centred")
        average = size.mean(-1, keepdim=True) * _SAFE
        off = count * average * (1 + first.unit) + first.unit * middle + first.faint
        off = up((off + (n + 6) * eta + apart.mean(-1, keepdim=True)) * _SAFE, 4)
        fits("mean", middle + off)
        fits("centred", (centred + off) * (1 + second.unit) + second.faint)
        own = second.relative(u), second.faint
    if "variance" in parts:
        stored = part("variance")
        kappa = 4 * count * size.square().mean(-1, keepdim=True) * _SAFE / least
        kappa = (1 + kappa) * (1 + turned).square() * (1 + stored.unit) - 1 + stored.faint / least
        averaging = "variance"
    else:
        averaging = "mean2" if node.op == "layer_norm" else "mean"
        square, mean = part("square"), part(averaging)
        alpha, beta = own
        ratio = off.square() / least
        spread = (torch.sqrt(1 + ratio) + turned) * (1 + alpha) + beta * torch.rsqrt(least)
        kappa = up(spread.square() * _SAFE - 1, 4)
        whole = (centred + off) * (1 + alpha) + beta
        fits("square", whole.square() * (1 + square.relative(2 * u)) + square.faint)
        averaged = mean.relative(count)
        kappa = (1 + kappa) * (1 + square.relative(2 * u)) * (1 + averaged) - 1
        faint = square.faint * (1 + averaged) + mean.faint + (n + 6) * eta
        kappa = kappa + faint / least
    fits(averaging, most * (1 + kappa))
    shift = part("shift")
    low, high = _scalar(kernel, eps, shift.form, node.name)
    added = (max(high - eps, eps - low) + eta) * (1 + shift.unit) + shift.faint
    kappa = up(((1 + kappa) * (1 + shift.relative(2 * u)) - 1 + added / least) * _SAFE, 8)
    if not bool((kappa < 1).all()):
        raise NoBound(node.name, "the variance may be lost in the roundings of what is written out")
    fits("shift", most * (1 + kappa))
    root = 1 / torch.sqrt(1 - kappa) * (1 + _ROOT * u)
    highest = torch.rsqrt(least)
    if "root" in parts:  # a root and its reciprocal, each of them stored
        stored = part("root")
        fits("root", torch.sqrt(most * (1 + kappa)))
        lost = stored.unit + stored.faint * highest / torch.sqrt(1 - kappa)
        reciprocal = stored
    else:
        stored = part("sqrt")
        lost = stored.unit + stored.faint * highest / torch.sqrt(1 - kappa)
        reciprocal = part("reciprocal") if "reciprocal" in parts else Part(stored.form, 0.0, 0.0)
        fits("sqrt", torch.sqrt(most * (1 + kappa)) * (1 + stored.unit) + stored.faint)
    if not bool((lost < 1).all()):
        raise NoBound(node.name, "the root may be lost in the roundings of what is written out")
    root = root / (1 - lost) * (1 + reciprocal.unit) * (1 + 2 * u)
    theta = up((root - 1 + reciprocal.faint * torch.sqrt(most)) * _SAFE + 2.0**-48, 4)
    if "quotient" not in parts:
        fits("root" if "root" in parts else "reciprocal", highest * (1 + theta))
    name = "quotient" if "quotient" in parts else "normed"
    normed = part(name)
    weighted = part("weighted") if "weighted" in parts else Part(normed.form, 0.0, eta)
    return Written(
        theta,
        off,
        own,
        (normed.relative(2 * u), normed.faint),
        (weighted.relative(u), weighted.faint),
        {"normed": normed.form, "weighted": weighted.form},
        u,
        eta,
    )


def _scalar(kernel: Rounding, value: float, form: Format, node: str) -> tuple[float, float]:
    """Return between which numbers eps lies after it may have been rounded to a format."""
    pinned = kernel.own.pinned(form.name)
    return (kernel if pinned is None else Rounding(pinned)).scalar(value, form, node)


LEAST_VARIANCE, MOST_SQUARES = 2.0**-100, 2.0**126
"""Outside, squares underflow or their sum overflows in the float32 inside of a norm."""


@dataclass(frozen=True, slots=True)
class _Normal:
    """One kernel: centred input c, variance v (eps included), r = v^-1/2 and y = c·r."""

    c: Box
    v: Box
    r: Box
    y: Box


def interval_rms_norm(step: Step) -> State:
    """Bound x / sqrt(mean(x²) + eps) * weight."""
    return _norm(step, centre=False)


def interval_layer_norm(step: Step) -> State:
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
