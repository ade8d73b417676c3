"""Every metric in plain Python floats: a second, independent implementation.

Written from the formulas of docs/reference/metrics.md and the papers cited there, position by
position, without arrays and without the functions under test.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

Row = list[float]
LABEL_BINS = 15


@dataclass(frozen=True)
class Text:
    """A request: token ids, the logits of both kernels and of a reference at each position, the
    states of both, and the token that was sampled at each position."""

    ids: tuple[int, ...]
    train: list[Row]
    infer: list[Row]
    gold: list[Row]
    states: tuple[list[Row], list[Row]]
    drawn: tuple[int, ...]


@dataclass(frozen=True)
class Sequence_:
    """A rollout: the log-probabilities of both sides, and everything else that was recorded."""

    tokens: tuple[int, ...]
    train: Row
    infer: Row
    tops: tuple[list[list[tuple[int, float]]], list[list[tuple[int, float]]]]
    advantages: Row
    rewards: tuple[float, float]
    refused: tuple[bool, bool]
    texts: tuple[str, str]
    reference: str
    gradients: tuple[Row, Row]
    routes: tuple[list[list[list[int]]], list[list[list[int]]]]
    scores: list[list[Row]]
    arrived: float
    stamps: Row
    prompt: int
    cache: tuple[int, int, int, float]


# --- policies ------------------------------------------------------------------------------------


def logs(row: Row) -> Row:
    """Return ln softmax."""
    top = max(row)
    total = top + math.log(math.fsum(math.exp(z - top) for z in row))
    return [z - total for z in row]


def ranked(row: Row, k: int) -> list[int]:
    """Return the k likeliest tokens; of equal ones the smaller id comes first."""
    return sorted(range(len(row)), key=lambda token: (-row[token], token))[:k]


Pair = Callable[[Row, Row], float]


def by_policy(function: Callable[[float, float], float]) -> Pair:
    """Return the sum over tokens of a function of ln p and ln q."""
    return lambda a, b: math.fsum(map(function, logs(a), logs(b)))


def largest(function: Callable[[float, float], float]) -> Pair:
    """Return the largest over tokens of a function of ln p and ln q."""
    return lambda a, b: max(map(function, logs(a), logs(b)))


def drift(a: Row, b: Row) -> Row:
    """Return the differences infer - train."""
    return [y - x for x, y in zip(a, b, strict=True)]


def length(row: Row) -> float:
    """Return the Euclidean length."""
    return math.sqrt(math.fsum(x * x for x in row))


def centred(row: Row) -> Row:
    """Return a row less its mean."""
    return [x - fmean(row) for x in row]


def bits(value: float) -> int:
    """Return the index of a float64 in the order of all float64 numbers."""
    (whole,) = struct.unpack("<q", struct.pack("<d", value))
    return whole if whole >= 0 else -(whole + 2**63)


def margin_of(row: Row) -> float:
    """Return the largest score minus the second largest."""
    first, second = sorted(row, reverse=True)[:2]
    return first - second


def kl_of(p: Sequence[float], q: Sequence[float]) -> float:
    """Return KL of two distributions given by log-probabilities."""
    return math.fsum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True))


def js_of(a: Row, b: Row) -> float:
    """Return the Jensen-Shannon divergence."""
    p, q = logs(a), logs(b)
    middle = [math.log((math.exp(x) + math.exp(y)) / 2) for x, y in zip(p, q, strict=True)]
    return (kl_of(p, middle) + kl_of(q, middle)) / 2


def tv_of(a: Row, b: Row) -> float:
    """Return the total variation."""
    return by_policy(lambda x, y: abs(math.exp(x) - math.exp(y)) / 2)(a, b)


def entropy(row: Row) -> float:
    """Return the entropy in nats."""
    return -math.fsum(math.exp(x) * x for x in logs(row))


def flips(a: Row, b: Row) -> float:
    """Return 1 where the most likely token changes."""
    return float(ranked(a, 1) != ranked(b, 1))


def overlap(k: int) -> Pair:
    """Return the share of the top k tokens that both have."""
    return lambda a, b: len(set(ranked(a, k)) & set(ranked(b, k))) / k


def jaccard(k: int) -> Pair:
    """Return the intersection over the union of the top k tokens."""

    def of(a: Row, b: Row) -> float:
        one, other = set(ranked(a, k)), set(ranked(b, k))
        return len(one & other) / len(one | other)

    return of


def rank_biased(a: Row, b: Row, p: float = 0.9, k: int = 10) -> float:
    """Return RBO_ext of Webber, Moffat and Zobel (2010), equation 30, of two even lists."""
    shared = [len(set(ranked(a, d)) & set(ranked(b, d))) for d in range(1, k + 1)]
    summed = math.fsum(x / d * p**d for d, x in enumerate(shared, 1))
    return shared[-1] / k * p**k + (1 - p) / p * summed


def kendall(a: Row, b: Row, k: int = 10) -> float:
    """Return K^(1/2) of Fagin, Kumar and Sivakumar (2003), normalised by its maximum."""
    one, other = ranked(a, k), ranked(b, k)
    every = sorted({*one, *other})
    total = 0.0
    for at, i in enumerate(every):
        for j in every[at + 1 :]:
            inside = [(i in side, j in side) for side in (one, other)]
            if all(map(all, inside)):
                total += (one.index(i) < one.index(j)) != (other.index(i) < other.index(j))
            elif any(map(all, inside)):
                both, rest = (one, other) if all(inside[0]) else (other, one)
                if i in rest or j in rest:
                    alone, missing = (i, j) if i in rest else (j, i)
                    total += both.index(missing) < both.index(alone)
                else:
                    total += 0.5
            else:
                total += 1
    return total / (k * (3 * k - 1) / 2)


PAIRS: Mapping[str, Pair] = {
    "logit_l2": lambda a, b: length(drift(a, b)),
    "logit_l2_centered": lambda a, b: length(centred(drift(a, b))),
    "logit_linf": lambda a, b: max(map(abs, drift(a, b))),
    "logit_span": lambda a, b: max(drift(a, b)) - min(drift(a, b)),
    "logit_rel_l2": lambda a, b: length(drift(a, b)) / length(a),
    "logit_cosine": lambda a, b: (
        math.fsum(x * y for x, y in zip(a, b, strict=True)) / length(a) / length(b)
    ),
    "bitwise_mismatch_count": lambda a, b: float(
        sum(bits(x) != bits(y) for x, y in zip(a, b, strict=True))
    ),
    "ulp_max": lambda a, b: float(max(abs(bits(x) - bits(y)) for x, y in zip(a, b, strict=True))),
    "stable_fraction": lambda a, b: float(margin_of(a) > 2 * max(map(abs, drift(a, b)))),
    "margin": lambda a, b: margin_of(a),
    "kl": lambda a, b: kl_of(logs(a), logs(b)),
    "kl_infer_train": lambda a, b: kl_of(logs(b), logs(a)),
    "jeffreys": lambda a, b: kl_of(logs(a), logs(b)) + kl_of(logs(b), logs(a)),
    "js": js_of,
    "tv": tv_of,
    "hellinger2": by_policy(lambda x, y: (math.exp(x / 2) - math.exp(y / 2)) ** 2 / 2),
    "chi2_train_infer": lambda a, b: by_policy(lambda x, y: math.exp(2 * x - y))(a, b) - 1,
    "chi2_infer_train": lambda a, b: by_policy(lambda x, y: math.exp(2 * y - x))(a, b) - 1,
    "renyi_inf": largest(lambda x, y: x - y),
    "log_ratio_linf": largest(lambda x, y: abs(x - y)),
    "entropy_gap": lambda a, b: entropy(a) - entropy(b),
    "top1_overlap": overlap(1),
    "top5_overlap": overlap(5),
    "top10_overlap": overlap(10),
    "jaccard1": jaccard(1),
    "jaccard5": jaccard(5),
    "jaccard10": jaccard(10),
    "rbo10": rank_biased,
    "kendall10": kendall,
    "top1_flip": flips,
    "flip_hazard": lambda a, b: 1000 * flips(a, b),
}
"""Functions of the logits of both kernels at one position."""


# --- sampled tokens ------------------------------------------------------------------------------


def binary(p: float, q: float) -> float:
    """Return KL of two Bernoulli distributions."""
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


RATIOS: Mapping[str, Callable[[float], float]] = {
    "log_ratio": math.log,
    "importance_ratio": lambda w: w,
    "k1": lambda w: -math.log(w),
    "k2": lambda w: math.log(w) ** 2 / 2,
    "k3": lambda w: w - 1 - math.log(w),
    "w_log_w": lambda w: w * math.log(w),
    "w_log_w_minus": lambda w: w * math.log(w) - w + 1,
    "tv_is": lambda w: abs(w - 1) / 2,
    "chi2_token": lambda w: w * w - 1,
    "chi2_is": lambda w: (w - 1) ** 2,
    "jsd_is": lambda w: (w * math.log(2 * w / (1 + w)) + math.log(2 / (1 + w))) / 2,
    "is_variance_inflation": lambda w: w * w,
    "mult_prob_error": lambda w: max(w, 1 / w),
    "ratio_extreme": lambda w: float(w > 2 or w < 1 / 2),
    "ratio_above2": lambda w: float(w > 2),
    "ratio_above10": lambda w: float(w > 10),
    "ratio_below2": lambda w: float(w < 1 / 2),
    "ratio_below10": lambda w: float(w < 1 / 10),
    "clipfrac0": lambda w: float(not 0.8 <= w <= 1.2),
    "oob_tis": lambda w: float(w > 2),
    "oob_mis": lambda w: float(not 0.5 <= w <= 2),
    "oob_icepop": lambda w: float(not 0.5 <= w <= 5),
    "oob_veto": lambda w: float(w < 1e-4),
}
"""Functions of w = p(y)/q(y) at a sampled token."""

COINS: Mapping[str, Callable[[float, float], float]] = {
    "prob_absdiff": lambda p, q: abs(p - q),
    "binary_tv": lambda p, q: (abs(p - q) + abs((1 - p) - (1 - q))) / 2,
    "binary_kl": lambda p, q: max(binary(p, q), binary(q, p)),
}
"""Functions of p(y) and q(y)."""


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Return Pearson's correlation."""
    a, b = centred(list(x)), centred(list(y))
    return math.fsum(s * t for s, t in zip(a, b, strict=True)) / length(a) / length(b)


