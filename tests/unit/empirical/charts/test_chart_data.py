"""Chart data: closed forms, a second implementation, and limits of size."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl_backends.empirical.charts import charts_of
from kcdsl_backends.empirical.charts.series import (
    by_doubling,
    by_rank,
    disagreement,
    drift_by,
    edges_of,
    flips_by_margin,
    histogram,
    percentiles,
    positions,
)
from kcdsl_backends.empirical.decision.report import conclude, slice_data
from tests.support.evidence import clause, evidence

NUMBERS = st.lists(st.floats(0, 1e12, allow_subnormal=False), min_size=1, max_size=60)


# --- histograms ----------------------------------------------------------------------------------


def test_values_are_counted_between_the_stated_edges() -> None:
    values = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    scale, edges = edges_of(values, bins=4)
    assert (scale, edges) == ("linear", [0.0, 1.0, 2.0, 3.0, 4.0])
    assert histogram(values, scale, edges)["counts"] == [1, 1, 1, 2]


def test_log_scale_counts_zeros_separately() -> None:
    values = np.array([0.0, 0.0, 1e-6, 1e-3, 1.0])
    scale, edges = edges_of(values, bins=6)
    assert scale == "log"
    assert edges == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    found = histogram(values, scale, edges)
    assert found["zeros"] == 2
    assert sum(found["counts"]) == 3
    assert found["counts"][0] == found["counts"][-1] == 1


def test_histogram_has_the_units_of_a_slice_with_smaller_values() -> None:
    """A slice with some rollouts of a prompt has other worst values than the prompt."""
    table = evidence()
    data = slice_data(table)
    units = tuple(
        replace(unit, values={**unit.values, "kl": unit.values["kl"] / 1e3})
        for unit in data["long"].requests
    )
    charts = charts_of(table, {**data, "long": replace(data["long"], requests=units)}, ())
    (drawn,) = (c for c in charts["histograms"] if c["metric"] == "kl")
    for part in drawn["slices"]:
        assert sum(part["counts"]) + part["zeros"] + part["outside"] == part["n"], part["slice"]


def test_histograms_of_equal_and_missing_values() -> None:
    assert edges_of(np.array([0.25, 0.25])) == ("linear", [0.25, 0.25])
    assert histogram(np.array([0.25, 0.25]), "linear", [0.25, 0.25])["counts"] == [2]
    assert edges_of(np.array([])) == ("linear", [])
    assert edges_of(np.array([math.nan, math.inf])) == ("linear", [])
    assert histogram(np.array([math.nan]), "linear", [])["outside"] == 1


@given(NUMBERS)
def test_every_value_is_counted_once(values: list[float]) -> None:
    array = np.array([*values, math.nan, math.inf])
    scale, edges = edges_of(array)
    found = histogram(array, scale, edges)
    assert sum(found["counts"]) + found["zeros"] + found["outside"] == found["n"] == array.size
    assert found["outside"] == 2
    assert edges == sorted(edges)
    assert len(edges) <= 25


def test_percentiles_are_rounded_to_the_worse_order_statistic() -> None:
    values = np.arange(1.0, 101.0)
    assert percentiles(values, higher_is_better=False) == {
        "p50": 50, "p90": 90, "p95": 95, "p99": 99, "worst": 100,
    }  # fmt: skip
    assert percentiles(values, higher_is_better=True) == {
        "p50": 51, "p90": 11, "p95": 6, "p99": 2, "worst": 1,
    }  # fmt: skip
    assert percentiles(np.array([1.0, math.nan]), higher_is_better=False) is None


# --- curves and ranges ---------------------------------------------------------------------------


@given(st.lists(st.lists(st.sampled_from([0.4, 1.0]), min_size=1, max_size=30), min_size=1))
def test_disagreement_curve_equals_the_metric(texts: list[list[float]]) -> None:
    found = disagreement([np.array(text) for text in texts])
    expected = {}
    for at in range(max(map(len, texts))):
        reached = [min(text[: at + 1]) < 1 for text in texts if len(text) > at]
        expected[at] = (sum(reached), len(reached))
    assert [p["at"] for p in found] == sorted(expected)
    assert all((p["count"], p["n"]) == expected[int(p["at"])] for p in found)


def survivors(texts: list[list[float]], at: int) -> float:
    """Return the product-limit estimate by position, by definition."""
    agreeing = 1.0
    for position in range(at + 1):
        left = [t for t in texts if len(t) > position and all(v == 1 for v in t[:position])]
        new = [t for t in left if t[position] < 1]
        agreeing *= 1 - len(new) / len(left) if left else 1
    return 1 - agreeing


@given(st.lists(st.lists(st.sampled_from([0.4, 1.0, 1.0]), min_size=1, max_size=12), min_size=1))
def test_ended_texts_are_censored(texts: list[list[float]]) -> None:
    found = disagreement([np.array(text) for text in texts])
    shares = [float(p["share"]) for p in found]
    assert shares == pytest.approx([survivors(texts, int(p["at"])) for p in found])
    assert all(a <= b for a, b in pairwise(shares))
    if len({len(text) for text in texts}) == 1:
        assert shares == pytest.approx([p["count"] / p["n"] for p in found])


def test_curve_is_monotone_where_a_diverged_text_ends() -> None:
    found = disagreement([np.array([0.0]), np.array([1.0, 1.0, 1.0])])
    assert [(p["count"], p["n"]) for p in found] == [(1, 2), (0, 1), (0, 1)]
    assert [p["share"] for p in found] == [0.5, 0.5, 0.5]


def test_nan_neither_agrees_nor_disagrees() -> None:
    found = flips_by_margin(np.array([1.0, 2.0, 3.0]), np.array([0.0, math.nan, 1.0]))
    assert sum(point["n"] for point in found) == 2
    made = evidence(count=4)
    for run in made.runs.values():
        run.unit.values["top1_overlap"][:] = math.nan
    charts = charts_of(made, slice_data(made), ())
    assert {curve["k"] for curve in charts["disagreement"]} == {5}
    assert charts["flips_by_margin"] == []


def test_signed_metric_is_shown_by_its_magnitude() -> None:
    made = evidence((clause("N-R", "max", "log_ratio", "1/50", magnitude=True),))
    document = conclude(made).to_json()
    (row,) = (c for c in document["charts"]["histograms"] if c["metric"] == "log_ratio")
    sizes = [float(np.abs(r.unit.values["log_ratio"]).max()) for r in made.runs.values()]
    assert row["magnitude"] is True
    assert row["edges"][0] == min(sizes)
    assert row["slices"][0]["percentiles"]["worst"] == max(sizes)
    assert [limit["clause"] for limit in row["limits"]] == ["N-R"]


def test_number_of_points_does_not_grow_with_text_length() -> None:
    assert positions(100_000)[0] == 0
    assert positions(100_000)[-1] == 99_999
    assert len(positions(100_000)) == 64
    assert positions(3) == [0, 1, 2]
    assert positions(0) == []
    assert disagreement([np.empty(0)]) == []


def test_flips_are_counted_in_the_bin_of_their_margin() -> None:
    margins = np.arange(120.0)
    overlaps = np.where(margins < 10, 0.0, 1.0)
    found = flips_by_margin(margins, overlaps)
    assert len(found) == 12
    assert (found[0]["low"], found[0]["high"]) == (0.0, 9.0)
    assert [point["count"] for point in found] == [10] + [0] * 11
    assert sum(point["n"] for point in found) == 120


@given(st.lists(st.integers(0, 6).map(float), max_size=80))
def test_bins_contain_every_finite_key_once_and_keep_ties_together(keys: list[float]) -> None:
    array = np.array([*keys, math.nan])
    held = [(low, high, array[inside]) for low, high, inside in by_rank(array, 4)]
    assert sorted(np.concatenate([h for _, _, h in held]) if held else []) == sorted(keys)
    assert all((h >= low).all() and (h <= high).all() for low, high, h in held)
    assert all(a[1] < b[0] for a, b in pairwise(held))
    assert len(held) <= 4


def test_position_bins_double_in_width() -> None:
    found = [(low, high) for low, high, _ in by_doubling(np.arange(9.0))]
    assert found == [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15)]


def test_drift_bins_state_their_counts() -> None:
    keys, values = np.arange(40.0), np.arange(40.0) ** 2
    (first, second) = drift_by(by_rank(keys, 2), values)
    assert (first["low"], first["high"], first["n"]) == (0, 19, 20)
    assert first["mean"] == pytest.approx(np.mean(values[:20]))
    assert (first["p50"], first["p95"], first["worst"]) == (9**2, 18**2, 19**2)
    assert second["worst"] == 39**2
    assert drift_by(by_rank(keys, 2), np.full(40, math.nan)) == []


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.full
def test_charts_are_finite_json_of_bounded_size() -> None:
    sizes = []
    for count in (800, 3000):
        found = evidence(count=count)
        charts = charts_of(found, slice_data(found), ())
        sizes.append(len(json.dumps(charts, allow_nan=False)))
        assert charts["requests"] == count
    assert sizes[1] < 1.2 * sizes[0]


def test_charts_do_not_depend_on_storage_order() -> None:
    one = evidence()
    runs, certified = list(one.runs.items()), list(one.certified.items())
    other = evidence(runs=dict(runs[::-1]), certified=dict(certified[::-1]))
    assert conclude(one).dumps() == conclude(other).dumps()


def test_slices_have_separate_counts_on_common_edges() -> None:
    found = evidence()
    charts = charts_of(found, slice_data(found), ())
    kl = next(c for c in charts["histograms"] if c["metric"] == "kl")
    counts = {row["slice"]: row["counts"] for row in kl["slices"]}
    assert [a + b for a, b in zip(counts["short"], counts["long"], strict=True)] == counts["all"]
    assert sum(counts["all"]) == 60
    assert kl["edges"][0] == min(float(r.unit.values["kl"].max()) for r in found.runs.values())


def test_metrics_of_clauses_are_drawn_with_their_limits() -> None:
    charts = conclude(evidence()).to_json()["charts"]
    drawn = {c["metric"]: c for c in charts["histograms"]}
    assert "log_ratio" in drawn
    assert "margin" not in drawn
    assert [(x["clause"], x["threshold"]) for x in drawn["kl"]["limits"]] == [("N-KL", 1e-3)]
    assert drawn["log_ratio"]["limits"] == []  # a limit of a mean is not drawn


@pytest.mark.parametrize("q", ["99/100", "999/1000"])
def test_limits_of_percentiles_are_drawn_however_they_are_written(q: str) -> None:
    made = evidence((clause("N-Q", "quantile", "kl", "1/1000", q=q),))
    charts = conclude(made).to_json()["charts"]
    (drawn,) = (c for c in charts["histograms"] if c["metric"] == "kl")
    assert [(x["clause"], x["threshold"]) for x in drawn["limits"]] == [("N-Q", 1e-3)]


def test_bounds_are_shown_beside_values_of_the_same_requests() -> None:
    found = evidence()
    charts = {c["metric"]: c for c in conclude(found).to_json()["charts"]["certified"]}
    assert charts["kl"]["n"] == 45
    assert charts["drift of attn_0"]["n"] == 60
    for point in charts["kl"]["points"]:
        values = found.runs[point["request"]].unit.values["kl"]
        assert point["measured"] == float(values.max())
        assert point["certified"] == 50 * float(values.max())


def test_correction_table_counts_all_sampled_tokens() -> None:
    found = evidence()
    tokens = sum(request.length for request in found.requests)
    rows = {row["rule"]: row for row in conclude(found).to_json()["charts"]["what_if"]}
    assert set(rows) == {"tis", "mis", "icepop", "veto"}
    assert all(row["n"] == tokens for row in rows.values())
    ratios = np.concatenate([run.unit.values["log_ratio"] for run in found.runs.values()])
    assert rows["mis"]["above"] == int((ratios > math.log(2)).sum())
    assert rows["veto"]["high"] is None


def test_encoders_have_charts_of_states() -> None:
    clauses = (clause("N-H", "max", "hidden_linf", "1"),)
    charts = conclude(evidence(clauses, encoder=True)).to_json()["charts"]
    assert [c["metric"] for c in charts["histograms"]][:2] == ["hidden_l2", "hidden_linf"]
    assert {(c["metric"], c["by"]) for c in charts["drift_by"]} == {
        ("hidden_linf", "position"), ("hidden_linf", "length"), ("embedding_l2", "length"),
    }  # fmt: skip
    assert charts["disagreement"] == []


def test_missing_values_give_no_charts() -> None:
    nothing = evidence(count=0)
    assert charts_of(nothing, slice_data(nothing), ()) == {}
