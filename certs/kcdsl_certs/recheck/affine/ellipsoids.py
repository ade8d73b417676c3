"""Ellipsoids around the errors of rows (section 1): |a·e| ≤ √(aᵀ P a) for every functional a.

Eigenvalues of their Gram matrices are bounded in floating point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, reads_one_each
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Floats
from kcdsl_certs.recheck.interval.state import gamma

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
        sure = value * (1 + 4 * n * gamma(n + 4, UNIT)) + 2.0**-30
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


Row = tuple[int, ...]
Ellipsoids = Mapping[Row, Floats]
_MORE = 1 + 2.0**-30
_FAINT = 2.0**-240  # so that float64 holds products of squares of weights and shapes


def extent_along(shape: Floats, functionals: Floats) -> Floats:
    """Return bounds [B] of functionals [B, n] on an ellipsoid, infinite where nothing is known."""
    if reads_one_each(functionals):
        squares = np.diagonal(functionals) ** 2 * np.diagonal(shape)
    else:
        squares = np.einsum("bi,bi->b", functionals @ shape, functionals)
    found = np.sqrt(np.maximum(squares, 0.0) + _lost(shape, functionals)) * _MORE
    return np.where(np.isfinite(found), found, np.inf)


def moved(shape: Floats, functionals: Floats) -> Floats:
    """Return the ellipsoid A P Aᵀ of functionals A [B, n], raised by what the products lost."""
    if reads_one_each(functionals):
        alone = np.diagonal(functionals)
        product = alone[:, None] * shape * alone
    else:
        product = functionals @ shape @ functionals.T
    return np.asarray(product + np.eye(len(product)) * _lost(shape, functionals).sum())


def _lost(shape: Floats, functionals: Floats) -> Floats:
    """Return what float64 may lose in aᵀ P a: |P_ij| ≤ √P_ii √P_jj."""
    size = np.abs(functionals) @ np.sqrt(np.maximum(np.diagonal(shape), 0.0))
    return np.asarray(size**2 * 4 * gamma(2 * len(shape) + 8, UNIT))


def sum_of(parts: list[Floats]) -> Floats:
    """Return an ellipsoid around sums of members: (Σ w) Σ P_k/w_k, w_k = √trace(P_k)."""
    roots = [math.sqrt(max(float(np.trace(part)), 0.0)) for part in parts]
    total, whole = np.zeros_like(parts[0]), sum(roots)
    for part, root in zip(parts, roots, strict=True):
        if root > 0:
            total += whole / root * part
    rounding = 2.0**-30 * float(np.trace(total)) * np.eye(len(total))
    return np.asarray((total / 2 + total.T / 2) * _MORE + rounding)


def longest(shape: Floats, functionals: Floats) -> float:
    """Return a bound of |A e|₂ for functionals A [B, n]."""
    n = len(shape)
    if len(functionals) <= n:
        product = moved(shape, functionals)
        return math.sqrt(largest(product, float(np.trace(product)) * _MORE)) * _MORE
    trace = float(np.trace(shape))
    try:
        root = np.linalg.cholesky(shape + 2.0**-30 * trace * np.eye(n))
    except np.linalg.LinAlgError:
        return math.inf
    sides = functionals @ root
    size = math.sqrt(largest(sides.T @ sides, float((sides**2).sum()) * _MORE))
    off = gamma(n + 4, UNIT) * float(np.linalg.norm(functionals) * np.linalg.norm(root))
    found = (size + off) * _MORE
    return found if math.isfinite(found) else math.inf


def reached(ellipsoids: Ellipsoids, reach: Floats, adjoint: Adjoint) -> Floats:
    """Return bounds [B] of functionals of an error: of each row by its ellipsoid or its reach."""
    found = np.zeros(adjoint.batch)
    for row, part in rows_of(adjoint):
        within = part.sizes(reach)
        if row in ellipsoids:
            columns = part.window[-1]
            values = part.values.reshape(part.batch, -1)
            within = np.minimum(within, extent_along(ellipsoids[row][columns, columns], values))
        found = found + within
    return found * _MORE


def rows_of(adjoint: Adjoint) -> list[tuple[Row, Adjoint]]:
    """Return the rows of a window with what functionals read of each."""
    *lead, _ = adjoint.extent
    ones = (1,) * len(lead)
    found = []
    for place in np.ndindex(*lead):
        row = tuple(int(i + s) for i, s in zip(place, adjoint.start[:-1], strict=True))
        values = adjoint.values[(slice(None), *place)].reshape(adjoint.batch, *ones, -1)
        found.append((row, Adjoint(values, (*row, adjoint.start[-1]))))
    return found


def norm_of(matrix: Floats, size: float) -> float:
    """Return a bound of |M x|₂ for |x|₂ ≤ size."""
    small = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    trace = float((matrix**2).sum()) * (1 + 2.0**-30) + TINY
    return math.sqrt(largest(small, trace)) * size * (1 + 2.0**-40)


def segment(ends: Floats, lost: float) -> Floats:
    """Return an ellipsoid around multiples by -1 to 1 of a vector that is off from `ends` [B] by up
    to `lost`: (v + w)(v + w)ᵀ ≤ (1 + t) v vᵀ + (1 + 1/t) w wᵀ."""
    size = float(np.linalg.norm(ends)) * _MORE
    t = lost / size if size > lost else 1.0
    rounding = np.eye(len(ends)) * (lost * (lost + max(lost, size)) * _MORE)
    return np.asarray(np.outer(ends, ends) * ((1 + t) * _MORE) + rounding)


@dataclass(frozen=True, slots=True)
class RowSquares:
    """One row e in the ellipsoid `shape`, with Σ e_k² at most `whole`; `lines` are sums of squares
    of the rows of the shape."""

    shape: Floats
    whole: float
    lines: Floats

    @staticmethod
    def of(shape: Floats, norm: float) -> RowSquares:
        """Return what an ellipsoid and a norm say of the squares of a row."""
        shape = shape + _FAINT * np.eye(len(shape))
        most = largest(shape, float(np.trace(shape)) * _MORE)
        return RowSquares(shape, min(most, norm**2) * _MORE, (shape**2).sum(axis=-1))

    def root(self, weights: Floats) -> Floats:
        """Return bounds [B] of √(Σ β e²) for weights β ≥ 0 [B, n].

        Q = shape: Σ β e² ≤ c·whole + |√Q diag(β - c) √Q|_F for every c ≥ 0, and the square of this
        norm is Σ_kl β_k β_l Q_kl² - 2c Σ_kl β_k Q_kl² + c² Σ_kl Q_kl².
        """
        weights = (weights + _FAINT) * _MORE
        squares, total = weights @ self.shape**2, float(self.lines.sum())
        both, one = (squares * weights).sum(axis=-1), squares.sum(axis=-1)
        least = np.full(len(weights), np.inf)
        if not total > 0:
            return least
        off = np.sqrt(np.maximum(both - one**2 / total, 0.0) / total)
        steep = self.whole / math.sqrt(max(total - self.whole**2, 2.0**-40 * total))
        lost = gamma(4 * len(self.lines) + 64, UNIT)
        for price in (np.maximum(one / total - steep * off, 0.0), np.zeros(len(weights))):
            middle, last = 2 * price * one, price**2 * total
            norm = np.maximum(both - middle + last, 0.0) + lost * (both + middle + last)
            least = np.minimum(least, price * self.whole + np.sqrt(norm) * _MORE)
        return np.asarray(np.sqrt(least * _MORE) * _MORE)


@dataclass(frozen=True, slots=True)
class Squares:
    """Rows |e_k| ≤ factor_k·|x_k| + own_k, x as `rows` say."""

    rows: Mapping[Row, RowSquares]
    factor: Floats | None = None
    own: Floats | None = None

    def root(self, row: Row, weights: Floats) -> Floats:
        """Return bounds [B] of √(Σ β e²) of a row for β [B, n], infinite where none is known."""
        if row not in self.rows:
            return np.full(len(weights), np.inf)
        sized = weights if self.factor is None else weights * (self.factor[row] ** 2 * _MORE)
        found = self.rows[row].root(sized)
        if self.own is not None:
            found = found + np.sqrt(weights @ self.own[row] ** 2 * _MORE) * _MORE
        return np.asarray(found * _MORE)

    def each(self, weights: Floats) -> Floats:
        """Return bounds [..., 1] of √(Σ β e²) of every row for β [..., n]."""
        found = np.full((*weights.shape[:-1], 1), np.inf)
        for row in self.rows:
            found[row] = self.root(row, weights[row][None])[0]
        return found
