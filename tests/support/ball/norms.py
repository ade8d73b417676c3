"""Layer norms of one row: normalised values of both kernels, and their rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from flint import arb

from tests.support.ball import numbers
from tests.support.ball.boxes import Box, around
from tests.support.ball.kernel import Kernel, gamma
from tests.support.ball.numbers import Balls, each, larger, most, smaller, total


def centred_box(x: Box) -> Box:
    n = x.lo.shape[-1]
    m, r = x.middle, x.radius
    share = r * (1 - arb(2) / n) + total(r) / n
    return around(m - total(m) / n, share)


def secant(a: Balls, b: Balls) -> Balls:
    """Return the decrease of 1/sqrt(v) per unit of v between a = 1/sqrt(v) and b."""
    return np.asarray((a * b) ** 2 / (a + b), dtype=object)


@dataclass(frozen=True)
class Side:
    c: Box
    v: Box
    r: Box
    y: Box

    @staticmethod
    def of(x: Box, eps: arb, centred: bool) -> Side:
        n = x.lo.shape[-1]
        c = centred_box(x) if centred else x
        zero = numbers.ZERO
        inner = larger(larger(c.lo, -c.hi), zero)
        low, high = inner**2, c.mag**2
        v = Box(total(low) / n + eps, total(high) / n + eps)
        r = Box(
            each(lambda z: 1 / z.sqrt(), v.hi),
            each(lambda z: 1 / z.sqrt(), v.lo),
        )
        cap = arb(n - 1 if centred else n).sqrt()
        top = smaller(_greatest(c.hi, low, high, n, eps), cap)
        bottom = larger(-_greatest(-c.lo, low, high, n, eps), -cap)
        return Side(c, v, r, Box(bottom, top).meet(c * r))


def _greatest(h: Balls, low: Balls, high: Balls, n: int, eps: arb) -> Balls:
    def one(value: arb, rest_low: arb, rest_high: arb) -> arb:
        if value == 0:
            return numbers.ZERO
        rest = rest_low if value >= 0 else rest_high
        return value / ((value**2 + rest) / n + eps).sqrt()

    return each(one, h, total(low) - low, total(high) - high)


def norm_error(
    kernel: Kernel, x: Box, apart: Balls, at: Side, gain: Balls, bias: Balls, centred: bool
) -> Balls:
    n, u, eta = x.lo.shape[-1], kernel.u_f, kernel.eta_f
    mean = total(x.mag) / n
    e_c: Any = numbers.ZERO
    theta: Any = gamma(n + 3, u) + 8 * u
    between = 2 * apart
    if centred:
        e_c = 4 * u * x.mag + gamma(n + 6, u) * mean + (n + 6) * eta + total(between) / n
        kappa = 4 * gamma(n + 6, u) * (total(x.mag**2) / n) / at.v.lo
        theta = each(lambda z: (1 + 8 * u) / (1 - z).sqrt() - 1, kappa)
    tau = each(lambda z, v: (z / (n * v)).sqrt(), total(between**2), at.v.lo)
    theta = (1 + theta) * (1 + tau) - 1
    theta = (1 + theta) * (1 + u) ** 2 - 1
    y = at.y.mag
    e_n = theta * y + e_c * at.r.hi * (1 + theta)
    if kernel.coarse:
        u_c, eta_c = kernel.cast(kernel.compute)
        e_n = e_n + u_c * (y + e_n) + eta_c
    tiny = eta * (1 + gain + 3 * most(x.mag))
    return np.asarray(e_n * gain + 3 * u * (y * gain + e_n * gain + bias) + tiny, dtype=object)
