"""Metrics that recorded runs feed: how each is measured, and the function of its arrays.

A forward pass of both kernels does not give what they read; a trace that does can call the
functions by the names of the language. Their arrays are described where they are defined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from numpy.typing import ArrayLike

from kcdsl_backends.empirical.metrics import (
    behaviour,
    logits,
    lumped,
    reinforcement,
    routing,
    sequences,
    serving,
)
from kcdsl_backends.empirical.metrics.measure import Bias, Measure

Counted = Literal["token", "request", "slice"]
Better = Literal["lower", "higher"]


def _recorded(
    name: str,
    tier: str,
    estimator: str,
    bias: Bias,
    counted: Counted,
    *,
    better: Better = "lower",
    low: float | None = 0.0,
    high: float | None = None,
    direction: str = "",
    unit: str = "1",
) -> Measure:
    return Measure(
        name,
        "text",
        tier,
        estimator,
        bias,
        counted,
        better,
        low,
        high,
        direction,
        noisy=True,
        unit=unit,
    )


def _worst_layer(train: ArrayLike, infer: ArrayLike) -> float:
    """Return the router agreement of the layer that agrees least."""
    return float(routing.router_agreement(train, infer).min())


def _refusal_flips(train: ArrayLike, infer: ArrayLike) -> float:
    """Return the share of prompts that exactly one kernel refuses."""
    return behaviour.flips(train, infer).rate


def _gap_of_shares(train: ArrayLike, infer: ArrayLike) -> float:
    """Return the absolute difference of two shares over the same prompts."""
    return behaviour.flips(train, infer).gap


def _reward_delta(train: ArrayLike, infer: ArrayLike) -> float:
    """Return the absolute difference of mean rewards over the same prompts."""
    return behaviour.paired(train, infer).gap


def _slope(deltas: Any) -> float:
    """Return the slope of length scaling."""
    return sequences.length_scaling(deltas).slope


_D = "D"
RECORDED: Mapping[str, Measure] = {
    m.name: m
    for m in (
        _recorded(
            "noise_ratio", "A", "||z_infer - z_gold|| / ||z_train - z_gold||", "exact", "token"
        ),
        _recorded(
            "topk_tail_kl", "B", "KL of (top k, rest)", "lower_bound", "token",
            direction="KL(train || infer)", unit="nat",
        ),
        _recorded(
            "topk_tail_tv", "B", "TV of (top k, rest)", "lower_bound", "token", high=1.0,
            direction="symmetric", unit="ratio",
        ),
        _recorded(
            "seq_log_ratio", "C", "sum ln w", "unbiased", "request", low=None,
            direction="-KL(infer || train) of sequences", unit="nat",
        ),
        _recorded("geo_ratio", "C", "e^(mean ln w)", "biased", "request"),
        _recorded("seq_max_abs", "C", "max |ln w|", "lower_bound", "request", unit="nat"),
        _recorded(
            "seq_k3", "C", "W - 1 - ln W, W = e^(sum ln w)", "unbiased", "request",
            direction="KL(infer || train) of sequences", unit="nat",
        ),
        _recorded(
            "log_ppl_diff", "C", "-mean ln w: train minus infer", "unbiased", "request", low=None,
            direction="KL(infer || train) per token", unit="nat",
        ),
        _recorded("ppl_ratio", "C", "e^(-mean ln w)", "biased", "request"),
        _recorded(
            "ess_seq", "C", "(sum W)^2 / (n sum W^2), raw", "biased", "slice", better="higher",
            high=1.0, unit="ratio",
        ),
        _recorded(
            "tail_mass_seq", "C", "share of W outside [1/2, 2]", "unbiased", "slice", high=1.0,
            unit="ratio",
        ),
        _recorded(
            "length_scaling", "C", "slope of ln rms(sum ln w) on ln L", "biased", "slice", low=None
        ),
        _recorded("icc", "C", "one-way ICC(1) of ln w", "biased", "slice", low=None, high=1.0),
        _recorded("reward_delta", _D, "|mean paired difference|", "biased", "slice"),
        _recorded("adv_weighted_bias", "C", "|mean (w - 1) A|", "biased", "slice"),
        _recorded(
            "refusal_flip", _D, "1 where one refuses; McNemar", "unbiased", "request", high=1.0,
            unit="ratio",
        ),
        *(
            _recorded(
                name, _D, f"|share of infer - share of train| of outputs that {what}", "biased",
                "slice", high=1.0, unit="ratio",
            )
            for name, what in (
                ("json_parse_gap", "parse"),
                ("tool_schema_gap", "follow a schema"),
                ("exact_match_gap", "are the reference"),
            )
        ),
        _recorded(
            "grad_cosine", _D, "cosine of g_train, g_infer", "exact", "slice", better="higher",
            low=-1.0, high=1.0,
        ),
        _recorded("grad_rel_bias", _D, "||g_infer - g_train|| / ||g_train||", "exact", "slice"),
        _recorded(
            "router_agreement", "A", "least over layers of mean |R_p and R_q| / k", "exact",
            "slice", better="higher", high=1.0, unit="ratio",
        ),
        _recorded(
            "tokens_any_flip", "A", "share of tokens rerouted in any layer", "exact", "slice",
            high=1.0, unit="ratio",
        ),
        _recorded(
            "router_margin", "A", "k-th best score - next", "exact", "token", better="higher"
        ),
        _recorded("ttft", "E", "first token - arrival", "exact", "request", unit="s"),
        _recorded("tpot", "E", "(last - first) / (tokens - 1)", "exact", "request", unit="s"),
        _recorded(
            "kv_memory", "E", "2 layers heads width tokens bytes", "exact", "slice", unit="B"
        ),
    )
}  # fmt: skip
"""How the metrics that only recorded runs feed are measured."""

RECORDED_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "noise_ratio": logits.noise_ratio,
    "topk_tail_kl": lumped.topk_tail_kl,
    "topk_tail_tv": lumped.topk_tail_tv,
    "seq_log_ratio": sequences.seq_log_ratio,
    "geo_ratio": sequences.geo_ratio,
    "seq_max_abs": sequences.seq_max_abs,
    "seq_k3": sequences.seq_k3,
    "log_ppl_diff": sequences.log_ppl_diff,
    "ppl_ratio": sequences.ppl_ratio,
    "ess_seq": sequences.ess_sequences,
    "tail_mass_seq": sequences.tail_mass_sequences,
    "length_scaling": _slope,
    "icc": sequences.intraclass_correlation,
    "reward_delta": _reward_delta,
    "adv_weighted_bias": reinforcement.adv_weighted_bias,
    "refusal_flip": _refusal_flips,
    "json_parse_gap": _gap_of_shares,
    "tool_schema_gap": _gap_of_shares,
    "exact_match_gap": _gap_of_shares,
    "grad_cosine": reinforcement.grad_cosine,
    "grad_rel_bias": reinforcement.grad_rel_bias,
    "router_agreement": _worst_layer,
    "tokens_any_flip": routing.tokens_any_flip,
    "router_margin": routing.router_margin,
    "ttft": serving.time_to_first_token,
    "tpot": serving.time_per_output_token,
    "kv_memory": serving.kv_memory,
}
"""The functions of recorded arrays, by the names of the language."""
