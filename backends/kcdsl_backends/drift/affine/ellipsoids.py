"""Bounds of weighted sums of squares by ellipsoids around the errors of rows (Rule 3.9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Row, largest_eigenvalue
from kcdsl_backends.drift.boxes import SAFE, gamma

FAINT = 2.0**-240
"""Added to weights and ellipsoids, so that float64 holds the products of their squares."""


@dataclass(frozen=True, slots=True)
class Energy:
    """What bounds Σ β_k e_k² of one row for weights β >= 0: e is in the ellipsoid `matrix` [n, n].

    `largest` bounds Σ e_k²; `squares` [n] are the sums of the squares of its rows.
    """

    matrix: Tensor
    largest: float
    squares: Tensor

    @staticmethod
    def of(matrix: Tensor, length: float) -> Energy:
        """Return the energy of errors in an ellipsoid that are no longer than `length`."""
        unit = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        matrix = matrix + FAINT * unit
        largest = largest_eigenvalue(matrix, float(matrix.diagonal().sum()) * SAFE)
        return Energy(matrix, min(largest, length**2 * SAFE), matrix.square().sum(-1))

    def root(self, weights: Tensor) -> Tensor:
        """Bound √(Σ β_k e_k²) for weights β [B, n] -> [B].

        Σ β e² = c Σ e² + Σ (β - c) e², for every c >= 0. The first sum is at most `largest`,
        the second the root of Σ_kl (β_k - c)(β_l - c) Q_kl².
        """
        weights = (weights + FAINT) * SAFE
        mixed = weights @ self.matrix.square()
        first, second = (mixed * weights).sum(-1), mixed.sum(-1)
        third = self.squares.sum()
        middle = second / third
        left = (first - middle * second).clamp_min(0) / third
        slope = self.largest / (third - self.largest**2).clamp_min(2.0**-40 * third).sqrt()
        price = (middle - slope * left.sqrt()).clamp_min(0)
        inexact = gamma(4 * len(self.squares) + 32) * (
            first + 2 * price * second + price.square() * third
        )
        found = first - 2 * price * second + price.square() * third + inexact
        return ((price * self.largest + found.clamp_min(0).sqrt()) * SAFE).sqrt() * SAFE


@dataclass(frozen=True, slots=True)
class RowEnergies:
    """The same of errors |e_k| <= factor_k |x_k| + own_k, x in an ellipsoid, by rows."""

    rows: Mapping[Row, Energy]
    factor: Tensor | None = None
    own: Tensor | None = None

    def root(self, row: Row, weights: Tensor) -> Tensor:
        """Bound √(Σ β_k e_k²) of a row for weights β [B, n] -> [B]; infinite if none is known."""
        if row not in self.rows:
            return weights.new_full(weights.shape[:1], torch.inf)
        scaled = weights if self.factor is None else weights * self.factor[row].square() * SAFE
        found = self.rows[row].root(scaled)
        if self.own is not None:
            found = found + (weights @ self.own[row].square() * SAFE).sqrt() * SAFE
        return found * SAFE

    def whole(self, weights: Tensor) -> Tensor:
        """Bound √(Σ β_k e_k²) of every row for weights β [..., n] -> [..., 1]."""
        found = torch.full_like(weights[..., :1], torch.inf)
        for row in self.rows:
            found[row] = self.root(row, weights[row][None])
        return found


def line(values: Tensor, lost: float) -> Tensor:
    """Return an ellipsoid around multiples by -1 to 1 of a vector [B] that is within `lost` of
    these values.

    (v + w)(v + w)ᵀ is at most (1 + t) v vᵀ + (1 + 1/t) w wᵀ for every t > 0; t = |w|/|v| here, 1
    where v is shorter than w.
    """
    length = float(values.norm()) * SAFE
    share = lost / length if length > lost else 1.0
    unit = torch.eye(len(values), dtype=values.dtype, device=values.device)
    rounding = unit * (lost * (lost + max(lost, length)))
    return (torch.outer(values, values) * (1 + share) + rounding) * SAFE
