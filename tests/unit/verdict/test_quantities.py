"""Values beside a threshold: in its unit, distinguishable from it, never misquoted."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kcdsl.verdict.quantities import UNREACHED, distinct_text, quantity, scale, stated

UNITS = ("1", "%", "ratio", "s", "B", "tok/s", "nat")
FINITE = st.floats(min_value=1e-30, max_value=1e15)


def read(text: str) -> Fraction:
    """Return the value, in base units, that a reader takes from a text."""
    number, _, word = text.removesuffix("%").partition(" ")
    factors = {"ms": Fraction(1, 1000), "MB": Fraction(10**6), "GB": Fraction(10**9)}
    value = Fraction(number.replace(",", "")) * factors.get(word, Fraction(1))
    return value / 100 if text.endswith("%") else value


@pytest.mark.parametrize(
    ("threshold", "unit", "text"),
    [
        (0.99999, "ratio", "99.999%"),
        (0.001234, "nat", "0.001234"),
        (1e-6, "s", "0.001 ms"),
        (1800.0, "s", "1,800 s"),
        (86_400.5, "s", "86,400.5 s"),
        (0.07, "ratio", "7%"),
        (1234.5, "tok/s", "1234.5 tok/s"),
        (1.2345e9, "B", "1.2345 GB"),
        (1e-9, "ratio", "1e-09"),
    ],
)
def test_threshold_is_quoted_as_stated(threshold: float, unit: str, text: str) -> None:
    assert stated(threshold, unit) == text


@pytest.mark.parametrize(
    ("value", "threshold", "unit", "text"),
    [
        (0.0500001, 0.05, "nat", "0.0500001"),
        (0.05, 0.05, "nat", "0.05"),
        (0.04, 0.05, "nat", "0.04"),
        (0.999996, 0.99999, "%", "99.9996%"),
        (1.0, 0.99999, "%", "100%"),
        (math.nextafter(1.0, 0.0), 1.0, "%", "99.99999999999999%"),
        (1.11e-6, 1e-3, "%", "0.000111%"),
        (2.0004, 2.0, "s", "2.0004 s"),
        (None, 0.05, "nat", UNREACHED),
        (math.nan, 0.05, "nat", UNREACHED),
        (0.0123, None, "s", "12.3 ms"),
        (0.0, None, "s", "0 s"),
        (1543.21, None, "s", "1,543 s"),
        (999.9, None, "s", "1,000 s"),
        (1543.21, 1543.0, "s", "1,543.21 s"),
        (12_345.0, 1800.0, "s", "12,345 s"),
        (2.5e12, None, "B", "2,500 GB"),
    ],
)
def test_value_is_distinguishable_from_its_threshold(
    value: float | None, threshold: float | None, unit: str, text: str
) -> None:
    assert distinct_text(value, threshold, unit) == text


@given(value=FINITE, factor=st.sampled_from([1.0, 1 + 1e-9, 1 - 1e-9, 1.0004, 0.5]), data=st.data())
def test_printed_value_is_on_the_right_side_of_the_threshold(
    value: float, factor: float, data: st.DataObject
) -> None:
    """For thresholds with at most ten digits, which are quoted exactly."""
    unit = data.draw(st.sampled_from(UNITS))
    threshold = float(f"{value * factor:.10g}")
    assume(value == threshold or abs(value - threshold) > 1e-14 * threshold)
    seen, limit = read(distinct_text(value, threshold, unit)), read(stated(threshold, unit))
    assert (seen > limit) == (value > threshold)
    assert (seen == limit) == (value == threshold)


@given(st.floats(min_value=0, max_value=1, exclude_max=True))
def test_only_an_exact_share_of_1_prints_100_percent(value: float) -> None:
    assert quantity(value, "ratio") != "100%"


def test_values_of_one_row_share_a_unit() -> None:
    assert scale("ratio", 0.001) == scale("ratio", 0.0) == "%"
    assert scale("ratio", 1e-9) == "1"
    assert scale("ratio", None) == "ratio"
    assert scale("nat", 0.001) == "nat"
