"""Bound functions: values compared with decimals, monotonicity, limits, domain, conversions."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise

import pytest

from kcdsl.inequalities import (
    NAMES,
    DomainError,
    bias_free_clip,
    bound,
    excess,
    gradient_bias,
    kl,
    reward,
    round_down,
    round_up,
    span_from_intervals,
    span_from_norm,
    tv,
)
from kcdsl_certs.verification.bound_chain import implied_bound

UPPER = tuple(name for name in NAMES if name != "ess")
GRID = sorted(
    {10.0 ** (e / 7) for e in range(-70, 25)}
    | {edge * (1 + d) for edge in (0.05, 1.0, 2.0, 4.0, 8.0, 80.0, 300.0, 700.0, 1400.0, 2800.0)
       for d in (-1e-3, -1e-9, -1e-12, 0.0, 1e-12, 1e-9, 1e-3)}
)  # fmt: skip


@pytest.mark.parametrize("name", UPPER)
@pytest.mark.parametrize(
    "s", [5e-324, 1e-160, 1e-6, 1e-3, 0.05, 0.49, 0.999999, 1.0, 3.7, 20.0, 80.0, 300.0, 600.0]
)
def test_upper_bounds_exceed_the_exact_value_slightly(name: str, s: float) -> None:
    exact = implied_bound(name, s.hex(), Fraction(1))
    assert exact is not None
    computed = Fraction(bound(name, s))
    assert computed >= exact / (1 + Fraction(1, 10**50))
    # kl, jeffreys, chi2 ... move by up to s/2 times the rounding of s onto the grid.
    assert computed <= exact * (1 + Fraction(3, 10**11) + Fraction(s) / 10**11) + Fraction(3e-323)


@pytest.mark.parametrize("s", [1e-6, 0.3, 2.0, 50.0, 400.0, 900.0])
def test_effective_sample_size_is_rounded_down(s: float) -> None:
    chi2 = implied_bound("chi2", s.hex(), Fraction(1))
    assert chi2 is not None
    exact = 1 / (1 + chi2)
    computed = Fraction(bound("ess", s))
    assert computed <= exact
    assert computed >= exact * (1 - Fraction(3, 10**11) - Fraction(s) / 10**11) - Fraction(3e-323)


@pytest.mark.parametrize("name", NAMES)
def test_bounds_are_monotone_across_every_switch(name: str) -> None:
    values = [bound(name, s) for s in GRID]
    if name == "ess":
        values.reverse()
    assert all(a <= b for a, b in pairwise(values))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("start", [1e-3, 0.05, 0.9999999999, 3.9999999999, 30.0, 79.9, 120.0])
def test_bounds_are_monotone_between_neighbouring_floats(name: str, start: float) -> None:
    arguments = [start]
    for _ in range(2_000):
        arguments.append(arguments[-1] * (1 + 3e-13))
    values = [bound(name, s) for s in arguments]
    if name == "ess":
        values.reverse()
    assert all(a <= b for a, b in pairwise(values))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [math.nan, -1e-300, -1.0, -math.inf, True, "1", None])
def test_negative_and_non_finite_arguments_are_refused(name: str, wrong: object) -> None:
    with pytest.raises(DomainError):
        bound(name, wrong)  # type: ignore[arg-type]


def test_limits_of_bounds() -> None:
    at_infinity = {name: bound(name, math.inf) for name in NAMES}
    assert at_infinity["tv"] == at_infinity["hellinger2"] == 1.0
    assert math.log(2) <= at_infinity["js"] <= math.nextafter(math.log(2), 1.0)
    assert at_infinity["ess"] == 0.0
    for name in ("kl", "jeffreys", "chi2", "abs_log_ratio", "w_log_w"):
        assert at_infinity[name] == math.inf
        assert not math.isnan(bound(name, 1.7976931348623157e308))
    for name in NAMES:
        assert bound(name, 0.0) == (1.0 if name == "ess" else 0.0)
        assert bound(name, -0.0) == bound(name, 0.0)


def test_small_arguments_follow_the_leading_terms() -> None:
    s = 1e-4
    quarter, square = s / 4, s * s
    leading = {
        "tv": quarter,
        "kl": square / 8,
        "jeffreys": square / 4,
        "chi2": square / 4,
        "hellinger2": square / 32,
        "js": square / 32,
        "abs_log_ratio": s,
        "w_log_w": s,
    }
    for name, value in leading.items():
        assert bound(name, s) == pytest.approx(value, rel=2e-4)
    assert all(kl(s) <= s * s / 8 * (1 + 5e-11) for s in GRID)


def test_jeffreys_bound_is_below_twice_the_kl_bound() -> None:
    assert bound("jeffreys", 3.0) < 2 * kl(3.0)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DomainError, match="hellinger2"):
        bound("renyi", 1.0)


# --- conversions ---------------------------------------------------------------------------------


def test_conversions_round_up() -> None:
    third = Fraction(1, 3)
    assert Fraction(span_from_norm("span", 0.1, third)) >= Fraction(0.1) / third
    assert Fraction(span_from_norm("inf", 0.1)) == 2 * Fraction(0.1)
    two = Fraction(span_from_norm("2", 0.1, third)) / (Fraction(0.1) / third)
    assert 0 <= two**2 - 2 < Fraction(1, 10**14)
    assert span_from_norm("inf", 1.5e308) == math.inf
    assert span_from_norm("span", 5e-324, 3) == 5e-324
    points = [(v, v) for v in (0.1, 0.4, -0.2)]
    assert span_from_intervals(points, 0.5) == pytest.approx(1.2)
    assert Fraction(span_from_intervals(points[::2])) >= Fraction(0.1) + Fraction(0.2)
    assert span_from_intervals([(-1.0, 0.5), (0.0, 2.0)], 2) == 1.5


@pytest.mark.parametrize("temperature", [0, 0.0, -1, math.nan, math.inf, Fraction(0), True])
def test_bounds_require_a_positive_temperature(temperature: float) -> None:
    with pytest.raises(DomainError):
        span_from_norm("inf", 1.0, temperature)
    with pytest.raises(DomainError):
        span_from_intervals([(0.0, 0.0), (1.0, 1.0)], temperature)


@pytest.mark.parametrize("row", [[], [1.0], [0.0, math.nan], [0.0, math.inf], [-math.inf, 0.0]])
def test_empty_and_nan_rows_are_refused(row: list[float]) -> None:
    with pytest.raises(DomainError):
        span_from_intervals([(v, v) for v in row])


def test_empty_intervals_and_unknown_norms_are_refused() -> None:
    with pytest.raises(DomainError, match="empty"):
        span_from_intervals([(1.0, 0.0), (0.0, 0.0)])
    with pytest.raises(DomainError, match="norm '1'"):
        span_from_norm("1", 1.0)
    for wrong in (math.nan, math.inf, -1.0):
        with pytest.raises(DomainError):
            span_from_norm("inf", wrong)


# --- rewards, gradients, weights -----------------------------------------------------------------


def test_reward_and_gradient_bias_scale_the_total_variation() -> None:
    assert reward(3.0, 0.7) == pytest.approx(3 * math.tanh(0.175))
    assert reward(3.0, 0.7) >= 3.0 * tv(0.7)
    assert gradient_bias(2.0, 5.0, 0.7) == pytest.approx(20 * math.tanh(0.175))
    assert reward(0.0, 5.0) == gradient_bias(1.0, 0.0, 5.0) == reward(5.0, 0.0) == 0.0
    assert reward(5e-324, 1e-10) > 0.0
    for wrong in (math.nan, -1.0, math.inf):
        with pytest.raises(DomainError):
            reward(wrong, 1.0)
        with pytest.raises(DomainError):
            gradient_bias(1.0, wrong, 1.0)


def test_importance_weight_bounds() -> None:
    assert bias_free_clip(0.0) == 0.0
    assert bias_free_clip(0.1) >= math.expm1(0.1)
    assert bias_free_clip(800.0) == math.inf


def test_excess_of_a_weight_has_no_cancellation() -> None:
    assert excess(0.0) == 0.0
    assert excess(1e-9) == pytest.approx(5e-19, rel=1e-8)
    assert excess(-0.0999999) == pytest.approx(excess(-0.1000001), rel=1e-5)
    assert excess(800.0) == math.inf


def test_only_the_standard_library_is_imported() -> None:
    code = (
        "import sys, kcdsl.inequalities; "
        "heavy = {'numpy', 'torch', 'z3', 'scipy', 'mpmath'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_directed_rounding() -> None:
    tenth = Fraction(1, 10)
    assert Fraction(round_down(tenth)) <= tenth <= Fraction(round_up(tenth))
    assert round_up(Fraction(1, 4)) == round_down(Fraction(1, 4)) == 0.25
    assert round_up(Fraction(10) ** 400) == math.inf
    assert math.isfinite(round_down(Fraction(10) ** 400))
    assert round_down(-(Fraction(10) ** 400)) == -math.inf
