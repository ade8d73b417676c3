"""Remainders of activations: a vector between two others, its magnitudes summing to little."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.spectrum import largest
from kcdsl_certs.recheck.affine.tape import FAINT, Curve
from kcdsl_certs.recheck.box import Floats

_MORE = 1 + 2.0**-38


@dataclass(frozen=True, slots=True)
class Remainder:
    """o with low ≤ o ≤ high, low ≤ 0 ≤ high [..., n], and Σ|o| ≤ total [..., 1] in each row."""

    low: Floats
    high: Floats
    total: Floats

    @property
    def curve(self) -> Curve:
        """Return the bounds of its functionals."""
        return Curve(self._between, self._length)

    def _between(self, adjoint: Adjoint) -> tuple[Floats, Floats]:
        below, above = -self.low[adjoint.window], self.high[adjoint.window]
        up, weights = adjoint.values > 0, np.abs(adjoint.values)
        total = self.total[adjoint.window[:-1]]
        least = most_of(weights, np.where(up, below, above), total)
        most = most_of(weights, np.where(up, above, below), total)
        return -least, most

    def _length(self, adjoint: Adjoint) -> float:
        cap = np.maximum(-self.low, self.high)[adjoint.window]
        total = self.total[adjoint.window[:-1]]
        columns = np.linalg.norm(adjoint.values, axis=0)[None] * _MORE + FAINT
        by_columns = float(most_of(columns, cap[None], total)[0])
        scaled = (adjoint.values * np.sqrt(cap)).reshape(adjoint.batch, -1)
        spread = largest(scaled @ scaled.T, float((scaled**2).sum()) * _MORE)
        return min(by_columns, math.sqrt(spread * float(total.sum())) * _MORE + 2.0**-450)


def most_of(weights: Floats, caps: Floats, total: Floats) -> Floats:
    """Return a bound of Σ w·t, 0 ≤ t ≤ caps, with rows of t that sum to at most `total`.

    It is λ·total + Σ max(w - λ, 0)·caps for any λ ≥ 0; that λ is best at which elements of larger
    weight use up the total. weights and caps are [B, ..., n], total [..., 1]; returned is [B].
    """
    caps = np.broadcast_to(caps, weights.shape)
    order = np.argsort(-weights, axis=-1)
    ordered = np.take_along_axis(weights, order, axis=-1)
    used = np.cumsum(np.take_along_axis(caps, order, axis=-1), axis=-1)
    last = (used < total).sum(axis=-1, keepdims=True)
    n = weights.shape[-1]
    price = np.take_along_axis(ordered, np.minimum(last, n - 1), axis=-1)
    price = np.where(last < n, price, 0.0)
    over = (np.maximum(weights - price, 0.0) * caps).sum(axis=-1)
    # a price of 0 costs nothing, whatever the total, which may be infinite
    paid = np.where(price > 0, price * np.where(price > 0, total, 0.0), 0.0)[..., 0]
    return np.asarray((over + paid).reshape(weights.shape[0], -1).sum(axis=-1) * _MORE)
