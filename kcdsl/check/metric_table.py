"""The metrics of the language, as data; `kcdsl.check.metrics` explains the fields.

p is the policy of the training kernel, q that of the inference kernel, w = p(y)/q(y) at a token y
that was sampled from q.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kcdsl.check.units import BYTES, NATS, ONE, RATIO, THROUGHPUT, TIME, Dimension
from kcdsl.ir.terms import Family

Kind = Literal["pointwise", "aggregate"]
Counted = Literal["token", "request", "window"]
Better = Literal["lower", "higher"]

POINTWISE = frozenset({"mean", "max", "min", "quantile"})
_INDICATOR = frozenset({"mean", "rate", "max"})
_AGGREGATE = frozenset({"aggregate"})
_ZERO, _UNIT = Fraction(0), Fraction(1)
LN_2_UP = Fraction(6931471805599454, 10**16)
"""A little more than ln 2, the largest Jensen-Shannon divergence."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """What the language knows of one metric. `needs` are the data it is computed from:
    `logits` (of both kernels), `hidden`, `sampled`, `tokens`, `labels`, `rewards`, `text`,
    `timing`, `memory`, `outcomes` or `repeats`."""

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
    """Both signs are bad; the metric is bounded through `abs(...)` only."""
    lower: Fraction | None = _ZERO
    """The smallest value possible, where there is one."""
    upper: Fraction | None = None
    """The largest value possible, where there is one."""
    unit: str | None = None
    """The unit in which the function of a user's metric returns its values."""
    function: str | None = None
    """`module:function` or `file.py:function` of a user's metric; None for those built in."""

    @property
    def nonnegative(self) -> bool:
        """Say whether no value is below zero."""
        return self.lower is not None and self.lower >= 0


def _token(
    name: str,
    dimension: Dimension,
    summary: str,
    needs: str = "logits",
    *,
    family: Family = Family.NUMERICAL,
    better: Better = "lower",
    statistics: frozenset[str] = POINTWISE,
    signed: bool = False,
    lower: Fraction | None = _ZERO,
    upper: Fraction | None = None,
) -> MetricDefinition:
    return MetricDefinition(
        name, family, "pointwise", "token", better, dimension, statistics, (needs,), summary,
        signed, lower, upper,
    )  # fmt: skip


def _overlap(k: int) -> MetricDefinition:
    return _token(
        f"top{k}_overlap",
        RATIO,
        f"share of the {k} likeliest tokens on which both kernels agree",
        family=Family.STATISTICAL,
        better="higher",
        upper=_UNIT,
    )


def _request(
    name: str,
    family: Family,
    dimension: Dimension,
    needs: str,
    summary: str,
    *,
    better: Better = "lower",
    statistics: frozenset[str] = POINTWISE,
    lower: Fraction | None = _ZERO,
    upper: Fraction | None = None,
) -> MetricDefinition:
    return MetricDefinition(
        name, family, "pointwise", "request", better, dimension, statistics, (needs,), summary,
        False, lower, upper,
    )  # fmt: skip


def _aggregate(
    name: str,
    family: Family,
    dimension: Dimension,
    needs: tuple[str, ...],
    summary: str,
    *,
    better: Better = "lower",
    statistics: frozenset[str] = _AGGREGATE,
    upper: Fraction | None = None,
) -> MetricDefinition:
    return MetricDefinition(
        name, family, "aggregate", "window", better, dimension, statistics, needs, summary,
        False, _ZERO, upper,
    )  # fmt: skip


_MEAN = frozenset({"mean"})
_N, _S, _R = Family.NUMERICAL, Family.STATISTICAL, Family.RUNTIME

