"""Cases of a row: boxes of all its elements for each choice of grid points (section 7).

A probability that may round to one of two grid points moves every element of the context of its row
and head. One choice for all elements gives tighter bounds than the worst choice for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.numerics.formats import CASTS, Casts, Format
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.boxes import Box, down, gamma, up

CHOICES = 8
"""Most elements of a row that are chosen one by one: 2^8 cases."""
SCORES = 4
"""Most scores among these."""
NUMBERS = 2**22
"""Most numbers of all cases of a tensor."""
_SAFE = 1.0 + 2.0**-40
_APART = 2.0**-34
"""Bounds the relative difference of the numbers of two programs."""
_PRODUCTS = 2**23
"""Most numbers of a batch of functionals in all cases."""


def beyond(formed: Box) -> Box:
    """Return a slightly wider box, to be rounded to a grid.

    Then a second program that follows the same rules finds no further grid point, also at ties,
    though its numbers differ in their last digits.
    """
    return formed.widen(formed.mag() * _APART)


@dataclass(frozen=True, slots=True)
class Ends:
    """The least and greatest grid points of stored values; `two`: there are no others between them.
    `casts` is the rounding to the grid."""

    low: Tensor
    high: Tensor
    two: Tensor
    form: Format
    casts: Casts = CASTS["nearest"]

    @staticmethod
    def of(low: Tensor, high: Tensor, form: Format, casts: Casts = CASTS["nearest"]) -> Ends:
        """Return the ends, with `two` where they are neighbours."""
        middle = form.nearest(low / 2 + high / 2)
        return Ends(low, high, (low < high) & ((middle == low) | (middle == high)), form, casts)

    def within(self, formed: Box) -> Ends:
        """Return the ends of stored values whose results before the cast also lie in a box."""
        formed = beyond(formed)
        low, high = (self.casts.step(end, self.form) for end in (formed.lo, formed.hi))
        return Ends.of(
            torch.minimum(torch.maximum(low, self.low), self.high),
            torch.maximum(torch.minimum(high, self.high), self.low),
            self.form,
            self.casts,
        )


@dataclass(frozen=True, slots=True)
class Cases:
    """Boxes [C, *shape]: all elements of a block of `width` lie in the same one of C boxes.

    Blocks are consecutive elements of the last dimension. Different blocks may be in different
    cases.
    """

    low: Tensor
    high: Tensor
    width: int

    @property
    def hull(self) -> Box:
        """Return the hull of all cases."""
        return Box(self.low.amin(0), self.high.amax(0))

    @property
    def widest(self) -> Tensor:
        """Return half of the widest box of every element."""
        return up(((self.high - self.low) / 2).amax(0), 2)

    def permuted(self, dims: Sequence[int]) -> Cases | None:
        """Return the cases of x.permute(dims); None if that splits blocks."""
        if dims[-1] != len(dims) - 1:
            return None
        order = (0, *(1 + d for d in dims))
        return Cases(self.low.permute(order), self.high.permute(order), self.width)

    def reshaped(self, shape: Sequence[int]) -> Cases | None:
        """Return the cases of x.reshape(shape); None if that splits blocks."""
        if shape[-1] % self.width:
            return None
        low, high = (part.reshape(-1, *shape) for part in (self.low, self.high))
        return Cases(low, high, self.width)

    def between(self, a: Adjoint) -> tuple[Tensor, Tensor]:
        """Bound Σ values·x for x in these boxes, [B] from below and above."""
        start, stop = a.window[-1]
        first, last = start // self.width * self.width, -(-stop // self.width) * self.width
        window = (*a.window[:-1], (first, last))
        part = (slice(None), *(slice(s, e) for s, e in window))
        low, high = (
            side[part].reshape(side.shape[0], -1, self.width).permute(1, 2, 0)
            for side in (self.low, self.high)
        )
        values = a.on(window).reshape(a.values.shape[0], -1, self.width).permute(1, 0, 2)
        step = max(1, _PRODUCTS // (low.shape[0] * low.shape[2]))
        found = [_extremes(some, low, high) for some in torch.split(values, step, 1)]
        least, most = (torch.cat(side) for side in zip(*found, strict=True))
        size = torch.maximum(-low, high).abs().amax(-1).clamp_min(0)
        off = torch.einsum("gbw,gw->b", values.abs(), size) * (2.0**-40)
        return least - off, most + off


def _extremes(values: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ over blocks of the least and of the largest case: [G, B, w], [G, w, C] -> [B]."""
    positive, negative = values.clamp_min(0), values.clamp_max(0)
    most = (positive @ high + negative @ low).amax(-1).sum(0)
    least = (positive @ low + negative @ high).amin(-1).sum(0)
    return least, most


@dataclass(frozen=True, slots=True)
class Together:
    """A part of o_n in cases, in place of its radius for functionals; `rest` bounds the rest."""

    cases: Cases
    rest: Tensor


def split(ends: Ends, worth: Tensor, count: int) -> Ends:
    """Choose, in every row, one of both grid points for up to `count` elements that have two.

    Args:
        ends: [C, ..., n].
        worth: the weight of an element, broadcastable to [C, ..., n]: elements with the largest
            width times weight are chosen.

    Returns:
        Ends [2^k·C, ..., n] for k <= count choices.
    """
    effect = torch.where(ends.two, ends.high - ends.low, 0.0) * worth
    count = min(count, int((effect > 0).sum(-1).max()))
    if count < 1:
        return ends
    weights, places = effect.topk(count)
    below, above = ends.low.gather(-1, places), ends.high.gather(-1, places)
    lows, highs = [], []
    for case in range(2**count):
        bits = torch.tensor([bool(case >> k & 1) for k in range(count)], device=places.device)
        low = torch.where(bits & (weights > 0), above, below)
        high = torch.where(~bits & (weights > 0), below, above)
        lows.append(ends.low.scatter(-1, places, low))
        highs.append(ends.high.scatter(-1, places, high))
    return Ends.of(torch.cat(lows), torch.cat(highs), ends.form, ends.casts)


def choices(shape: Sequence[int]) -> int:
    """Return how many elements of a row may be chosen; [C, *shape] has at most `NUMBERS` then."""
    return min(CHOICES, int(math.log2(max(1, NUMBERS // math.prod(shape)))))


def of_product(ends: Ends, v: Box, error: Tensor) -> Cases:
    """Return p @ v ± error in the cases of p.

    Args:
        ends: the ends of p in every case, [C, ..., m, n].
        v: box [..., n, d].
        error: [..., m, d], the whole error of the product.
    """
    (values, own), terms = v.midpoint(), v.shape[-2]
    middle = ends.low / 2 + ends.high / 2
    error_bound = up(torch.maximum(ends.high - middle, middle - ends.low)) * (ends.high > ends.low)
    most = middle.abs() + error_bound
    inexact = gamma(terms + 4) * (most @ (values.abs() + own))
    wide = (error_bound @ values.abs() + most @ own + inexact + error) * _SAFE
    product = middle @ values
    return Cases(down(product - wide), up(product + wide), error.shape[-1])


def on_grid(formed: Cases, ends: Ends) -> Cases:
    """Return the cases of results that are stored on a grid, all within their ends."""
    stored = ends.within(Box(formed.low, formed.high))
    return Cases(stored.low, stored.high, formed.width)
