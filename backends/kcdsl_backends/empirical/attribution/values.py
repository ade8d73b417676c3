"""The value of a coalition: one statistic of a metric over the requests, and its resamples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
from kcdsl_backends.empirical.statistics.bootstrap import resampled_limits, resamples_needed

Array = NDArray[np.float64]
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


@dataclass(frozen=True, slots=True)
class Known:
    """A number with its interval; None where nothing supports a limit."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def shown(self) -> bool:
        """Say whether it is shown to be other than 0."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0


def intervals(
    table: Table, columns: Mapping[str, Mapping[str, Coefficients]], seed: int
) -> dict[str, dict[str, Known]]:
    """Return what each set of coefficients makes of the table, column by column.

    The limits of one column, two of each number, hold together with 95 %. A number that is the
    same whatever is drawn, such as that of a source without any effect, has no width.
    """
    values = table.values()
    shares = {name: ONE_LOOK.divided(2 * max(1, len(found))) for name, found in columns.items()}
    counts = [resamples_needed(c.divided(2), _RESAMPLES) for c in shares.values()]
    known = [count for count in counts if count is not None]
    if table.limited() is not None or len(known) < len(counts) or not known:
        return {
            name: {key: Known(float(apply(own, values))) for key, own in found.items()}
            for name, found in columns.items()
        }
    drawn = table.resampled(seed, max(known))
    return {
        name: {key: _known(own, values, drawn, shares[name]) for key, own in found.items()}
        for name, found in columns.items()
    }


def _known(
    coefficients: Coefficients,
    values: Mapping[int, float],
    drawn: Mapping[int, Array],
    confidence: Confidence,
) -> Known:
    value = float(apply(coefficients, values))
    total = np.zeros(next(iter(drawn.values())).size)
    for mask, factor in coefficients.items():
        total = total + float(factor) * drawn[mask]
    return Known(value, *resampled_limits(value, total, confidence))
