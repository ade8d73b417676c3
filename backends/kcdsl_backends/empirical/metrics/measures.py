"""The functions of metrics by their names, and what each of them is worth.

The names are those of `kcdsl.metrics`. Tiers: A full logits or states of both kernels; B the
k likeliest tokens of both; C tokens sampled from the inference kernel; D recorded behaviour; E the
clock, the memory counter, repeated runs; F records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics import (
    distribution,
    gradient,
    hidden,
    logits,
    ranks,
    sampled,
)
from kcdsl_backends.empirical.metrics.measure import Bias, Measure, Source
from kcdsl_backends.empirical.metrics.measure_table import MEASURES, UNMEASURED
from kcdsl_backends.empirical.metrics.policies import PolicyPair
from kcdsl_backends.empirical.metrics.rejection import CLIP, RULES
from kcdsl_backends.empirical.metrics.segments import Array

__all__ = [
    "MEASURES",
    "PAIR_FUNCTIONS",
    "PROBABILITY_FUNCTIONS",
    "SAMPLED_FUNCTIONS",
    "STATE_FUNCTIONS",
    "UNMEASURED",
    "Bias",
    "GradientFunction",
    "Measure",
    "PairFunction",
    "Source",
    "gradient_function",
]

PairFunction = Callable[[PolicyPair], Tensor]
StateFunction = Callable[[Tensor, Tensor], Tensor]
GradientFunction = Callable[[Array], Array]


def _of_lists(name: str) -> PairFunction:
    function, k = ranks.LIST_METRICS[name]
    return partial(ranks.of_pair, metric=partial(function, k=k), k=k)


def _flip(pair: PolicyPair) -> Tensor:
    return 1.0 - ranks.top1_agreement(pair)


PAIR_FUNCTIONS: Mapping[str, PairFunction] = {
    "logit_l2": logits.logit_l2,
    "logit_l2_centered": logits.logit_l2_centered,
    "logit_linf": logits.logit_linf,
    "logit_span": logits.logit_span,
    "logit_rel_l2": logits.logit_rel_l2,
    "logit_cosine": logits.logit_cosine,
    "margin": logits.margin,
    "stable_fraction": logits.stable_fraction,
    "kl": distribution.kl_train_infer,
    "kl_infer_train": distribution.kl_infer_train,
    "jeffreys": distribution.jeffreys,
    "js": distribution.jensen_shannon,
    "tv": distribution.total_variation,
    "hellinger2": distribution.hellinger_squared,
    "chi2_train_infer": distribution.chi2_train_infer,
    "chi2_infer_train": distribution.chi2_infer_train,
    "renyi_inf": distribution.renyi_infinity,
    "log_ratio_linf": distribution.log_ratio_linf,
    "entropy_gap": distribution.entropy_gap,
    "top1_overlap": ranks.top1_agreement,
    "top1_flip": _flip,
    "flip_hazard": lambda pair: 1000.0 * _flip(pair),
    **{name: _of_lists(name) for name in ranks.LIST_METRICS},
}
"""Functions of both policies, one value per position: the reference of the fused pass."""


def _beyond(low: float, high: float) -> Callable[[Tensor], Tensor]:
    """Return the indicator of ratios outside [low, high]; NaN stays NaN."""
    lower = math.log(low) if low > 0 else -math.inf
    upper = math.log(high)

    def outside(delta: Tensor) -> Tensor:
        found = ((delta < lower) | (delta > upper)).to(torch.float64)
        return torch.where(delta.isnan(), torch.nan, found)

    return outside


SAMPLED_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "log_ratio": lambda delta: delta,
    "w_log_w": sampled.w_log_w,
    "w_log_w_minus": sampled.w_log_w_minus,
    "k1": sampled.k1,
    "k2": sampled.k2,
    "k3": sampled.k3,
    "tv_is": sampled.tv_is,
    "importance_ratio": sampled.importance_ratio,
    "chi2_token": sampled.chi2_token,
    "chi2_is": sampled.chi2_is,
    "jsd_is": sampled.jsd_is,
    "is_variance_inflation": sampled.is_variance_inflation,
    "mult_prob_error": sampled.mult_prob_error,
    "ratio_extreme": _beyond(0.5, 2.0),
    "ratio_above2": _beyond(0.0, 2.0),
    "ratio_above10": _beyond(0.0, 10.0),
    "ratio_below2": _beyond(0.5, math.inf),
    "ratio_below10": _beyond(0.1, math.inf),
    "clipfrac0": _beyond(1 - CLIP, 1 + CLIP),
    **{f"oob_{rule.name}": _beyond(rule.low, rule.high) for rule in RULES},
}
"""Functions of ln w at tokens sampled from the inference kernel."""

PROBABILITY_FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prob_absdiff": sampled.prob_absdiff,
    "binary_tv": sampled.prob_absdiff,
    "binary_kl": sampled.binary_kl,
}
"""Functions of ln p and ln q at tokens sampled from the inference kernel."""

STATE_FUNCTIONS: Mapping[str, StateFunction] = {
    "hidden_l2": hidden.hidden_l2,
    "hidden_linf": hidden.hidden_linf,
    "embedding_l2": hidden.embedding_l2,
    "embedding_cosine": hidden.embedding_cosine,
}
"""Functions of the last hidden states [T, D] of both kernels."""


def gradient_function(advantage_max: float, score_norm_max: float) -> GradientFunction:
    """Return the bound 2 A_max G TV as a function of total variations."""
    return partial(gradient.bias_of_tv, factor=advantage_max * score_norm_max)
