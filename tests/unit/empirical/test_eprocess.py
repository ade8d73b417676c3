"""Anytime-valid limits: reference values, guards, and a second test of the same hypothesis."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kcdsl_backends.empirical.statistics import estimates, planning, rates
from kcdsl_backends.empirical.statistics.estimates import Confidence
from kcdsl_backends.empirical.statistics.rates import E_PROCESS, limit_ranks

ALPHA = Fraction(1, 20)
ANYTIME = Confidence(anytime=True)
PERCENT = Fraction(1, 100)


@pytest.mark.parametrize(
    ("k", "n", "rate", "wanted"),
    [
        (611, 120_000, PERCENT, 174.724004438),
        (0, 10**6, Fraction(1, 10**5), 8.72796568071),
        (9000, 10**6, PERCENT, 47.8791832197),
        (9999, 10**6, PERCENT, -5.06746573835),
    ],
)
def test_values_equal_quadrature_with_fifty_digits(
    k: int, n: int, rate: Fraction, wanted: float
) -> None:
    assert rates.log_certify(k, n, rate) == pytest.approx(wanted, rel=5e-10)


def test_both_processes_equal_sums_over_a_grid() -> None:
    """The mixture integral by brute force, for both sides."""
    rate, k, n = Fraction(1, 10), 4, 90
    p = (np.arange(2_000_000) + 0.5) / 2_000_000
    weight = p**-0.5 * (1 - p) ** -0.5
    ratio = k * np.log(p / 0.1) + (n - k) * np.log((1 - p) / 0.9)
    for function, side, count in (
        (rates.log_certify, p < 0.1, 4),
        (rates.log_alarm, p > 0.1, 30),
    ):
        ratio = count * np.log(p / 0.1) + (n - count) * np.log((1 - p) / 0.9)
        mixture = (weight * np.exp(ratio))[side].sum() / weight[side].sum()
        assert function(count, n, rate) == pytest.approx(math.log(mixture), rel=2e-3)


@pytest.mark.parametrize(("k", "n"), [(500, 1000), (2000, 20_000), (10, 1000), (1000, 1000)])
def test_clear_violation_is_never_certified(k: int, n: int) -> None:
    """A floor below the truncated mass would give 923 and 2196 for the first two."""
    assert rates.log_certify(k, n, PERCENT) == 0
    assert not E_PROCESS.shows_below(k, n, PERCENT, ALPHA)
    assert rates._log_mixture(k, n, PERCENT, below=True) <= 0
    assert rates.log_alarm(0, n, PERCENT) == rates.log_alarm(n // 100, n, PERCENT) == 0


def test_mass_is_not_floored() -> None:
    assert rates._log_mixture(500, 1000, PERCENT, below=True) == -math.inf


@pytest.mark.parametrize("rate", [Fraction(0), Fraction(1), Fraction(-1), Fraction(2)])
def test_zero_budget_is_refused(rate: Fraction) -> None:
    for function in (rates.log_certify, rates.log_alarm):
        with pytest.raises(ValueError, match="between 0 and 1"):
            function(0, 10, rate)
    with pytest.raises(ValueError, match="between 0 and 1"):
        planning.units_for_budget(rate, ANYTIME)


@pytest.mark.parametrize(
    ("rate", "n"), [(PERCENT, 377), (Fraction(1, 1000), 3787), (Fraction(1, 10_000), 37_883)]
)
def test_units_needed_without_exceedances(rate: Fraction, n: int) -> None:
    assert planning.units_for_budget(rate, ANYTIME) == n
    assert E_PROCESS.shows_below(0, n, rate, ALPHA)
    assert not E_PROCESS.shows_below(0, n - 1, rate, ALPHA)
    assert E_PROCESS.upper_limit(0, 10 * n, ALPHA) == pytest.approx(3.79 / (10 * n), rel=0.02)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_printed_limits_are_rounded_outward(pair: tuple[int, int]) -> None:
    k, n = pair
    low, high = E_PROCESS.lower_limit(k, n, ALPHA), E_PROCESS.upper_limit(k, n, ALPHA)
    assert low <= k / n <= high
    if high < 1:
        assert E_PROCESS.shows_below(k, n, Fraction(high), ALPHA)
        assert not E_PROCESS.shows_below(k, n, Fraction(high) * (1 - Fraction(1, 10**9)), ALPHA)
    if low > 0:
        assert E_PROCESS.shows_above(k, n, Fraction(low), ALPHA)
        assert not E_PROCESS.shows_above(k, n, Fraction(low) * (1 + Fraction(1, 10**9)), ALPHA)
    fixed = rates.limits(k, n, Confidence())
    assert low <= fixed[0]
    assert high >= fixed[1]


@given(st.integers(1, 2000), st.fractions(Fraction(1, 200), Fraction(1, 2), max_denominator=200))
def test_anytime_pass_implies_a_single_look_pass(n: int, rate: Fraction) -> None:
    """A certificate, which recomputes the binomial tail, therefore accepts it."""
    k = E_PROCESS.most_exceedances(n, rate, ALPHA)
    if k is not None:
        assert rates.shows_below(k, n, rate, Confidence())
        assert E_PROCESS.shows_below(k, n, rate, ALPHA)
        assert not E_PROCESS.shows_below(k + 1, n, rate, ALPHA)


def test_anytime_ranks_are_wider_than_single_look_ranks() -> None:
    q = Fraction(9, 10)
    for n in (100, 400, 2000):
        (low, high), (once_low, once_high) = (
            limit_ranks(n, q, ANYTIME),
            limit_ranks(n, q, Confidence()),
        )
        assert low is not None
        assert once_low is not None
        assert low <= once_low
        assert high is None or (once_high is not None and high >= once_high)


# --- many looks ----------------------------------------------------------------------------------


def _counted(p: float, runs: int, looks: int, every: int) -> tuple[np.ndarray, np.ndarray]:
    n = np.arange(1, looks + 1) * every
    k = np.random.default_rng(4).binomial(every, p, size=(runs, looks)).cumsum(axis=1)
    return k, n


def _passes(k: np.ndarray, n: np.ndarray, confidence: Confidence) -> float:
    from kcdsl_backends.empirical.statistics.rates import most_exceedances

    allowed = [most_exceedances(int(m), PERCENT, confidence) for m in n]
    limits = np.array([-1 if a is None else a for a in allowed])
    return float((k <= limits).any(axis=1).mean())


def test_repeated_looks_need_anytime_limits() -> None:
    k, n = _counted(0.01, runs=1500, looks=100, every=100)
    once, often = Confidence(), _passes(k, n, Confidence())
    assert often > 0.15
    assert _passes(k[:, -1:], n[-1:], once) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1500)
    assert _passes(k, n, ANYTIME) <= 0.05
    planned = estimates.confidence_over(100)
    assert _passes(k, n, planned) <= 0.05
    good, n = _counted(0.002, runs=300, looks=50, every=100)
    assert _passes(good, n, ANYTIME) == 1


def _decided(k: int, n: int) -> bool | None:
    """Return whether k of n decide a rate of 1 % at every look; None if undecided."""
    if E_PROCESS.shows_above(k, n, PERCENT, ALPHA):
        return False
    return True if E_PROCESS.shows_below(k, n, PERCENT, ALPHA) else None


def test_confidence_sequence_does_not_contradict() -> None:
    """The confidence sequence method (Ding, Gandy and Hahn) stops where (n + 1) b(k; n, p) < ε.

    It is another anytime-valid test of the same hypothesis; where one decides beyond a factor of
    two of the budget, the other does not decide the opposite.
    """
    generator = np.random.default_rng(12)
    agreements = 0
    for p in (0.001, 0.003, 0.03, 0.1):
        k = generator.binomial(100, p, size=(40, 60)).cumsum(axis=1)
        n = np.arange(1, 61) * 100
        stops = np.log(n + 1) + stats.binom.logpmf(k, n, 0.01) < math.log(0.05)
        for row, found in zip(k, stops, strict=True):
            if not found.any():
                continue
            at = int(found.argmax())
            below = bool(row[at] < 0.01 * n[at])
            decided = (_decided(int(row[i]), int(n[i])) for i in range(60))
            assert next((o for o in decided if o is not None), None) == below
            agreements += 1
    assert agreements > 140


def test_few_units_are_inconclusive() -> None:
    assert _decided(0, 400) is True
    assert _decided(0, 100) is None
    assert _decided(40, 400) is False


@pytest.mark.full
def test_module_does_not_import_torch() -> None:
    """An online router imports the same functions."""
    import subprocess
    import sys

    code = (
        "import sys; import kcdsl_backends.empirical.statistics.planning; "
        "import kcdsl_backends.empirical.questions.plan; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
