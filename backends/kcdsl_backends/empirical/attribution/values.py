"""The value of a coalition: one statistic of a metric over the requests, and its resamples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kcdsl.verdict.attribution import Figure
from kcdsl_backends.empirical.attribution.shapley import Coefficients, apply
from kcdsl_backends.empirical.statistics import (
    FEWEST_CLUSTERS,
    ONE_LOOK,
    Confidence,
    NotMeasurable,
    check_values,
    quantile_rank,
    resamples,
)
from kcdsl_backends.empirical.statistics.bootstrap import (
    clustered_ratio,
    resampled_limits,
    resamples_needed,
)

Array = NDArray[np.float64]
Limits = tuple[float | None, float | None]
Statistic = Literal["mean", "p50", "p90", "p95", "p99", "max"]
STATISTICS: tuple[Statistic, ...] = ("mean", "p50", "p90", "p95", "p99", "max")
_QUANTILES = {
    "p50": Fraction(1, 2),
    "p90": Fraction(9, 10),
    "p95": Fraction(19, 20),
    "p99": Fraction(99, 100),
    "max": Fraction(1),
}
_RESAMPLES = 1999
_BEYOND = 10
"""Requests that must lie beyond a percentile for resampling to show how it varies."""


@dataclass(frozen=True, slots=True)
class Column:
    """What one coalition gave: by request the sum of its token values, their number, the worst."""

    sums: Array
    counts: Array
    worst: Array

    def equals(self, other: Column) -> bool:
        """Say whether every request gave the same."""
        return all(
            np.array_equal(one, two)
            for one, two in (
                (self.sums, other.sums),
                (self.counts, other.counts),
                (self.worst, other.worst),
            )
        )


def column(values: Sequence[Array], better: str, what: str) -> Column:
    """Return the column of the token values of each request.

    Raises NotMeasurable for a request without values, and for one that is not finite.
    """
    if not values:
        raise NotMeasurable(f"{what}: there are no requests")
    arrays = [check_values(v, what) for v in values]
    least = min if better == "higher" else max
    return Column(
        np.array([math.fsum(a) for a in arrays]),
        np.array([float(a.size) for a in arrays]),
        np.array([float(least(a)) for a in arrays]),
    )


@dataclass(frozen=True, slots=True)
class Table:
    """The columns of all coalitions that ran; every one is about the same n requests in the same
    order, so that they are resampled together."""

    statistic: Statistic
    better: str
    columns: Mapping[int, Column]

    @property
    def requests(self) -> int:
        """Return n."""
        return int(next(iter(self.columns.values())).sums.size)

    def values(self) -> dict[int, float]:
        """Return the value of each coalition; a mean is the correctly rounded sum over tokens."""
        return {mask: self._value(found) for mask, found in self.columns.items()}

    def _value(self, found: Column) -> float:
        if self.statistic == "mean":
            return math.fsum(found.sums) / math.fsum(found.counts)
        sign = 1.0 if self.better == "lower" else -1.0
        ordered = np.sort(sign * found.worst)
        return sign * float(ordered[self._rank(ordered.size) - 1])

    def _rank(self, n: int) -> int:
        return quantile_rank(n, _QUANTILES[self.statistic])

    def limited(self) -> str | None:
        """Return why no interval can be given; None where one can."""
        n = self.requests
        if n < FEWEST_CLUSTERS:
            return f"{n} requests say too little; intervals need {FEWEST_CLUSTERS}"
        beyond = n if self.statistic == "mean" else n - self._rank(n)
        if beyond < _BEYOND:
            return (
                f"{beyond} of {n} requests lie beyond the {self.statistic}, so it speaks of these "
                f"requests alone; an interval needs {_BEYOND} of them"
            )
        return None

    def parts(self, coefficients: Coefficients) -> Array:
        """Return by request what a set of coefficients makes of the sums, [n]; exactly 0 where
        coalitions of opposite coefficients have the same sums."""
        sizes = {abs(factor) for factor in coefficients.values()}
        total = np.zeros(self.requests)
        for size in sorted(sizes):
            signed = [
                math.copysign(1.0, factor) * self.columns[mask].sums
                for mask, factor in coefficients.items()
                if abs(factor) == size
            ]
            total += float(size) * np.array([math.fsum(own) for own in zip(*signed, strict=True)])
        return total

    def resampled(self, seed: int, count: int) -> dict[int, Array]:
        """Return `count` values of each coalition; each draws the same requests for all."""
        parts: dict[int, list[Array]] = {mask: [] for mask in self.columns}
        for drawn in resamples(self.requests, seed, count):
            for mask, found in self.columns.items():
                parts[mask].append(self._drawn(found, drawn))
        return {mask: np.concatenate(found) for mask, found in parts.items()}

    def _drawn(self, found: Column, drawn: NDArray[np.int64]) -> Array:
        if self.statistic == "mean":
            sums: Array = found.sums[drawn].sum(axis=1) / found.counts[drawn].sum(axis=1)
            return sums
        sign = 1.0 if self.better == "lower" else -1.0
        place = self._rank(drawn.shape[1]) - 1
        ordered: Array = np.partition(sign * found.worst[drawn], place, axis=1)[:, place]
        return sign * ordered


def intervals(
    table: Table, columns: Mapping[str, Mapping[str, Coefficients]], seed: int
) -> dict[str, dict[str, Figure]]:
    """Return what each set of coefficients makes of the table, column by column.

    The limits of one column, two of each number, share 5 % of error. A number that is 0 on every
    request, such as that of a source without any effect, has no width.
    """
    values = table.values()
    found: dict[str, dict[str, Figure]] = {}
    for name, numbers in columns.items():
        share = ONE_LOOK.divided(2 * max(1, len(numbers)))
        limits = _limits(table, numbers, values, share, seed)
        found[name] = {
            key: Figure(float(apply(own, values)), *limits[key]) for key, own in numbers.items()
        }
    return found


def _limits(
    table: Table,
    numbers: Mapping[str, Coefficients],
    values: Mapping[int, float],
    confidence: Confidence,
    seed: int,
) -> dict[str, Limits]:
    """Return the limits of the numbers of one column."""
    if table.limited() is not None:
        return dict.fromkeys(numbers, (None, None))
    if table.statistic == "mean":
        return {key: _of_mean(table, own, confidence, seed) for key, own in numbers.items()}
    count = resamples_needed(confidence.divided(2), _RESAMPLES)
    if count is None:
        return dict.fromkeys(numbers, (None, None))
    drawn = table.resampled(seed, count)
    return {key: _of_draws(own, values, drawn, confidence) for key, own in numbers.items()}


def _of_mean(table: Table, coefficients: Coefficients, confidence: Confidence, seed: int) -> Limits:
    """Return the limits of a sum of means over the same tokens, which is one such mean."""
    parts = table.parts(coefficients)
    if not parts.any():
        return 0.0, 0.0
    counts = next(iter(table.columns.values())).counts
    found = clustered_ratio(parts, counts, seed=seed, confidence=confidence)
    return found.low, found.high


def _of_draws(
    coefficients: Coefficients,
    values: Mapping[int, float],
    drawn: Mapping[int, Array],
    confidence: Confidence,
) -> Limits:
    value = float(apply(coefficients, values))
    total = np.zeros(next(iter(drawn.values())).size)
    for mask, factor in coefficients.items():
        total = total + float(factor) * drawn[mask]
    return resampled_limits(value, total, confidence)
