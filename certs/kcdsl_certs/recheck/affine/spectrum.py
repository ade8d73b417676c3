"""The largest eigenvalue of a Gram matrix, bounded in floating point (section 1)."""

from __future__ import annotations

import math

import numpy as np

from kcdsl_certs.recheck.box import Floats
from kcdsl_certs.recheck.rules.state import gamma

_UNIT = 2.0**-53
_SMALL = 160  # up to this size all eigenvalues are computed
_STEPS = 48  # of the Lanczos iteration
_RISES = (-20, -14, -12, -10, -8, -6, -4)


def largest(gram: Floats, trace: float) -> float:
    """Return a bound of the largest eigenvalue of a positive semidefinite matrix.

    Args:
        gram: [n, n], off by up to 2^-30·trace (in the norm) from the matrix that is meant.
        trace: a bound of the trace of that matrix.
    """
    if not (math.isfinite(trace) and trace > 0 and bool(np.isfinite(gram).all())):
        return trace
    n = gram.shape[0]
    even = gram / 2 / trace + gram.T / 2 / trace
    value = _estimate(even)
    for rise in _RISES:
        value = value * (1 + 2.0**rise)
        try:
            np.linalg.cholesky(value * np.eye(n) - even)
        except np.linalg.LinAlgError:
            continue
        sure = value * (1 + 4 * n * gamma(n + 4, _UNIT)) + 2.0**-30
        return float(trace * min(1.0, sure) * (1 + 2.0**-50))
    return trace


def _estimate(even: Floats) -> float:
    """Return about the largest eigenvalue."""
    n = even.shape[0]
    if n <= _SMALL:
        return float(np.linalg.eigvalsh(even)[-1])
    start = np.abs(even).sum(axis=-1)
    if not start.any():
        return 0.0
    basis = np.zeros((_STEPS, n))
    vector = start / np.linalg.norm(start)
    for step in range(_STEPS):
        basis[step] = vector
        vector = even @ vector
        for _ in range(2):
            vector = vector - basis[: step + 1].T @ (basis[: step + 1] @ vector)
        size = float(np.linalg.norm(vector))
        if size < 2.0**-40:
            basis = basis[: step + 1]
            break
        vector = vector / size
    return float(np.linalg.eigvalsh(basis @ even @ basis.T)[-1])
