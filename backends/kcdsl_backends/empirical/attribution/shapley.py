"""The values of coalitions, and their split among players: alone, left out, Shapley.

A coalition is a bit mask over the players; a game knows the values of some coalitions. Each split
is a linear function of these values with rational coefficients, so that it is exact, sums up, and
can be resampled.

Shapley (1953) averages what a player adds over all orders in which the players may join. Where
some coalitions have no value, the average is over the orders that pass only through those that
have one, as for games under precedence constraints (Faigle and Kern 1992); it still sums up, and
with all coalitions it is Shapley's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import factorial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kcdsl.verdict.studies.attribution import EstimatedNumber
from kcdsl_backends.empirical.statistics.bootstrap import (
    FEWEST_CLUSTERS,
    clustered_ratio,
    resampled_limits,
    resamples,
    resamples_needed,
)
from kcdsl_backends.empirical.statistics.estimates import (
    ONE_LOOK,
    Confidence,
    NotMeasurable,
    check_values,
)
from kcdsl_backends.empirical.statistics.rates import quantile_rank

Coefficients = Mapping[int, Fraction]
"""A linear function of the values of coalitions: the sum of coefficient times value."""


@dataclass(frozen=True, slots=True)
class Split:
    """The split of the value of all players among `players` of them, given known coalitions.

    `orders` of `all_orders` pass through known coalitions only. Without any, nothing can be split
    and `shares` is empty.
    """

    players: int
    orders: int
    all_orders: int
    shares: tuple[Coefficients, ...]

    @property
    def whole(self) -> bool:
        """Return whether every order counts; the shares are then Shapley's."""
        return self.orders == self.all_orders


def split(players: int, known: Iterable[int]) -> Split:
    """Return the shares of all players, given the coalitions whose values are known."""
    runs = frozenset(known)
    full = (1 << players) - 1
    before = _paths_from_nothing(players, runs)
    after = _paths_to_all(players, runs)
    orders = before.get(full, 0)
    if orders == 0:
        return Split(players, 0, factorial(players), ())
    shares: list[dict[int, Fraction]] = []
    for player in range(players):
        own: dict[int, Fraction] = {}
        for mask in sorted(runs):
            joined = mask | 1 << player
            if joined == mask or joined not in runs:
                continue
            weight = Fraction(before.get(mask, 0) * after.get(joined, 0), orders)
            if weight:
                own[joined] = own.get(joined, Fraction(0)) + weight
                own[mask] = own.get(mask, Fraction(0)) - weight
        shares.append(own)
    return Split(players, orders, factorial(players), tuple(shares))


def alone(player: int, known: Iterable[int]) -> Coefficients | None:
    """Return v({i}) - v(nothing); None where one of them is not known."""
    return _difference(1 << player, 0, frozenset(known))


def left_out(player: int, players: int, known: Iterable[int]) -> Coefficients | None:
    """Return v(all) - v(all without i); None where one of them is not known."""
    full = (1 << players) - 1
    return _difference(full, full & ~(1 << player), frozenset(known))


def apply(coefficients: Coefficients, values: Mapping[int, float]) -> Fraction:
    """Return the exact linear combination of finite values."""
    return sum(
        (factor * Fraction(values[mask]) for mask, factor in coefficients.items()), Fraction(0)
    )


def merged(mask: int, groups: tuple[tuple[int, ...], ...]) -> int | None:
    """Return a coalition of players as one of groups; None if a group is only partly in it."""
    found = 0
    for index, group in enumerate(groups):
        inside = [bool(mask >> player & 1) for player in group]
        if all(inside):
            found |= 1 << index
        elif any(inside):
            return None
    return found


def _difference(first: int, second: int, runs: frozenset[int]) -> Coefficients | None:
    if first not in runs or second not in runs:
        return None
    return {first: Fraction(1), second: Fraction(-1)}


def _paths_from_nothing(players: int, runs: frozenset[int]) -> dict[int, int]:
    """Count the orders in which each known coalition can be reached through known ones."""
    paths = {0: 1} if 0 in runs else {}
    for mask in sorted(runs - {0}):  # every coalition comes after those inside it
        before = (mask & ~(1 << p) for p in range(players) if mask >> p & 1)
        count = sum(paths.get(inner, 0) for inner in before)
        if count:
            paths[mask] = count
    return paths


def _paths_to_all(players: int, runs: frozenset[int]) -> dict[int, int]:
    """Count the orders in which the others can join each known coalition."""
    full = (1 << players) - 1
    mirrored = frozenset(full & ~mask for mask in runs)
    return {full & ~m: count for m, count in _paths_from_nothing(players, mirrored).items()}


# --- values of coalitions, and resamples of requests ----------------------------------------------

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
"""Number of requests beyond a percentile that resampling needs to show its variation."""


