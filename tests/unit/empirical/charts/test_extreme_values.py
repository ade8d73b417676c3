"""Charts are finite and drawable for any finite measured values."""

from __future__ import annotations

import math
import re
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.verdict.html import curves
from kcdsl.verdict.html import distributions as bounds
from kcdsl.verdict.html import distributions as histograms
from kcdsl.verdict.messages import brief
from kcdsl_backends.empirical.charts.series import (
    by_rank,
    drift_by,
    edges_of,
    histogram,
    mean,
    percentiles,
)

_NOT_DRAWN = re.compile(r'"[^"]*\b(nan|inf)\b[^"]*"')
LARGEST, LEAST = 1.7976931348623157e308, 5e-324
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(min_value=LEAST, max_value=LARGEST)


def _one(values: list[float], limit: float) -> str:
    array = np.array(values)
    scale, edges = edges_of(array)
    assert all(map(math.isfinite, edges))
    assert edges == sorted(edges)
    counted = histogram(array, scale, edges)
    assert sum(counted["counts"]) + counted["zeros"] == array.size
    chart = {
        "metric": "m",
        "unit": "nat",
        "formula": "",
        "magnitude": False,
        "better": "lower",
        "scale": scale,
        "edges": edges,
        "slices": [
            {
                "slice": "all",
                **counted,
                "percentiles": percentiles(array, higher_is_better=False),
            }
        ],
        "limits": [{"clause": "N", "op": "<=", "threshold": limit}],
    }
    return histograms.histogram(chart, 0, "request").svg


@given(st.lists(NUMBERS, min_size=1, max_size=12), NUMBERS)
def test_any_finite_values_have_a_histogram(values: list[float], limit: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _NOT_DRAWN.search(_one(values, limit)) is None


@pytest.mark.parametrize(
    "values",
    [
        [LARGEST],
        [LARGEST, 1.0],
        [-LARGEST, LARGEST],
        [1.3e308] * 40,
        [LEAST, LARGEST],
        [LEAST, 2 * LEAST],
        [0.0, LEAST],
        [-0.0, 0.0],
    ],
)
def test_extremes_of_float64_have_a_histogram(values: list[float]) -> None:
    assert _NOT_DRAWN.search(_one(values, 0.05)) is None


@given(st.lists(POSITIVE, min_size=1, max_size=12))
def test_any_finite_drift_is_drawn_in_bins(values: list[float]) -> None:
    points = drift_by(by_rank(np.arange(len(values), dtype=float)), np.array(values))
    assert all(math.isfinite(point["mean"]) for point in points)
    chart = {"metric": "m", "unit": "nat", "by": "entropy", "of": "token", "points": points}
    assert _NOT_DRAWN.search(curves.drift_by(chart, 0).svg) is None


@given(POSITIVE, POSITIVE)
def test_any_bound_is_drawn_with_any_value(measured: float, certified: float) -> None:
    points = [{"request": "a", "measured": measured, "certified": certified}]
    chart = {"metric": "m", "unit": "nat", "points": points, "n": 1, "of": 1}
    assert _NOT_DRAWN.search(bounds.certified(chart, 0).svg) is None


def test_mean_is_finite_even_if_the_sum_overflows() -> None:
    assert mean(np.full(40, 1.3e308)) == pytest.approx(1.3e308)
    assert mean(np.array([LARGEST, LARGEST])) == LARGEST
    assert mean(np.array([1.0, 2.0, 4.5])) == 2.5
    assert mean(np.array([1.0, math.inf])) == math.inf
    assert math.isnan(mean(np.array([1.0, math.nan])))


def test_infinite_and_zero_numbers_are_formatted_briefly() -> None:
    assert [brief(x) for x in (math.inf, -math.inf, math.nan)] == ["∞", "-∞", "–"]
