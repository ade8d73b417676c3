"""The checker's evaluation of the inequality chain."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import pairwise

import mpmath
import pytest

from kcdsl.inequalities import bound, gradient_bias, reward, span_from_norm
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.verification.bound_chain import METRICS, implied_bound, span_of_norm

CONSTANTS = {
    "reward_range": Fraction(7, 3),
    "advantage_max": Fraction(1, 10),
    "score_norm_max": Fraction(25),
}
DISTRIBUTIONS = (
    "tv", "kl", "jeffreys", "chi2", "hellinger2", "js", "abs_log_ratio", "w_log_w",
)  # fmt: skip


def claimed(metric: str, s: float) -> float:
    """Return the value that the compiler's own chain would write into a certificate."""
    match metric:
        case "reward_delta":
            return reward(math.nextafter(7 / 3, 3), s)
        case "grad_bias":
            return gradient_bias(math.nextafter(0.1, 1), 25.0, s)
        case "log_ratio":
            return bound("abs_log_ratio", s)
        case _:
            return bound(metric, s)


@pytest.mark.parametrize("metric", METRICS)
def test_claims_of_the_compiler_are_accepted_and_tight(metric: str) -> None:
    rng = random.Random(metric)
    for _ in range(60):
        width = 10.0 ** rng.uniform(-12, 2.3)
        temperature = Fraction(rng.randint(1, 300), 100)
        s = span_from_norm("span", width, temperature)
        exact = implied_bound(metric, width.hex(), temperature, CONSTANTS)
        value = claimed(metric, s)
        if exact is None or value == math.inf:
            continue
        assert Fraction(value) >= exact
        assert Fraction(value) <= exact * (1 + Fraction(3, 10**11) + Fraction(s) / 10**11)


@pytest.mark.parametrize("metric", DISTRIBUTIONS)
@pytest.mark.parametrize("s", [1e-9, 1e-3, 0.7, 5.0, 90.0, 3999.0])
def test_decimals_agree_with_another_arithmetic(metric: str, s: float) -> None:
    computed = implied_bound(metric, s.hex(), Fraction(1))
    assert computed is not None
    with mpmath.workdps(120):
        x = mpmath.mpf(s)
        exact = {
            "tv": mpmath.tanh(x / 4),
            "kl": x / mpmath.expm1(x) - 1 + mpmath.log(mpmath.expm1(x) / x),
            "jeffreys": x * mpmath.tanh(x / 4),
            "chi2": mpmath.sinh(x / 2) ** 2,
            "hellinger2": 1 - mpmath.sech(x / 4),
            "js": x / 4 * mpmath.tanh(x / 4) - mpmath.log(mpmath.cosh(x / 4)),
            "abs_log_ratio": x,
            "w_log_w": x * mpmath.exp(x),
        }[metric]
        ratio = mpmath.mpf(computed.numerator) / computed.denominator / exact
        assert -(mpmath.mpf(10) ** -58) <= ratio - 1 <= mpmath.mpf(10) ** -45


@pytest.mark.parametrize("metric", METRICS)
def test_bounds_grow_with_the_span_and_shrink_with_the_temperature(metric: str) -> None:
    spans = [0.0, 5e-324, 1e-300, 1e-20, 1e-6, 0.1, 1.0, 30.0, 900.0, 3990.0, 4010.0, 1e300]
    values = [implied_bound(metric, s.hex(), Fraction(1), CONSTANTS) for s in spans]
    finite = [v for v in values if v is not None]
    assert values[: len(finite)] == finite  # None only at the end
    assert all(a <= b for a, b in pairwise(finite))
    assert finite[0] == 0
    cold = implied_bound(metric, (0.5).hex(), Fraction(1, 2), CONSTANTS)
    warm = implied_bound(metric, (0.5).hex(), Fraction(2), CONSTANTS)
    assert cold is not None
    assert warm is not None
    assert cold > warm


def test_saturated_bounds_are_accepted() -> None:
    far = (1e9).hex()
    one = Fraction(1)
    assert implied_bound("tv", far, one) == implied_bound("hellinger2", far, one) == 1
    js = implied_bound("js", far, one)
    assert js is not None
    assert 0 <= js - Fraction(math.log(2)) < Fraction(1, 10**15)
    assert implied_bound("chi2", far, one) is None
    assert implied_bound("w_log_w", far, one) is None
    kl = implied_bound("kl", far, one)
    assert kl is not None
    assert float(kl) == pytest.approx(1e9 - 1 - math.log(1e9))


def test_exact_span_is_used_unchanged() -> None:
    assert implied_bound("log_ratio", Fraction(1, 3), Fraction(1, 7)) == Fraction(7, 3)


def test_norms_convert_to_spans() -> None:
    assert span_of_norm("span", (0.1).hex()) == Fraction(0.1)
    assert span_of_norm("inf", (0.1).hex()) == 2 * Fraction(0.1)
    two = span_of_norm("2", (0.1).hex())
    assert 0 <= (two / Fraction(0.1)) ** 2 - 2 < Fraction(1, 10**45)
    assert Fraction(span_from_norm("2", 0.1)) >= two / (1 + Fraction(1, 10**40))
    with pytest.raises(Rejected, match="chain/norm"):
        span_of_norm("1", (0.1).hex())


@pytest.mark.parametrize(
    "text", ["inf", "nan", "-0x1.0p+0", "0x1p+0", "0.1", "10", "", "0x1.0p+9999"]
)
def test_invalid_spans_are_refused(text: str) -> None:
    with pytest.raises(Rejected):
        implied_bound("tv", text, Fraction(1))
    with pytest.raises(Rejected):
        span_of_norm("inf", text)


def test_missing_and_invalid_premises_are_refused() -> None:
    one = (1.0).hex()
    for metric in ("top1_overlap", "ess", "latency", ""):
        with pytest.raises(Rejected, match="chain/metric"):
            implied_bound(metric, one, Fraction(1))
    for temperature in (Fraction(0), Fraction(-1)):
        with pytest.raises(Rejected, match="chain/temperature"):
            implied_bound("tv", one, temperature)
    with pytest.raises(Rejected, match="chain/constant"):
        implied_bound("reward_delta", one, Fraction(1))
    with pytest.raises(Rejected, match="chain/constant"):
        implied_bound("grad_bias", one, Fraction(1), {"advantage_max": Fraction(1)})
    with pytest.raises(Rejected, match="chain/constant"):
        implied_bound("reward_delta", one, Fraction(1), {"reward_range": Fraction(-1)})
    with pytest.raises(Rejected, match="chain/span"):
        implied_bound("tv", Fraction(-1), Fraction(1))
