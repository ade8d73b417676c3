"""Order statistics: percentiles, extremes, and thresholds that come with a guarantee.

That the q-quantile lies above x_(r) means that n - r or fewer units exceed it although a share of
1 - q does: a statement about a count, so the limits of a percentile are those of a rate. Nothing is
assumed of the distribution, and nothing is interpolated.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from kcdsl_backends.empirical.statistics.rates import most_exceedances
from kcdsl_backends.empirical.statistics.vocabulary import (
    ONE_LOOK,
    Array,
    Confidence,
    Estimate,
    check_values,
)


def quantile_rank(n: int, q: Fraction) -> int:
    """Return the rank ceil(q n), at least 1, of the order statistic that is the q-quantile."""
    if not 0 <= q <= 1:
        raise ValueError(f"a quantile lies in [0, 1], not {q}")
    return max(1, math.ceil(q * n))


def limit_ranks(n: int, q: Fraction, confidence: Confidence) -> tuple[int | None, int | None]:
    """Return the ranks (from 1) of the lower and the upper limit of the q-quantile, 0 < q < 1."""
    below, above = most_exceedances(n, q, confidence), most_exceedances(n, 1 - q, confidence)
    return None if below is None else below + 1, None if above is None else n - above


def quantile(values: Array, q: Fraction, confidence: Confidence | None = ONE_LOOK) -> Estimate:
    """Return the order statistic x_(ceil(q n)) with one-sided limits.

    `confidence` None asks for the value alone.
    """
    array = np.sort(check_values(values, "quantile"))
    n = int(array.size)
    value = float(array[quantile_rank(n, q) - 1])
    if q in (0, 1) or confidence is None:
        return Estimate(value, None, None, n, "order-statistic")
    low, high = limit_ranks(n, q, confidence)
    return Estimate(
        value,
        None if low is None else float(array[low - 1]),
        None if high is None else float(array[high - 1]),
        n,
        "order-statistic",
    )


def largest(values: Array) -> Estimate:
    """Return the maximum. No sample bounds the maximum of what it was drawn from from above."""
    array = check_values(values, "max")
    return Estimate(float(array.max()), float(array.max()), None, int(array.size), "maximum")


def smallest(values: Array) -> Estimate:
    """Return the minimum. No sample bounds the minimum of what it was drawn from from below."""
    array = check_values(values, "min")
    return Estimate(float(array.min()), None, float(array.min()), int(array.size), "minimum")


def threshold(
    values: Array,
    rate: Fraction,
    confidence: Confidence = ONE_LOOK,
    *,
    better: str = "lower",
) -> float | None:
    """Return the tightest τ of which these units show that at most `rate` are beyond it.

    An order statistic by its binomial rank: unlike the empirical quantile, which is exceeded too
    often about half of the time, it errs with a probability of at most `confidence.error`. None
    where the units are too few for any (fewer than 59, 299, 2995 for 5 %, 1 %, 0.1 %).
    """
    array = np.sort(check_values(values, "threshold"))
    allowed = most_exceedances(int(array.size), rate, confidence)
    if allowed is None:
        return None
    rank = array.size - allowed if better == "lower" else allowed + 1
    return float(array[rank - 1])
