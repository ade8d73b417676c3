"""Shares of units and order statistics, at one look or at every look.

Exceedances are counted as `not (x <= τ)`: a NaN exceeds, and a missing value allows no statement.
Counts are integers and rates fractions, so every engine agrees on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from scipy import special, stats

from kcdsl_backends.empirical.statistics.estimates import (
    ONE_LOOK,
    Array,
    Confidence,
    Estimate,
    Exceedance,
    NotMeasurable,
    check_counts,
    check_rate,
    check_values,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import lower_tail

_NEAR = 1e-9
"""Upper bound of the relative error of the float64 tail; nearer to the level it does not decide."""
_OUTWARD = 1e-12
_A = _B = 0.5
_METHODS = {False: "clopper-pearson", True: "e-process"}
_STEPS = 200
_PRECISION = 1e-12


class ClopperPearson:
    """Exact binomial limits for a number of units fixed in advance.

    Decisions use the binomial tail itself, near its level with 50 digits; printed limits are
    rounded outward. Source: Clopper and Pearson 1934.
    """

    def shows_below(self, k: int, n: int, rate: Fraction, error: Fraction) -> bool:
        """Return whether k of n show a rate of at most `rate`: P(X <= k | n, rate) <= error.

        False if the tail is not known accurately enough. Exact in its three arguments.
        """
        check_counts(k, n)
        check_rate(rate)
        if Fraction(k) >= n * rate:
            return False
        tail, level = float(stats.binom.cdf(k, n, float(rate))), float(error)
        if abs(tail - level) > _NEAR * level:
            return tail < level
        try:
            return Fraction(lower_tail(k, n, rate)) <= error
        except Rejected:
            return False

    def shows_above(self, k: int, n: int, rate: Fraction, error: Fraction) -> bool:
        """Return whether k of n show a rate of at least `rate`: P(X >= k | n, rate) <= error."""
        check_counts(k, n)
        return self.shows_below(n - k, n, 1 - rate, error)

    def upper_limit(self, k: int, n: int, error: Fraction) -> float:
        """Return the largest rate not excluded by k of n, rounded up; 1 for n of n."""
        check_counts(k, n)
        if k == n:
            return 1.0
        if k == 0:
            limit = -math.expm1(math.log(float(error)) / n)
        else:
            limit = float(stats.beta.ppf(float(1 - error), k + 1, n - k))
        return min(1.0, limit * (1 + _OUTWARD))

    def lower_limit(self, k: int, n: int, error: Fraction) -> float:
        """Return the smallest rate not excluded by k of n, rounded down; 0 for 0 of n."""
        check_counts(k, n)
        if k == 0:
            return 0.0
        if k == n:
            limit = math.exp(math.log(float(error)) / n)
        else:
            limit = float(stats.beta.ppf(float(error), k, n - k + 1))
        return max(0.0, limit * (1 - _OUTWARD))

    def most_exceedances(self, n: int, rate: Fraction, error: Fraction) -> int | None:
        """Return the largest k that still shows at most `rate`, or None where not even 0 does."""
        check_rate(rate)
        if n <= 0:
            return None
        k = min(n, int(stats.binom.ppf(float(error), n, float(rate))) + 1)
        while k >= 0 and not self.shows_below(k, n, rate, error):
            k -= 1
        return None if k < 0 else k


class EProcess:
    """Limits of a rate that hold at every look at growing data.

    The state is two integers, k of n units beyond the threshold, so it merges across shards and
    does not depend on order. Evidence against "the rate is at least δ" is the mixture of likelihood
    ratios over p < δ with a Beta(1/2, 1/2) prior truncated at δ; against "at most δ" the same over
    p > δ. Each is a non-negative supermartingale that starts at 1, so (Ville 1939) the probability
    that it ever reaches 1/α is at most α, for any stopping rule.
    """

    def shows_below(self, k: int, n: int, rate: Fraction, error: Fraction) -> bool:
        """Return whether k of n show a rate of at most `rate`, with one error for all looks."""
        return _reaches(log_certify(k, n, rate), n, error)

    def shows_above(self, k: int, n: int, rate: Fraction, error: Fraction) -> bool:
        """Return whether k of n show a rate of at least `rate`, with one error for all looks."""
        return _reaches(log_alarm(k, n, rate), n, error)

    def upper_limit(self, k: int, n: int, error: Fraction) -> float:
        """Return the least rate above k/n that is excluded, rounded up; 1 if none is."""
        check_counts(k, n)
        if k == n or not self.shows_below(k, n, Fraction(math.nextafter(1.0, 0.0)), error):
            return 1.0
        low, high = k / n, math.nextafter(1.0, 0.0)
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if high - low <= _PRECISION * high or not low < middle < high:
                break
            if self.shows_below(k, n, Fraction(middle), error):
                high = middle
            else:
                low = middle
        return high

    def lower_limit(self, k: int, n: int, error: Fraction) -> float:
        """Return the greatest rate below k/n that is excluded, rounded down; 0 if none is."""
        check_counts(k, n)
        least = 2.0**-1000
        if k == 0 or not self.shows_above(k, n, Fraction(least), error):
            return 0.0
        low, high = least, k / n
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if high - low <= _PRECISION * high or not low < middle < high:
                break
            if self.shows_above(k, n, Fraction(middle), error):
                low = middle
            else:
                high = middle
        return low

    def most_exceedances(self, n: int, rate: Fraction, error: Fraction) -> int | None:
        """Return the largest k that still shows at most `rate`, or None where not even 0 does."""
        check_rate(rate)
        if n <= 0 or not self.shows_below(0, n, rate, error):
            return None
        low, high = 0, math.ceil(n * rate)
        while high - low > 1:
            middle = (low + high) // 2
            if self.shows_below(middle, n, rate, error):
                low = middle
            else:
                high = middle
        return low


def log_certify(k: int, n: int, rate: Fraction) -> float:
    """Return ln E against "the true rate is at least `rate`" after k of n.

    0 if k/n is not below the rate: there is no evidence against it. Raises ValueError for a rate of
    0 or 1, which no sample shows.
    """
    check_counts(k, n)
    check_rate(rate)
    return 0.0 if k >= n * rate else _log_mixture(k, n, rate, below=True)


def log_alarm(k: int, n: int, rate: Fraction) -> float:
    """Return ln E against "the true rate is at most `rate`" after k of n."""
    check_counts(k, n)
    check_rate(rate)
    return 0.0 if k <= n * rate else _log_mixture(k, n, rate, below=False)


def _log_mixture(k: int, n: int, rate: Fraction, *, below: bool) -> float:
    """Return the logarithm of the mixture; -inf without mass on the side of the alternative."""
    delta = float(rate)
    complement = math.log1p(-delta) if delta < 0.5 else math.log(float(1 - rate))
    mass = special.betainc if below else special.betaincc
    posterior, prior = float(mass(k + _A, n - k + _B, delta)), float(mass(_A, _B, delta))
    if posterior <= 0 or prior <= 0:
        return -math.inf
    return (
        float(special.betaln(k + _A, n - k + _B))
        + math.log(posterior)
        - float(special.betaln(_A, _B))
        - math.log(prior)
        - k * math.log(delta)
        - (n - k) * complement
    )


def _reaches(evidence: float, n: int, error: Fraction) -> bool:
    """Return whether ln E reaches ln 1/α, after subtracting a bound of its rounding error."""
    slack = 64 * 2.0**-52 * (n + 2) * math.log(n + 2)
    return evidence - slack >= -math.log(float(error))


CLOPPER_PEARSON, E_PROCESS = ClopperPearson(), EProcess()


def _rule(confidence: Confidence) -> ClopperPearson | EProcess:
    return E_PROCESS if confidence.anytime else CLOPPER_PEARSON


def limits(k: int, n: int, confidence: Confidence) -> tuple[float, float]:
    """Return both one-sided limits of a rate after k of n, rounded outward."""
    rule = _rule(confidence)
    return rule.lower_limit(k, n, confidence.error), rule.upper_limit(k, n, confidence.error)


def shows_below(k: int, n: int, rate: Fraction, confidence: Confidence) -> bool:
    """Return whether k of n show a rate of at most `rate`."""
    if rate >= 1:
        return True
    if rate <= 0 or n <= 0:
        return False
    return _rule(confidence).shows_below(k, n, rate, confidence.error)


def shows_above(k: int, n: int, rate: Fraction, confidence: Confidence) -> bool:
    """Return whether k of n show a rate above `rate`; for a rate of 0 one unit is enough."""
    if rate >= 1 or n <= 0:
        return False
    if rate <= 0:
        return k > 0
    return _rule(confidence).shows_above(k, n, rate, confidence.error)


def most_exceedances(n: int, rate: Fraction, confidence: Confidence) -> int | None:
    """Return the largest k of n that shows at most `rate`, or None where not even 0 does."""
    return _rule(confidence).most_exceedances(n, rate, confidence.error)


def proportion(k: int, n: int, confidence: Confidence | None = ONE_LOOK) -> Estimate:
    """Return k / n with one-sided limits; without limits for `confidence` None."""
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


# The q-quantile lies above x_(r) only if at most n - r units exceed it, of which a share of 1 - q
# is expected: a statement about a count, so the limits of a percentile are those of a rate. The
# distribution is arbitrary, and nothing is interpolated.


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

    Without limits for `confidence` None.
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
    """Return the maximum. No sample bounds the maximum of its population from above."""
    array = check_values(values, "max")
    return Estimate(float(array.max()), float(array.max()), None, int(array.size), "maximum")


def smallest(values: Array) -> Estimate:
    """Return the minimum. No sample bounds the minimum of its population from below."""
    array = check_values(values, "min")
    return Estimate(float(array.min()), None, float(array.min()), int(array.size), "minimum")


def threshold(
    values: Array,
    rate: Fraction,
    confidence: Confidence = ONE_LOOK,
    *,
    better: str = "lower",
) -> float | None:
    """Return the tightest τ for which these units show that at most `rate` are beyond it.

    It is the order statistic of the binomial rank, which errs with a probability of at most
    `confidence.error`; the empirical quantile errs about half of the time. None for too few units
    (below 59, 299, 2995 for 5 %, 1 %, 0.1 %).
    """
    array = np.sort(check_values(values, "threshold"))
    allowed = most_exceedances(int(array.size), rate, confidence)
    if allowed is None:
        return None
    rank = array.size - allowed if better == "lower" else allowed + 1
    return float(array[rank - 1])
