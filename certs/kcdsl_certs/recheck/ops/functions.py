"""GELU, SiLU and tanh as functions: ranges of their values and of two derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Box, Floats, raised

_TRUST = 2.0**-48  # 4 ulp of a library function and the arithmetic around it

_SPREAD, _CUBIC = math.sqrt(2 / math.pi), 0.044715  # constants of the tanh form of GELU


@dataclass(frozen=True, slots=True)
class Function:
    """A smooth function with its derivative, both as (lower, upper) at given doubles.

    `valley` is where the function has its only minimum (None: it increases); `turns` are the
    critical points of the derivative. Both are doubles next to the true points: there the functions
    are so flat that the difference is far below the slack of the values.
    """

    value: Callable[[Floats], tuple[Floats, Floats]]
    slope: Callable[[Floats], tuple[Floats, Floats]]
    valley: float | None
    turns: tuple[float, ...]


def _gelu_value(x: Floats) -> tuple[Floats, Floats]:
    return about(x * _normal(x), np.abs(x) * 2.0**-50)


def _gelu_slope(x: Floats) -> tuple[Floats, Floats]:
    density = np.exp(-x * x / 2) * (1 / math.sqrt(2 * math.pi))
    return about(_normal(x) + x * density, np.full(x.shape, 2.0**-47))


def _by_tanh(x: Floats) -> tuple[Floats, Floats]:
    """Return 2u and 2u' of u = √(2/π)(x + 0.044715 x³), for x within ±30: beyond, σ(2u) is flat."""
    square = x * x
    first = 2 * _SPREAD * x * (1 + _CUBIC * square)
    return first, 2 * _SPREAD * (1 + 3 * _CUBIC * square)


def _gelu_tanh_value(x: Floats) -> tuple[Floats, Floats]:
    twice, _ = _by_tanh(np.clip(x, -30.0, 30.0))
    return about(x * logistic(twice), np.abs(x) * 2.0**-49)


def _gelu_tanh_slope(x: Floats) -> tuple[Floats, Floats]:
    near = np.clip(x, -30.0, 30.0)
    twice, steep = _by_tanh(near)
    s, other = logistic(twice), logistic(-twice)
    return about(s + near * s * other * steep, np.full(x.shape, 2.0**-46))


def gelu_tanh_second(x: Floats) -> Floats:
    """Return the second derivative of x·σ(w), w = 2u: σ'(2w' + xw'' + x(1 - 2σ)w'²)."""
    near = np.clip(x, -30.0, 30.0)
    twice, steep = _by_tanh(near)
    s, other = logistic(twice), logistic(-twice)
    bent = 12 * _SPREAD * _CUBIC * near
    return np.asarray(s * other * (2 * steep + near * bent + near * (other - s) * steep * steep))


def _normal(x: Floats) -> Floats:
    """Return Φ(x) with an absolute error below 2^-51."""
    return np.clip(0.5 * (1 + _erf(x * math.sqrt(0.5))), 0.0, 1.0)


def _erf(x: Floats) -> Floats:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), dtype=np.float64)


def _silu_value(x: Floats) -> tuple[Floats, Floats]:
    return about(x * logistic(x), np.abs(x) * logistic(x) * _TRUST)


def _silu_slope(x: Floats) -> tuple[Floats, Floats]:
    s, other = logistic(x), logistic(-x)
    return about(s + x * s * other, np.full(x.shape, 2.0**-47))


def logistic(x: Floats) -> Floats:
    """Return 1/(1 + e^-x) with an error of a few ulp."""
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, e) / (1 + e))


def _tanh_value(x: Floats) -> tuple[Floats, Floats]:
    y = np.tanh(x)
    lo, hi = about(y, np.abs(y) * _TRUST)
    return np.maximum(lo, -1.0), np.minimum(hi, 1.0)


def _tanh_slope(x: Floats) -> tuple[Floats, Floats]:
    y = np.tanh(x)
    return about(1 - y * y, np.full(x.shape, 2.0**-47))


def about(y: Floats, radius: Floats) -> tuple[Floats, Floats]:
    """Return y - r and y + r, rounded outward, for an r slightly above `radius`."""
    wide = radius * (1 + 2.0**-40) + 2.0**-1000
    return box.down(y - wide), box.above(y + wide)


GELU = Function(_gelu_value, _gelu_slope, -0.7517915246935645, (-math.sqrt(2), math.sqrt(2)))
GELU_TANH = Function(
    *(_gelu_tanh_value, _gelu_tanh_slope, -0.75246142207101626),
    (-1.41850400879082836, 1.41850400879082836),
)
SILU = Function(
    _silu_value, _silu_slope, -1.2784645427610738, (-2.3993572805154677, 2.3993572805154677)
)
TANH = Function(_tanh_value, _tanh_slope, None, (0.0,))


