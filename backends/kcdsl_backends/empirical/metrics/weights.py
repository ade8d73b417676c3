"""Aggregates of importance weights and of sampled log-probabilities."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from kcdsl_backends.empirical.metrics.evidence import Unmeasured, column, columns


def ess_fraction(log_weights: ArrayLike) -> float:
    """Return ESS/n = (sum w)^2 / (n sum w^2) of raw weights given by their logarithms.

    Never clamp weights before: weights inside [1/C, C] cannot have an ESS/n below
    4 C^2/(1 + C^2)^2, 0.64 for C = 2, whatever they were. Estimates 1/(1 + chi2(train || infer)).
    """
    values = column(log_weights, "ln w")
    weights = np.exp(values - values.max())
    return math.fsum(weights) ** 2 / (values.size * math.fsum(weights * weights))


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Return the correlation of two columns; raises Unmeasured where one of them is constant."""
    a, b = columns(2, x=x, y=y)
    a, b = (np.ldexp(v, -math.frexp(float(np.abs(v).max()))[1]) for v in (a, b))  # no square is inf
    a, b = a - math.fsum(a) / a.size, b - math.fsum(b) / b.size
    spread = math.sqrt(math.fsum(a * a)) * math.sqrt(math.fsum(b * b))
    if not spread > 0:
        raise Unmeasured("a column without spread has no correlation")
    return max(-1.0, min(1.0, math.fsum(a * b) / spread))


def pearson_probabilities(train_log: ArrayLike, infer_log: ArrayLike) -> float:
    """Return the correlation of the probabilities of sampled tokens, given their logarithms."""
    a, b = columns(2, train=train_log, infer=infer_log)
    return pearson(np.exp(a), np.exp(b))