def effective(weights: Sequence[float]) -> float:
    """Return (sum w)^2 / (n sum w^2)."""
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


def pareto_shape(weights: Sequence[float]) -> float:
    """Return the shape of the tail as `gpdfit` of the R package loo has it.

    Zhang and Stephens (2009), with the prior of Vehtari et al. (2024).
    """
    ordered = sorted(weights)
    tail = math.ceil(min(len(ordered) / 5, 3 * math.sqrt(len(ordered))))
    x = [w - ordered[-tail - 1] for w in ordered[-tail:]]
    n, m = len(x), 30 + math.floor(math.sqrt(len(x)))
    star = x[math.floor(n / 4 + 0.5) - 1]
    thetas = [1 / x[-1] + (1 - math.sqrt(m / (j - 0.5))) / 3 / star for j in range(1, m + 1)]

    def profile(theta: float) -> float:
        k = fmean(math.log1p(-theta * value) for value in x)
        return n * (math.log(-theta / k) - k - 1)

    heights = [profile(theta) for theta in thetas]
    shares = [1 / math.fsum(math.exp(other - own) for other in heights) for own in heights]
    best = math.fsum(theta * share for theta, share in zip(thetas, shares, strict=True))
    k = fmean(math.log1p(-best * value) for value in x)
    return (n * k + 0.5 * 10) / (n + 10)


