"""Interval arithmetic of estimates encloses every combination of values."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl_backends.empirical.statistics.estimates import EstimateInterval, NotMeasurable, compare

numbers = st.fractions(-10, 10, max_denominator=20)


@st.composite
def intervals(draw: st.DrawFn) -> EstimateInterval:
    low, value, high = sorted((draw(numbers), draw(numbers), draw(numbers)))
    ends = draw(st.tuples(st.booleans(), st.booleans()))
    return EstimateInterval(value, low if ends[0] else None, high if ends[1] else None)


def inside(value: Fraction, interval: EstimateInterval) -> bool:
    above = interval.low is None or interval.low <= value
    return above and (interval.high is None or value <= interval.high)


def points(interval: EstimateInterval) -> list[Fraction]:
    low = interval.value - 5 if interval.low is None else interval.low
    high = interval.value + 5 if interval.high is None else interval.high
    return [low, interval.value, high, (low + high) / 2]


@pytest.mark.full
@given(intervals(), intervals(), st.sampled_from("+-*/"))
def test_results_enclose_every_combination(
    a: EstimateInterval, b: EstimateInterval, op: str
) -> None:
    try:
        found = a.combine(op, b)
    except NotMeasurable:
        assert op == "/"
        assert b.value == 0
        return
    for x in points(a):
        for y in points(b):
            if op == "/" and y == 0:
                continue
            value = {"+": x + y, "-": x - y, "*": x * y}.get(op) if op != "/" else x / y
            assert value is not None
            assert inside(value, found)


@given(intervals())
def test_magnitudes_enclose_every_value(a: EstimateInterval) -> None:
    found = a.magnitude(a)
    assert all(inside(abs(x), found) for x in points(a))
    assert found.value == abs(a.value)


@given(intervals(), intervals(), st.sampled_from(["<=", "<", ">=", ">", "=="]))
def test_verdicts_agree_with_every_combination(
    a: EstimateInterval, b: EstimateInterval, op: str
) -> None:
    outcome = compare(a, op, b)
    truths = {
        {"<=": x <= y, "<": x < y, ">=": x >= y, ">": x > y, "==": x == y}[op]
        for x in points(a)
        for y in points(b)
    }
    if outcome == "held":
        assert truths == {True}
    if outcome == "violated":
        assert truths == {False}


@pytest.mark.parametrize(
    ("op", "outcome"), [("<=", "held"), (">=", "held"), ("==", "held"), ("<", "violated")]
)
def test_equal_points_are_decided(op: str, outcome: str) -> None:
    half = EstimateInterval.point(Fraction(1, 2))
    assert compare(half, op, half) == outcome


def test_unknown_operators_are_defects() -> None:
    point = EstimateInterval.point(Fraction(1))
    with pytest.raises(ValueError, match="comparison"):
        compare(point, "!=", point)
    with pytest.raises(ValueError, match="operation"):
        point.combine("%", point)


def test_overflowing_products_keep_open_ends() -> None:
    """A product may exceed every double; a missing end stays missing."""
    large = EstimateInterval.point(Fraction(10) ** 300)
    product = large.combine("*", large)
    assert product.value == Fraction(10) ** 600
    some = EstimateInterval(Fraction(1), Fraction(1), None)
    assert product.combine("*", some) == EstimateInterval(product.value, product.value, None)
    assert product.negate().combine("*", some) == EstimateInterval(
        -product.value, None, -product.value
    )
