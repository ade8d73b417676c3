"""Elementwise operations (section 3), and ReLU (section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint, summed
from kcdsl_backends.interval.box import EPS, Box, gamma, up
from kcdsl_backends.interval.rules.elementwise import (
    GELU,
    GELU_TANH,
    SILU,
    TANH,
    Smooth,
    gelu_tanh_curvature,
)
from kcdsl_backends.planes.functional import Functional, total
from kcdsl_backends.planes.relu import Change, ReluPlanes, first_slopes
from kcdsl_backends.planes.rules.linear import PASS
from kcdsl_backends.planes.run import Operand, Part, Rule, Run
from kcdsl_backends.planes.tape import SAFE, Entry, Source


def _sizes(operand: Operand) -> tuple[Tensor, Tensor, Tensor]:
    return operand.reference.abs(), operand.deviation.mag(), operand.drift.mag()


def add(sign: float) -> Rule:
    """Return the rule of a + b (sign 1) or a - b (sign -1)."""

    def rule(run: Run, node: Node) -> None:
        a, b = run.operand(node, 0), run.operand(node, 1)
        reference = a.reference + sign * b.reference
        own, e, d = (p + q for p, q in zip(_sizes(a), _sizes(b), strict=True))
        zero, repeated = torch.zeros_like(reference), reference.numel()

        def pull(f: Functional) -> list[Source]:
            return [_gathered(f, a, 1.0), _gathered(f, b, sign)]

        inexact = gamma(PASS + (0 if a.reference.shape == b.reference.shape else repeated))
        run.append(
            node,
            reference,
            pull,
            Part(zero, (4 * EPS * own + inexact * e) * SAFE),
            Part(zero, (inexact * d + 2.0**-1000).expand(reference.shape) * SAFE),
        )

    return rule


def _gathered(f: Functional, operand: Operand, factor: float) -> Source:
    shape = tuple(operand.reference.shape)
    return operand.index, f.each(lambda part: summed(part.times(factor), shape))


def scale(run: Run, node: Node) -> None:
    """Append x·c or x/c."""
    constant = float(node.attrs["factor" if node.op == "scale" else "divisor"])
    factor = constant if node.op == "scale" else 1 / constant
    x = run.operand(node, 0)
    own, e, d = (abs(factor) * size for size in _sizes(x))
    zero = torch.zeros_like(own)
    run.append(
        node,
        x.reference * factor,
        lambda f: [(x.index, f.each(lambda part: part.times(factor)))],
        Part(zero, gamma(PASS) * (own + e) * SAFE),
        Part(zero, (gamma(PASS) * d + 2.0**-1000) * SAFE),
    )


def shift(run: Run, node: Node) -> None:
    """Append x + offset."""
    x, offset = run.operand(node, 0), float(node.attrs["offset"])
    own, e, d = _sizes(x)
    zero = torch.zeros_like(own)
    run.append(
        node,
        x.reference + offset,
        lambda f: [(x.index, f)],
        Part(zero, gamma(PASS) * (own + abs(offset) + e) * SAFE),
        Part(zero, (gamma(PASS) * d + 2.0**-1000) * SAFE),
    )


def relu(run: Run, node: Node) -> None:
    """Append max(x, 0), by planes whose slopes may be chosen."""
    x, state = run.operand(node, 0), run.state(run.source(node, 0))
    after = run.state(node)
    reference = x.reference.clamp_min(0)
    own = Change(Box.point(x.reference), x.deviation, state.train)
    pair = Change(state.train, state.drift, state.infer)
    planes = ReluPlanes(x.index, x.reference, own, pair, first_slopes(own, pair))
    boxes = (after.train - Box.point(reference), after.drift)
    entry = Entry(node.name, reference, *boxes, lambda a: [], planes=planes)
    run.index[node.name] = run.tape.add(entry)


def _second_of_gelu(x: Tensor) -> Tensor:
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (2 - x * x)


def _second_of_silu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _second_of_tanh(x: Tensor) -> Tensor:
    t = torch.tanh(x)
    return -2 * t * (1 - t * t)


Curvature = Callable[[Tensor], Tensor]

CURVATURES: dict[str, tuple[Smooth, Curvature, float, float]] = {
    "gelu": (GELU, _second_of_gelu, 0.7979, 0.7788),
    "gelu by tanh": (GELU_TANH, gelu_tanh_curvature, 0.7979, 0.7788),
    "silu": (SILU, _second_of_silu, 0.5001, 0.3083),
    "tanh": (TANH, _second_of_tanh, 0.7699, 2.0001),
}
"""Activation, its second derivative, and bounds of the magnitudes of the second and the third."""


def activation(run: Run, node: Node) -> None:
    """Append a smooth activation by its slopes in the middle, of deviation and drift."""
    by_tanh = node.attrs.get("approximate") == "tanh"
    function, second, steepest, third = CURVATURES["gelu by tanh" if by_tanh else node.op]
    x = run.operand(node, 0)
    h = x.reference
    (ec, er), (dc, dr) = x.deviation.midpoint(), x.drift.midpoint()
    middle = h + ec
    reference, at_middle, at_moved = (function.value(v) for v in (h, middle, middle + dc))
    slope, steep = function.derivative(middle), function.derivative(middle + dc)
    trust = 2.0**-45 * torch.maximum(torch.maximum(h.abs(), middle.abs()) + dc.abs(), _one(h))
    # deviation: |φ(m + ê) - φ(m) - φ'(m) ê| <= K ê²/2
    k_e, _ = _curved(second, steepest, third, middle, er)
    e_centre = at_middle - reference - slope * ec
    e_radius = k_e * er * er / 2 + trust * (1 + er)
    # drift: K (|ê||d̂| + d̂²/2) + |Δ_c| ω |ê|, ω the range of φ'' where m + ê + [0, Δ] lies
    k_d, wide = _curved(second, steepest, third, middle + dc / 2, er + dr + dc.abs() / 2)
    change = _difference(function, middle, dc, at_moved - at_middle, trust)
    turn = _slope_difference(second, middle, dc, steep - slope, third, trust)
    d_centre = change.centre - turn.centre * ec - steep * dc
    d_radius = (
        k_d * (er * dr + dr * dr / 2)
        + dc.abs() * wide * er
        + change.radius
        + turn.radius * er
        + trust * dr
    )
    away = gamma(PASS) * 4
    run.append(
        node,
        reference,
        _along(x.index, slope, turn.centre, steep),
        Part(e_centre, (e_radius + away * (slope.abs() * (er + ec.abs()))) * SAFE),
        Part(
            d_centre,
            (
                d_radius
                + away * (steep.abs() * (dr + dc.abs()) + turn.centre.abs() * (er + ec.abs()))
            )
            * SAFE
            + 2.0**-1000,
        ),
    )


def _one(like: Tensor) -> Tensor:
    return torch.ones_like(like)


def _along(index: int, slope: Tensor, turn: Tensor, steep: Tensor) -> Callable[..., list[Source]]:
    moves = bool(turn.any())

    def pull(f: Functional) -> list[Source]:
        on_e: Adjoint | None = None if f.deviation is None else f.deviation.times(slope)
        on_d = None if f.drift is None else f.drift.times(steep)
        if f.drift is not None and moves:
            on_e = total(on_e, f.drift.times(turn))
        return [(index, Functional(on_e, on_d))]

    return pull


def _curved(
    second: Curvature, steepest: float, third: float, middle: Tensor, radius: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the largest |φ''| on middle ± radius, and the length of its range."""
    value = second(middle)
    spread = third * radius + 2.0**-40
    largest = torch.minimum(value.abs() + spread, torch.full_like(value, steepest))
    return largest * SAFE, torch.minimum(2 * spread, 2 * torch.full_like(value, steepest)) * SAFE


