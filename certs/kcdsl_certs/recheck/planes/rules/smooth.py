"""Smooth activations by their slopes in the middle (section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Box, Floats
from kcdsl_certs.recheck.planes.course import Added, Course, halves, raised
from kcdsl_certs.recheck.planes.functional import Functional, joined
from kcdsl_certs.recheck.planes.rules.linear import SPARE
from kcdsl_certs.recheck.planes.tape import FAINT, UNIT
from kcdsl_certs.recheck.rules.elementwise import (
    GELU,
    GELU_TANH,
    SILU,
    TANH,
    Function,
    approximated,
    gelu_tanh_second,
    slopes,
)
from kcdsl_certs.recheck.rules.state import gamma

_TRUST = 2.0**-45


@dataclass(frozen=True, slots=True)
class Curve:
    """An activation with its second derivative, and bounds of the second's and third's size."""

    function: Function
    second: Callable[[Floats], Floats]
    steepest: float
    third: float


def _second_of_gelu(x: Floats) -> Floats:
    return np.asarray((2 - x * x) * np.exp(-x * x / 2) * (1 / math.sqrt(2 * math.pi)))


def _second_of_silu(x: Floats) -> Floats:
    small = np.exp(-np.abs(x))
    product = small / (1 + small) ** 2  # s(1 - s)
    return np.asarray(product * (2 - np.abs(x) * (1 - small) / (1 + small)))


def _second_of_tanh(x: Floats) -> Floats:
    y = np.tanh(x)
    return np.asarray(-2 * y * (1 - y * y))


_CURVES = {
    "gelu": Curve(GELU, _second_of_gelu, 0.7979, 0.7788),
    "gelu by tanh": Curve(GELU_TANH, gelu_tanh_second, 0.7979, 0.7788),
    "silu": Curve(SILU, _second_of_silu, 0.5001, 0.3083),
    "tanh": Curve(TANH, _second_of_tanh, 0.7699, 2.0001),
}


def activation(course: Course, node: Node) -> None:
    """Write φ(x): φ'(m) e, and φ'(m + D_c) D + (φ'(m + D_c) - φ'(m)) e, around the middles."""
    curve = _CURVES["gelu by tanh" if node.op == "gelu" and approximated(node) else node.op]
    function = curve.function
    x = course.operand(node, 0)
    h, (ec, er), (dc, dr) = x.reference, halves(x.e), halves(x.d)
    m = h + ec
    there = m + dc
    trust = _TRUST * np.maximum(np.abs(h) + np.abs(ec) + np.abs(dc), 1.0)
    reference, at_m = _value(function, h), _value(function, m)
    slope, steep = _slope(function, m), _slope(function, there)
    k, _ = _curvature(curve, m, er)
    e_radius = k * er * er / 2 + trust * (1 + er)
    k, apart = _curvature(curve, m + dc / 2, er + dr + np.abs(dc) / 2)
    step, off_step = _step(function, m, dc, _value(function, there) - at_m, trust)
    turn, off_turn = _turn(curve, m, dc, steep - slope, trust)
    d_radius = k * (er * dr + dr * dr / 2) + np.abs(dc) * apart * er
    d_radius = d_radius + off_step + off_turn * er + trust * dr
    lost = 4 * gamma(SPARE, UNIT)
    far_e, far_d = er + np.abs(ec), dr + np.abs(dc)
    e_radius = e_radius + lost * np.abs(slope) * far_e
    d_radius = d_radius + lost * (np.abs(steep) * far_d + np.abs(turn) * far_e)

    def pull(f: Functional) -> tuple[tuple[int, Functional], ...]:
        e = None if f.e is None else f.e.times(slope)
        if f.d is None:
            return ((x.place, Functional(e, None)),)
        return ((x.place, Functional(joined(e, f.d.times(turn)), f.d.times(steep))),)

    course.write(
        node,
        reference,
        pull,
        Added(at_m - reference - slope * ec, raised(e_radius) + FAINT),
        Added(step - turn * ec - steep * dc, raised(d_radius) + FAINT),
    )


def _value(function: Function, x: Floats) -> Floats:
    low, high = function.value(x)
    return np.asarray(low / 2 + high / 2)


def _slope(function: Function, x: Floats) -> Floats:
    low, high = function.slope(x)
    return np.asarray(low / 2 + high / 2)


def _curvature(curve: Curve, middle: Floats, radius: Floats) -> tuple[Floats, Floats]:
    """Return the largest |φ''| on middle ± radius, and the length of the range of φ'' there."""
    value, spread = curve.second(middle), curve.third * radius + 2.0**-40
    most = np.minimum(np.abs(value) + spread, curve.steepest)
    return raised(most), raised(2 * np.minimum(spread, curve.steepest))


def _step(
    function: Function, m: Floats, step: Floats, direct: Floats, trust: Floats
) -> tuple[Floats, Floats]:
    """Return φ(m + s) - φ(m) and its error: the difference, or by the range of slopes between."""
    ends = m, m + step
    between = slopes(function, Box(np.minimum(*ends), np.maximum(*ends)))
    middle, radius = halves(between)
    by_slope = raised((radius + 4 * UNIT * np.abs(middle)) * np.abs(step))
    better = by_slope < 2 * trust
    return np.where(better, middle * step, direct), np.where(better, by_slope, 2 * trust)


def _turn(
    curve: Curve, m: Floats, step: Floats, direct: Floats, trust: Floats
) -> tuple[Floats, Floats]:
    """Return φ'(m + s) - φ'(m) and its error, likewise."""
    by_curve = raised((curve.third * np.abs(step) / 2 + 2.0**-40) * np.abs(step))
    better = by_curve < 2 * trust
    found = np.where(better, curve.second(m + step / 2) * step, direct)
    return found, np.where(better, by_curve, 2 * trust)
