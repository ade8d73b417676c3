"""Clopper-Pearson limits compared with scipy and exact tails; refused inputs."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kcdsl_backends.empirical.statistics import rates
from kcdsl_backends.empirical.statistics.estimates import Confidence, NotMeasurable
from kcdsl_backends.empirical.statistics.rates import CLOPPER_PEARSON as EXACT
from kcdsl_certs.statement import certifies

ALPHA = Fraction(1, 20)
counts = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counts)
def test_limits_equal_another_implementation_rounded_outward(pair: tuple[int, int]) -> None:
    k, n = pair
    for side, ours in (
        ("less", EXACT.upper_limit),
        ("greater", EXACT.lower_limit),
    ):
        found = stats.binomtest(k, n, alternative=side).proportion_ci(0.95, "exact")
        theirs = found.high if side == "less" else found.low
        assert ours(k, n, ALPHA) == pytest.approx(theirs, rel=1e-6, abs=1e-300)
    assert EXACT.lower_limit(k, n, ALPHA) <= k / n <= EXACT.upper_limit(k, n, ALPHA)
    high, low = EXACT.upper_limit(k, n, ALPHA), EXACT.lower_limit(k, n, ALPHA)
    assert k == n or stats.binom.cdf(k, n, high) <= 0.05 * (1 + 1e-9)
    assert k == 0 or stats.binom.sf(k - 1, n, low) <= 0.05 * (1 + 1e-9)


@given(counts, st.fractions(Fraction(1, 500), Fraction(499, 500), max_denominator=500))
def test_rate_is_shown_exactly_if_the_tail_is_small(pair: tuple[int, int], rate: Fraction) -> None:
    k, n = pair
    tail = sum(
        (math.comb(n, i) * rate**i * (1 - rate) ** (n - i) for i in range(k + 1)), Fraction(0)
    )
    wanted = k < n * rate and tail <= ALPHA
    assert EXACT.shows_below(k, n, rate, ALPHA) == wanted
    assert EXACT.shows_above(n - k, n, 1 - rate, ALPHA) == wanted


def test_tail_near_the_level_is_decided_with_many_digits() -> None:
    """(1/2)^2 is a quarter; doubles cannot separate 10^-20 on either side.

    At the exact level, where no precision decides, nothing is shown.
    """
    half, quarter, hair = Fraction(1, 2), Fraction(1, 4), Fraction(1, 10**20)
    assert EXACT.shows_below(0, 2, half + hair, quarter)
    assert not EXACT.shows_below(0, 2, half - hair, quarter)
    assert not EXACT.shows_below(0, 2, half, quarter)


@given(st.integers(1, 3000), st.fractions(Fraction(1, 300), Fraction(1, 2), max_denominator=300))
def test_passes_are_accepted_in_certificates(n: int, rate: Fraction) -> None:
    k = EXACT.most_exceedances(n, rate, ALPHA)
    if k is None:
        assert not certifies(0, n, rate, ALPHA)
        return
    assert certifies(k, n, rate, ALPHA)
    assert not certifies(k + 1, n, rate, ALPHA)


def test_zero_failure_limit() -> None:
    for n in (1, 59, 299, 2995):
        limit = EXACT.upper_limit(0, n, ALPHA)
        assert limit == pytest.approx(1 - 0.05 ** (1 / n), rel=1e-11)
        assert limit >= 1 - 0.05 ** (1 / n)
    assert EXACT.upper_limit(0, 10**6, ALPHA) == pytest.approx(3.0e-6, rel=2e-3)


@pytest.mark.parametrize("confidence", [Confidence(), Confidence(anytime=True)])
def test_zero_units_show_nothing(confidence: Confidence) -> None:
    assert not rates.shows_below(0, 0, Fraction(1, 2), confidence)
    assert not rates.shows_above(0, 0, Fraction(1, 2), confidence)
    assert not rates.shows_below(0, 10**9, Fraction(0), confidence)
    assert rates.shows_above(1, 10**9, Fraction(0), confidence)
    with pytest.raises(NotMeasurable):
        rates.proportion(0, 0, confidence)
    with pytest.raises(NotMeasurable):
        rates.exceedance([], confidence)
    for k, n in ((-1, 5), (6, 5)):
        with pytest.raises(ValueError, match="of 5"):
            rates.proportion(k, n, confidence)


def test_tail_beyond_exact_arithmetic_shows_nothing() -> None:
    """Beyond ten million units, a tail within rounding of its level does not count as smaller."""
    n = 20_000_000
    rate = Fraction(EXACT.upper_limit(0, n, ALPHA)) * (1 - Fraction(1, 10**11))
    assert not EXACT.shows_below(0, n, rate, ALPHA)


# --- order statistics ----------------------------------------------------------------------------


@given(
    st.lists(st.floats(-10, 10), min_size=1, max_size=150),
    st.fractions(Fraction(1, 100), Fraction(1), max_denominator=1000),
)
def test_percentile_is_an_integer_count(values: list[float], q: Fraction) -> None:
    tau, n = 0.5, len(values)
    value = rates.quantile(np.array(values), q, None).value
    exceed = sum(v > tau for v in values)
    assert (value <= tau) == (exceed <= n - max(1, math.ceil(q * n)))


def test_p99_means_exceedances_are_at_most_n_over_100() -> None:
    for n in range(1, 1200):
        rank = rates.quantile_rank(n, Fraction(99, 100))
        for k in {0, n // 100, n // 100 + 1, n} & set(range(n + 1)):
            assert (k <= n - rank) == (100 * k <= n)
