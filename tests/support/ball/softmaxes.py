"""Softmax of one row: range, drift and rounding, and hulls of averaged values."""

from __future__ import annotations

import numpy as np
from flint import arb

from tests.support.ball import numbers
from tests.support.ball.boxes import Box, max_of, min_of
from tests.support.ball.kernel import FINE, Kernel
from tests.support.ball.numbers import Balls, balls, least, most
from tests.support.ball.runs import FORMATS


def softmax_range(s: Box) -> Box:
    n = s.lo.size
    lo, hi = np.empty(n, dtype=object), np.empty(n, dtype=object)
    for k in range(n):
        others = [j for j in range(n) if j != k]
        lo[k] = 1 / (1 + sum(((s.hi[j] - s.lo[k]).exp() for j in others), numbers.ZERO))
        hi[k] = 1 / (1 + sum(((s.lo[j] - s.hi[k]).exp() for j in others), numbers.ZERO))
    return Box(lo, hi)


def softmax_drift(p: Box, d: Box) -> Box:
    n = p.lo.size
    lo, hi = balls(np.zeros(n)), balls(np.zeros(n))
    if n == 1:
        return Box(lo, hi)
    for k in range(n):
        others = [j for j in range(n) if j != k]
        t_lo = d.lo[k] - max_of(d.hi[others])
        t_hi = d.hi[k] - min_of(d.lo[others])
        lo[k] = _extreme(p.lo[k], p.hi[k], t_lo, -1)
        hi[k] = _extreme(p.lo[k], p.hi[k], t_hi, 1)
    return Box(lo, hi)


def _extreme(low: arb, high: arb, t: arb, sign: int) -> arb:
    def f(p: arb) -> arb:
        k = t.expm1()
        return p * (1 - p) * k / (1 + p * k)

    ends = f(low).max(f(high)) if sign > 0 else f(low).min(f(high))
    steepest = 1 / (1 + (t / 2).exp())
    if sign * t >= 0 and low <= steepest and steepest <= high:
        return (t / 4).tanh()
    return ends


def softmax_rounding(kernel: Kernel, form: str, s: Box, apart: Balls, high: Balls, n: int) -> Balls:
    u, (u_p, eta_p) = kernel.u_f, kernel.cast(form)
    spread = max_of(s.hi) - min_of(s.lo)
    a = u * (spread + 2 * max_of(s.mag)) if kernel.fused else u * spread
    epsilon = 2 * int(kernel.record["attention"]["exp_ulps"]) * u
    once = u / (1 - u)
    total_ = 2 * kernel.tiles(n) * (a + epsilon / (1 - epsilon) + once) + (n + 8) * once
    total_ = total_ + 2 * max_of(apart)
    if kernel.fused and FORMATS[form][0] < FINE:
        lost = (1 + u_p) * n * eta_p
        total_ = total_ + u_p / (1 - u_p) + lost / (1 - lost)
    theta, zeta = total_.expm1(), numbers.power(-120)
    return np.asarray(theta * high + zeta + u_p * (high * (1 + theta) + zeta) + eta_p, dtype=object)


def hull(v: Box, allowed: np.ndarray) -> Box:
    shape = (*np.broadcast_shapes(allowed.shape[:-2], v.lo.shape[:-2]), allowed.shape[-2])
    lo = np.empty((*shape, v.lo.shape[-1]), dtype=object)
    hi = np.empty(lo.shape, dtype=object)
    columns = np.broadcast_to(allowed, (*shape, allowed.shape[-1]))
    low = np.broadcast_to(v.lo, (*shape[:-1], *v.lo.shape[-2:]))
    high = np.broadcast_to(v.hi, low.shape)
    for index in np.ndindex(*shape):
        some = np.flatnonzero(columns[index])
        lo[index] = least(low[index[:-1]][some], 0)[0]
        hi[index] = most(high[index[:-1]][some], 0)[0]
    return Box(lo, hi)
