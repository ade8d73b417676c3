"""Tokens drawn from the inference policy, and the aggregates of their importance ratios.

delta = ln p(y) - ln q(y) of sampled tokens y, w = e^delta; `kcdsl.metrics.sampled` defines their
metrics. This module has the estimators that need more than one operation. Weights are never
truncated before aggregation, which would hide large ratios.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from kcdsl.metrics.sampled import RULES, Rule, logarithms
from kcdsl_backends.empirical.metrics.policies import PolicyPair, bregman, kl
from kcdsl_backends.empirical.statistics.estimates import (
    Array,
    NotMeasurable,
    column,
    columns,
    rounded_sum,
)

_NEAR, _LARGE = 1e-3, 300.0
_FAR = 700.0
"""For |delta| beyond this, w ln w - w vanishes beside 1 in float64, and e^-delta soon overflows."""


def request_seed(seed: int, request: str) -> int:
    """Return the 63-bit seed of one request, so that no result depends on the order of requests."""
    digest = hashlib.sha256(f"{seed}|{request}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def sample_tokens(pair: PolicyPair, seed: int) -> Tensor:
    """Draw one token per position from the inference policy q, [N] int64.

    The same seed gives the same tokens on every device: uniforms come from numpy's PCG64.
    """
    rows = pair.infer_log.shape[0]
    uniform = torch.from_numpy(np.random.default_rng(seed).random(rows)).to(pair.infer_log.device)
    cumulative = pair.infer_log.exp().cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
    return drawn[:, 0].clamp(max=cumulative.shape[-1] - 1)


def w_log_w_minus(delta: Tensor) -> Tensor:
    """Return w ln w - w + 1 = e^delta (e^-delta - 1 + delta), 1 if w is nearly 0."""
    return torch.where(delta < -_FAR, 1.0, delta.exp() * bregman(-delta))


def jsd_is(delta: Tensor) -> Tensor:
    """Return (w ln(2w/(1 + w)) + ln(2/(1 + w))) / 2 >= 0, the contribution of one token to JS.

    With m = ln((1 + w)/2) = delta/2 + ln cosh(delta/2) the value is (w (delta - m) - m)/2; near
    delta = 0 it is delta^2/8 (1 + delta/2 + ...), without cancellation.
    """
    half = delta.abs() / 2
    near = half.clamp(max=_LARGE)
    mean = delta / 2 + torch.log1p(torch.sinh(near) ** 2) / 2 + (half - near)
    direct = (delta.exp() * (delta - mean) - mean) / 2
    direct = torch.where(torch.isneginf(delta), math.log(2) / 2, direct)
    series = delta**2 / 8 * (1 + delta / 2 + delta**2 / 8)
    return torch.where(delta.abs() < _NEAR, series, direct).clamp(min=0.0)


def prob_absdiff(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return |p(y) - q(y)|, also the total variation of "y or not y".

    A difference of *probabilities of the sampled token*, not of policies: tokens of low probability
    hardly count; under Gaussian noise it is about a fifth of TV.
    """
    larger = torch.maximum(train_log, infer_log)
    return larger.exp() * -torch.expm1(-(train_log - infer_log).abs())


def binary_kl(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return the larger KL divergence of "y or not y", at most the larger one of the policies."""
    train = torch.stack([train_log, _log_rest(train_log)], dim=-1)
    infer = torch.stack([infer_log, _log_rest(infer_log)], dim=-1)
    return torch.maximum(kl(train, infer), kl(infer, train))


def _log_rest(log_p: Tensor) -> Tensor:
    """Return ln(1 - p)."""
    return torch.log(-torch.expm1(log_p))


# --- aggregates of raw weights ------------------------------------------------------------------


def ess_fraction(log_weights: ArrayLike) -> float:
    """Return ESS/n = (sum w)^2 / (n sum w^2) of raw weights given by their logarithms.

    Do not clamp the weights: weights inside [1/C, C] cannot have an ESS/n below 4 C^2/(1 + C^2)^2,
    0.64 for C = 2, whatever they were. Estimates 1/(1 + chi2(train || infer)).
    """
    values = column(log_weights, "ln w")
    weights = np.exp(values - values.max())
    return rounded_sum(weights) ** 2 / (values.size * rounded_sum(weights * weights))


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Return the correlation of two columns; raises NotMeasurable if one of them is constant."""
    a, b = columns(2, x=x, y=y)
    a, b = (np.ldexp(v, -math.frexp(float(np.abs(v).max()))[1]) for v in (a, b))  # no square is inf
    a, b = a - rounded_sum(a) / a.size, b - rounded_sum(b) / b.size
    spread = math.sqrt(rounded_sum(a * a)) * math.sqrt(rounded_sum(b * b))
    if not spread > 0:
        raise NotMeasurable("a column without spread has no correlation")
    return max(-1.0, min(1.0, rounded_sum(a * b) / spread))


def pearson_probabilities(train_log: ArrayLike, infer_log: ArrayLike) -> float:
    """Return the correlation of the probabilities of sampled tokens, given their logarithms."""
    a, b = columns(2, train=train_log, infer=infer_log)
    return pearson(np.exp(a), np.exp(b))


# --- remedies -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The effect of a rule: the number of the n tokens outside its band, the share of tokens that
    it keeps, and the means of the weights after it and of the raw weights."""

    rule: Rule
    below: int
    above: int
    n: int
    kept: float
    mean_weight: float
    mean_raw: float


def what_if(
    log_ratio: ArrayLike, lengths: Sequence[int], rules: Sequence[Rule] = RULES
) -> tuple[WhatIf, ...]:
    """Return the effect of each rule on the tokens of consecutive sequences of these lengths.

    Raises NotMeasurable if the lengths do not add up to the tokens, or there are none.
    """
    values = column(log_ratio, "ln r")
    if any(n < 1 for n in lengths) or sum(lengths) != values.size:
        raise NotMeasurable(f"lengths that add up to {sum(lengths)} for {values.size} tokens")
    return tuple(_apply(values, lengths, rule) for rule in rules)


def _apply(values: Array, lengths: Sequence[int], rule: Rule) -> WhatIf:
    lower, upper = logarithms(rule.low, rule.high)
    below, above = values < lower, values > upper
    outside = below | above
    with np.errstate(over="ignore"):
        weights = np.exp(values)
    match rule.does:
        case "truncate":
            kept, left = 1.0, np.exp(np.clip(values, lower, upper))
        case "mask":
            kept, left = float(np.mean(~outside)), np.where(outside, 0.0, weights)
        case "veto":
            starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
            vetoed = np.repeat(np.maximum.reduceat(outside, starts), lengths)
            kept, left = float(np.mean(~vetoed)), np.where(vetoed, 0.0, weights)
        case other:
            raise ValueError(f"unknown rule {other!r}")
    return WhatIf(
        rule,
        int(np.count_nonzero(below)),
        int(np.count_nonzero(above)),
        values.size,
        kept,
        _mean(left),
        _mean(weights),
    )


def _mean(weights: Array) -> float:
    """Return a mean of weights, infinite if one of them is or their sum overflows."""
    whole = bool(np.isfinite(weights).all())
    return rounded_sum(weights) / weights.size if whole else math.inf
