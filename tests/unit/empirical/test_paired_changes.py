"""Paired changes of two runs and of a 2×2 design, against definitions written again."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from kcdsl.api import causes
from kcdsl_backends.empirical.questions import pairs
from kcdsl_backends.empirical.statistics import paired
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable


def test_an_interaction_counts_units_by_the_sign_of_two_differences() -> None:
    rng = np.random.default_rng(3)
    runs = [rng.random(200) < share for share in (0.95, 0.9, 0.9, 0.5)]
    found = paired.change_of_shares(runs)
    signs = [(int(d) - int(c)) - (int(b) - int(a)) for a, b, c, d in zip(*runs, strict=True)]
    worse, better = sum(s < 0 for s in signs), sum(s > 0 for s in signs)
    assert (found.worse, found.better, found.n) == (worse, better, 200)
    assert found.delta == (better - worse) / 200
    test = stats.binomtest(better, worse + better, alternative="less")
    assert found.harm == pytest.approx(test.pvalue)
    assert found.low < found.delta < found.high < 0


def test_an_interaction_of_means_has_the_limits_of_students_t() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(0, 1, (4, 50)) + np.array([[0.0], [1.0], [2.0], [4.0]])
    parts = [pairs._linear(row, np.ones(50)) for row in values]
    found = paired.change_of_means([p[0] for p in parts], [p[1] for p in parts], upward=False)
    each = (values[3] - values[2]) - (values[1] - values[0])
    test = stats.ttest_1samp(each, 0, alternative="greater")
    limits = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert found.delta == pytest.approx(each.mean())
    assert (found.low, found.high) == pytest.approx((limits.low, limits.high))
    assert found.harm == pytest.approx(test.pvalue)


@pytest.mark.full
def test_an_interaction_is_seldom_named_where_there_is_none() -> None:
    rng, false = np.random.default_rng(5), 0
    for _ in range(2000):
        runs = [rng.random(60) < 0.9 for _ in range(4)]
        false += paired.change_of_shares(runs).harm <= paired.ERROR
    assert false / 2000 <= paired.ERROR


def test_the_error_that_causes_state_is_the_one_that_rows_share() -> None:
    assert causes._ERROR == paired.ERROR


def test_no_units_are_no_evidence() -> None:
    with pytest.raises(NotMeasurable):
        paired.change_of_shares([np.zeros(0, dtype=bool)] * 4)
    with pytest.raises(NotMeasurable):
        paired.change_of_means([0.0] * 4, [np.zeros(1)] * 4, upward=True)
