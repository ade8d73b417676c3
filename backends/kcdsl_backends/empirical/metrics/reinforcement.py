"""What ignoring the importance ratio does to a policy gradient, from recorded rollouts.

w = p(y)/q(y) of sampled tokens, A their advantages, g gradients on a probe batch.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from kcdsl_backends.empirical.metrics.evidence import Unmeasured, column, columns


def adv_weighted_bias(delta: ArrayLike, advantages: ArrayLike) -> float:
    """Return |mean((w - 1) A)|, the scalar part of the gradient bias without a bound on scores.

    The inner mean is unbiased for E_infer[(w - 1) A]; the absolute value is biased upwards by
    noise, so a verdict needs the interval of the inner mean.
    """
    return abs(adv_weighted_mean(delta, advantages))


def adv_weighted_mean(delta: ArrayLike, advantages: ArrayLike) -> float:
    """Return mean((w - 1) A); delta = ln w.

    Raises:
        Unmeasured: terms beyond float64 stand on both sides of zero.
    """
    ratios, values = columns(delta=delta, advantages=advantages)
    with np.errstate(over="ignore", invalid="ignore"):
        terms = np.where(values == 0, 0.0, np.expm1(ratios) * values)
    if terms.max() == math.inf and terms.min() == -math.inf:
        raise Unmeasured("(w - 1) A goes beyond float64 on both sides of zero")
    return math.fsum(terms / ratios.size)


def is_variance_inflation(delta: ArrayLike) -> float:
    """Return mean w^2 = 1 + chi2, by which importance weighting multiplies a variance."""
    values = column(delta, "ln w")
    with np.errstate(over="ignore"):
        return math.fsum(np.exp(2 * values) / values.size)


def grad_cosine(train: ArrayLike, infer: ArrayLike) -> float:
    """Return the cosine of two gradients; raises Unmeasured where one of them is zero."""
    g, h = columns(train=train, infer=infer)
    a, b = _length(g), _length(h)
    if not (a > 0 and b > 0):
        raise Unmeasured("a gradient of zero has no direction")
    apart = _length(h / b - g / a)
    return max(-1.0, min(1.0, 1 - apart * apart / 2))


def grad_rel_bias(train: ArrayLike, infer: ArrayLike) -> float:
    """Return ||g_infer - g_train|| / ||g_train||; raises Unmeasured where g_train is zero."""
    g, h = columns(train=train, infer=infer)
    a = _length(g)
    if not a > 0:
        raise Unmeasured("no bias is relative to a gradient of zero")
    return _length(h - g) / a


def _length(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    largest = float(np.abs(values).max())
    if largest == 0:
        return 0.0
    return largest * math.sqrt(math.fsum((values / largest) ** 2))
