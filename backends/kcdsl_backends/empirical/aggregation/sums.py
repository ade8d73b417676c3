"""Exact sums of doubles: every value is written as integers times powers of two.

A value below 2^h is n_0 2^(h-61) + n_1 2^(h-122) + ... with integers of at most 61 bits, found by
truncation: each remainder is exact. Sums of integers do not depend on their order, so the sum is
the same for every number of threads, files and row groups, and is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

_BITS = 61
_LEAST = -1074
"""The exponent of the smallest double: with it nothing is left."""


def steps_for(largest: float, count: int) -> tuple[float, ...]:
    """Return the powers of two of `count` integers for values of at most `largest`, or fewer where
    they reach the smallest double."""
    high = math.frexp(largest)[1]
    exponents: list[int] = []
    for i in range(1, count + 1):
        exponents.append(max(high - _BITS * i, _LEAST))
        if exponents[-1] == _LEAST:
            break
    return tuple(math.ldexp(1.0, exponent) for exponent in exponents)


@dataclass(frozen=True, slots=True)
class ExactSums:
    """Sums as integers times one power of two."""

    integers: Sequence[int]
    unit: Fraction

    def rounded(self, integer: int) -> float:
        """Return the nearest double of a sum; infinite beyond the largest."""
        try:
            return integer * self.unit.numerator / self.unit.denominator
        except OverflowError:
            return math.inf if integer > 0 else -math.inf


def exact_sums(columns: Sequence[Sequence[str]], steps: Sequence[float]) -> ExactSums:
    """Return one sum for each row of digits; there is a column for each step."""
    unit = Fraction(steps[-1])
    weights = [int(Fraction(step) / unit) for step in steps]
    integers = [
        sum(int(n) * weight for n, weight in zip(row, weights, strict=True))
        for row in zip(*columns, strict=True)
    ]
    return ExactSums(integers, unit)
