"""The constants of one kernel, and its storage and summation errors (section 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from flint import arb

from tests.support.ball import numbers
from tests.support.ball.boxes import Box, around, known, max_of, min_of
from tests.support.ball.numbers import Balls, balls, each, larger, total
from tests.support.ball.runs import FORMATS

Pair = tuple[Box, Box]
FINE = 24
"""Bits of float32."""


@dataclass(frozen=True)
class Kernel:
    """The constants of one numerics record."""

    record: Any

    def u(self, form: str) -> arb:
        return numbers.power(-FORMATS[form][0])

    def eta(self, form: str) -> arb:
        return numbers.power(FORMATS[form][1] - FORMATS[form][0])

    @property
    def compute(self) -> str:
        return str(self.record["compute"])

    @property
    def accumulate(self) -> str:
        return str(self.record["accumulate"])

    @property
    def inner(self) -> str:
        return "float64" if self.compute == "float64" else "float32"

    @property
    def u_f(self) -> arb:
        return self.u(self.inner)

    @property
    def eta_f(self) -> arb:
        return numbers.power(-1074 if self.inner == "float64" else -149)

    @property
    def coarse(self) -> bool:
        return FORMATS[self.compute][0] < FINE

    @property
    def fused(self) -> bool:
        return bool(self.record["attention"]["style"] == "fused")

    def target(self, role: str) -> str:
        own = role in ("scores", "probabilities")
        return str(self.record["attention"][role] if own else self.compute)

    def tiles(self, n: int) -> int:
        return -(-n // int(self.record["attention"]["tile"])) if self.fused else 1

    def stored(self, form: str, y: Box, error: Balls, inner: str) -> Pair:
        """Return the stored value and its error (section 2)."""
        precision, lowest = FORMATS[form]
        v = y.widen(error)
        u, eta = self.cast(form)
        if self.free:
            cast = u * v.mag + eta
            value = self._shrunk(v, u, eta) if self.inward else v.widen(cast)
            return value, self._off(v, cast).widen(error)
        if precision >= max(FINE, FORMATS[inner][0]):
            return v, around(balls(np.zeros(v.lo.shape)), error)
        step = numbers.cut if self.inward else numbers.nearest
        q = v.map(lambda x: each(lambda z: step(z, precision, lowest), x))
        free = self._off(v, larger(u * v.mag, eta))
        same = each(lambda a, b: bool(a == b), q.lo, q.hi).astype(bool)
        wrong = Box(np.where(same, q.lo - v.hi, free.lo), np.where(same, q.hi - v.lo, free.hi))
        return q, wrong.widen(error)

    @property
    def free(self) -> bool:
        return str(self.record["casts"]).startswith("any")

    @property
    def inward(self) -> bool:
        return str(self.record["casts"]).endswith("toward_zero")

    def cast(self, form: str) -> tuple[arb, arb]:
        """Return u and η of one cast: twice that of a rounding to nearest where it is directed."""
        times = 1 if self.record["casts"] in ("any", "nearest") else 2
        return times * self.u(form), times * self.eta(form)

    def taken_for(self, c: arb, role: str) -> Box:
        """Return C, the hull of a kernel's possible values of a Python number (section 2)."""
        form = self.target(role)
        if FORMATS[form][0] >= FORMATS[self.inner][0]:
            return known(c)
        if self.record["casts"] in ("any", "nearest"):
            ends = [numbers.nearest(c, *FORMATS[form])]
        else:
            ends = list(numbers.beside(c, *FORMATS[form]))
        return Box(balls(min_of(balls([c, *ends]))), balls(max_of(balls([c, *ends]))))

    def rereading(self, form: str, v: Box) -> Balls:
        """Return the largest error of the cast of one reading, where casts are free."""
        u, eta = self.cast(form)
        return np.asarray(u * v.mag + eta, dtype=object)

    def held(self, value: arb) -> arb:
        """Return a constant as the kernel stores it."""
        inward = self.record["weights"].get("rounding") == "toward_zero"
        return (numbers.cut if inward else numbers.nearest)(value, *FORMATS[self.compute])

    def _off(self, v: Box, most_of: Balls) -> Box:
        if not self.inward:
            return Box(-most_of, most_of)
        zero = balls(np.zeros(v.lo.shape))
        positive = each(lambda x: bool(x > 0), v.hi).astype(bool)
        negative = each(lambda x: bool(x < 0), v.lo).astype(bool)
        return Box(np.where(positive, -most_of, zero), np.where(negative, most_of, zero))

    def _shrunk(self, v: Box, u: arb, eta: arb) -> Box:
        def less(z: arb) -> arb:
            return (abs(z) * (1 - u) - eta).max(numbers.ZERO) * z.sgn()

        low = each(lambda z: less(z) if z > 0 else z, v.lo)
        return Box(low, each(lambda z: less(z) if z < 0 else z, v.hi))

    def accumulated(self, magnitudes: Balls, result: Balls, k: int, j: int) -> Balls:
        """Return A_k,j(S, Y)."""
        u, eta = self.u(self.accumulate), self.eta(self.accumulate)
        lost = u * (k * (magnitudes + result) / 2 + j * magnitudes)
        return np.asarray(lost / (1 - (k + j) * u) + (k + j) * eta, dtype=object)

    def flushed(self, a: Balls, b: Balls) -> Any:
        if not self.coarse:
            return numbers.ZERO
        sums = total(a) + total(b, -2)
        return numbers.power(-126) * (sums + 2 * a.shape[-1] + 4)


def gamma(count: int, u: arb) -> arb:
    return count * u / (1 - count * u)