@dataclass(frozen=True, slots=True)
class CoalitionColumn:
    """One coalition by request: the sum of its token values, their number, the worst."""

    sums: Array
    counts: Array
    worst: Array

    def equals(self, other: CoalitionColumn) -> bool:
        """Return whether every request has the same values."""
        return all(
            np.array_equal(one, two)
            for one, two in (
                (self.sums, other.sums),
                (self.counts, other.counts),
                (self.worst, other.worst),
            )
        )


def column(values: Sequence[Array], better: str, what: str) -> CoalitionColumn:
    """Return the column of the token values of each request.

    Raises NotMeasurable for a request without values, and for one that is not finite.
    """
    if not values:
        raise NotMeasurable(f"{what}: there are no requests")
    arrays = [check_values(v, what) for v in values]
    worst = min if better == "higher" else max
    return CoalitionColumn(
        np.array([math.fsum(a) for a in arrays]),
        np.array([float(a.size) for a in arrays]),
        np.array([float(worst(a)) for a in arrays]),
    )


@dataclass(frozen=True, slots=True)
class Table:
    """The columns of all coalitions that ran. All have the same n requests in the same order, so
    that they are resampled together."""

    statistic: Statistic
    better: str
    columns: Mapping[int, CoalitionColumn]

    @property
    def requests(self) -> int:
        """Return n."""
        return int(next(iter(self.columns.values())).sums.size)

    def values(self) -> dict[int, float]:
        """Return the value of each coalition; a mean is the correctly rounded sum over tokens."""
        return {mask: self._value(found) for mask, found in self.columns.items()}

    def _value(self, found: CoalitionColumn) -> float:
        if self.statistic == "mean":
            return math.fsum(found.sums) / math.fsum(found.counts)
        sign = 1.0 if self.better == "lower" else -1.0
        ordered = np.sort(sign * found.worst)
        return sign * float(ordered[self._rank(ordered.size) - 1])

    def _rank(self, n: int) -> int:
        return quantile_rank(n, _QUANTILES[self.statistic])

    def limited(self) -> str | None:
        """Return why there is no interval; None if there is one."""
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
        """Return the linear combination of the sums by request, [n]; exactly 0 if coalitions of
        opposite coefficients have the same sums."""
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
        """Return `count` values of each coalition; each draws the same requests for all, and their
        order changes nothing."""
        parts: dict[int, list[Array]] = {mask: [] for mask in self.columns}
        columns = self.columns.values()
        order = np.lexsort([part for c in columns for part in (c.sums, c.counts, c.worst)])
        for drawn in resamples(self.requests, seed, count):
            for mask, found in self.columns.items():
                parts[mask].append(self._resample_values(found, order[drawn]))
        return {mask: np.concatenate(found) for mask, found in parts.items()}

    def _resample_values(self, found: CoalitionColumn, drawn: NDArray[np.int64]) -> Array:
        if self.statistic == "mean":
            sums: Array = found.sums[drawn].sum(axis=1) / found.counts[drawn].sum(axis=1)
            return sums
        sign = 1.0 if self.better == "lower" else -1.0
        place = self._rank(drawn.shape[1]) - 1
        ordered: Array = np.partition(sign * found.worst[drawn], place, axis=1)[:, place]
        return sign * ordered


def intervals(
    table: Table, columns: Mapping[str, Mapping[str, Coefficients]], seed: int
) -> dict[str, dict[str, EstimatedNumber]]:
    """Return each linear combination of coalition values with its interval, column by column.

    The limits of one column, two of each number, share 5 % of error. The interval of a number that
    is 0 on every request, as of a source without effect, is [0, 0].
    """
    values = table.values()
    found: dict[str, dict[str, EstimatedNumber]] = {}
    for name, numbers in columns.items():
        share = ONE_LOOK.divided(2 * max(1, len(numbers)))
        limits = _limits(table, numbers, values, share, seed)
        found[name] = {
            key: EstimatedNumber(float(apply(own, values)), *limits[key])
            for key, own in numbers.items()
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
        return {key: _limits_of_mean(table, own, confidence, seed) for key, own in numbers.items()}
    count = resamples_needed(confidence.divided(2), _RESAMPLES)
    if count is None:
        return dict.fromkeys(numbers, (None, None))
    drawn = table.resampled(seed, count)
    return {key: _limits_of_draws(own, values, drawn, confidence) for key, own in numbers.items()}


def _limits_of_mean(
    table: Table, coefficients: Coefficients, confidence: Confidence, seed: int
) -> Limits:
    """Return the limits of a sum of means over the same tokens, which is one such mean."""
    parts = table.parts(coefficients)
    if not parts.any():
        return 0.0, 0.0
    counts = next(iter(table.columns.values())).counts
    found = clustered_ratio(parts, counts, seed=seed, confidence=confidence)
    return found.low, found.high


def _limits_of_draws(
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
