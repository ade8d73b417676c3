"""Metrics that recorded runs feed: how each is measured, and the function of its arrays.

A forward pass of both kernels does not give what they read; recordings and servers do
(`kcdsl_backends.empirical.rollouts`). Requests carry arrays of numbers only, flattened where they
have more dimensions, under the names below; numbers of a whole slice are formed from those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
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
from kcdsl_backends.empirical.metrics.aggregates import Aggregate
from kcdsl_backends.empirical.metrics.evidence import Array, Unmeasured
from kcdsl_backends.empirical.metrics.measure import Bias, Measure

LENGTHS = "rollout_lengths"
"""Counted tokens of each rollout of a request, in the order of its arrays."""
ADVANTAGE_WEIGHTED = "advantage_weighted"
"""(w - 1) A of each counted token."""
SHARED_ROUTES, LAYERS, REROUTED = "shared_routes", "routed_layers", "rerouted"
"""Shares of chosen experts that both sides share, token by token [tokens x layers]; how many layers
each rollout has; 1 for each token that was rerouted in any layer."""
GRADIENTS = ("train_gradient", "infer_gradient", "gradient_width")
"""Gradients of each rollout, one after the other, and how many numbers each of them has."""
CACHE = "cache_bytes"
"""Bytes of keys and values of each rollout."""
TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "object": dict,
    "array": list,
}
"""Types of fields that a schema of a tool's calls may name."""

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
    noisy: bool = True,
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
        noisy=noisy,
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
            "noise_ratio", "A", "||z_infer - z_gold|| / ||z_train - z_gold||", "exact", "token",
            noisy=False,
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
            "router_margin", "A", "k-th best score - next, in the layer with least", "exact",
            "token", better="higher",
        ),
        _recorded(
            "kv_memory", "E", "largest 2 layers heads width tokens bytes", "exact", "slice",
            unit="B", noisy=False,
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
    "kv_memory": serving.kv_memory,
}
"""The functions of recorded arrays, by the names of the language."""


def _split(values: Array, lengths: Array) -> list[Array]:
    """Return the arrays of single rollouts."""
    sizes = lengths.astype(np.int64)
    if int(sizes.sum()) != values.size or bool((sizes <= 0).any()):
        raise Unmeasured(f"{int(sizes.sum())} tokens of rollouts for {values.size} values")
    return [np.asarray(part) for part in np.split(values, np.cumsum(sizes)[:-1])]


def _scaling(deltas: Array, lengths: Array) -> float:
    return _slope(_split(deltas, lengths))


def _icc(deltas: Array, lengths: Array) -> float:
    return sequences.intraclass_correlation(_split(deltas, lengths))


def _ess(sums: Array) -> float:
    return sequences.ess_sequences([np.array([s]) for s in sums])


def _tail_mass(sums: Array) -> float:
    return sequences.tail_mass_sequences([np.array([s]) for s in sums])


def _summed(gradients: Array, widths: Array) -> Array:
    """Return the sum of the gradients of rollouts: that of the whole batch."""
    if widths.size == 0 or bool((widths != widths[0]).any()) or widths[0] < 1:
        raise Unmeasured("the gradients of rollouts have different sizes")
    found: Array = gradients.reshape(-1, int(widths[0])).sum(axis=0)
    return found


def _batch_cosine(train: Array, infer: Array, widths: Array) -> float:
    return reinforcement.grad_cosine(_summed(train, widths), _summed(infer, widths))


def _batch_bias(train: Array, infer: Array, widths: Array) -> float:
    return reinforcement.grad_rel_bias(_summed(train, widths), _summed(infer, widths))


def _agreement(shares: Array, layers: Array) -> float:
    """Return the mean share of the layer that agrees least."""
    if layers.size == 0 or bool((layers != layers[0]).any()):
        raise Unmeasured("rollouts have routes of different numbers of layers")
    return float(shares.reshape(-1, int(layers[0])).mean(axis=0).min())


def _mean(values: Array) -> float:
    if values.size == 0:
        raise Unmeasured("there are no values")
    return float(values.mean())


RECORDED_AGGREGATES: Mapping[str, Aggregate] = {
    "ess_seq": Aggregate(("seq_log_ratio",), _ess),
    "tail_mass_seq": Aggregate(("seq_log_ratio",), _tail_mass),
    "length_scaling": Aggregate(("log_ratio", LENGTHS), _scaling),
    "icc": Aggregate(("log_ratio", LENGTHS), _icc),
    "grad_cosine": Aggregate(GRADIENTS, _batch_cosine),
    "grad_rel_bias": Aggregate(GRADIENTS, _batch_bias),
    "router_agreement": Aggregate((SHARED_ROUTES, LAYERS), _agreement),
    "tokens_any_flip": Aggregate((REROUTED,), _mean),
}
"""Numbers of a slice that are formed from the arrays of its requests."""

MAGNITUDES: Mapping[str, tuple[str, tuple[float | None, float | None]]] = {
    "adv_weighted_bias": (ADVANTAGE_WEIGHTED, (None, None)),
    "reward_delta": ("reward_delta", (None, None)),
    "json_parse_gap": ("json_parse_gap", (-1.0, 1.0)),
    "tool_schema_gap": ("tool_schema_gap", (-1.0, 1.0)),
    "exact_match_gap": ("exact_match_gap", (-1.0, 1.0)),
}
"""Absolute values of means: the array whose mean it is, and the range of its values. The limits are
those of the mean: noise makes its absolute value too large, and a limit of that would not do."""
