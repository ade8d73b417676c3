"""Aggregates of raw importance weights: sample sizes, tails, correlations, and remedies.

Weights are never truncated before: that hides what these numbers are there to show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from kcdsl.metrics.sampled import RULES, Rule, logarithms
from kcdsl_backends.empirical.metrics.columns import Array, Unmeasured, column, columns
from kcdsl_backends.empirical.statistics.vocabulary import rounded_sum

UNRELIABLE = 0.7
"""A tail index above this leaves importance-weighted means without use (Vehtari et al. 2024)."""
_FEWEST_TAIL = 25


def ess_fraction(log_weights: ArrayLike) -> float:
    """Return ESS/n = (sum w)^2 / (n sum w^2) of raw weights given by their logarithms.

    Never clamp weights before: weights inside [1/C, C] cannot have an ESS/n below
    4 C^2/(1 + C^2)^2, 0.64 for C = 2, whatever they were. Estimates 1/(1 + chi2(train || infer)).
    """
    values = column(log_weights, "ln w")
    weights = np.exp(values - values.max())
    return math.fsum(weights) ** 2 / (values.size * math.fsum(weights * weights))


def pearson(x: ArrayLike, y: ArrayLike) -> float:
    """Return the correlation of two columns; raises Unmeasured where one of them is constant."""
    a, b = columns(2, x=x, y=y)
    a, b = (np.ldexp(v, -math.frexp(float(np.abs(v).max()))[1]) for v in (a, b))  # no square is inf
    a, b = a - math.fsum(a) / a.size, b - math.fsum(b) / b.size
    spread = math.sqrt(math.fsum(a * a)) * math.sqrt(math.fsum(b * b))
    if not spread > 0:
        raise Unmeasured("a column without spread has no correlation")
    return max(-1.0, min(1.0, math.fsum(a * b) / spread))


def pearson_probabilities(train_log: ArrayLike, infer_log: ArrayLike) -> float:
    """Return the correlation of the probabilities of sampled tokens, given their logarithms."""
    a, b = columns(2, train=train_log, infer=infer_log)
    return pearson(np.exp(a), np.exp(b))


def pareto_k(delta: ArrayLike) -> float:
    """Return the shape of the generalised Pareto law that fits the largest ratios w.

    The estimator of Zhang and Stephens (2009) with the prior of Vehtari et al. (2024): the
    diagnostic of Pareto-smoothed importance sampling. Above 0.7 means of w are not reliable. Equal
    ratios have no tail and give -inf. The tail is the ceil(min(n/5, 3 sqrt n)) largest. Raises
    Unmeasured below 26 tokens.
    """
    values = np.sort(column(delta, "ln w", fewest=_FEWEST_TAIL + 1))
    count = math.ceil(min(values.size / 5, 3 * math.sqrt(values.size)))
    weights = np.exp(values - values[-1])
    excess = weights[-count:] - weights[-count - 1]
    if not excess[-1] > 0:
        return -math.inf
    shape = _fit_pareto(excess[excess > 0])
    return float(shape * count / (count + 10) + 0.5 * 10 / (count + 10))


def _fit_pareto(excess: Array) -> float:
    """Return the shape by the profile likelihood averaged over a grid (Zhang and Stephens)."""
    n = excess.size
    if n < 5:
        raise Unmeasured(f"{n} different ratios in the tail, needs at least 5")
    points = 30 + math.isqrt(n)
    quartile = excess[int(n / 4 + 0.5) - 1]
    grid = 1 / excess[-1] + (1 - np.sqrt(points / (np.arange(points) + 0.5))) / (3 * quartile)
    with np.errstate(all="ignore"):
        shapes = np.log1p(-grid[:, None] * excess).mean(axis=1)
        likelihood = n * (np.log(-grid / shapes) - shapes - 1)
    usable = np.isfinite(likelihood)
    weights = np.exp(likelihood[usable] - likelihood[usable].max())
    best = float(np.sum(grid[usable] * weights) / np.sum(weights))
    return float(np.mean(np.log1p(-best * excess)))


# --- remedies -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a rule would do: tokens outside the band of n, the share of tokens it keeps, and the
    mean of the weights it leaves beside the mean of the raw ones."""

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
    """Return what each rule would do to the tokens of sequences of these lengths, in their order.

    Raises Unmeasured where the lengths do not add up to the tokens, or nothing is there.
    """
    values = column(log_ratio, "ln r")
    if any(n < 1 for n in lengths) or sum(lengths) != values.size:
        raise Unmeasured(f"lengths that add up to {sum(lengths)} for {values.size} tokens")
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
    """Return a mean of weights, infinite where one of them is, or where their sum overflows."""
    whole = bool(np.isfinite(weights).all())
    return rounded_sum(weights) / weights.size if whole else math.inf
