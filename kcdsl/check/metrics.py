"""The registry of metrics: what each one measures, as data.

A *pointwise* metric has one value per counted unit (token, request or window) and needs a
statistic; an *aggregate* metric is one number per window. The direction says which values are
good; a *signed* metric is bounded through `abs(...)` only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kcdsl.check.units import BYTES, NATS, ONE, RATIO, THROUGHPUT, TIME, Dimension
from kcdsl.ir.terms import Family

Kind = Literal["pointwise", "aggregate"]
Counted = Literal["token", "request", "window"]
Better = Literal["lower", "higher"]

_POINTWISE = frozenset({"mean", "max", "min", "quantile"})
_INDICATOR = frozenset({"mean", "rate", "max"})
_AGGREGATE = frozenset({"aggregate"})


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """What the language knows of one metric. `needs` are the data it is computed from:
    `logits` (of both kernels), `hidden`, `labels`, `rewards`, `text`, `timing`, `memory`,
    `outcomes` or `repeats`."""

    name: str
    family: Family
    kind: Kind
    counted: Counted
    better: Better
    dimension: Dimension
    statistics: frozenset[str]
    needs: tuple[str, ...]
    summary: str
    signed: bool = False
    nonnegative: bool = True
    upper: Fraction | None = None
    """The largest value possible, where there is one."""


def _numerical(
    name: str, dimension: Dimension, summary: str, needs: str = "logits"
) -> MetricDefinition:
    return MetricDefinition(
        name,
        Family.NUMERICAL,
        "pointwise",
        "token",
        "lower",
        dimension,
        _POINTWISE,
        (needs,),
        summary,
    )


def _overlap(k: int) -> MetricDefinition:
    return MetricDefinition(
        f"top{k}_overlap",
        Family.STATISTICAL,
        "pointwise",
        "token",
        "higher",
        RATIO,
        _POINTWISE,
        ("logits",),
        f"share of the {k} likeliest tokens on which both kernels agree",
        upper=Fraction(1),
    )


_DEFINITIONS = (
    _numerical("logit_l2", ONE, "l2 norm of the difference of logits"),
    _numerical("logit_l2_centered", ONE, "the same after removing the mean difference"),
    _numerical("logit_linf", ONE, "largest absolute difference of logits"),
    _numerical("logit_span", ONE, "largest minus smallest difference of logits"),
    _numerical("kl", NATS, "KL(train || infer) of the next-token distributions"),
    MetricDefinition(
        "tv",
        Family.NUMERICAL,
        "pointwise",
        "token",
        "lower",
        RATIO,
        _POINTWISE,
        ("logits",),
        "total variation of the next-token distributions",
        upper=Fraction(1),
    ),
    MetricDefinition(
        "log_ratio",
        Family.NUMERICAL,
        "pointwise",
        "token",
        "lower",
        NATS,
        _POINTWISE,
        ("logits",),
        "ln of train over infer probability of the sampled token",
        signed=True,
        nonnegative=False,
    ),
    MetricDefinition(
        "w_log_w",
        Family.NUMERICAL,
        "pointwise",
        "token",
        "lower",
        NATS,
        frozenset({"mean"}),
        ("logits",),
        "w ln w of the importance ratio; its mean estimates KL(train || infer)",
        nonnegative=False,
    ),
    _numerical("hidden_l2", ONE, "l2 norm of the difference of hidden states", "hidden"),
    _numerical("hidden_linf", ONE, "largest absolute difference of hidden states", "hidden"),
    MetricDefinition(
        "embedding_l2",
        Family.NUMERICAL,
        "pointwise",
        "request",
        "lower",
        ONE,
        _POINTWISE,
        ("hidden",),
        "l2 norm of the difference of sentence embeddings",
    ),
    MetricDefinition(
        "embedding_cosine",
        Family.NUMERICAL,
        "pointwise",
        "request",
        "higher",
        ONE,
        _POINTWISE,
        ("hidden",),
        "cosine of the two sentence embeddings",
        nonnegative=False,
        upper=Fraction(1),
    ),
    MetricDefinition(
        "grad_bias",
        Family.NUMERICAL,
        "aggregate",
        "window",
        "lower",
        ONE,
        _AGGREGATE,
        ("logits",),
        "norm of the policy-gradient bias that ignoring the importance ratio causes",
    ),
    _overlap(1),
    _overlap(5),
    _overlap(10),
    MetricDefinition(
        "ece_gap",
        Family.STATISTICAL,
        "aggregate",
        "window",
        "lower",
        RATIO,
        _AGGREGATE,
        ("logits", "labels"),
        "absolute difference of the expected calibration errors",
        upper=Fraction(1),
    ),
    MetricDefinition(
        "reward_delta",
        Family.STATISTICAL,
        "aggregate",
        "window",
        "lower",
        ONE,
        _AGGREGATE,
        ("rewards",),
        "absolute difference of the mean rewards",
    ),
    MetricDefinition(
        "refusal_flip",
        Family.STATISTICAL,
        "pointwise",
        "request",
        "lower",
        RATIO,
        _INDICATOR,
        ("text",),
        "1 where exactly one of the two kernels refuses, else 0",
        upper=Fraction(1),
    ),
    MetricDefinition(
        "json_parse_gap",
        Family.STATISTICAL,
        "aggregate",
        "window",
        "lower",
        RATIO,
        _AGGREGATE,
        ("text",),
        "absolute difference of the shares of output that parse as JSON",
        upper=Fraction(1),
    ),
    MetricDefinition(
        "latency",
        Family.RUNTIME,
        "pointwise",
        "request",
        "lower",
        TIME,
        _POINTWISE,
        ("timing",),
        "time from a request to its last token",
    ),
    MetricDefinition(
        "throughput",
        Family.RUNTIME,
        "aggregate",
        "window",
        "higher",
        THROUGHPUT,
        _AGGREGATE,
        ("timing",),
        "tokens per second over the window",
    ),
    MetricDefinition(
        "peak_memory",
        Family.RUNTIME,
        "aggregate",
        "window",
        "lower",
        BYTES,
        _AGGREGATE | {"max"},
        ("memory",),
        "largest memory in use",
    ),
    MetricDefinition(
        "failure_rate",
        Family.RUNTIME,
        "aggregate",
        "window",
        "lower",
        RATIO,
        _AGGREGATE,
        ("outcomes",),
        "share of requests that failed",
        upper=Fraction(1),
    ),
    MetricDefinition(
        "determinism",
        Family.RUNTIME,
        "aggregate",
        "window",
        "higher",
        RATIO,
        _AGGREGATE,
        ("repeats",),
        "share of repeated requests whose output is equal bit for bit",
        upper=Fraction(1),
    ),
)

METRICS: dict[str, MetricDefinition] = {d.name: d for d in _DEFINITIONS}
"""Canonical name -> definition. The IR holds canonical names only."""

ALIASES: dict[str, str] = {
    "top1_agreement": "top1_overlap",
    "top5_agreement": "top5_overlap",
    "top10_agreement": "top10_overlap",
}
"""Second names of the language; they compile to the canonical name."""


def find_metric(name: str) -> MetricDefinition | None:
    """Return the definition for a canonical name or an alias."""
    return METRICS.get(ALIASES.get(name, name))


@dataclass(frozen=True, slots=True)
class RecordMetric:
    """What a metric name of the record form stands for; `unit` is that of its threshold."""

    statistic: str
    metric: str
    magnitude: bool = False
    q: Fraction | None = None
    unit: str | None = None


_PERCENTILE = re.compile(r"p([1-9][0-9]?)_(.+)")
_UNIT_SUFFIXES = {
    "latency_ms": ("latency", "ms"),
    "latency_s": ("latency", "s"),
    "peak_memory_mb": ("peak_memory", "MB"),
    "peak_memory_gb": ("peak_memory", "GB"),
    "throughput_tok_s": ("throughput", "tok/s"),
}


def find_record_metric(name: str) -> RecordMetric | None:
    """Resolve a metric name of the record form, such as `p99_kl` or `mean_abs_log_ratio`.

    A name is an optional statistic (`p95_`, `mean_`, `max_`), an optional `abs_`, a metric and
    an optional unit suffix. An overlap without a statistic means its mean.
    """
    statistic, q, rest = "", None, name
    percentile = _PERCENTILE.fullmatch(name)
    if percentile is not None:
        statistic, q, rest = "quantile", Fraction(int(percentile[1]), 100), percentile[2]
    else:
        for word in ("mean", "max", "rate"):
            if name.startswith(word + "_"):
                statistic, rest = word, name.removeprefix(word + "_")
    magnitude = rest.startswith("abs_")
    rest, unit = _UNIT_SUFFIXES.get(rest.removeprefix("abs_"), (rest.removeprefix("abs_"), None))
    definition = find_metric(rest)
    if definition is None:
        return None
    if not statistic:
        if definition.kind == "aggregate":
            statistic = "aggregate"
        elif definition.name.endswith("_overlap"):
            statistic = "mean"
        else:
            return None
    return RecordMetric(statistic, definition.name, magnitude, q, unit)


RECORD_NAMES: tuple[str, ...] = (
    "p50_logit_l2",
    "p95_logit_l2",
    "p99_logit_l2",
    "mean_kl",
    "p99_kl",
    "top1_overlap",
    "top5_overlap",
    "top10_overlap",
    "mean_abs_log_ratio",
    "mean_w_log_w",
    "ece_gap",
    "p95_latency_ms",
    "p99_latency_ms",
    "peak_memory_mb",
    "throughput_tok_s",
    "reward_delta",
)
"""The names of the record form that are listed in messages."""
