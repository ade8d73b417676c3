"""Numbers of a slice that are functions of sums over its requests.

The requests of a slice are resampled whole, so the number of a resample follows from a few sums of
each request, without reading its tokens again. The sums are of deviations from the values without
drift, so that a small drift is not a difference of large numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kcdsl.metrics.definition import BINS, RANKS
from kcdsl_backends.empirical.statistics.estimates import (
    Array,
    NotMeasurable,
    column,
    rounded_sum,
)

Requests = Sequence[Sequence[Array]]
"""The arrays of each request, in the order of the inputs of a metric."""
Counts = NDArray[np.float64]
"""Multiplicities of requests in resamples [B, n]."""
UNRELIABLE = 0.7
"""A tail index above this makes importance-weighted means unreliable (Vehtari et al. 2024)."""
_FEWEST_TAIL = 25
_ROUNDING = 2.0**-51
"""Largest relative rounding error of the mean of equal values."""
_LARGE = 300.0
"""The square of e^x for x beyond this nearly overflows float64."""
_FAR = 700.0
_SHOWN, _UNSEEN = 100, 0.25


@dataclass(frozen=True, slots=True)
class SumFunction:
    """A smooth function of sums over requests.

    `of` gives the sums [n, S] of the requests; it raises NotMeasurable if they would overflow.
    `value` maps totals [..., S], real or complex, to the number on a variance-stabilised scale;
    `back` maps that to the number. `beyond` gives the sums of one more request from those of the
    worst observed one, since a sample hardly has all rare, large values. It raises NotMeasurable if
    no bound of unobserved values exists; None stands for the worst request itself.
    """

    of: Callable[[Requests], Array]
    value: Callable[[NDArray[Any]], NDArray[Any]]
    back: Callable[[float], float]
    beyond: Callable[[Requests, Array], Array] | None = None


ResampledFunction = Callable[[Requests], Callable[[Counts], Array]]
"""Maps requests to the function that gives the number of each resample, NaN if it has none."""


# --- tails of ratios -----------------------------------------------------------------------------


def tail_length(n: int) -> int:
    """Return the number of largest of n ratios in the tail: ceil(min(n/5, 3 sqrt n))."""
    return math.ceil(min(n / 5, 3 * math.sqrt(n)))


def pareto_k(delta: ArrayLike, n: int | None = None) -> float:
    """Return the shape of the generalised Pareto law that fits the largest ratios w.

    The estimator of Zhang and Stephens (2009) with the prior of Vehtari et al. (2024): the
    diagnostic of Pareto-smoothed importance sampling. Above 0.7 means of w are not reliable. Equal
    ratios have no tail and give -inf. `n` is the number of tokens if `delta` holds only the largest
    of them, more than their tail. Raises NotMeasurable below 26 tokens.
    """
    size = len(np.atleast_1d(delta)) if n is None else n
    fewest = _FEWEST_TAIL + 1 if n is None else min(tail_length(n), _FEWEST_TAIL) + 1
    values = np.sort(column(delta, "ln w", fewest=fewest))
    if size <= _FEWEST_TAIL:
        raise NotMeasurable(f"ln w: {size} values, needs at least {_FEWEST_TAIL + 1}")
    count = tail_length(size)
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
        raise NotMeasurable(f"{n} different ratios in the tail, needs at least 5")
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


# --- sequences of one request or more ------------------------------------------------------------


def length_scaling(deltas: ArrayLike, lengths: ArrayLike, groups: int = 6) -> float:
    """Return the slope of ln of the spread of sequence log-ratios on ln of their length.

    Slope 1/2 is independent noise, slope 1 a systematic bias. Every sequence contributes prefixes
    of lengths 2^j, so that all lengths have the same sequences; the spread is the root mean square.
    `deltas` holds the concatenated sequences. Raises NotMeasurable for fewer than 8 sequences,
    prefixes of fewer than three lengths, no drift.
    """
    found = _split(deltas, lengths)
    shortest = min(d.size for d in found)
    if len(found) < 8 or shortest < 4:
        raise NotMeasurable(f"{len(found)} sequences of at least {shortest} tokens: needs 8 of 4")
    prefixes = [2**j for j in range(shortest.bit_length())][-groups:]
    sums = np.array([[rounded_sum(d[:n]) for n in prefixes] for d in found])
    spread = np.sqrt(np.mean(sums * sums, axis=0))
    if not (spread > 0).all():
        raise NotMeasurable("sequences without drift have no scaling")
    return slope_of_spreads(spread * spread, groups)


def slope_of_spreads(squares: Array, groups: int = 6) -> float:
    """Return the slope of ln of the spread on ln of the length, from the mean squares of prefixes
    of 1, 2, 4 and so on tokens; the last `groups` count."""
    last = squares[-groups:]
    x = np.log(2.0) * np.arange(last.size)
    x = x - x.mean()
    return float(x @ np.log(last) / 2 / (x @ x))


def intraclass_correlation(values: ArrayLike, lengths: ArrayLike) -> float:
    """Return ICC(1) of the tokens of sequences: the share of variance that sequences explain.

    The one-way estimator for groups of unequal size (Donner 1986). n tokens correspond to about n /
    (1 + (m - 1) ICC) independent ones, m the mean length. Raises NotMeasurable for fewer than two
    sequences, for sequences of one token each and for constant values.
    """
    groups = _split(values, lengths)
    sizes = np.array([g.size for g in groups], dtype=np.float64)
    n, count = float(sizes.sum()), len(groups)
    if count < 2 or n <= count:
        raise NotMeasurable(f"{count} sequences of {int(n)} tokens have no correlation within")
    means = np.array([rounded_sum(g) / g.size for g in groups])
    grand = math.fsum(sizes * means) / n
    between = math.fsum(sizes * (means - grand) ** 2) / (count - 1)
    within = math.fsum(rounded_sum((g - m) ** 2) for g, m in zip(groups, means, strict=True)) / (
        n - count
    )
    typical = (n - math.fsum(sizes * sizes) / n) / (count - 1)
    total = between + (typical - 1) * within
    rounding = max(float(np.abs(g).max()) for g in groups) * _ROUNDING
    if not total > rounding * rounding:
        raise NotMeasurable("values that never vary have no correlation")
    return (between - within) / total


def _split(values: ArrayLike, lengths: ArrayLike) -> list[Array]:
    """Return the arrays of single sequences, none of them empty."""
    joined, sizes = column(values, "ln w"), column(lengths, "lengths").astype(np.int64)
    if int(sizes.sum()) != joined.size or bool((sizes <= 0).any()):
        raise NotMeasurable(f"{int(sizes.sum())} tokens of rollouts for {joined.size} values")
    return [np.asarray(part) for part in np.split(joined, np.cumsum(sizes)[:-1])]


# --- weights -------------------------------------------------------------------------------------


def _weights(requests: Requests) -> Array:
    """Return n, the sum of w - 1, and the sum of (w - 1)^2."""
    rows = []
    for (delta,) in requests:
        if float(delta.max()) > _LARGE:
            raise NotMeasurable("ratios beyond e^300 have no sums of squares")
        excess = np.expm1(delta)
        rows.append((delta.size, excess.sum(), excess @ excess))
    return np.array(rows, dtype=np.float64)


def _logit_ess(totals: NDArray[Any]) -> NDArray[Any]:
    """Return ln(e / (1 - e)) = ln((n + U)^2 / (n V - U^2)) of e = (sum w)^2 / (n sum w^2)."""
    n, u, v = (totals[..., i] for i in range(3))
    found: NDArray[Any] = 2 * np.log(n + u) - np.log(n * v - u * u)
    return found


def _logistic(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > -_FAR else 0.0


def _beyond_ratios(requests: Requests, worst: Array) -> Array:
    """Add to a request the expected square of ratios beyond the largest, 1 / (1 - 2 k) times its
    square for a Pareto law of the fitted shape k.

    Raises NotMeasurable for k >= 1/2, where squares have no mean. A tail of fewer than 100 ratios
    does not determine k, which is then at most 1/4.
    """
    every = np.concatenate([delta for (delta,) in requests])
    shape = pareto_k(every)
    if tail_length(every.size) < _SHOWN:
        shape = min(shape, _UNSEEN)
    if shape >= 0.5:
        raise NotMeasurable("the squares of ratios may have no mean")
    largest = math.expm1(float(every.max()))
    found = worst.copy()
    found[2] += largest * largest / (1 - 2 * max(shape, 0.0))
    return found


# --- correlations --------------------------------------------------------------------------------


def _pairs(requests: Requests) -> Array:
    return _centred([(infer, train - infer) for train, infer in requests])


def _probabilities(requests: Requests) -> Array:
    """Return the sums of q and of p - q = q (e^(ln p - ln q) - 1)."""
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = [(np.exp(q), np.exp(q) * np.expm1(p - q)) for p, q in requests]
    if not all(bool(np.isfinite(gap).all()) for _, gap in pairs):
        raise NotMeasurable("ratios beyond float64 have no sums")
    return _centred(pairs)


def _centred(pairs: Sequence[tuple[Array, Array]]) -> Array:
    """Return n and the sums of x, d, x^2, x d, d^2 with x and d centred and scaled."""
    size = sum(x.size for x, _ in pairs)
    middle = sum(float(x.sum()) for x, _ in pairs) / size
    shift = sum(float(d.sum()) for _, d in pairs) / size
    scale = max(float(np.abs(x - middle).max()) for x, _ in pairs) or 1.0
    rows = []
    for x, d in pairs:
        a, b = (x - middle) / scale, (d - shift) / scale
        rows.append((a.size, a.sum(), b.sum(), a @ a, a @ b, b @ b))
    return np.array(rows, dtype=np.float64)


def _fisher(totals: NDArray[Any]) -> NDArray[Any]:
    """Return artanh of the correlation of x and x + d; 1 - r^2 = (Vx Vd - C^2) / (Vx Vy)."""
    n, x, d, xx, xd, dd = (totals[..., i] for i in range(6))
    var, cross, gap = xx - x * x / n, xd - x * d / n, dd - d * d / n
    other = var + 2 * cross + gap
    r = (var + cross) / np.sqrt(var * other)
    found: NDArray[Any] = np.log1p(r) - np.log((var * gap - cross * cross) / (var * other)) / 2
    return found


# --- sequences -----------------------------------------------------------------------------------


def _within(requests: Requests) -> Array:
    """Return, by request, the numbers of tokens and sequences, and the sums of s, s^2/m, of squared
    token values and of m^2; s is the centred sum of a sequence of m tokens."""
    middle = sum(float(d.sum()) for d, _ in requests) / sum(d.size for d, _ in requests)
    rows = []
    for delta, lengths in requests:
        values, sizes = delta - middle, np.asarray(lengths)
        sums = np.add.reduceat(values, np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int))
        rows.append(
            (values.size, sizes.size, sums.sum(), (sums * sums / sizes).sum(), values @ values,
             (sizes * sizes).sum())
        )  # fmt: skip
    return np.array(rows, dtype=np.float64)


def _icc(totals: NDArray[Any]) -> NDArray[Any]:
    n, count, s, q, squares, sizes = (totals[..., i] for i in range(6))
    between = (q - s * s / n) / (count - 1)
    within = (squares - q) / (n - count)
    typical = (n - sizes / n) / (count - 1)
    found: NDArray[Any] = (between - within) / (between + (typical - 1) * within)
    return found


SUMS: Mapping[str, SumFunction] = {
    "ess_frac": SumFunction(_weights, _logit_ess, _logistic, _beyond_ratios),
    "ess_seq": SumFunction(_weights, _logit_ess, _logistic, _beyond_ratios),
    "pearson_p": SumFunction(_probabilities, _fisher, math.tanh),
    "pearson_logp": SumFunction(_pairs, _fisher, math.tanh),
    "icc": SumFunction(_within, _icc, lambda x: x),
}
"""Smooth functions of sums, by metric."""


# --- functions that are not smooth ---------------------------------------------------------------


def _tails(requests: Requests) -> Callable[[Counts], Array]:
    """Return the Pareto shape of resamples from the largest ratios of all requests."""
    sizes = np.array([delta.size for (delta,) in requests], dtype=np.float64)
    every = np.concatenate([delta for (delta,) in requests])
    owner = np.repeat(np.arange(sizes.size), sizes.astype(int))
    order = np.argsort(-every, kind="stable")

    def of(counts: Counts) -> Array:
        found = np.full(len(counts), math.nan)
        for row, drawn in enumerate(counts):
            total = int(drawn @ sizes)
            wanted = tail_length(total) + 1
            reach = 2 * wanted
            while True:
                first = order[:reach]
                copies = drawn[owner[first]].astype(int)
                if copies.sum() >= wanted or reach >= order.size:
                    break
                reach *= 2
            try:
                found[row] = pareto_k(np.repeat(every[first], copies), total)
            except NotMeasurable:
                continue
        return found

    return of


def _scaling(requests: Requests) -> Callable[[Counts], Array]:
    """Return the slope of resamples from sums of squares of prefixes; the shortest drawn sequence
    limits their length."""
    shortest = np.array([float(np.min(lengths)) for _, lengths in requests])
    counted = np.array([len(lengths) for _, lengths in requests], dtype=np.float64)
    longest = int(shortest.max()).bit_length()
    squares = np.full((len(requests), longest), math.nan)
    for row, (delta, lengths) in enumerate(requests):
        running = np.concatenate([[0.0], np.cumsum(delta)])
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(int)
        for j in range(int(shortest[row]).bit_length()):
            sums = running[starts + 2**j] - running[starts]
            squares[row, j] = sums @ sums

    def of(counts: Counts) -> Array:
        found = np.full(len(counts), math.nan)
        for row, drawn in enumerate(counts):
            drawn_requests = drawn > 0
            levels = int(shortest[drawn_requests].min()).bit_length()
            sequences = float(drawn @ counted)
            means = drawn[drawn_requests] @ squares[drawn_requests, :levels] / sequences
            if sequences >= 8 and shortest[drawn_requests].min() >= 4 and bool((means > 0).all()):
                found[row] = slope_of_spreads(means)
        return found

    return of


def _least_agreement(requests: Requests) -> Callable[[Counts], Array]:
    """Return the mean share of the layer that agrees least, from sums by layer."""
    layers = {float(count) for _, counts in requests for count in counts}
    if len(layers) != 1:
        raise NotMeasurable("rollouts have routes of different numbers of layers")
    (width,) = (int(count) for count in layers)
    rows = [shares.reshape(-1, width) for shares, _ in requests]
    sums = np.array([row.sum(axis=0) for row in rows])
    sizes = np.array([len(row) for row in rows], dtype=np.float64)
    return lambda counts: np.asarray((counts @ sums / (counts @ sizes)[:, None]).min(axis=1))


REDRAWN: Mapping[str, ResampledFunction] = {
    "tail_index": _tails,
    "length_scaling": _scaling,
    "router_agreement": _least_agreement,
}
"""Functions of a few numbers of each request that are not smooth, by metric."""


# --- calibration ----------------------------------------------------------------------------------


def _calibration_excess(requests: Requests, bins: int, ranks: int) -> float:
    """Return a bound of the bias of a calibration error of these requests, the larger of both
    kernels.

    The error sums |S| over bins, S the sum of confidence - accuracy in a bin, and E|S| exceeds |ES|
    by at most the standard deviation of S (Jensen), here over whole requests. So a small sample
    makes a calibrated kernel look worse and a miscalibrated one hardly, and their difference is too
    small.
    """
    n, found = len(requests), [0.0]
    for side in (0, 2):
        rows = [(part[side] - part[side + 1]).reshape(-1, ranks) for part in requests]
        own = np.repeat(np.arange(n), [len(row) for row in rows])
        gaps, sure = np.concatenate(rows), np.concatenate([part[side] for part in requests])
        right = np.concatenate([part[side + 1] for part in requests]).reshape(-1, ranks)
        total = 0.0
        for rank, confidence in enumerate(sure.reshape(-1, ranks).T):
            order = np.lexsort((right[:, rank], confidence))
            for part in np.array_split(order, bins):
                sums = np.bincount(own[part], gaps[part, rank], n)
                total += math.sqrt(n * float(np.var(sums, ddof=1))) / len(part)
        found.append(total / (bins * ranks))
    return max(found)


EXCESS: Mapping[str, Callable[[Requests], float]] = {
    "ece_gap": lambda requests: _calibration_excess(requests, BINS, 1),
    "ace_gap": lambda requests: _calibration_excess(requests, BINS, RANKS),
}
"""Widening of the limits of numbers that are biased in small samples, by metric."""

SHARES: Mapping[str, Callable[[Array], Array]] = {
    "tail_mass_seq": lambda sums: (np.abs(sums) > math.log(2)).astype(np.float64),
    "tokens_any_flip": lambda rerouted: rerouted,
}
"""Shares: means of indicators, by metric."""
