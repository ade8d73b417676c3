"""The worst case over a box for a known distribution."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest

from kcdsl.chain import ChainDomainError, bound, bound_box, bound_box_from_rest


def enumerated(name: str, p: list[float], eps: float) -> float:
    """Return the largest value over all vertices of the box."""
    best = 0.0
    for signs in product((-eps, eps), repeat=len(p)):
        moment = math.log(math.fsum(a * math.exp(u) for a, u in zip(p, signs, strict=True)))
        ratio = [moment - u for u in signs]  # ln(p/q)
        if name == "tv":
            q = [a * math.exp(-r) for a, r in zip(p, ratio, strict=True)]
            value = 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q, strict=True))
        else:
            value = math.fsum(a * (math.expm1(-r) + r) for a, r in zip(p, ratio, strict=True))
        best = max(best, value)
    return best


def normalised(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


CASES = [
    [0.99, 0.01],
    [0.9, 0.06, 0.04],
    [0.7, 0.1, 0.1, 0.1],
    [0.5, 0.3, 0.2],
    [0.25] * 4,
    normalised([2.0**-k for k in range(8)]),
    normalised([1.0, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01]),
    [1.0, 0.0],
]


@pytest.mark.parametrize("name", ["tv", "kl"])
@pytest.mark.parametrize("eps", [1e-3, 0.1, 0.7, 2.0, 5.0])
@pytest.mark.parametrize("p", CASES)
def test_never_below_the_enumeration_and_equal_to_it_in_the_confident_regime(
    name: str, eps: float, p: list[float]
) -> None:
    box, exact = bound_box(name, p, eps), enumerated(name, p, eps)
    assert box.value >= exact * (1 - 1e-9) - 1e-15
    assert box.value <= bound(name, 2 * eps)
    if box.rule == "confident":
        assert box.value == pytest.approx(exact, rel=1e-7, abs=1e-12)
    else:
        assert box.value == bound(name, 2 * eps)


@pytest.mark.parametrize("name", ["tv", "kl"])
def test_outside_the_confident_regime_only_the_generic_bound_is_used(name: str) -> None:
    # Here a scan over sorted prefixes reaches less than the best subset: {0.4, 0.1} is no prefix.
    p, eps = [0.4, 0.3, 0.2, 0.1], 0.05
    assert bound_box(name, p, eps).rule == "generic"
    scan = max(
        enumerated_subset(name, math.fsum(sorted(p)[: k + 1]), eps) for k in range(len(p) - 1)
    )
    exact = enumerated(name, p, eps)
    assert bound_box(name, p, eps).value >= exact
    assert scan <= exact * (1 + 1e-12)


def enumerated_subset(name: str, mass: float, eps: float) -> float:
    k = math.expm1(2 * eps)
    if name == "tv":
        return mass * (1 - mass) * k / (1 + mass * k)
    return math.log1p(mass * k) - 2 * eps * mass


def test_a_prefix_scan_falls_short_where_a_subset_hits_the_peak() -> None:
    p, eps = normalised([0.45, 0.35, 0.2]), 1.6  # peak 1/(1 + e^1.6) = 0.168, then 0.2 is best
    q = normalised([0.4, 0.3, 0.17, 0.13])
    prefixes = [math.fsum(sorted(q)[: k + 1]) for k in range(3)]
    scan = max(enumerated_subset("tv", mass, eps) for mass in prefixes)
    assert scan < enumerated("tv", q, eps) * (1 - 1e-3)
    assert bound_box("tv", q, eps).value >= enumerated("tv", q, eps)
    assert bound_box("tv", p, eps).value >= enumerated("tv", p, eps)


def test_the_worked_example_is_far_below_the_generic_bound() -> None:
    box = bound_box("tv", [0.99, 0.01], 0.1)
    assert box.rule == "confident"
    assert box.value == pytest.approx(0.0022, abs=5e-5)
    assert bound("tv", 0.2) / box.value > 20


def test_tiny_drifts_keep_their_digits() -> None:
    box = bound_box("kl", [0.99, 0.01], 1e-9)
    assert box.rule == "confident"
    assert box.value == pytest.approx(0.5 * 0.99 * 0.01 * (2e-9) ** 2, rel=1e-6)


def test_the_bound_grows_as_less_is_known_of_the_top_class() -> None:
    values = [bound_box_from_rest("tv", rest / 1000, 0.3).value for rest in range(1001)]
    assert all(a <= b for a, b in pairwise(values))
    assert values[0] < 1e-300
    assert values[-1] == bound("tv", 0.6)


def test_other_names_use_the_generic_bound_and_huge_boxes_do_not_overflow() -> None:
    assert bound_box("chi2", [0.99, 0.01], 0.1).value == bound("chi2", 0.2)
    assert bound_box("tv", [0.99, 0.01], 1e4).value == 1.0
    assert bound_box("kl", [0.99, 0.01], math.inf).value == math.inf
    assert bound_box("tv", [0.99, 0.01], 0.0).value == 0.0


@pytest.mark.parametrize(
    "p", [[], [1.0], [0.5, math.nan], [1.5, -0.5], [0.5, 0.4], [math.inf, 0.0]]
)
def test_what_is_no_distribution_is_refused(p: list[float]) -> None:
    with pytest.raises(ChainDomainError):
        bound_box("tv", p, 0.1)


@pytest.mark.parametrize("eps", [math.nan, -0.1])
def test_a_box_without_a_width_is_refused(eps: float) -> None:
    with pytest.raises(ChainDomainError):
        bound_box("tv", [0.5, 0.5], eps)
    with pytest.raises(ChainDomainError):
        bound_box_from_rest("tv", 1.5, 0.1)
