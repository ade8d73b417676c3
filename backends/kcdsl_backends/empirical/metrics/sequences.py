"""Metrics of whole sequences: texts that both kernels read, and rollouts of the inference kernel.

delta holds ln w = ln p(y) - ln q(y) of the tokens of one sequence; the weight of a sequence is the
product of those of its tokens. Every function raises Unmeasured on nothing and on what is not
finite.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from kcdsl_backends.empirical.metrics.columns import Array, Unmeasured, column, indicators
from kcdsl_backends.empirical.statistics.estimates import rounded_sum

_ROUNDING = 2.0**-51
"""Largest relative distance of the mean of equal values from them."""
_LARGEST = 709.0
"""Exponents below this have an exponential in float64."""


def seq_log_ratio(delta: ArrayLike) -> float:
    """Return the sum of delta: ln w of the sequence."""
    return rounded_sum(column(delta, "ln w"))


def geo_ratio(delta: ArrayLike) -> float:
    """Return e^(mean delta), the geometric mean of the ratios."""
    values = column(delta, "ln w")
    return _exponential(rounded_sum(values) / values.size)


def seq_max_abs(delta: ArrayLike) -> float:
    """Return max |delta|."""
    return float(np.abs(column(delta, "ln w")).max())


def seq_k3(delta: ArrayLike) -> float:
    """Return W - 1 - ln W of the sequence weight W; its mean estimates KL(infer || train) of
    sequences, +inf where W leaves the range of float64."""
    total = seq_log_ratio(delta)
    return math.expm1(total) - total if total < _LARGEST else math.inf


def log_ppl_diff(train_log: ArrayLike, infer_log: ArrayLike) -> float:
    """Return ln PPL_train - ln PPL_infer in nats per token: -mean delta.

    Train minus inference: positive where the training kernel finds the sampled tokens less likely.
    """
    train, infer = column(train_log, "ln p"), column(infer_log, "ln q")
    if train.size != infer.size:
        raise Unmeasured(f"{train.size} and {infer.size} tokens")
    return -rounded_sum(train - infer) / train.size


def ppl_ratio(train_log: ArrayLike, infer_log: ArrayLike) -> float:
    """Return PPL_train / PPL_infer."""
    return _exponential(log_ppl_diff(train_log, infer_log))


def _exponential(exponent: float) -> float:
    """Return e^exponent, +inf where it leaves the range of float64."""
    return math.exp(exponent) if exponent < _LARGEST else math.inf


def greedy_divergence_step(flips: ArrayLike) -> int:
    """Return how many tokens agree before the first flip; all of them where none flips."""
    values = indicators(flips, "flips")
    found = np.flatnonzero(values)
    return int(found[0]) if found.size else values.size


def max_token_kl(kl: ArrayLike) -> float:
    """Return the largest divergence of any position, which trust-region bounds are driven by."""
    values = column(kl, "kl")
    if values.min() < 0:
        raise Unmeasured("kl: a divergence is never negative")
    return float(values.max())


def composed_tv(tv: ArrayLike) -> float:
    """Return 1 - prod(1 - tau_t), which bounds the total variation of sequences.

    It does so only where each tau_t bounds the total variation of step t for *every* history; with
    values measured on one text it says what that text would give. At 1 it is vacuous.
    """
    values = column(tv, "tv")
    if values.min() < 0 or values.max() > 1:
        raise Unmeasured("tv: a total variation lies in [0, 1]")
    with np.errstate(divide="ignore"):
        return -math.expm1(math.fsum(np.log1p(-values))) if values.max() < 1 else 1.0


def tail_mass(sums: ArrayLike) -> float:
    """Return the share of sequences whose weight e^sum lies outside [1/2, 2]."""
    return float(np.mean(np.abs(column(sums, "sums of ln w")) > math.log(2)))


def length_scaling(deltas: ArrayLike, lengths: ArrayLike, groups: int = 6) -> float:
    """Return the slope of ln of the spread of sequence log-ratios on ln of their length.

    Slope 1/2 is independent noise, slope 1 a systematic bias. Every sequence gives its prefixes of
    lengths 2^j, so that each group holds the same sequences; the spread is the root mean square.
    `deltas` holds the sequences one after the other. Raises Unmeasured for fewer than 8 sequences,
    prefixes of fewer than three lengths, no drift.
    """
    found = _split(deltas, lengths)
    shortest = min(d.size for d in found)
    if len(found) < 8 or shortest < 4:
        raise Unmeasured(f"{len(found)} sequences of at least {shortest} tokens: needs 8 of 4")
    prefixes = [2**j for j in range(shortest.bit_length())][-groups:]
    sums = np.array([[math.fsum(d[:n]) for n in prefixes] for d in found])
    spread = np.sqrt(np.mean(sums * sums, axis=0))
    if not (spread > 0).all():
        raise Unmeasured("sequences without drift have no scaling")
    x, y = np.log(np.array(prefixes, dtype=np.float64)), np.log(spread)
    x = x - x.mean()
    return float(x @ y / (x @ x))


def intraclass_correlation(values: ArrayLike, lengths: ArrayLike) -> float:
    """Return ICC(1) of the tokens of sequences: the share of variance that sequences explain.

    The one-way estimator for groups of unequal size (Donner 1986). n tokens count for about
    n / (1 + (m - 1) ICC) independent ones, m the mean length. Raises Unmeasured for fewer than two
    sequences, for sequences of one token each and where nothing varies.
    """
    groups = _split(values, lengths)
    sizes = np.array([g.size for g in groups], dtype=np.float64)
    n, count = float(sizes.sum()), len(groups)
    if count < 2 or n <= count:
        raise Unmeasured(f"{count} sequences of {int(n)} tokens have no correlation within")
    means = np.array([math.fsum(g) / g.size for g in groups])
    grand = math.fsum(sizes * means) / n
    between = math.fsum(sizes * (means - grand) ** 2) / (count - 1)
    within = math.fsum(math.fsum((g - m) ** 2) for g, m in zip(groups, means, strict=True)) / (
        n - count
    )
    typical = (n - math.fsum(sizes * sizes) / n) / (count - 1)
    total = between + (typical - 1) * within
    rounding = max(float(np.abs(g).max()) for g in groups) * _ROUNDING
    if not total > rounding * rounding:
        raise Unmeasured("values that never vary have no correlation")
    return (between - within) / total


def _split(values: ArrayLike, lengths: ArrayLike) -> list[Array]:
    """Return the arrays of single sequences, none of them empty."""
    joined, sizes = column(values, "ln w"), column(lengths, "lengths").astype(np.int64)
    if int(sizes.sum()) != joined.size or bool((sizes <= 0).any()):
        raise Unmeasured(f"{int(sizes.sum())} tokens of rollouts for {joined.size} values")
    return [np.asarray(part) for part in np.split(joined, np.cumsum(sizes)[:-1])]
