"""Paired comparison of two runs, or of the four of a 2×2 design, unit by unit.

Shares are compared by the units that meet a threshold in one run only (McNemar 1947, exact binomial
test), means by the changes of the requests (t test, also with their skewness removed). In a 2×2
design the change of a unit is the difference of two differences, the interaction of the factors; of
shares its sign counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy import stats

from kcdsl_backends.empirical.statistics.bootstrap import skewness
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable, holm

ERROR = 0.05
FEWEST = 2


@dataclass(frozen=True, slots=True)
class PairedChange:
    """The comparison of a row; `harm` and `use` are the one-sided p-values of a change for the
    worse and for the better."""

    n: int
    delta: float
    low: float
    high: float
    harm: float
    use: float
    worse: int | None = None
    better: int | None = None
    compared_at: float | None = None


def contrast(runs: Sequence[Any]) -> Any:
    """Return second - first of two runs; of four, (fourth - third) - (second - first)."""
    first, second, *others = runs
    change = second - first
    return (others[1] - others[0]) - change if others else change


def change_of_shares(kept: Sequence[Any]) -> PairedChange:
    """Compare the units that meet the threshold, one array for each run (McNemar's exact test), or
    their counts by the sign of the change (sign test)."""
    moved = contrast([np.asarray(each, dtype=np.int64) for each in kept])
    n, worse, better = int(moved.size), int(np.sum(moved < 0)), int(np.sum(moved > 0))
    if not n:
        raise NotMeasurable("there are no units")
    changed = worse + better
    if not changed:
        return PairedChange(n, 0.0, 0.0, 0.0, 1.0, 1.0, 0, 0)
    share = stats.binomtest(better, changed)
    limits = share.proportion_ci(1 - ERROR, method="exact")
    low, high = (float((2 * limit - 1) * changed / n) for limit in (limits.low, limits.high))
    harm = float(stats.binom.cdf(better, changed, 0.5))
    use = float(stats.binom.cdf(worse, changed, 0.5))
    return PairedChange(n, (better - worse) / n, low, high, harm, use, worse, better)


def change_of_means(
    values: Sequence[float], residuals: Sequence[Any], *, upward: bool
) -> PairedChange:
    """Compare ratios of sums over requests, by the residuals of each request in every run.

    Of skewed changes the t test shows too much against their long tail. So the studentised change
    is also transformed by its skewness (Hall 1992), and the less significant of both counts.
    """
    away, delta = contrast(residuals), float(contrast(values))
    n = int(away.size)
    if n < FEWEST:
        raise NotMeasurable("a single request has no spread")
    spread = float(np.std(away, ddof=1)) * math.sqrt(n)
    if spread == 0.0:  # all changes are equal: the p-value of n signs
        sure = 2.0**-n if delta else 1.0
        harm, use = (sure, 1.0) if (delta < 0) == upward else (1.0, sure)
        return PairedChange(n, delta, delta, delta, harm, use)
    skew, t = skewness(away) / math.sqrt(n), delta / spread
    both = (t, t + skew * t**2 / 3 + skew**2 * t**3 / 27 + skew / 6)
    falls = max(float(stats.t.cdf(each, n - 1)) for each in both)
    rises = max(float(stats.t.sf(each, n - 1)) for each in both)
    q = float(stats.t.ppf(1 - ERROR / 2, n - 1))
    high = delta + spread * max(q, -_with_skewness(-q, skew))
    low = delta - spread * max(q, _with_skewness(q, skew))
    harm, use = (falls, rises) if upward else (rises, falls)
    return PairedChange(n, delta, low, high, harm, use)


def _with_skewness(removed: float, skew: float) -> float:
    """Return the studentised change of which Hall's transformation is `removed`."""
    if abs(skew) < 1e-9:
        return removed
    return float(3 * (np.cbrt(1 + skew * (removed - skew / 6)) - 1) / skew)


def rejected(chances: Sequence[float]) -> frozenset[int]:
    """Return the rejected hypotheses of no change, by Holm's method."""
    error = Fraction(ERROR)
    candidates = [i for i, chance in enumerate(chances) if chance <= ERROR]
    return holm(len(chances), error, candidates, lambda i, level: chances[i] <= level)[0]