def image(function: Function, x: Box) -> Box:
    """Return the range of a function on a box."""
    low, high = function.value(x.lo), function.value(x.hi)
    lo, hi = np.minimum(low[0], high[0]), np.maximum(low[1], high[1])
    if function.valley is not None:
        bottom = function.value(np.array(function.valley))[0]
        lo = np.where(_holds(x, function.valley), np.minimum(lo, bottom), lo)
    return Box(lo, hi)


def slopes(function: Function, x: Box) -> Box:
    """Return the range of a function's derivative on a box."""
    low, high = function.slope(x.lo), function.slope(x.hi)
    lo, hi = np.minimum(low[0], high[0]), np.maximum(low[1], high[1])
    for turn in function.turns:
        at = function.slope(np.array(turn))
        inside = _holds(x, turn)
        lo = np.where(inside, np.minimum(lo, at[0]), lo)
        hi = np.where(inside, np.maximum(hi, at[1]), hi)
    return Box(lo, hi)


def _holds(x: Box, point: float) -> box.Bools:
    """Return where a box holds a point known to a few ulp."""
    wide = abs(point) * 2.0**-40 + 2.0**-1000
    found: box.Bools = (x.lo <= point + wide) & (x.hi >= point - wide)
    return found


Bend = Callable[[Box], Box]


def gelu_bend(x: Box) -> Box:
    """Return the range of (2 - x²)·density(x), whose extremes are at 0 and ±2."""
    return _even(x, _gelu_second, 2.0)


def gelu_tanh_bend(x: Box) -> Box:
    """Return the range of the second derivative of tanh-GELU; extremes at 0 and ±2.0134807."""
    return _even(x, gelu_tanh_second, 2.013480724624258)


def _even(x: Box, second: Callable[[Floats], Floats], far: float) -> Box:
    """Return the range of an even function with extremes at 0 and ±far."""
    ends = [second(x.lo), second(x.hi)]
    lo, hi = np.minimum(*ends), np.maximum(*ends)
    for turn in (-far, 0.0, far):
        inside = (x.lo <= turn + 2.0**-40) & (turn - 2.0**-40 <= x.hi)
        at = second(np.array(turn))
        lo, hi = np.where(inside, np.minimum(lo, at), lo), np.where(inside, np.maximum(hi, at), hi)
    return Box(lo - 2.0**-46, hi + 2.0**-46)


def _gelu_second(x: Floats) -> Floats:
    return np.asarray((2 - x * x) * np.exp(-x * x / 2) * (1 / math.sqrt(2 * math.pi)))


def silu_bend(x: Box) -> Box:
    """Return a box of the second derivative of silu on all reals."""
    return Box(np.full(x.shape, -0.1), np.full(x.shape, 0.5 + 2.0**-40))


def tanh_bend(x: Box) -> Box:
    """Return a box of the second derivative of tanh on all reals, 4/(3√3) < 0.77 in size."""
    return Box(np.full(x.shape, -0.77), np.full(x.shape, 0.77))


@dataclass(frozen=True, slots=True)
class Curve:
    """An activation: its second derivative, the range of that on a box (`bend`), and bounds of the
    size of the second derivative and of the third."""

    function: Function
    second: Callable[[Floats], Floats]
    bend: Bend
    steepest: float
    third: float


def _silu_second(x: Floats) -> Floats:
    small = np.exp(-np.abs(x))
    product = small / (1 + small) ** 2  # s(1 - s)
    return np.asarray(product * (2 - np.abs(x) * (1 - small) / (1 + small)))


def _tanh_second(x: Floats) -> Floats:
    y = np.tanh(x)
    return np.asarray(-2 * y * (1 - y * y))


GELU_CURVE = Curve(GELU, _gelu_second, gelu_bend, 0.7979, 0.7788)
GELU_TANH_CURVE = Curve(GELU_TANH, gelu_tanh_second, gelu_tanh_bend, 0.7979, 0.7788)
SILU_CURVE = Curve(SILU, _silu_second, silu_bend, 0.5001, 0.3083)
TANH_CURVE = Curve(TANH, _tanh_second, tanh_bend, 0.7699, 2.0001)


def value_of(function: Function, x: Floats) -> Floats:
    """Return the middle of the enclosure of the value at x."""
    low, high = function.value(x)
    return np.asarray(low / 2 + high / 2)


def slope_of(function: Function, x: Floats) -> Floats:
    """Return the middle of the enclosure of the slope at x."""
    low, high = function.slope(x)
    return np.asarray(low / 2 + high / 2)


def curvature(curve: Curve, middle: Floats, radius: Floats) -> tuple[Floats, Floats]:
    """Return the largest |φ''| on middle ± radius, and the length of the range of φ'' there."""
    value, spread = curve.second(middle), curve.third * radius + 2.0**-40
    most = np.minimum(np.abs(value) + spread, curve.steepest)
    return raised(most), raised(2 * np.minimum(spread, curve.steepest))
