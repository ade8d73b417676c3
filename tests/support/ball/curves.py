"""Ranges of activation functions and of their slopes on boxes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flint import arb

from tests.support.ball import numbers
from tests.support.ball.boxes import Box
from tests.support.ball.numbers import each, larger, smaller


def normal(x: arb) -> arb:
    return (-x / numbers.TWO.sqrt()).erfc() / 2


def gelu_slope(x: arb) -> arb:
    return normal(x) + x * (-x * x / 2).exp() / (2 * arb.pi()).sqrt()


def _steep(x: arb) -> arb:
    return 2 * (numbers.TWO / arb.pi()).sqrt() * (1 + 3 * arb(0.044715) * x * x)


def gelu_tanh_slope(x: arb) -> arb:
    s = 1 / (1 + (-numbers.cubic(x)).exp())
    return s + x * s * (1 - s) * _steep(x)


def _gelu_tanh_bend(x: arb) -> arb:
    s = 1 / (1 + (-numbers.cubic(x)).exp())
    bent = 12 * (numbers.TWO / arb.pi()).sqrt() * arb(0.044715) * x
    return 2 * _steep(x) + x * bent + x * (1 - 2 * s) * _steep(x) ** 2


def silu_slope(x: arb) -> arb:
    s = 1 / (1 + (-x).exp())
    return s + x * s * (1 - s)


def tanh_slope(x: arb) -> arb:
    return 1 - x.tanh() ** 2


def _root(function: Callable[[arb], arb], lo: float, hi: float) -> arb:
    """Return where a function changes its sign, by bisection."""
    a, b = arb(lo), arb(hi)
    for _ in range(numbers.PRECISION - 10):
        middle = ((a + b) / 2).mid()
        same = (function(middle) > 0) == (function(a) > 0)
        a, b = (middle, b) if same else (a, middle)
    return a


def _silu_bend(x: arb) -> arb:
    s = 1 / (1 + (-x).exp())
    return 2 + x * (1 - 2 * s)


GELU_VALLEY = _root(gelu_slope, -1.0, -0.5)
GELU_TANH_VALLEY = _root(gelu_tanh_slope, -1.0, -0.5)
GELU_TANH_TURN = _root(_gelu_tanh_bend, 1.0, 2.0)
SILU_VALLEY = _root(silu_slope, -2.0, -1.0)
SILU_TURN = _root(_silu_bend, 1.0, 4.0)


def range_of(function: Callable[[arb], arb], x: Box, turns: list[arb]) -> Box:
    """Return the range on a box of a function that is monotone between its turns."""
    low, high = each(function, x.lo), each(function, x.hi)
    lo, hi = smaller(low, high), larger(low, high)
    for turn in turns:
        at = function(turn)
        inside = each(lambda a, b, t=turn: a <= t and t <= b, x.lo, x.hi).astype(bool)
        lo, hi = np.where(inside, smaller(lo, at), lo), np.where(inside, larger(hi, at), hi)
    return Box(lo, hi)
