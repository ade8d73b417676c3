"""The metric registry."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kcdsl.ir.terms import Family
from kcdsl.metrics import (
    BUILT_IN,
    METRICS,
    PREFIX,
    RECORD_NAMES,
)
from kcdsl.units import NAMED, UNITS


@pytest.mark.parametrize("name", sorted(METRICS))
def test_definitions_are_complete(name: str) -> None:
    metric = METRICS[name]
    assert metric.name == name
    assert metric.dimension in NAMED.values()
    assert metric.statistics
    assert metric.needs
    assert metric.summary
    assert ("aggregate" in metric.statistics) == (metric.kind == "aggregate")
    assert (metric.counted == "window") == (metric.kind == "aggregate")
    assert metric.function is None
    if metric.lower is not None and metric.upper is not None:
        assert metric.lower < metric.upper
    assert not (metric.signed and metric.lower is not None)


def test_directions_of_metrics() -> None:
    higher = {name for name, metric in METRICS.items() if metric.better == "higher"}
    assert higher == {
        "top1_overlap",
        "top5_overlap",
        "top10_overlap",
        "throughput",
        "determinism",
        "embedding_cosine",
        "margin",
        "logit_cosine",
        "stable_fraction",
        "jaccard1",
        "jaccard5",
        "jaccard10",
        "rbo10",
        "greedy_divergence_step",
        "ess_frac",
        "ess_seq",
        "pearson_p",
        "pearson_logp",
        "grad_cosine",
        "router_agreement",
        "router_margin",
    }


def test_families_of_metrics() -> None:
    runtime = {name for name, metric in METRICS.items() if metric.family is Family.RUNTIME}
    timed = {"latency", "ttft", "tpot", "throughput"}
    assert runtime == timed | {"peak_memory", "kv_memory", "failure_rate", "determinism"}


def test_prefixes_of_record_names_do_not_start_a_metric_name() -> None:
    assert [name for name in METRICS if PREFIX.match(name)] == []


@pytest.mark.parametrize(
    ("name", "statistic", "metric", "magnitude", "q", "unit"),
    [
        ("p50_logit_l2", "quantile", "logit_l2", False, Fraction(1, 2), None),
        ("p99_kl", "quantile", "kl", False, Fraction(99, 100), None),
        ("mean_kl", "mean", "kl", False, None, None),
        ("top5_overlap", "mean", "top5_overlap", False, None, None),
        ("mean_abs_log_ratio", "mean", "log_ratio", True, None, None),
        ("mean_w_log_w", "mean", "w_log_w", False, None, None),
        ("ece_gap", "aggregate", "ece_gap", False, None, None),
        ("p95_latency_ms", "quantile", "latency", False, Fraction(19, 20), "ms"),
        ("peak_memory_mb", "aggregate", "peak_memory", False, None, "MB"),
        ("throughput_tok_s", "aggregate", "throughput", False, None, "tok/s"),
        ("max_kl", "max", "kl", False, None, None),
        ("min_embedding_cosine", "min", "embedding_cosine", False, None, None),
        ("mean_k3", "mean", "k3", False, None, None),
        ("mean_kl_nats", "mean", "kl", False, None, "nats"),
        ("max_latency_min", "max", "latency", False, None, "min"),
        ("max_peak_memory_gib", "max", "peak_memory", False, None, "GiB"),
        ("p99_jeffreys", "quantile", "jeffreys", False, Fraction(99, 100), None),
    ],
)
def test_record_names_resolve_to_metrics(
    name: str, statistic: str, metric: str, magnitude: bool, q: Fraction | None, unit: str | None
) -> None:
    found = BUILT_IN.find_record(name)
    assert found is not None
    assert (found.statistic, found.metric, found.magnitude, found.q, found.unit) == (
        statistic,
        metric,
        magnitude,
        q,
        unit,
    )


def test_every_listed_record_name_resolves() -> None:
    for name in RECORD_NAMES:
        found = BUILT_IN.find_record(name)
        assert found is not None, name
        assert found.statistic in METRICS[found.metric].statistics
        assert found.unit is None or UNITS[found.unit].dimension == METRICS[found.metric].dimension


@pytest.mark.parametrize(
    "name", ["kl", "p99_kll", "p0_kl", "p100_kl", "latency", "mean_kl_ms", "p99_ms", "mean_", ""]
)
def test_unknown_names_are_refused(name: str) -> None:
    assert BUILT_IN.find_record(name) is None
