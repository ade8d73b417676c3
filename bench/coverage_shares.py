"""Coverage of the intervals of an attribution to three sources, by simulation.

`make bench-coverage` prints the figures that docs/reference/attribution.md quotes. The effects of
the sources are scaled by a level with mean 1 for each request. Two effects add up except for a
tenth; the third is 0 on average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kcdsl_backends.empirical.attribution.shapley import (
    CoalitionColumn,
    Coefficients,
    Statistic,
    Table,
    apply,
    intervals,
    split,
)

Array = NDArray[np.float64]
Level = Callable[[np.random.Generator, int], Array]

SHARES = {"first": 0.95, "second": 0.25, "nothing": 0.0}
"""True shares of means: effects 1 and 0.3 with an interaction of -0.1, and noise."""
POPULATION = 400_000
"""Sample size at which shares of a percentile are taken as those of the population."""


@dataclass(frozen=True, slots=True)
class Held:
    """Rates of samples: all three intervals hold; each source is significant; any is significant
    with the wrong sign, including the source without effect."""

    together: float
    shown: dict[str, float]
    wrong: float


def game(generator: np.random.Generator, n: int, level: Level) -> Table:
    """Return the results of all eight mixed kernels on n requests of 4 to 63 tokens."""
    counts = generator.integers(4, 64, n).astype(np.float64)

    def effect(size: float) -> Array:
        return size * counts * level(generator, n)

    first, second, both = effect(1.0), effect(0.3), effect(-0.1)
    noise = effect(0.5) * generator.choice([-1.0, 1.0], n)
    columns = {}
    for mask in range(8):
        sums = (mask & 1) * first + (mask >> 1 & 1) * second + (mask >> 2) * noise
        sums = sums + both if mask & 3 == 3 else sums
        columns[mask] = CoalitionColumn(sums, counts, sums / counts)
    return Table("mean", "lower", columns)


def shares_held(level: Level, n: int, runs: int, statistic: Statistic = "mean") -> Held:
    """Return how often intervals contain the true shares."""
    generator = np.random.default_rng(n)
    wanted = dict(zip(SHARES, split(3, range(8)).shares, strict=True))
    truths = SHARES if statistic == "mean" else _of_many(level, statistic, wanted)
    held = wrong = 0
    shown = dict.fromkeys(SHARES, 0)
    for run in range(runs):
        table = replace(game(generator, n, level), statistic=statistic)
        found = intervals(table, {"shares": wanted}, run)["shares"]
        inside, mistaken = True, False
        for name, truth in truths.items():
            low, high = found[name].low, found[name].high
            inside &= (low is None or low <= truth) and (high is None or truth <= high)
            shown[name] += found[name].shown
            mistaken |= found[name].shown and found[name].value * truth <= 0
        held += inside
        wrong += mistaken
    return Held(held / runs, {name: count / runs for name, count in shown.items()}, wrong / runs)


def _of_many(
    level: Level, statistic: Statistic, wanted: Mapping[str, Coefficients]
) -> dict[str, float]:
    """Return the shares of a percentile in a large sample."""
    table = replace(game(np.random.default_rng(0), POPULATION, level), statistic=statistic)
    values = table.values()
    return {name: float(apply(own, values)) for name, own in wanted.items()}
