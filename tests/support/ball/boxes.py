"""Boxes of balls, and the state (T, I, D) of a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from flint import arb

from tests.support.ball.numbers import Balls, balls, larger, least, most, size, smaller


@dataclass(frozen=True)
class Box:
    """Lower and upper ends, arrays of balls of one shape."""

    lo: Balls
    hi: Balls

    def map(self, move: Callable[[Balls], Balls]) -> Box:
        return Box(move(self.lo), move(self.hi))

    @property
    def mag(self) -> Balls:
        return larger(size(self.lo), size(self.hi))

    @property
    def middle(self) -> Balls:
        return np.asarray((self.lo + self.hi) / 2, dtype=object)

    @property
    def radius(self) -> Balls:
        return np.asarray((self.hi - self.lo) / 2, dtype=object)

    def __add__(self, other: Box) -> Box:
        return Box(self.lo + other.lo, self.hi + other.hi)

    def __sub__(self, other: Box) -> Box:
        return Box(self.lo - other.hi, self.hi - other.lo)

    def __neg__(self) -> Box:
        return Box(-self.hi, -self.lo)

    def __mul__(self, other: Box) -> Box:
        products = [a * b for a in (self.lo, self.hi) for b in (other.lo, other.hi)]
        lo, hi = products[0], products[0]
        for product in products[1:]:
            lo, hi = smaller(lo, product), larger(hi, product)
        return Box(lo, hi)

    def __matmul__(self, other: Box) -> Box:
        a, b = self.middle, other.middle
        spread = size(a) @ other.radius + self.radius @ size(b) + self.radius @ other.radius
        return around(a @ b, spread)

    def times(self, factor: Any) -> Box:
        return self * known(factor)

    def meet(self, other: Box) -> Box:
        return Box(larger(self.lo, other.lo), smaller(self.hi, other.hi))

    def join(self, other: Box) -> Box:
        return Box(smaller(self.lo, other.lo), larger(self.hi, other.hi))

    def widen(self, radius: Balls) -> Box:
        return Box(self.lo - radius, self.hi + radius)

    @property
    def turned(self) -> Box:
        return self.map(lambda v: np.swapaxes(v, -1, -2))


def around(centre: Balls, radius: Balls) -> Box:
    return Box(centre - radius, centre + radius)


def known(values: Any) -> Box:
    exact = balls(values)
    return Box(exact, exact)


@dataclass(frozen=True)
class State:
    """T, I and D of a node."""

    t: Box
    i: Box
    d: Box

    @property
    def middle(self) -> Box:
        half = balls(0.5)
        return (self.t + self.d.times(half)).meet((self.t + self.i).times(half))


@dataclass(frozen=True)
class Softmax:
    """T*, I*, D* of a softmax, the total variation of its rows, the rounding of both kernels."""

    star: State
    variation: Balls
    rounding: tuple[Balls, Balls]
    allowed: np.ndarray

    @property
    def stored(self) -> State:
        t, i = self.rounding
        return State(self.star.t.widen(t), self.star.i.widen(i), self.star.d.widen(t + i))


def reduced(t: Box, i: Box, d: Box) -> State:
    d = d.meet(i - t)
    i = i.meet(t + d)
    return State(t.meet(i - d), i, d)


def max_of(values: Balls) -> arb:
    found: arb = most(values).item()
    return found


def min_of(values: Balls) -> arb:
    found: arb = least(values).item()
    return found
