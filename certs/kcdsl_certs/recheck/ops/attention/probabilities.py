"""Softmax in real arithmetic and its rounding, row by row (section 5)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import ULP, Bools, Box, Floats, others
from kcdsl_certs.recheck.interval.state import Mask, Own
from kcdsl_certs.recheck.numerics.formats import FLOAT32
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics

_FAR = 600.0  # beyond this a drift of the logit counts as unbounded
_TRUST = 2.0**-49
ZETA = 2.0**-120
_MARGIN = 2.0**-40  # bounds the relative error of p°


def allowed_columns(masks: Sequence[object], shape: tuple[int, ...]) -> Bools:
    """Return the mask of allowed columns of the scores; refuse a row without any."""
    if not masks:
        return np.ones(shape, dtype=np.bool_)
    mask = masks[0]
    if not isinstance(mask, Mask):
        raise Rejected("rule/mask", "the mask of a softmax must be a bool constant")
    try:
        allowed = np.broadcast_to(mask.allowed, shape)
    except ValueError:
        raise Rejected("graph/shape", "the mask does not fit the scores") from None
    if not allowed.any(axis=-1).all():
        raise Rejected("rule/mask", "a row of the mask allows no column")
    return allowed


def probabilities(scores: Box, allowed: Bools) -> Box:
    """Return the range of the exact softmax over the allowed columns; 0 elsewhere."""
    top = np.where(allowed, scores.hi, -np.inf).max(axis=-1, keepdims=True)
    high = np.where(allowed, _exp_up(box.add_up(scores.hi, -top)), 0.0)
    low = np.where(allowed, _exp_down(box.add_down(scores.lo, -top)), 0.0)
    slack = (scores.shape[-1] + 4) * ULP
    least, most = others(low) * (1 - slack), others(high) * (1 + slack) + 2.0**-1060
    lo = np.maximum(box.down(low / (low + most) * (1 - 4 * ULP)), 0.0)
    hi = np.minimum(box.above(high / np.where(allowed, high + least, 1.0) * (1 + 4 * ULP)), 1.0)
    single = allowed & (allowed.sum(axis=-1, keepdims=True) == 1)
    lo, hi = np.where(allowed, lo, 0.0), np.where(allowed, hi, 0.0)
    return Box(np.where(single, 1.0, lo), np.where(single, 1.0, hi))


def _exp_up(x: Floats) -> Floats:
    return np.asarray(np.exp(x) * (1 + _TRUST) + 2.0**-1060)


def _exp_down(x: Floats) -> Floats:
    return np.maximum(np.exp(x) * (1 - _TRUST) - 2.0**-1060, 0.0)


def _greatest_other(values: Floats) -> Floats:
    """Return for each element the maximum of all others of its row (-inf if there are none)."""
    none = np.full((*values.shape[:-1], 1), -np.inf)
    before = np.maximum.accumulate(values, axis=-1)[..., :-1]
    after = np.maximum.accumulate(values[..., ::-1], axis=-1)[..., ::-1][..., 1:]
    left, right = np.concatenate([none, before], axis=-1), np.concatenate([after, none], axis=-1)
    return np.asarray(np.maximum(left, right))


def probability_drift(p: Box, drift: Box, allowed: Bools) -> Box:
    """Return a box of p_i - p_t from the range of p_t and the drift of the scores."""
    several = allowed & (allowed.sum(axis=-1, keepdims=True) > 1)
    high = _greatest_other(np.where(allowed, drift.hi, -np.inf))
    low = -_greatest_other(np.where(allowed, -drift.lo, -np.inf))
    t_lo = box.add_down(drift.lo, -np.where(several, high, 0.0))
    t_hi = box.add_up(drift.hi, -np.where(several, low, 0.0))
    t_lo, t_hi = np.where(several, t_lo, 0.0), np.where(several, t_hi, 0.0)
    hi = np.maximum(_moved(p.lo, t_hi)[1], _moved(p.hi, t_hi)[1])
    lo = np.minimum(_moved(p.lo, t_lo)[0], _moved(p.hi, t_lo)[0])
    hi = np.where((t_hi >= 0) & _steepest_inside(p, t_hi), _greatest_move(t_hi), hi)
    lo = np.where((t_lo <= 0) & _steepest_inside(p, t_lo), -_greatest_move(-t_lo), lo)
    hi = np.where(t_hi > _FAR, box.add_up(np.ones(()), -p.lo), hi)
    lo = np.where(t_lo < -_FAR, -p.hi, lo)
    still = ~several | ((t_lo == 0) & (t_hi == 0))
    return Box(np.where(still, 0.0, lo), np.where(still, 0.0, hi))


def _steepest_inside(p: Box, t: Floats) -> Bools:
    """Return where p may contain p° = 1/(1 + e^{t/2}), where |f(·, t)| is greatest: tanh(|t|/4).

    f itself is not computed there: for t far below 0, p° rounds to 1 in float64.
    """
    place = 1 / (1 + np.exp(np.clip(t, -_FAR, _FAR) / 2))
    return np.asarray((p.lo * (1 - _MARGIN) <= place) & (place <= p.hi * (1 + _MARGIN)))


def _greatest_move(t: Floats) -> Floats:
    """Return an upper bound of tanh(t/4) for t ≥ 0."""
    return box.above(np.tanh(t / 4) * (1 + 2.0**-47) + 2.0**-1000)


def _moved(p: Floats, t: Floats) -> tuple[Floats, Floats]:
    """Return bounds of f(p, t) = p(1 - p)K / (1 + pK), K = expm1(t), for |t| ≤ 600.

    1 + pK is computed as (1 - p) + p·e^t, whose terms are non-negative.
    """
    t = np.clip(t, -_FAR, _FAR)
    rest = 1 - p
    found = p * rest * np.expm1(t) / (rest + p * np.exp(t))
    slack = np.abs(found) * 2.0**-47 + 2.0**-1000
    return box.down(found - slack), box.above(found + slack)


def total_variation(star: Box, drift: Box, allowed: Bools) -> Floats:
    """Return a bound of the total variation of each row, [..., T, 1]."""
    n = star.shape[-1]
    top = np.where(allowed, drift.hi, -np.inf).max(axis=-1, keepdims=True)
    bottom = np.where(allowed, drift.lo, np.inf).min(axis=-1, keepdims=True)
    spread = box.add_up(top, -bottom)
    by_logits = np.minimum(box.up(np.tanh(box.lifted(spread) / 4), 8), 1.0)
    total = box.up(box.mag(star).sum(axis=-1, keepdims=True), n + 8)
    return np.minimum(by_logits, total / 2)


def softmax_rounding(
    kernel: KernelNumerics, scores: Box, high: Floats, allowed: Bools, own: Own = None
) -> Floats:
    """Return B_K ≥ |stored probability - exact softmax of the stored scores|, high ≥ the latter.

    Raises Rejected "bound/not-finite".
    """
    u, eta = kernel.off(kernel.probabilities)
    theta = relative_rounding(kernel, scores, allowed, own=own)
    size = box.lifted(high)
    wide = theta * size + ZETA + u * (size * (1 + theta) + ZETA) + eta
    found = np.where(allowed, box.up(wide), 0.0)
    if not bool(np.isfinite(found).all()):
        raise Rejected("bound/not-finite", "the rounding of a softmax has no bound")
    return found


def relative_rounding(
    kernel: KernelNumerics, scores: Box, allowed: Bools, columns: int | None = None, own: Own = None
) -> Floats:
    """Return Θ_K of each row, the relative error before the cast of the probabilities.

    The sum of a row may be of scores that are up to 2·own from those of the probabilities. The
    number of columns is that of the scores unless `columns` is given.

    Row sums of probabilities rounded to a coarse format have a relative error of u_p and an error
    of η_p per column, relative to a sum of at least about 1. Raises Rejected "bound/not-finite".
    """
    n, u, form = columns or scores.shape[-1], kernel.inner.u, kernel.probabilities
    relative, faint = kernel.off(form)
    top = np.where(allowed, scores.hi, -np.inf).max(axis=-1, keepdims=True)
    bottom = np.where(allowed, scores.lo, np.inf).min(axis=-1, keepdims=True)
    argument = u * box.add_up(top, -bottom)
    if kernel.fused:
        # exp(s·c - m·c) with m·c rounded separately: the error grows with the size, not the range.
        size_of = np.where(allowed, box.magnitude(scores), 0.0).max(axis=-1, keepdims=True)
        argument = box.up(argument + 2 * u * size_of, 2)
    epsilon = 2 * kernel.exp_ulps * u
    lost = (1 + relative) * n * faint
    if not (epsilon < 1 and lost < 1):
        raise Rejected("bound/not-finite", "the rounding of a softmax has no bound")
    tiles = -(-n // kernel.tile) if kernel.fused else 1
    once = u / (1 - u)
    exponent = 2 * tiles * (argument + epsilon / (1 - epsilon) + once) + (n + 8) * once
    if kernel.fused and form.precision < FLOAT32.precision:
        exponent = exponent + relative / (1 - relative) + lost / (1 - lost)
    if own is not None:
        exponent = exponent + 2 * np.where(allowed, own, 0.0).max(axis=-1, keepdims=True)
    theta = box.up(np.expm1(box.up(exponent)), 16)
    if not bool(np.isfinite(theta).all()):
        raise Rejected("bound/not-finite", "the rounding of a softmax has no bound")
    return theta
