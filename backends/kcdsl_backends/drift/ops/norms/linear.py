"""RMSNorm and LayerNorm as one operation (section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Adjoint, at
from kcdsl_backends.drift.boxes.box import EPS, SAFE, Box, gamma
from kcdsl_backends.drift.linear.run import (
    LinearOperand,
    LinearPart,
    LinearRule,
    LinearRun,
    Unknown,
    linear_deviations,
    linear_directions,
)
from kcdsl_backends.drift.linear.tape import LINEAR_PASS, Functional, LinearVJP, Source
from kcdsl_backends.drift.ops.norms.interval import normalise


@dataclass(frozen=True, slots=True)
class _Slope:
    """J(x) δ = r(δ - y mean(y δ)) at one x; `away` bounds what it misses along the way."""

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
    """Return J at the middle of the way, and how far J of other places of the way is from it.

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
    if centred:  # y is centred but for float64, the functional is not
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
    """Bound |J(x)δ - J_m δ| where |δ| <= delta, |mean(y_m δ)| <= along, x as near as said."""
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
