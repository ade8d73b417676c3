"""Values of coalitions, their resamples, and missing intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from bench.coverage import LEVELS
from bench.coverage_shares import game, shares_held
from kcdsl.verdict.studies.attribution import EstimatedNumber
from kcdsl_backends.empirical.attribution.shapley import (
    Array,
    CoalitionColumn,
    Statistic,
    Table,
    apply,
    column,
    intervals,
    split,
)
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable

RNG = np.random.default_rng(3)


def requests(n: int, size: float, spread: float = 0.1) -> list[Array]:
    return [np.abs(size + spread * RNG.standard_normal(3 + i % 5)) for i in range(n)]


def table(statistic: Statistic, better: str = "lower", n: int = 60, **sizes: float) -> Table:
    columns = {int(m[1:]): column(requests(n, size), better, "m") for m, size in sizes.items()}
    return Table(statistic, better, columns)


def test_mean_weighs_tokens_and_percentile_counts_worst_tokens() -> None:
    values = [np.array([1.0, 2.0, 3.0]), np.array([10.0])]
    found = column(values, "lower", "m")
    assert Table("mean", "lower", {0: found}).values()[0] == 4.0
    assert Table("max", "lower", {0: found}).values()[0] == 10.0
    assert Table("p50", "lower", {0: found}).values()[0] == 3.0
    least = column(values, "higher", "m")
    assert Table("max", "higher", {0: least}).values()[0] == 1.0
    assert Table("p50", "higher", {0: least}).values()[0] == 10.0


@pytest.mark.parametrize("bad", [[], [np.array([])], [np.array([1.0, math.nan])]])
def test_invalid_evidence_has_no_value(bad: list[Array]) -> None:
    with pytest.raises(NotMeasurable):
        column(bad, "lower", "m")


@pytest.mark.parametrize("statistic", ["mean", "p50", "p90", "max"])
@pytest.mark.parametrize("better", ["lower", "higher"])
def test_resamples_equal_the_statistic_of_drawn_requests(statistic: Statistic, better: str) -> None:
    from kcdsl_backends.empirical.statistics.bootstrap import resamples

    values = sorted(requests(23, 1.0), key=max if better == "lower" else min)
    own = Table(statistic, better, {0: column(values, better, "m")})
    drawn = np.concatenate(list(resamples(23, 5, 40)))
    expected = [
        Table(statistic, better, {0: column([values[i] for i in row], better, "m")}).values()[0]
        for row in drawn
    ]
    assert own.resampled(5, 40)[0] == pytest.approx(expected, rel=1e-12)


def test_real_sources_are_shown_and_noise_is_not() -> None:
    values = requests(60, 1.0)
    noise = [np.abs(v + 0.05 * RNG.standard_normal(v.size)) for v in values]
    zero = [np.zeros(v.size) for v in values]
    columns = {m: column(v, "lower", "m") for m, v in enumerate((zero, values, zero, noise))}
    own = Table("mean", "lower", columns)
    shares = dict(enumerate(split(2, columns).shares))
    found = intervals(own, {"shapley": {str(i): c for i, c in shares.items()}}, 0)["shapley"]
    assert found["0"].shown
    assert found["0"].value == pytest.approx(1.0, abs=0.1)
    assert not found["1"].shown
    assert found["1"].low is not None


def test_simultaneous_intervals_widen_with_their_number() -> None:
    own = table("mean", m0=0.0, m1=1.0)
    one = split(1, own.columns).shares[0]
    few = intervals(own, {"a": {"x": one}}, 0)["a"]["x"]
    many = intervals(own, {"a": {str(i): one for i in range(20)}}, 0)["a"]["0"]
    assert few.low is not None
    assert few.high is not None
    assert many.low is not None
    assert many.high is not None
    assert many.low < few.low < few.high < many.high


@pytest.mark.parametrize(
    ("statistic", "n", "limited"),
    [
        ("mean", 19, True),
        ("mean", 20, False),
        ("max", 500, True),
        ("p99", 500, True),
        ("p99", 1000, False),
        ("p50", 20, False),
    ],
)
def test_too_few_requests_give_no_interval(statistic: Statistic, n: int, limited: bool) -> None:
    own = table(statistic, n=n, m0=0.0, m1=1.0)
    assert (own.limited() is not None) == limited
    coefficients = {0: Fraction(-1), 1: Fraction(1)}
    found = intervals(own, {"a": {"x": coefficients}}, 0)["a"]["x"]
    assert (found.low is None) == limited
    assert found.shown != limited


def test_intervals_are_determined_by_the_seed() -> None:
    own = table("mean", m0=0.0, m1=1.0)
    wanted = {"a": {"x": split(1, own.columns).shares[0]}}
    assert intervals(own, wanted, 7) == intervals(own, wanted, 7)
    assert intervals(own, wanted, 7) != intervals(own, wanted, 8)


@pytest.mark.parametrize("statistic", ["mean", "p50"])
def test_intervals_do_not_depend_on_the_order_of_requests(statistic: Statistic) -> None:
    order = np.random.default_rng(0).permutation(60)
    own = table(statistic, m0=1.0, m1=1.3)
    columns = {
        mask: CoalitionColumn(c.sums[order], c.counts[order], c.worst[order])
        for mask, c in own.columns.items()
    }
    wanted = {"a": {"x": {1: Fraction(1), 0: Fraction(-1)}}}
    found = intervals(own, wanted, 0)
    assert found["a"]["x"].low is not None
    assert found == intervals(replace(own, columns=columns), wanted, 0)


def test_interval_that_touches_zero_is_not_significant() -> None:
    assert not EstimatedNumber(1.0, 0.0, 2.0).shown
    assert not EstimatedNumber(1.0).shown
    assert not EstimatedNumber(0.0, 0.0, 0.0).shown
    assert EstimatedNumber(1.0, 0.5, 2.0).shown
    assert EstimatedNumber(-1.0, -2.0, -0.5).shown


# --- do intervals hold? --------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("level", "least"), [("normal", 0.9), ("lognormal 1.5", 0.78)])
def test_intervals_of_shares_have_joint_coverage(level: str, least: float) -> None:
    """On 20 requests; simple percentile intervals cover in 0.69 of the skewed cases."""
    found = shares_held(LEVELS[level], 20, 150)
    assert found.together >= least
    assert found.wrong <= 0.08
    assert found.shown["first"] > 0.8


def test_intervals_of_shares_of_a_percentile_have_joint_coverage() -> None:
    assert shares_held(LEVELS["normal"], 20, 60, "p50").together >= 0.93


def test_source_without_effect_has_share_zero() -> None:
    """Adding and subtracting a third of a value leaves no rounding error."""
    noise = 0.1 * RNG.standard_normal((4, 40)) + 1.0 / 3.0
    counts = np.full(40, 7.0)
    columns = {m: CoalitionColumn(noise[m & 3], counts, noise[m & 3]) for m in range(8)}
    own = Table("mean", "lower", columns)
    shares = split(3, columns).shares
    assert intervals(own, {"shapley": {"x": shares[2]}}, 0)["shapley"]["x"] == EstimatedNumber(
        0.0, 0.0, 0.0
    )
    assert not own.parts(shares[2]).any()
    assert own.parts(shares[0]).sum() / 280 == pytest.approx(
        float(apply(shares[0], own.values())), rel=1e-12
    )


@pytest.mark.parametrize("known", [range(8), (0, 1, 3, 7), (0, 1, 2, 3, 7), (0, 4, 5, 6, 7)])
def test_shares_of_means_sum_to_the_total_with_missing_coalitions(known: Sequence[int]) -> None:
    every = game(np.random.default_rng(5), 30, LEVELS["lognormal 1"])
    own = replace(every, columns={m: every.columns[m] for m in known})
    shares = {str(i): c for i, c in enumerate(split(3, own.columns).shares)}
    found = intervals(own, {"shapley": shares}, 0)["shapley"]
    values = own.values()
    assert math.fsum(f.value for f in found.values()) == pytest.approx(
        values[7] - values[0], rel=1e-13
    )
    for figure in found.values():
        assert figure.low is not None
        assert figure.high is not None
        assert figure.low <= figure.value <= figure.high
