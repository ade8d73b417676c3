"""Bounds of eigenvalues that hold in floating point."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kcdsl_backends.interval.box import gamma

ATTEMPTS = 8
"""How often an estimate is raised, by more each time, until the factorisation succeeds."""
STEPS = 8
"""Steps of the power iteration."""


def largest_eigenvalue(products: Tensor, trace: float) -> float:
    """Bound the largest eigenvalue, by a Cholesky factorisation that succeeds (Rump 2006)."""
    n = products.shape[0]
    even = (products + products.T) / 2
    unit = torch.eye(n, dtype=even.dtype, device=even.device)
    value = _estimate(even)
    for attempt in range(ATTEMPTS):
        value = value * (1 + 2.0 ** (attempt - 8))
        _, failed = torch.linalg.cholesky_ex(value * unit - even)
        if not int(failed) and math.isfinite(value):
            return min(trace, value * (1 + 4 * n * gamma(n + 4)) + 2.0**-30 * trace)
    return trace


def _estimate(even: Tensor) -> float:
    """Return about the largest eigenvalue: power iteration on the fourth power, from below."""
    scale = float(even.diagonal().sum())
    if not 0 < scale < math.inf:
        return scale
    square = even / scale @ (even / scale)
    fourth = square @ square
    vector = fourth.sum(-1) + fourth.diagonal()
    for _ in range(STEPS):
        vector = fourth @ vector
        vector = vector / vector.norm().clamp_min(2.0**-900)
    return float((even @ vector).norm())