def _difference(
    function: Smooth, middle: Tensor, step: Tensor, direct: Tensor, trust: Tensor
) -> Part:
    """Return φ(m + s) - φ(m): the difference, or the slope where that loses fewer digits."""
    span = function.slopes(
        Box(torch.minimum(middle, middle + step), torch.maximum(middle, middle + step))
    )
    slope, radius = span.midpoint()
    by_slope = up((radius + 2 * EPS * slope.abs()) * step.abs() * SAFE)
    by_values = 2 * trust
    better = by_slope < by_values
    return Part(torch.where(better, slope * step, direct), torch.where(better, by_slope, by_values))


def _slope_difference(
    second: Curvature,
    middle: Tensor,
    step: Tensor,
    direct: Tensor,
    third: float,
    trust: Tensor,
) -> Part:
    """Return φ'(m + s) - φ'(m), likewise."""
    value = second(middle + step / 2)
    by_curve = ((third * step.abs() / 2 + 2.0**-40) * step.abs()) * SAFE
    by_values = 2 * trust
    better = by_curve < by_values
    return Part(torch.where(better, value * step, direct), torch.where(better, by_curve, by_values))


def rope(run: Run, node: Node) -> None:
    """Append the rotary embedding x∘C + rot(x)∘S with known tables."""
    x = run.operand(node, 0)
    shape, half = x.reference.shape, node.shape[-1] // 2
    cos, sin = (run.kernels.plain(run.source(node, i)) for i in (1, 2))
    c, s = cos.train.expand(shape), sin.train.expand(shape)
    c_i, s_i = cos.infer.expand(shape), sin.infer.expand(shape)
    dc, ds = c_i - c, s_i - s

    def turned(values: Tensor) -> Tensor:
        return torch.cat([-values[..., half:], values[..., :half]], -1)

    def swapped(values: Tensor) -> Tensor:
        return torch.cat([values[..., half:], values[..., :half]], -1)

    def sizes(values: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return values * p.abs() + swapped(values) * q.abs()

    def back(part: Adjoint, p: Tensor, q: Tensor) -> Adjoint:
        window = (*part.window[:-1], (0, 2 * half))
        at = tuple(slice(first, last) for first, last in window)
        values = part.on(window)
        by_sin = values * q[at]
        result = values * p[at] + torch.cat([by_sin[..., half:], -by_sin[..., :half]], -1)
        return Adjoint(result, window, part.shape)

    def pull(f: Functional) -> list[Source]:
        on_e = None if f.deviation is None else back(f.deviation, c, s)
        on_d = None if f.drift is None else back(f.drift, c_i, s_i)
        if f.drift is not None and bool(dc.any() or ds.any()):
            on_e = total(on_e, back(f.drift, dc, ds))
        return [(x.index, Functional(on_e, on_d))]

    own, e, d = _sizes(x)
    back_error = gamma(PASS + 4)
    reference = x.reference * c + turned(x.reference) * s
    known = x.reference * dc + turned(x.reference) * ds
    run.append(
        node,
        reference,
        pull,
        Part(torch.zeros_like(known), back_error * (sizes(own, c, s) + sizes(e, c, s)) * SAFE),
        Part(
            known,
            (back_error * (sizes(own + e, dc, ds) + sizes(d, c_i, s_i)) + 2.0**-1000) * SAFE,
        ),
    )
