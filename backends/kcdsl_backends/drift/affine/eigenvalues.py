"""Bounds of largest eigenvalues, and ellipsoids around rows of errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Adjoint, by_rows
from kcdsl_backends.drift.boxes.box import gamma

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


Row = tuple[int, ...]
"""The index of a row of the last dimension."""
Ellipsoids = Mapping[Row, Tensor]
"""P [n, n] of some rows of a tensor [..., n]."""
MORE = 1.0 + 2.0**-30
"""More than the relative error of what is formed of few sums here."""


def quadratic(matrix: Tensor, functionals: Tensor) -> Tensor:
    """Bound |a·e| by √(aᵀ P a) for functionals a [B, n] -> [B]; infinite where that is none."""
    value = ((functionals @ matrix) * functionals).sum(-1)
    found = (value.clamp_min(0) + _rounding(matrix, functionals)).sqrt() * MORE
    return found.nan_to_num(nan=torch.inf, posinf=torch.inf)


def image(matrix: Tensor, functionals: Tensor) -> Tensor:
    """Return A P Aᵀ for functionals A [B, n], with what float64 may have lost on the diagonal."""
    lost = float(_rounding(matrix, functionals).sum())
    unit = torch.eye(functionals.shape[0], dtype=matrix.dtype, device=matrix.device)
    return functionals @ matrix @ functionals.T + lost * unit


def longest(matrix: Tensor, functionals: Tensor) -> float:
    """Bound |A e|₂ for functionals A [B, n]: √λ_max of A P Aᵀ.

    Of many functionals that is the largest singular value of A L, with P + 2^-30·trace = L Lᵀ;
    infinite where the factorisation fails.
    """
    n = matrix.shape[0]
    if functionals.shape[0] <= n:
        inner = image(matrix, functionals)
        return math.sqrt(largest_eigenvalue(inner, float(inner.diagonal().sum()) * MORE)) * MORE
    unit = torch.eye(n, dtype=matrix.dtype, device=matrix.device)
    trace = float(matrix.diagonal().sum())
    root, failed = torch.linalg.cholesky_ex(matrix + 2.0**-30 * trace * unit)
    if int(failed) or not math.isfinite(trace):
        return math.inf
    sized = functionals @ root
    size = math.sqrt(largest_eigenvalue(sized.T @ sized, float(sized.square().sum()) * MORE))
    lost = gamma(n + 4) * float(functionals.norm() * root.norm())
    return (size + lost) * MORE


def _rounding(matrix: Tensor, functionals: Tensor) -> Tensor:
    """Return what aᵀ P a may be off by: γ (Σ |a_i| √P_ii)², as |P_ij| <= √P_ii √P_jj."""
    size = functionals.abs() @ matrix.diagonal().clamp_min(0).sqrt()
    return 4 * gamma(2 * matrix.shape[0] + 8) * size.square()


def around_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return an ellipsoid that holds the sums of members of others: (Σ w) Σ P_k/w_k.

    By Cauchy and Schwarz (Σ √q_k)² <= (Σ w) Σ q_k/w_k for all w > 0; w_k = √trace here. The share
    of 2^-30 of the trace is more than what sums of up to 2^22 products lost.
    """
    weights = [math.sqrt(max(float(part.diagonal().sum()), 0.0)) for part in parts]
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        if weight > 0:
            total = total + part * (sum(weights) / weight)
    unit = torch.eye(total.shape[0], dtype=total.dtype, device=total.device)
    even = (total + total.T) / 2
    return even * MORE + unit * (2.0**-30 * float(total.diagonal().sum()))


def reached(ellipsoids: Ellipsoids, error_bound: Tensor, functional: Adjoint) -> Tensor:
    """Bound functionals [B] of an error: row by row by the ellipsoid, or by the error bound."""
    if not ellipsoids:
        return functional.magnitude(error_bound)
    total = torch.zeros_like(functional.values.flatten(1)[:, 0])
    columns = slice(*functional.window[-1])
    for row, part in by_rows(functional):
        within = part.magnitude(error_bound)
        if row in ellipsoids:
            matrix = ellipsoids[row][columns, columns]
            within = torch.minimum(within, quadratic(matrix, part.values.flatten(1)))
        total = total + within
    return total * MORE
