"""What each metric measures and how well: tier, estimator, bias class, unit counted, direction.

The names are those of `kcdsl.check.metrics`. Tiers: A full logits or states of both kernels; C
tokens sampled from the inference kernel; E the clock, the memory counter, repeated runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from kcdsl_backends.empirical.metrics import (
    distribution,
    gradient,
    hidden,
    logits,
    ranks,
    sampled,
)
from kcdsl_backends.empirical.metrics.policies import PolicyPair

Source = Literal[
    "logits", "sampled", "hidden", "calibration", "gradient", "runtime", "text", "user"
]
Bias = Literal["exact", "unbiased", "biased", "lower_bound", "upper_bound"]


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric as it is measured.

    `counted` is the unit of one value; `better` the good direction; `low` and `high` the range the
    values cannot leave, where there is one. `direction` names the two sides of a divergence.
    """

    name: str
    source: Source
    tier: str
    estimator: str
    bias: Bias
    counted: Literal["token", "request", "slice"]
    better: Literal["lower", "higher"]
    low: float | None = 0.0
    high: float | None = None
    direction: str = ""
    steps: int | None = None
    """Where it is set, a value is a whole number of 1/steps (shares of k tokens)."""
    noisy: bool = False
    """One more run of the same requests would give other values, so a verdict needs an interval."""
    unit: str = ""
    """The base unit of the values, where the name does not tell it."""


PairFunction = Callable[[PolicyPair], Tensor]
StateFunction = Callable[[Tensor, Tensor], Tensor]

PAIR_FUNCTIONS: Mapping[str, PairFunction] = {
    "logit_l2": logits.logit_l2,
    "logit_l2_centered": logits.logit_l2_centered,
    "logit_linf": logits.logit_linf,
    "logit_span": logits.logit_span,
    "margin": logits.margin,
    "kl": distribution.kl_train_infer,
    "kl_infer_train": distribution.kl_infer_train,
    "jeffreys": distribution.jeffreys,
    "js": distribution.jensen_shannon,
    "tv": distribution.total_variation,
    "hellinger2": distribution.hellinger_squared,
    "log_ratio_linf": distribution.log_ratio_linf,
    "top1_overlap": ranks.top1_agreement,
    "top5_overlap": partial(ranks.top_overlap, k=5),
    "top10_overlap": partial(ranks.top_overlap, k=10),
}
"""Functions of both policies, one value per position."""

SAMPLED_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "log_ratio": lambda delta: delta,
    "w_log_w": sampled.w_log_w,
    "w_log_w_minus": sampled.w_log_w_minus,
    "k1": sampled.k1,
    "k2": sampled.k2,
    "k3": sampled.k3,
    "tv_is": sampled.tv_is,
    "importance_ratio": sampled.importance_ratio,
}
"""Functions of ln w at tokens sampled from the inference kernel."""

STATE_FUNCTIONS: Mapping[str, StateFunction] = {
    "hidden_l2": hidden.hidden_l2,
    "hidden_linf": hidden.hidden_linf,
    "embedding_l2": hidden.embedding_l2,
    "embedding_cosine": hidden.embedding_cosine,
}
"""Functions of the last hidden states [T, D] of both kernels."""


def gradient_function(advantage_max: float, score_norm_max: float) -> PairFunction:
    """Return the bound 2 A_max G TV as a function of the policies."""
    return partial(
        gradient.grad_bias_bound, advantage_max=advantage_max, score_norm_max=score_norm_max
    )


def _exact(
    name: str,
    estimator: str,
    *,
    source: Source = "logits",
    counted: Literal["token", "request", "slice"] = "token",
    better: Literal["lower", "higher"] = "lower",
    low: float | None = 0.0,
    high: float | None = None,
    direction: str = "",
    steps: int | None = None,
) -> Measure:
    return Measure(
        name, source, "A", estimator, "exact", counted, better, low, high, direction, steps
    )


def _overlap(k: int) -> Measure:
    return _exact(
        f"top{k}_overlap",
        f"|top{k}(p) and top{k}(q)| / {k}",
        better="higher",
        high=1.0,
        steps=k,
    )


def _sampled(name: str, estimator: str, bias: Bias, direction: str, low: float | None) -> Measure:
    return Measure(
        name, "sampled", "C", estimator, bias, "token", "lower", low, None, direction, noisy=True
    )


