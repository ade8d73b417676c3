"""Shares and counts of units, at one look or at every look.

Exceedances are counted as `not (x <= τ)`: a NaN exceeds, and a missing value is no value but a
reason to say nothing. Counts are integers and rates fractions, so every engine agrees on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Protocol

from kcdsl_backends.empirical.statistics import eprocess, exact
from kcdsl_backends.empirical.statistics.eprocess import Counts
from kcdsl_backends.empirical.statistics.vocabulary import (
    ONE_LOOK,
    Confidence,
    Estimate,
    Exceedance,
    NotMeasurable,
    check_counts,
)

_METHODS = {False: "clopper-pearson", True: "e-process"}


class _Rule(Protocol):
    """What both kinds of limits offer; k, n and the rate are exact."""

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


def count_above(values: Iterable[float | None], tau: Fraction) -> Counts:
    """Count the values that are not at most τ, compared exactly; a NaN is one of them.

    Raises `NotMeasurable` for a missing value, which neither exceeds nor keeps anything.
    """
    k = n = missing = 0
    for value in values:
        missing += value is None
        if value is not None:
            n += 1
            k += not _at_most(value, tau)
    if missing:
        raise NotMeasurable(f"{missing} of {n + missing} values are missing")
    if n == 0:
        raise NotMeasurable("there are no values")
    return Counts(k, n)


def percentile_holds(counts: Counts, q: Fraction) -> bool:
    """Say whether the q-quantile x_(ceil(q n)) of what was counted is at most τ, in integers."""
    return counts.k <= counts.n - max(1, math.ceil(q * counts.n))


def _at_most(value: float, tau: Fraction) -> bool:
    if math.isfinite(value):
        return Fraction(value) <= tau
    return value == -math.inf
