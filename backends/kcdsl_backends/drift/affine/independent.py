"""Roundings as independent random numbers with mean zero (section 8).

Under this assumption a sum of roundings is a martingale: with parts of at most r_k it exceeds
sqrt(2 ln(2/α)·Σ r_k²) with probability at most α (Azuma 1967, Hoeffding 1963), where the worst case
is Σ r_k. The largest parts may be counted in the worst case, the others by chance. Terms that are
not roundings (remainders, float64 errors, known centres) count as in the worst case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph
from kcdsl.model.numerics.formats import CASTS, Casts
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.boxes import gamma
from kcdsl_backends.drift.boxes.sums import Sums
from kcdsl_certs.encoding.reals import real_text

SINGLE = 16
"""Number of the largest parts of a functional kept singly for every entry; 4 times that in all."""
_UP = 1.0 + 2.0**-40
_FAINT = 2.0**-480
"""Bounds the sum of 2^40 parts whose squares underflow to zero in float64."""


@dataclass(slots=True)
class Chance:
    """The joint probability of bounds: of at most `functionals` bounds any fails with probability
    at most `alpha`. `asked` counts those that were used."""

    alpha: Fraction
    functionals: int
    asked: int = 0

    @property
    def square(self) -> float:
        """Return 2 ln(2 N/α), by which Σ r² is multiplied."""
        return 2 * math.log(2 * self.functionals / float(self.alpha) * _UP) * _UP

    def to_json(self) -> dict[str, Any]:
        """Return the record of a proof."""
        return {"alpha": real_text(self.alpha), "functionals": self.functionals}

    def ask(self, count: int) -> None:
        """Count functionals whose bounds are used."""
        self.asked += count


@dataclass(frozen=True, slots=True)
class Parts:
    """The independent roundings in functionals [B].

    Of some elements of entries [B, K] the bounds `most` and `deviation`; of all others the sum of
    the `squares` of the deviations.
    """

    most: Tensor
    deviation: Tensor
    squares: Tensor

    @staticmethod
    def of(functional: Adjoint, roundings: Roundings) -> Parts:
        """Return the roundings of an entry in functionals of it."""
        every, most = functional.each(roundings.deviation), functional.each(roundings.most)
        largest, place = every.topk(min(SINGLE, every.shape[-1]), sorted=False)
        rest = every.scatter(-1, place, 0.0).square().sum(-1)
        rest = rest * (1 + 2 * gamma(every.shape[-1] + 8))
        return Parts(most.gather(-1, place), largest, rest)

    def plus(self, other: Parts | None) -> Parts:
        """Return the parts of the sum of two functionals of different roundings."""
        if other is None:
            return self
        most = torch.cat([self.most, other.most], -1)
        own, squares = torch.cat([self.deviation, other.deviation], -1), self.squares
        squares = squares + other.squares
        if own.shape[-1] > 4 * SINGLE:
            own, order = own.sort(dim=-1, descending=True)
            squares = squares + own[:, 4 * SINGLE :].square().sum(-1)
            own, most = own[:, : 4 * SINGLE], most.gather(-1, order[:, : 4 * SINGLE])
        return Parts(most, own, squares * _UP)

    def likely(self, chance: Chance) -> Tensor:
        """Bound the sum except in a share of all runs: the best number of elements in the worst
        case, all others by chance."""
        worth = self.deviation.square() / self.most.clamp_min(2.0**-1000)
        order = worth.argsort(dim=-1, descending=True)
        most, own = self.most.gather(-1, order), self.deviation.gather(-1, order).square()
        zero = torch.zeros_like(most[:, :1])
        sure = torch.cat([zero, most.cumsum(-1)], -1)
        left = torch.cat([own.flip(-1).cumsum(-1).flip(-1), zero], -1)
        spread = torch.sqrt((left + self.squares[:, None]) * chance.square)
        return (sure + spread).amin(-1) * _UP + _FAINT


def functionals_allowed(graph: BlockGraph) -> int:
    """Return the number of functionals that share a block's probability: a power of two, above four
    for every element of a result."""
    nodes = [node for node in graph.nodes if node.op not in ("param", "constant")]
    return 1 << (4 * sum(math.prod(node.shape) for node in nodes)).bit_length()


@dataclass(frozen=True, slots=True)
class Roundings:
    """The radius of an entry, split element by element.

    `sure` bounds the terms that are not independent roundings; `most` is the sum of the bounds of
    independent roundings, `deviation` the root of the sum of their squares.
    """

    sure: Tensor
    most: Tensor
    deviation: Tensor

    @staticmethod
    def none(sure: Tensor) -> Roundings:
        """Return a radius without independent roundings."""
        zero = torch.zeros_like(sure)
        return Roundings(sure, zero, zero)

    @staticmethod
    def one(sure: Tensor, rounding: Tensor, casts: Casts = CASTS["any"]) -> Roundings:
        """Return one rounding in every element plus `sure`; a directed rounding is sure too."""
        if casts.units != 1:
            return Roundings.none((sure + rounding) * _UP)
        return Roundings(sure, rounding, rounding)

    def with_sure(self, more: Tensor) -> Roundings:
        """Return the same with `more` added to the sure part."""
        return Roundings((self.sure + more) * _UP, self.most, self.deviation)

    def cast(self, most: Tensor, least: float, casts: Casts) -> Roundings:
        """Return the same with one more rounding of at most `most`, and `least` of underflow.

        Roundings that are not to nearest do not have mean zero, so they are sure.
        """
        if casts.units != 1:
            return self.with_sure((most + least) * _UP)
        together = torch.hypot(self.deviation, most) * _UP
        return Roundings((self.sure + least) * _UP, (self.most + most) * _UP, together)

    def where(self, kept: Tensor, otherwise: Tensor) -> Roundings:
        """Return the same where `kept`, else the sure bound `otherwise`."""
        most, deviation = (torch.where(kept, part, 0.0) for part in (self.most, self.deviation))
        return Roundings(torch.where(kept, self.sure, otherwise), most, deviation)


def of_sums(sums: Sums, error: Tensor) -> Roundings:
    """Split the `error` of sums: one rounding of each partial sum and of each product is
    independent; other roundings of terms and of tiles are shared by several sums.

    A partial sum is at most (S + mag(Y))/2 + E, and all terms together are at most S + E; a
    rounding counts in the sum as it is.
    """
    kernel = sums.kernel
    if kernel.numerics.products != "compute" or sums.unit is not None:
        return Roundings.none(error)  # truncation errors do not have mean zero
    terms, largest = sums.left.shape[-1], (sums.total + error) * _UP
    partial = (sums.total + sums.result) / 2 + error
    most = kernel.u_accumulate * (terms * partial + largest) * _UP
    own = kernel.u_accumulate * torch.sqrt(terms * partial.square() + largest.square()) * _UP
    shared = (sums.extra + sums.before - 1) * kernel.u_accumulate * largest
    faint = (terms + sums.extra + sums.before) * kernel.eta_accumulate
    return Roundings((shared + sums.flushed() + faint) * _UP, most, own)
