"""Bounds of eigenvalues that hold in floating point."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from kcdsl_backends.interval.box import gamma

RISES = (-20, -14, -12, -10, -8, -6, -4, -4)
"""By how much an estimate is raised, one after the other, until the factorisation succeeds; then
once more, so that a reader whose estimate is off in other digits finds no larger bound."""
STEPS = 48
"""Steps of the Lanczos iteration."""
SMALL = 160
"""Up to this size all eigenvalues are computed."""


def largest_eigenvalue(products: Tensor, trace: float) -> float:
    """Bound the largest eigenvalue, by a Cholesky factorisation that succeeds (Rump 2006).

    Args:
        products: [n, n], a Gram matrix.
        trace: a bound of its trace.
    """
    if not (0 < trace < math.inf and bool(torch.isfinite(products).all())):
        return trace
    n = products.shape[0]
    even = products / 2 / trace + products.T / 2 / trace
    unit = torch.eye(n, dtype=even.dtype, device=even.device)
    value = _estimate(even)
    for rise, more in pairwise(RISES):
        value = value * (1 + 2.0**rise)
        _, failed = torch.linalg.cholesky_ex(value * unit - even)
        if not int(failed) and math.isfinite(value):
            sure = value * (1 + 2.0**more) * (1 + 4 * n * gamma(n + 4)) + 2.0**-30
            return trace * min(1.0, sure) * (1 + 2.0**-50)
    return trace


def _estimate(even: Tensor) -> float:
    """Return about the largest eigenvalue, by the Lanczos iteration."""
    n = even.shape[0]
    if n <= SMALL:
        return float(torch.linalg.eigvalsh(even)[-1])
    vector = even.abs().sum(-1)
    length = float(vector.norm())
    if length == 0:
        return 0.0
    vector = vector / length
    basis = even.new_zeros(STEPS, n)
    for step in range(STEPS):
        basis[step] = vector
        known = basis[: step + 1]
        vector = even @ vector
        for _ in range(2):
            vector = vector - known.T @ (known @ vector)
        size = float(vector.norm())
        if size < 2.0**-40:
            basis = known
            break
        vector = vector / size
    return float(torch.linalg.eigvalsh(basis @ even @ basis.T)[-1])
