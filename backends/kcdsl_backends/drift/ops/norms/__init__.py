"""Norms in boxes (section 6) and in linear bounds; affine.py: in affine forms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Adjoint, at
from kcdsl_backends.drift.boxes import EPS, SAFE, Box, NoBound, exclusive_sums, gamma, up
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding
from kcdsl_backends.drift.boxes.state import State, Step
from kcdsl_backends.drift.linear import (
    LinearOperand,
    LinearPart,
    LinearRule,
    LinearRun,
    Unknown,
    linear_deviations,
    linear_directions,
)
from kcdsl_backends.drift.linear.tape import LINEAR_PASS, Functional, LinearVJP, Source
from kcdsl_backends.drift.ops.norms.affine import affine_norm
from kcdsl_backends.drift.ops.norms.written import (
    LEAST_VARIANCE,
    parts_of,
    refuse_large_squares,
    written,
)
from kcdsl_backends.drift.ops.operation import Operation


@dataclass(frozen=True, slots=True)
class _Normal:
    """One kernel: centred input c, variance v (eps included), r = v^-1/2 and y = c·r."""

    c: Box
    v: Box
    r: Box
    y: Box


def interval_norm(step: Step, *, centre: bool) -> State:
    """Bound x / sqrt(mean(x²) + eps) * weight, or (x - mean) / sqrt(var + eps) * weight + bias."""
    x, eps, inputs = step.operand(0), float(step.node.attrs["eps"]), step.node.inputs
    gain = step.kernels.plain(step.operand_node(1)) if len(inputs) > 1 else None
    bias = step.kernels.plain(step.operand_node(2)) if len(inputs) > 2 else None
    normal = [normalise(box, eps, centre, step.node.name) for box in (x.train, x.infer)]
    dc = _centred(x.drift) if centre else x.drift
    drift = _drift(normal[0], normal[1], dc)
    one = torch.ones((), dtype=dc.lo.dtype, device=dc.lo.device)
    exact, errors, apart = [], [], []
    for side, kernel in enumerate((step.kernels.train, step.kernels.infer)):
        here, own, again = normal[side], (x.train, x.infer)[side], x.apart[side]
        factor = one if gain is None else gain.boxes[side].mag()
        shift = 0 * one if bias is None else bias.boxes[side].mag()
        y = here.y if gain is None else here.y * gain.boxes[side]
        exact.append(y if bias is None else y + bias.boxes[side])
        # readings of one row share mean and root
        apart.append(None if again is None else up(again * here.r.hi * factor, 4))
        if parts_of(step.node):
            errors.append(_written(step.node, kernel, own, here, factor, shift, centre, again))
        else:
            inside = _inside(own, here, kernel, centre, step.node.name, again)
            errors.append(_affine_error(own, here.y, inside, factor, shift, kernel))
    if gain is not None:
        drift = drift * gain.boxes[1] + normal[0].y * gain.difference
    if bias is not None:
        drift = drift + bias.difference
    away: tuple[Apart, Apart] = (apart[0], apart[1])
    return step.finish((exact[0], exact[1]), drift, (errors[0], errors[1]), apart=away)


def _written(
    node: Node,
    kernel: Rounding,
    x: Box,
    normal: _Normal,
    factor: Tensor,
    shift: Tensor,
    centre: bool,
    again: Apart,
) -> Tensor:
    """Return E of a norm that is written out, whose sums may read x up to 2·apart from the one that
    is normalised; gain and bias are at most `factor` and `shift`."""
    y, v, one = normal.y.mag(), normal.v, torch.ones_like(x.lo[..., :1])
    middle = x.mean().mag() if centre else 0 * one
    apart = torch.zeros_like(y) if again is None else 2 * again.expand(y.shape)
    found = written(node, kernel, x.mag(), normal.c.mag(), middle, v.lo, v.hi, apart)
    root = up(normal.r.hi * (1 + found.theta), 4)
    error = up(found.theta * y + found.mean * root + found.apart(y, root), 4)
    return found.result(node.name, y, error, error, factor, shift)


def _centred(x: Box) -> Box:
    """Return the range of x - mean(x); radius r(1 - 2/n) + mean(r) is sharper than a difference."""
    n = x.shape[-1]
    middle, radius = x.midpoint()
    centre = middle - middle.mean(-1, keepdim=True)
    off = gamma(n + 4) * (middle.abs() + middle.abs().mean(-1, keepdim=True))
    spread = (radius * (1 - 2 / n) + radius.mean(-1, keepdim=True)) * (1 + 2 * gamma(n + 8))
    return Box.point(centre).widen(up(off + spread, 4))


def normalise(x: Box, eps: float, centre: bool, node: str) -> _Normal:
    """Return the parts of x / sqrt(mean(x²) + eps), with `centre` for x minus its mean.

    Raises NoBound where a centred row has a single element.
    """
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

    Mean and variance are of a reading of x that may be 2·apart from the normalised one.
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


def _affine_error(
    x: Box, y: Box, inside: Tensor, factor: Tensor, shift: Tensor, kernel: Rounding
) -> Tensor:
    scaled = inside * factor
    rounding = 3 * kernel.u_function * (y.mag() * factor + scaled + shift)
    # c·r, or r·gain before the product with c (|c| <= 2 max|x|), may underflow.
    lost = kernel.eta_function * (1 + factor + 3 * x.mag().amax(-1, keepdim=True))
    return up(scaled + rounding + lost, 8)


@dataclass(frozen=True, slots=True)
class _Slope:
    """J(x) δ = r(δ - y mean(y δ)) at one x; `away` bounds its error on the segment."""

    r: Tensor
    y: Tensor
    away: Tensor


def linear_norm(*, centred: bool) -> LinearRule:
    """Return the rule of layer_norm (centred) or rms_norm: Δy = ∫ J(x_τ) Δx dτ."""

    def rule(run: LinearRun, node: Node) -> None:
        x, eps = run.operand(node, 0), float(node.attrs["eps"])
        state = run.state(run.source(node, 0))
        n = x.reference.shape[-1]
        gain = run.kernels.plain(run.source(node, 1)) if len(node.inputs) > 1 else None
        bias = run.kernels.plain(run.source(node, 2)) if len(node.inputs) > 2 else None
        one = torch.ones(n, dtype=torch.float64, device=x.reference.device)
        g, g_infer = (one, one) if gain is None else (gain.train, gain.infer)
        b, b_infer = (0 * one, 0 * one) if bias is None else (bias.train, bias.infer)
        r, y = _at(x.reference, eps, centred=centred)
        point = Box.point(x.reference)
        own = _slope(run, node, x, "deviation", x.reference, point.hull(state.train), eps, centred)
        step, _ = x.drift.midpoint()
        between = x.reference + x.deviation.midpoint()[0] + step / 2
        way = state.train.hull(state.infer)
        moved = _slope(run, node, x, "drift", between, way, eps, centred)
        inside = normalise(state.train, eps, centred, node.name).y
        known = inside * Box.point(g_infer - g) + Box.point((b_infer - b).expand(y.shape))
        known_centre, known_radius = known.midpoint()
        wide = gamma(n + 32 + LINEAR_PASS)
        e, d = x.deviation.mag(), x.drift.mag()
        size = x.reference.abs()
        size = size + size.mean(-1, keepdim=True) if centred else size
        run.append(
            node,
            y * g + b,
            _back(x.index, own, moved, g, g_infer, centred=centred),
            LinearPart(
                torch.zeros_like(y),
                (
                    g.abs() * own.away
                    + wide * (g.abs() * (r * size + y.abs() + _linear(own, e)) + b.abs())
                )
                * SAFE,
            ),
            LinearPart(
                known_centre,
                (g_infer.abs() * (moved.away + wide * _linear(moved, d)) + known_radius) * SAFE
                + 8 * EPS * ((g_infer - g).abs() * inside.mag() + (b_infer - b).abs())
                + 2.0**-1000,
            ),
        )

    return rule


def _linear(slope: _Slope, error_bound: Tensor) -> Tensor:
    """Return a bound of the magnitudes summed in J δ and its adjoint."""
    error_bound = error_bound + error_bound.mean(-1, keepdim=True)
    return (
        slope.r
        * (error_bound + slope.y.abs() * (slope.y.abs() * error_bound).mean(-1, keepdim=True))
        * SAFE
    )


def _at(x: Tensor, eps: float, *, centred: bool) -> tuple[Tensor, Tensor]:
    c = x - x.mean(-1, keepdim=True) if centred else x
    r = (c.square().mean(-1, keepdim=True) + eps).rsqrt()
    return r, c * r


def _slope(
    run: LinearRun,
    node: Node,
    x: LinearOperand,
    unknown: Unknown,
    middle: Tensor,
    way: Box,
    eps: float,
    centred: bool,
) -> _Slope:
    """Return J at the midpoint of a segment, and a bound of its difference to J at other points.

    J(x)δ - J_m δ = (r - r_m)(δ - y_m mean(y_m δ)) - r((y - y_m) mean(yδ) + y_m mean((y - y_m)δ)).
    """
    r, y = _at(middle, eps, centred=centred)
    n = y.shape[-1]
    places = normalise(way, eps, centred, node.name)
    uniform = torch.full_like(y, 1 / n)
    size = (x.deviation if unknown == "deviation" else x.drift).mag()
    delta = linear_deviations(run.tape, x.index, uniform, unknown).mag() if centred else size
    along = linear_directions(run.tape, x.index, y / n, unknown)
    lost = gamma(n + 32)
    along = along + lost * (y.abs() * size).mean(-1, keepdim=True)
    if centred:  # y is centred up to float64 errors, the functional is not
        off = y.mean(-1, keepdim=True).abs() + lost * y.abs().mean(-1, keepdim=True)
        along = along + off * size.mean(-1, keepdim=True)
    along = along * SAFE
    y_away = torch.maximum((places.y.hi - y).abs(), (places.y.lo - y).abs()) + lost * y.abs()
    r_away = torch.maximum(places.r.hi - r, r - places.r.lo).clamp_min(0) + lost * r
    away = _away(y, r_away, y_away, places.r.hi, places.y.mag(), delta, along)
    return _Slope(r, y, away)


def _away(
    y: Tensor,
    r_away: Tensor,
    y_away: Tensor,
    r_high: Tensor,
    y_size: Tensor,
    delta: Tensor,
    along: Tensor,
) -> Tensor:
    """Bound |J(x)δ - J_m δ| for |δ| <= delta, |mean(y_m δ)| <= along, and x on the segment."""
    apart = (y_away * delta).mean(-1, keepdim=True) * SAFE
    whole = torch.minimum((y_size * delta).mean(-1, keepdim=True) * SAFE, along + apart)
    away = r_away * (delta + y.abs() * along)
    away = away + r_high * (y_away * whole + y.abs() * apart)
    return away * SAFE * SAFE


def _back(
    index: int, own: _Slope, moved: _Slope, g: Tensor, g_infer: Tensor, *, centred: bool
) -> LinearVJP:
    def through(part: Adjoint | None, slope: _Slope, gain: Tensor) -> Adjoint | None:
        if part is None:
            return None
        n = part.shape[-1]
        window = (*part.window[:-1], (0, n))
        place = at(window)
        values, unit = part.on(window) * gain, slope.y[place]
        back = slope.r[place[:-1]] * (values - unit * (values * unit).mean(-1, keepdim=True))
        back = back - back.mean(-1, keepdim=True) if centred else back
        return Adjoint(back, window, part.shape)

    def vjp(f: Functional) -> list[Source]:
        return [(index, Functional(through(f.deviation, own, g), through(f.drift, moved, g_infer)))]

    return vjp


OPERATIONS = {
    name: Operation(
        partial(interval_norm, centre=centred),
        partial(affine_norm, centred=centred),
        linear_norm(centred=centred),
        (0,),
    )
    for name, centred in (("rms_norm", False), ("layer_norm", True))
}