DEFINITIONS: tuple[MetricDefinition, ...] = (
    # logits
    _token("logit_l2", ONE, "l2 norm of the difference of logits"),
    _token("logit_l2_centered", ONE, "the same after removing the mean difference"),
    _token("logit_linf", ONE, "largest absolute difference of logits"),
    _token("logit_span", ONE, "largest minus smallest difference of logits"),
    _token(
        "margin", ONE, "best minus second best logit of the training kernel", better="higher"
    ),
    # distributions
    _token("kl", NATS, "KL(train || infer) of the next-token distributions"),
    _token("kl_infer_train", NATS, "KL(infer || train) of the next-token distributions"),
    _token("jeffreys", NATS, "sum of both KL divergences"),
    _token("js", NATS, "Jensen-Shannon divergence, at most ln 2", upper=LN_2_UP),
    _token("tv", RATIO, "total variation of the next-token distributions", upper=_UNIT),
    _token("hellinger2", RATIO, "squared Hellinger distance", upper=_UNIT),
    _token("log_ratio_linf", NATS, "largest |ln of train over infer probability| of any token"),
    # the token sampled from the inference kernel
    _token(
        "log_ratio",
        NATS,
        "ln of train over infer probability of the sampled token",
        "sampled",
        signed=True,
        lower=None,
    ),
    _token("importance_ratio", ONE, "train over infer probability of the sampled token", "sampled",
           statistics=frozenset({"max", "quantile"})),
    _token("k1", NATS, "-ln w; its mean estimates KL(infer || train)", "sampled",
           statistics=_MEAN, lower=None),
    _token("k2", NATS, "(ln w)^2 / 2; its mean approximates KL(infer || train)", "sampled"),
    _token("k3", NATS, "w - 1 - ln w; its mean estimates KL(infer || train)", "sampled"),
    _token("w_log_w", NATS, "w ln w; its mean estimates KL(train || infer)", "sampled",
           statistics=_MEAN, lower=None),
    _token("w_log_w_minus", NATS, "w ln w - w + 1; its mean estimates KL(train || infer)",
           "sampled"),
    _token("tv_is", RATIO, "|w - 1| / 2; its mean estimates the total variation", "sampled"),
    # hidden states
    _token("hidden_l2", ONE, "l2 norm of the difference of hidden states", "hidden"),
    _token("hidden_linf", ONE, "largest absolute difference of hidden states", "hidden"),
    _request("embedding_l2", _N, ONE, "hidden", "l2 norm of the difference of sentence embeddings"),
    _request("embedding_cosine", _N, ONE, "hidden", "cosine of the two sentence embeddings",
             better="higher", lower=Fraction(-1), upper=_UNIT),
    _aggregate("grad_bias", _N, ONE, ("logits",),
               "norm of the policy-gradient bias that ignoring the importance ratio causes"),
    # ranks, calibration, behaviour
    _overlap(1),
    _overlap(5),
    _overlap(10),
    _aggregate("ece_gap", _S, RATIO, ("logits", "labels"),
               "absolute difference of the expected calibration errors", upper=_UNIT),
    _aggregate("reward_delta", _S, ONE, ("rewards",), "absolute difference of the mean rewards"),
    _request("refusal_flip", _S, RATIO, "text",
             "1 where exactly one of the two kernels refuses, else 0",
             statistics=_INDICATOR, upper=_UNIT),
    _aggregate("json_parse_gap", _S, RATIO, ("text",),
               "absolute difference of the shares of output that parse as JSON", upper=_UNIT),
    # the running system
    _request("latency", _R, TIME, "timing", "time from a request to its last token"),
    _aggregate("throughput", _R, THROUGHPUT, ("timing",), "tokens per second over the window",
               better="higher"),
    _aggregate("peak_memory", _R, BYTES, ("memory",), "largest memory in use",
               statistics=_AGGREGATE | {"max"}),
    _aggregate("failure_rate", _R, RATIO, ("outcomes",), "share of requests that failed",
               upper=_UNIT),
    _aggregate("determinism", _R, RATIO, ("repeats",),
               "share of repeated requests whose output is equal bit for bit",
               better="higher", upper=_UNIT),
)  # fmt: skip
