"""Shares of units and order statistics, at one look or at every look.

Exceedances are counted as `not (x <= τ)`: a NaN exceeds, and a missing value is no value but a
reason to say nothing. Counts are integers and rates fractions, so every engine agrees on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from kcdsl_backends.empirical.statistics import eprocess, exact
from kcdsl_backends.empirical.statistics.estimates import (
    ONE_LOOK,
    Array,
    Confidence,
    Estimate,
    Exceedance,
    NotMeasurable,
    check_counts,
    check_values,
)

_METHODS = {False: "clopper-pearson", True: "e-process"}


class _Rule(Protocol):
    """Interface of both kinds of limits; k, n and the rate are exact."""

    def lower_limit(self, k: int, n: int, error: Fraction) -> float: ...
    def upper_limit(self, k: int, n: int, error: Fraction) -> float: ...
    def shows_below(self, k: int, n: int, rate: Fraction, error: Fraction) -> bool: ...
    def shows_above(self, k: int, n: int, rate: Fraction, error: Fraction) -> bool: ...
    def most_exceedances(self, n: int, rate: Fraction, error: Fraction) -> int | None: ...


def _rule(confidence: Confidence) -> _Rule:
    return eprocess if confidence.anytime else exact


def limits(k: int, n: int, confidence: Confidence) -> tuple[float, float]:
    """Return both one-sided limits of a rate after k of n, rounded outward."""
    rule = _rule(confidence)
    return rule.lower_limit(k, n, confidence.error), rule.upper_limit(k, n, confidence.error)


def shows_below(k: int, n: int, rate: Fraction, confidence: Confidence) -> bool:
    """Say whether k of n show a rate of at most `rate`."""
    if rate >= 1:
        return True
    if rate <= 0 or n <= 0:
        return False
    rule = _rule(confidence)
    return rule.shows_below(k, n, rate, confidence.error)


def shows_above(k: int, n: int, rate: Fraction, confidence: Confidence) -> bool:
    """Say whether k of n show a rate above `rate`; one unit is enough where none is allowed."""
    if rate >= 1 or n <= 0:
        return False
    if rate <= 0:
        return k > 0
    rule = _rule(confidence)
    return rule.shows_above(k, n, rate, confidence.error)


def most_exceedances(n: int, rate: Fraction, confidence: Confidence) -> int | None:
    """Return the largest k of n that shows at most `rate`, or None where not even 0 does."""
    rule = _rule(confidence)
    return rule.most_exceedances(n, rate, confidence.error)


def proportion(k: int, n: int, confidence: Confidence | None = ONE_LOOK) -> Estimate:
    """Return k / n with one-sided limits; `confidence` None asks for the value alone."""
    if n <= 0:
        raise NotMeasurable("rate: there are no values")
    check_counts(k, n)
    share = Fraction(k, n)
    if confidence is None:
        return Estimate(k / n, None, None, n, "clopper-pearson", share, Fraction(n))
    low, high = limits(k, n, confidence)
    return Estimate(k / n, low, high, n, _METHODS[confidence.anytime], share, Fraction(n))


def exceedance(beyond: Sequence[bool], confidence: Confidence = ONE_LOOK) -> Exceedance:
    """Count the units beyond a threshold."""
    k, n = sum(beyond), len(beyond)
    if n == 0:
        raise NotMeasurable("rate: there are no values")
    return Exceedance(k, n, *limits(k, n, confidence))


# --- order statistics -----------------------------------------------------------------------------


# That the q-quantile lies above x_(r) means that n - r or fewer units exceed it although a share of
# 1 - q does: a statement about a count, so the limits of a percentile are those of a rate. Nothing
# is assumed of the distribution, and nothing is interpolated.


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
