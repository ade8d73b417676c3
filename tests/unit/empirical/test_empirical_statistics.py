"""Order statistics, exact limits, and bootstrap by request."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl_backends.empirical.statistics import bootstrap, estimates, planning, rates
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable

values_list = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


@given(values_list, st.fractions(Fraction(1, 100), Fraction(99, 100)), st.floats(-1e6, 1e6))
def test_percentile_is_below_tau_exactly_if_few_enough_exceed(
    values: list[float], q: Fraction, tau: float
) -> None:
    found = rates.quantile(np.array(values), q, None)
    exceeding = sum(not (v <= tau) for v in values)
    assert (found.value <= tau) == (exceeding <= len(values) - math.ceil(q * len(values)))
    assert found.value in values


@pytest.mark.parametrize(("q", "n"), [(95, 59), (99, 299)])
def test_upper_limit_of_a_percentile_needs_enough_requests(q: int, n: int) -> None:
    few, enough = np.arange(float(n - 1)), np.arange(float(n))
    share = Fraction(q, 100)
    assert rates.quantile(few, share).high is None
    assert rates.quantile(enough, share).high == n - 1


def test_limits_of_a_percentile_have_their_coverage() -> None:
    generator = np.random.default_rng(5)
    q, runs, missed = Fraction(9, 10), 400, [0, 0]
    true = -math.log(0.1)
    for _ in range(runs):
        found = rates.quantile(generator.exponential(size=120), q)
        assert found.low is not None
        assert found.high is not None
        missed[0] += found.low > true
        missed[1] += found.high < true
    assert max(missed) / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_clopper_pearson_matches_known_values() -> None:
    """One-sided 95 %: 0 of 300 gives 0.00993608; after 0 of n the limit is 1 - alpha^(1/n)."""
    assert rates.proportion(0, 300).high == pytest.approx(0.00993608, abs=1e-8)
    assert rates.proportion(0, 59).high == pytest.approx(1 - 0.05 ** (1 / 59))
    assert rates.proportion(300, 300).low == pytest.approx(0.05 ** (1 / 300))
    assert rates.proportion(0, 300).low == 0
    assert rates.proportion(3, 3).high == 1


@pytest.mark.parametrize(
    ("rate", "n"), [(Fraction(5, 100), 59), (Fraction(1, 100), 299), (Fraction(1, 1000), 2995)]
)
def test_units_needed_for_a_budget_suffice(rate: Fraction, n: int) -> None:
    assert planning.units_for_budget(rate) == n
    assert rates.exceedance([False] * n).high <= rate
    assert rates.exceedance([False] * (n - 1)).high > rate


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [math.inf, 0.0], [-math.inf]])
def test_empty_and_non_finite_values_have_no_statistics(bad: list[float]) -> None:
    for function in (
        lambda v: rates.quantile(v, Fraction(1, 2)),
        rates.largest,
        rates.smallest,
        lambda v: bootstrap.clustered_ratio(v, np.ones(len(v)), seed=0),
    ):
        with pytest.raises(NotMeasurable):
            function(np.array(bad))
    with pytest.raises(NotMeasurable):
        rates.proportion(0, 0)


def test_means_do_not_depend_on_the_order_of_requests() -> None:
    sums, sizes = [1e16, 1.0, -1e16, 3.0] * 3, [1.0] * 12
    forward = bootstrap.clustered_ratio(sums, sizes, seed=0, confidence=None)
    backward = bootstrap.clustered_ratio(sums[::-1], sizes, seed=0, confidence=None)
    assert forward.value == backward.value == 1.0


def test_mean_weighs_tokens_and_resamples_requests() -> None:
    sums, sizes = [10.0] * 10 + [0.0] * 10, [10.0] * 10 + [30.0] * 10
    found = bootstrap.clustered_ratio(sums, sizes, seed=0)
    assert found.value == 0.25
    assert found.n == 20
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.25 < found.high
    mixed = np.random.default_rng(0).exponential(size=20)
    first = bootstrap.clustered_ratio(mixed, sizes, seed=0)
    assert bootstrap.clustered_ratio(mixed, sizes, seed=0) == first
    assert bootstrap.clustered_ratio(mixed, sizes, seed=1) != first


def test_limits_of_a_mean_cover_clustered_data() -> None:
    """Tokens of a request share its level; treated as independent they cover far less often."""
    generator = np.random.default_rng(11)
    runs, missed, naive = 150, [0, 0], 0
    for run in range(runs):
        level = generator.normal(size=40)
        sizes = generator.integers(5, 40, size=40).astype(float)
        sums = level * sizes + generator.normal(size=40) * np.sqrt(sizes)
        found = bootstrap.clustered_ratio(sums, sizes, seed=run)
        assert found.low is not None
        assert found.high is not None
        missed[0] += found.low > 0
        missed[1] += found.high < 0
        naive += abs(found.value) > 1.645 * math.sqrt(2 / sizes.sum())
    assert max(missed) / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert naive / runs > 0.3


def test_few_requests_give_no_limits() -> None:
    for n, limited in ((19, False), (20, True)):
        sums, sizes = np.arange(1.0, n + 1), np.ones(n)
        found = bootstrap.clustered_ratio(sums, sizes, seed=0)
        assert (found.low is not None) == (found.high is not None) == limited


def test_lower_and_upper_ranks_are_symmetric() -> None:
    """The lower limit of p5 equals the upper limit of p95 of the negated values."""
    values = np.random.default_rng(0).normal(size=1000)
    for n in (59, 60, 100, 473, 1000):
        for q in (Fraction(1, 20), Fraction(9, 10), Fraction(1, 2)):
            for confidence in (estimates.ONE_LOOK, estimates.confidence_over(None)):
                found = rates.quantile(values[:n], q, confidence)
                turned = rates.quantile(-values[:n], 1 - q, confidence)
                mirrored = [None if x is None else -x for x in (turned.high, turned.low)]
                assert [found.low, found.high] == mirrored


def test_equal_values_at_the_range_limit_use_the_binomial_limit() -> None:
    """Twenty values of 100 % show 86 %, not 100 %."""
    found = bootstrap.clustered_ratio([5.0] * 20, [5.0] * 20, seed=0, bounds=(0.0, 1.0))
    assert found.low == pytest.approx(0.05 ** (1 / 20))
    assert found.high == 1
    low = bootstrap.clustered_ratio([0.0] * 20, [5.0] * 20, seed=0, bounds=(0.0, 1.0))
    assert low.low == 0
    assert low.high == pytest.approx(1 - 0.05 ** (1 / 20))
    inside = bootstrap.clustered_ratio([2.0] * 20, [5.0] * 20, seed=0, bounds=(0.0, 1.0))
    assert (inside.low, inside.high) == (None, None)


def test_small_spread_is_not_stronger_than_none() -> None:
    """Five flips in 100 requests of 1000 tokens exclude no rate that zero flips would not."""
    flips, sizes = np.array([1.0] * 5 + [0.0] * 95), np.full(100, 1000.0)
    none = bootstrap.clustered_ratio(np.zeros(100), sizes, seed=0, bounds=(0.0, 1.0)).high
    few = bootstrap.clustered_ratio(flips, sizes, seed=0, bounds=(0.0, 1.0))
    assert none is not None
    assert few.high is not None
    assert few.high > none
    turned = bootstrap.clustered_ratio(sizes - flips, sizes, seed=0, bounds=(0.0, 1.0))
    assert turned.low == pytest.approx(1 - few.high)
    open_range = bootstrap.clustered_ratio(flips, sizes, seed=0, bounds=(0.0, None))
    assert open_range.high is not None
    assert open_range.high < 1e-3, "nothing is known of the end of such a range"


def test_many_requests_are_resampled_in_blocks() -> None:
    blocks = list(bootstrap.resamples(5_000_000, 0, 3))
    assert [b.shape for b in blocks] == [(1, 5_000_000)] * 3
    small = np.concatenate(list(bootstrap.resamples(10, 0, 1999)))
    assert small.shape == (1999, 10)
    assert small.min() == 0
    assert small.max() == 9