def _runtime(
    name: str,
    estimator: str,
    *,
    counted: Literal["request", "slice"],
    better: Literal["lower", "higher"] = "lower",
    bias: Bias = "exact",
    high: float | None = None,
    noisy: bool = False,
) -> Measure:
    return Measure(name, "runtime", "E", estimator, bias, counted, better, 0.0, high, noisy=noisy)


_TRAIN_INFER = "KL(train || infer)"
_INFER_TRAIN = "KL(infer || train)"

MEASURES: Mapping[str, Measure] = {
    m.name: m
    for m in (
        _exact("logit_l2", "||dz||_2"),
        _exact("logit_l2_centered", "||dz - mean(dz)||_2"),
        _exact("logit_linf", "max |dz|"),
        _exact("logit_span", "max dz - min dz"),
        _exact("margin", "z_(1) - z_(2) of the training kernel", better="higher"),
        _exact("kl", "sum p (e^d - 1 - d)", direction=_TRAIN_INFER),
        _exact("kl_infer_train", "sum q (e^-d - 1 + d)", direction=_INFER_TRAIN),
        _exact("jeffreys", f"{_TRAIN_INFER} + {_INFER_TRAIN}", direction="symmetric"),
        _exact("js", "KL(p || m)/2 + KL(q || m)/2", high=0.6931471805599454, direction="symmetric"),
        _exact("tv", "sum |p - q| / 2", high=1.0, direction="symmetric"),
        _exact("hellinger2", "sum (sqrt p - sqrt q)^2 / 2", high=1.0, direction="symmetric"),
        _exact("log_ratio_linf", "max |ln p - ln q|", direction="symmetric"),
        _exact("top1_overlap", "same first token", better="higher", high=1.0, steps=1),
        _overlap(5),
        _overlap(10),
        _exact("hidden_l2", "||dh||_2", source="hidden"),
        _exact("hidden_linf", "max |dh|", source="hidden"),
        _exact("embedding_l2", "||e_infer - e_train||_2", source="hidden", counted="request"),
        _exact(
            "embedding_cosine",
            "1 - ||e_infer - e_train||^2 / 2",
            source="hidden",
            counted="request",
            better="higher",
            low=-1.0,
            high=1.0,
        ),
        Measure(
            "grad_bias", "gradient", "A", "2 A_max G mean(tv)", "upper_bound", "token", "lower"
        ),
        Measure(
            "ece_gap",
            "calibration",
            "A",
            "|ECE_train - ECE_infer|, 15 equal-mass bins, labels = next token of the text",
            "biased",
            "slice",
            "lower",
            0.0,
            1.0,
        ),
        _sampled("log_ratio", "ln w", "unbiased", f"-{_INFER_TRAIN}", None),
        _sampled("w_log_w", "w ln w", "unbiased", _TRAIN_INFER, None),
        _sampled("w_log_w_minus", "w ln w - w + 1", "unbiased", _TRAIN_INFER, 0.0),
        _sampled("k1", "-ln w", "unbiased", _INFER_TRAIN, None),
        _sampled("k2", "(ln w)^2 / 2", "biased", _INFER_TRAIN, 0.0),
        _sampled("k3", "w - 1 - ln w", "unbiased", _INFER_TRAIN, 0.0),
        _sampled("tv_is", "|w - 1| / 2", "unbiased", "symmetric", 0.0),
        _sampled("importance_ratio", "w; its mean is 1 where q covers p", "unbiased", "", 0.0),
        _runtime(
            "latency", "wall time of one forward pass, synchronised", counted="request", noisy=True
        ),
        _runtime("throughput", "tokens / seconds", counted="request", better="higher", noisy=True),
        _runtime(
            "peak_memory",
            "largest memory of the process (CUDA: of the allocator)",
            counted="slice",
            bias="upper_bound",
        ),
        _runtime("failure_rate", "failed requests / requests", counted="request", high=1.0),
        _runtime(
            "determinism", "equal outputs / repeats", counted="request", better="higher", high=1.0
        ),
    )
}
"""Every metric this backend measures."""

UNMEASURED: Mapping[str, str] = {
    "reward_delta": "the requests carry no rewards of both kernels",
    "refusal_flip": "the requests carry no generated text of both kernels",
    "json_parse_gap": "the requests carry no generated text of both kernels",
}
"""Metrics of the language that need recorded behaviour, with what is missing here."""
