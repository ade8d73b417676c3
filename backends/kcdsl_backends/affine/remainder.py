"""Remainders of second order whose sum over a row is known (section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.affine.adjoint import Adjoint, at
from kcdsl_backends.affine.spectra import largest_eigenvalue
from kcdsl_backends.affine.tape import SAFE, Curved

SAMPLE = 192
"""About so many elements of a row are looked at to find a price."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """A vector o with low <= o <= high element by element, and Σ|o| <= total in every row.

    `low` <= 0 <= `high` [..., n], `total` [..., 1].
    """

    low: Tensor
    high: Tensor
    total: Tensor

    def curved(self) -> Curved:
        """Return what it adds to functionals."""
        return Curved(self._between, self._norm)

    def _between(self, a: Adjoint) -> tuple[Tensor, Tensor]:
        part = at(a.window)
        weights, low, high = a.values.abs(), -self.low[part], self.high[part]
        positive = a.values > 0
        total = self.total[part[:-1]]
        order = weights[..., :: _step(weights)].argsort(dim=-1, descending=True)
        most = _largest(weights, torch.where(positive, high, low), total, order)
        least = _largest(weights, torch.where(positive, low, high), total, order)
        return -least, most

    def _norm(self, a: Adjoint) -> float:
        """Bound |A o|: by column norms, and as Σ o²/cap <= Σ|o|, by that of A∘√cap."""
        part = at(a.window)
        most, total = torch.maximum(-self.low[part], self.high[part]), self.total[part[:-1]]
        columns = a.values.norm(dim=0, keepdim=True) * SAFE
        order = columns[..., :: _step(columns)].argsort(dim=-1, descending=True)
        one_by_one = float(_largest(columns, most[None], total, order))
        scaled = (a.values * most.sqrt()).flatten(1)
        products = scaled @ scaled.T
        spread = largest_eigenvalue(products, float(scaled.square().sum()) * SAFE)
        return min(one_by_one, math.sqrt(spread * float(total.sum()) * SAFE) * SAFE)


def _largest(weights: Tensor, caps: Tensor, total: Tensor, order: Tensor) -> Tensor:
    """Bound Σ weights·t over 0 <= t <= caps with row sums up to total: [B, ..., n] -> [B].

    Any price λ >= 0 gives the bound λ·total + Σ max(weights - λ, 0)·caps; the weight of the last
    element that is taken whole or in part, greatest weight first, is the best one. In long rows it
    is looked up among some of the elements, of which `order` is the order by weight.
    """
    step = _step(weights)
    if bool((caps.sum(-1, keepdim=True) <= total).all()):
        return (weights * caps).flatten(1).sum(-1) * SAFE
    ordered = weights[..., ::step].gather(-1, order)
    some = caps[..., ::step].expand_as(ordered).gather(-1, order) * step
    last = (some.cumsum(-1) < total).sum(-1, keepdim=True)
    price = torch.where(
        last < ordered.shape[-1],
        ordered.gather(-1, last.clamp_max(ordered.shape[-1] - 1)),
        torch.zeros_like(ordered[..., :1]),
    )
    value = price[..., 0] * total[..., 0] + ((weights - price).clamp_min(0) * caps).sum(-1)
    return value.flatten(1).sum(-1) * SAFE if value.dim() > 1 else value * SAFE


def _step(weights: Tensor) -> int:
    """Return the distance of the elements among which a price is looked up."""
    return max(1, weights.shape[-1] // SAMPLE)