# --- calibration ---------------------------------------------------------------------------------


def equal_bins(values: list[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Return (confidence, correct) in bins of equal size; the first ones may have one more."""
    ordered = sorted(values)
    small, more = divmod(len(ordered), LABEL_BINS)
    found, at = [], 0
    for number in range(LABEL_BINS):
        size = small + (number < more)
        found.append(ordered[at : at + size])
        at += size
    return found


def gap(part: list[tuple[float, float]]) -> float:
    """Return |mean confidence - accuracy| of a bin."""
    return abs(fmean(c for c, _ in part) - fmean(right for _, right in part))


def expected_error(values: list[tuple[float, float]]) -> float:
    """Return ECE."""
    return math.fsum(len(part) / len(values) * gap(part) for part in equal_bins(values))


def labelled(texts: Sequence[Text], side: str) -> list[tuple[Row, int]]:
    """Return (log-probabilities, next token) of every position that has a next token."""
    return [
        (logs(row), label)
        for text in texts
        for row, label in zip(getattr(text, side), text.ids[1:], strict=False)
    ]


def ece(texts: Sequence[Text], side: str) -> float:
    """Return the calibration error of the top-1 confidence."""
    pairs = [
        (math.exp(max(law)), float(ranked(law, 1) == [label]))
        for law, label in labelled(texts, side)
    ]
    return expected_error(pairs)


def ace(texts: Sequence[Text], side: str) -> float:
    """Return the mean gap over the bins of each of the five first ranks."""
    gaps = []
    for rank in range(5):
        pairs = []
        for law, label in labelled(texts, side):
            token = ranked(law, 5)[rank]
            pairs.append((math.exp(law[token]), float(token == label)))
        gaps += [gap(part) for part in equal_bins(pairs)]
    return fmean(gaps)


def brier(texts: Sequence[Text], side: str) -> float:
    """Return the mean Brier score."""
    return fmean(
        math.fsum((math.exp(x) - (token == label)) ** 2 for token, x in enumerate(law))
        for law, label in labelled(texts, side)
    )


def nll(texts: Sequence[Text], side: str) -> float:
    """Return the mean of -ln of the next token."""
    return fmean(-law[label] for law, label in labelled(texts, side))


# --- texts ---------------------------------------------------------------------------------------


def unit_mean(states: list[Row]) -> Row:
    """Return the mean state at length 1."""
    mean = [fmean(column) for column in zip(*states, strict=True)]
    return [x / length(mean) for x in mean]


def embeddings(text: Text) -> tuple[Row, Row]:
    """Return the sentence embeddings of both kernels."""
    return unit_mean(text.states[0]), unit_mean(text.states[1])


def of_positions(function: Pair) -> Callable[[Text], list[float]]:
    """Return the values of every position of a text."""
    return lambda text: [function(a, b) for a, b in zip(text.train, text.infer, strict=True)]


def of_states(function: Callable[[Row], float]) -> Callable[[Text], list[float]]:
    """Return a function of the drift of the states of every position."""
    return lambda text: [function(drift(a, b)) for a, b in zip(*text.states, strict=True)]


def sampled(text: Text) -> list[tuple[float, float]]:
    """Return ln p and ln q of the sampled tokens."""
    return [
        (logs(a)[y], logs(b)[y]) for a, b, y in zip(text.train, text.infer, text.drawn, strict=True)
    ]


def of_ratios(function: Callable[[float], float]) -> Callable[[Text], list[float]]:
    """Return a function of w at every sampled token."""
    return lambda text: [function(math.exp(p - q)) for p, q in sampled(text)]


def of_bernoulli(function: Callable[[float, float], float]) -> Callable[[Text], list[float]]:
    """Return a function of both probabilities of every sampled token."""
    return lambda text: [function(math.exp(p), math.exp(q)) for p, q in sampled(text)]


def first_flip(text: Text) -> list[float]:
    """Return the number of tokens before the first flip."""
    found = of_positions(flips)(text)
    return [float(found.index(1.0)) if 1.0 in found else float(len(found))]


def noise(text: Text) -> list[float]:
    """Return the error of infer divided by that of train."""
    return [
        length(drift(g, b)) / length(drift(g, a))
        for a, b, g in zip(text.train, text.infer, text.gold, strict=True)
    ]


OF_TEXTS: Mapping[str, Callable[[Text], list[float]]] = {
    **{name: of_positions(function) for name, function in PAIRS.items()},
    **{name: of_ratios(function) for name, function in RATIOS.items()},
    **{name: of_bernoulli(function) for name, function in COINS.items()},
    "noise_ratio": noise,
    "greedy_divergence_step": first_flip,
    "token_kl_max": lambda text: [max(of_positions(PAIRS["kl"])(text))],
    "sequence_tv": lambda text: [1 - math.prod(1 - tv for tv in of_positions(tv_of)(text))],
    "hidden_l2": of_states(length),
    "hidden_linf": of_states(lambda row: max(map(abs, row))),
    "embedding_l2": lambda text: [length(drift(*embeddings(text)))],
    "embedding_cosine": lambda text: [
        math.fsum(x * y for x, y in zip(*embeddings(text), strict=True))
    ],
}
"""Functions of one request: its values, one per position or one in all."""


def pooled(texts: Sequence[Text]) -> list[tuple[float, float]]:
    """Return ln p and ln q of all sampled tokens."""
    return [pair for text in texts for pair in sampled(text)]


OF_SLICES: Mapping[str, Callable[[Sequence[Text]], float]] = {
    "ece_gap": lambda texts: abs(ece(texts, "train") - ece(texts, "infer")),
    "ace_gap": lambda texts: abs(ace(texts, "train") - ace(texts, "infer")),
    "brier_gap": lambda texts: abs(brier(texts, "infer") - brier(texts, "train")),
    "nll_gap": lambda texts: abs(nll(texts, "infer") - nll(texts, "train")),
    "ess_frac": lambda texts: effective([math.exp(p - q) for p, q in pooled(texts)]),
    "tail_index": lambda texts: pareto_shape([math.exp(p - q) for p, q in pooled(texts)]),
    "pearson_p": lambda texts: correlation(
        [math.exp(p) for p, _ in pooled(texts)], [math.exp(q) for _, q in pooled(texts)]
    ),
    "pearson_logp": lambda texts: correlation(*zip(*pooled(texts), strict=True)),
    "grad_bias": lambda texts: (
        2 * 2.0 * 3.0 * fmean(tv for text in texts for tv in of_positions(tv_of)(text))
    ),
}
"""Functions of all requests; the constants of `grad_bias` are A_max 2 and G 3."""


# --- rollouts ------------------------------------------------------------------------------------


def ratios(one: Sequence_) -> Row:
    """Return ln w of the tokens."""
    return [p - q for p, q in zip(one.train, one.infer, strict=True)]


def lumped(one: Sequence_) -> list[tuple[Row, Row]]:
    """Return both distributions of each token on the commonly listed tokens, plus a rest."""
    found = []
    for at, token in enumerate(one.tokens):
        p = dict(one.tops[0][at]) | {token: one.train[at]}
        q = dict(one.tops[1][at]) | {token: one.infer[at]}
        told = sorted(p.keys() & q.keys())
        laws = []
        for side in (p, q):
            known = [side[token] for token in told]
            laws.append([*known, math.log(1 - math.fsum(map(math.exp, known)))])
        found.append((laws[0], laws[1]))
    return found


def is_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_call(text: str) -> bool:
    """Return whether a text is a JSON object whose city is a string."""
    found: Any = json.loads(text) if is_json(text) else None
    return isinstance(found, dict) and isinstance(found.get("city"), str)


def differing(rollouts: Sequence[Sequence_], good: Callable[[str, Sequence_], bool]) -> float:
    """Return |share of infer - share of train|."""
    return abs(fmean(good(r.texts[1], r) - good(r.texts[0], r) for r in rollouts))


def total(rollouts: Sequence[Sequence_], side: int) -> Row:
    """Return the gradient of the whole batch."""
    return [
        math.fsum(column) for column in zip(*(r.gradients[side] for r in rollouts), strict=True)
    ]


def relative_bias(rollouts: Sequence[Sequence_]) -> float:
    """Return ||g_infer - g_train|| / ||g_train||."""
    g, h = total(rollouts, 0), total(rollouts, 1)
    return length(drift(g, h)) / length(g)


def direction(rollouts: Sequence[Sequence_]) -> float:
    """Return the cosine of the two gradients."""
    g, h = total(rollouts, 0), total(rollouts, 1)
    return math.fsum(x * y for x, y in zip(g, h, strict=True)) / length(g) / length(h)


def agreement(rollouts: Sequence[Sequence_]) -> float:
    """Return the minimum over layers of the mean share of experts that both sides chose."""
    layers = len(rollouts[0].routes[0][0])
    return min(
        fmean(
            len(set(a[layer]) & set(b[layer])) / len(a[layer])
            for r in rollouts
            for a, b in zip(*r.routes, strict=True)
        )
        for layer in range(layers)
    )


def rerouted(rollouts: Sequence[Sequence_]) -> float:
    """Return the share of tokens whose set of experts differs in any layer."""
    return fmean(
        any(set(x) != set(y) for x, y in zip(a, b, strict=True))
        for r in rollouts
        for a, b in zip(*r.routes, strict=True)
    )


def spread_slope(rollouts: Sequence[Sequence_]) -> float:
    """Return the slope of ln rms of prefix sums on ln length, prefixes of lengths 1, 2, 4, ..."""
    every = [ratios(r) for r in rollouts]
    lengths = [2**j for j in range(20) if 2**j <= min(map(len, every))][-6:]
    x = [math.log(n) for n in lengths]
    y = [math.log(math.sqrt(fmean(math.fsum(row[:n]) ** 2 for row in every))) for n in lengths]
    return (
        math.fsum(s * t for s, t in zip(centred(x), centred(y), strict=True))
        / length(centred(x)) ** 2
    )


def intraclass_correlation(rollouts: Sequence[Sequence_]) -> float:
    """Return ICC(1) of the one-way analysis of variance with unequal groups (Donner 1986)."""
    groups = [ratios(r) for r in rollouts]
    sizes = [len(g) for g in groups]
    n, k = sum(sizes), len(groups)
    grand = math.fsum(x for g in groups for x in g) / n
    between = math.fsum(len(g) * (fmean(g) - grand) ** 2 for g in groups) / (k - 1)
    inside = math.fsum((x - fmean(g)) ** 2 for g in groups for x in g) / (n - k)
    typical = (n - sum(s * s for s in sizes) / n) / (k - 1)
    return (between - inside) / (between + (typical - 1) * inside)


OF_ROLLOUTS: Mapping[str, Callable[[Sequence_], list[float]]] = {
    "topk_tail_kl": lambda r: [kl_of(p, q) for p, q in lumped(r)],
    "topk_tail_tv": lambda r: [
        math.fsum(abs(math.exp(x) - math.exp(y)) for x, y in zip(p, q, strict=True)) / 2
        for p, q in lumped(r)
    ],
    "seq_log_ratio": lambda r: [math.fsum(ratios(r))],
    "geo_ratio": lambda r: [math.exp(fmean(ratios(r)))],
    "seq_max_abs": lambda r: [max(map(abs, ratios(r)))],
    "seq_k3": lambda r: [math.exp(math.fsum(ratios(r))) - 1 - math.fsum(ratios(r))],
    "log_ppl_diff": lambda r: [-fmean(r.train) + fmean(r.infer)],
    "ppl_ratio": lambda r: [math.exp(-fmean(r.train)) / math.exp(-fmean(r.infer))],
    "refusal_flip": lambda r: [float(r.refused[0] != r.refused[1])],
    "router_margin": lambda r: [
        min(sorted(layer)[-2] - sorted(layer)[-3] for layer in token) for token in r.scores
    ],
    "ttft": lambda r: [r.stamps[0] - r.arrived],
    "tpot": lambda r: [fmean(b - a for a, b in pairwise(r.stamps))],
    "latency": lambda r: [r.stamps[-1] - r.arrived],
}
"""Functions of one rollout: its values."""


def all_ratios(rollouts: Sequence[Sequence_]) -> Row:
    """Return the weights of whole sequences."""
    return [math.exp(math.fsum(ratios(r))) for r in rollouts]


OF_BATCHES: Mapping[str, Callable[[Sequence[Sequence_]], float]] = {
    "ess_seq": lambda rs: effective(all_ratios(rs)),
    "tail_mass_seq": lambda rs: fmean(not 0.5 <= w <= 2 for w in all_ratios(rs)),
    "length_scaling": spread_slope,
    "icc": intraclass_correlation,
    "reward_delta": lambda rs: abs(fmean(r.rewards[1] - r.rewards[0] for r in rs)),
    "adv_weighted_bias": lambda rs: abs(
        fmean(
            (math.exp(d) - 1) * a for r in rs for d, a in zip(ratios(r), r.advantages, strict=True)
        )
    ),
    "json_parse_gap": lambda rs: differing(rs, lambda text, r: is_json(text)),
    "tool_schema_gap": lambda rs: differing(rs, lambda text, r: is_call(text)),
    "exact_match_gap": lambda rs: differing(rs, lambda text, r: text == r.reference),
    "grad_cosine": direction,
    "grad_rel_bias": relative_bias,
    "router_agreement": agreement,
    "tokens_any_flip": rerouted,
    "throughput": lambda rs: (
        sum(len(r.tokens) for r in rs) / math.fsum(r.stamps[-1] - r.arrived for r in rs)
    ),
    "kv_memory": lambda rs: max(
        2 * math.prod(r.cache[:3]) * (r.prompt + len(r.tokens)) * r.cache[3] for r in rs
    ),
}
"""Functions of all rollouts, which have distinct prompts."""

OF_RUNS = ("peak_memory", "failure_rate", "determinism")
"""Metrics of clocks and memory counters; the test states their numbers."""
DEFINED = frozenset({*OF_TEXTS, *OF_SLICES, *OF_ROLLOUTS, *OF_BATCHES, *OF_RUNS})
"""Every metric with a definition here."""
