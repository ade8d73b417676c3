"""Values of recorded runs: outputs, gradients, routes, times, caches, and whole sequences.

Routes are arrays [N, L, k]: for N tokens and L layers the ids of the k chosen experts, in any
order; scores are [N, L, E]. Every function raises NotMeasurable for no values, different shapes and
impossible values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kcdsl_backends.empirical.statistics.estimates import (
    Array,
    NotMeasurable,
    column,
    indicators,
    rounded_sum,
)

Routes = NDArray[np.int64]
TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "object": dict,
    "array": list,
}
"""Types of fields that the schema of a tool call may name."""
_NOTHING = object()


# --- outputs --------------------------------------------------------------------------------------


def parses_as_json(texts: Sequence[str]) -> Array:
    """Return 1 for each text that is one JSON value (without NaN and Infinity), else 0."""
    return np.array([float(_value_of(text) is not _NOTHING) for text in texts])


def calls_tool(texts: Sequence[str], required: Mapping[str, type | tuple[type, ...]]) -> Array:
    """Return 1 for each text that is a JSON object with fields of the required types, else 0.

    `required` maps a field to the Python type of its value; true and false are no numbers.
    """
    return np.array([float(_follows(_value_of(text), required)) for text in texts])


def exact_matches(texts: Sequence[str], references: Sequence[str]) -> Array:
    """Return 1 where a text is its reference, spaces at both ends aside, else 0."""
    if len(texts) != len(references):
        raise NotMeasurable(f"{len(texts)} texts for {len(references)} references")
    return np.array([float(a.strip() == b.strip()) for a, b in zip(texts, references, strict=True)])


def _value_of(text: str) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _follows(value: Any, required: Mapping[str, type | tuple[type, ...]]) -> bool:
    if not isinstance(value, dict):
        return False
    for name, kind in required.items():
        found = value.get(name, _NOTHING)
        wants_truth = kind is bool or (isinstance(kind, tuple) and bool in kind)
        if not isinstance(found, kind) or (isinstance(found, bool) and not wants_truth):
            return False
    return True


# --- gradients ------------------------------------------------------------------------------------


def grad_cosine(train: ArrayLike, infer: ArrayLike, widths: ArrayLike) -> float:
    """Return the cosine of both gradients of a batch; raises NotMeasurable if one is zero."""
    g, h = _summed(train, widths), _summed(infer, widths)
    a, b = _length(g), _length(h)
    if not (a > 0 and b > 0):
        raise NotMeasurable("a gradient of zero has no direction")
    apart = _length(h / b - g / a)
    return max(-1.0, min(1.0, 1 - apart * apart / 2))


def grad_rel_bias(train: ArrayLike, infer: ArrayLike, widths: ArrayLike) -> float:
    """Return ||g_infer - g_train|| / ||g_train||; raises NotMeasurable if g_train is zero."""
    g, h = _summed(train, widths), _summed(infer, widths)
    a = _length(g)
    if not a > 0:
        raise NotMeasurable("no bias is relative to a gradient of zero")
    return _length(h - g) / a


def _summed(gradients: ArrayLike, widths: ArrayLike) -> Array:
    """Return the gradient of a batch: the sum of the concatenated gradients of its rollouts."""
    values, sizes = column(gradients, "gradients"), column(widths, "sizes of gradients")
    if bool((sizes != sizes[0]).any()) or sizes[0] < 1 or values.size != sizes.sum():
        raise NotMeasurable("the gradients of rollouts have different sizes")
    found: Array = values.reshape(-1, int(sizes[0])).sum(axis=0)
    return found


def _length(values: Array) -> float:
    largest = float(np.abs(values).max())
    if largest == 0:
        return 0.0
    return largest * math.sqrt(math.fsum((values / largest) ** 2))


# --- routes ---------------------------------------------------------------------------------------


def router_agreement(train: ArrayLike, infer: ArrayLike) -> Array:
    """Return the mean share of chosen experts that both sides share, one value per layer [L]."""
    a, b = _routes(train, infer)
    shared: Array = (a[..., :, None] == b[..., None, :]).any(axis=-1).sum(axis=-1)
    found: Array = shared.mean(axis=0) / a.shape[2]
    return found


def any_flip(train: ArrayLike, infer: ArrayLike) -> Array:
    """Return 1 for each token with another set of experts in at least one layer, [N]."""
    a, b = _routes(train, infer)
    same = (np.sort(a, axis=2) == np.sort(b, axis=2)).all(axis=(1, 2))
    found: Array = 1.0 - same
    return found


def router_margin(scores: ArrayLike, k: int) -> Array:
    """Return the k-th best score minus the next, [N, L]: the smallest drift that changes the
    route."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 3 or values.size == 0 or not 1 <= k < values.shape[2]:
        raise NotMeasurable(f"scores {values.shape} have no margin of the {k} best")
    if not bool(np.isfinite(values).all()):
        raise NotMeasurable("scores must be finite")
    ordered = np.sort(values, axis=2)
    found: Array = ordered[..., -k] - ordered[..., -k - 1]
    return found


def least_agreement(shares: ArrayLike, layers: ArrayLike) -> float:
    """Return the mean share of the layer that agrees least, from shares of all tokens."""
    values, counts = column(shares, "shares"), column(layers, "layers")
    if bool((counts != counts[0]).any()):
        raise NotMeasurable("rollouts have routes of different numbers of layers")
    return float(values.reshape(-1, int(counts[0])).mean(axis=0).min())


def mean_of(values: ArrayLike) -> float:
    """Return the mean of a column."""
    return float(column(values, "values").mean())


def _routes(train: ArrayLike, infer: ArrayLike) -> tuple[Routes, Routes]:
    a, b = np.asarray(train), np.asarray(infer)
    if a.ndim != 3 or a.shape != b.shape or a.size == 0:
        raise NotMeasurable(f"routes must be two [N, L, k] arrays, not {a.shape} and {b.shape}")
    for side in (a, b):
        if side.dtype.kind not in "iu" or int(side.min()) < 0:
            raise NotMeasurable("routes must hold the ids of experts")
        ordered = np.sort(side, axis=2)
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise NotMeasurable("an expert is chosen twice for one token")
    return a.astype(np.int64), b.astype(np.int64)


# --- times and memory -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """One request: the times of its arrival and of each of its tokens, in seconds."""

    arrived: float
    tokens: Sequence[float]


def time_to_first_token(served: Served) -> float:
    """Return TTFT in seconds."""
    return _stamps(served)[0] - served.arrived


def time_per_output_token(served: Served) -> float:
    """Return TPOT: the mean time between tokens after the first, in seconds.

    Raises NotMeasurable for a request of one token.
    """
    stamps = _stamps(served)
    if len(stamps) < 2:
        raise NotMeasurable("one token has no time between tokens")
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1)


def latency(served: Served) -> float:
    """Return the time from the request to its last token, in seconds."""
    return _stamps(served)[-1] - served.arrived


def kv_memory(layers: int, heads: int, width: int, tokens: int, bytes_each: float) -> float:
    """Return the bytes of keys and values: 2 layers heads width tokens bytes_each."""
    sizes = (layers, heads, width, tokens, bytes_each)
    if min(sizes) <= 0:
        raise NotMeasurable(f"a cache of {sizes} holds nothing")
    return 2 * layers * heads * width * tokens * bytes_each


def _stamps(served: Served) -> Sequence[float]:
    stamps = column(served.tokens, "times of tokens")
    if not np.isfinite(served.arrived) or stamps[0] < served.arrived:
        raise NotMeasurable("a token was given out before its request came")
    if bool((np.diff(stamps) < 0).any()):
        raise NotMeasurable("the times of tokens do not ascend")
    return [float(s) for s in stamps]


# --- whole sequences ------------------------------------------------------------------------------

_LARGEST = 709.0
"""e^x of exponents below this is finite in float64."""


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
        raise NotMeasurable(f"{train.size} and {infer.size} tokens")
    return -rounded_sum(train - infer) / train.size


def ppl_ratio(train_log: ArrayLike, infer_log: ArrayLike) -> float:
    """Return PPL_train / PPL_infer."""
    return _exponential(log_ppl_diff(train_log, infer_log))


def _exponential(exponent: float) -> float:
    """Return e^exponent, +inf where it leaves the range of float64."""
    return math.exp(exponent) if exponent < _LARGEST else math.inf


def greedy_divergence_step(flips: ArrayLike) -> int:
    """Return the number of tokens before the first flip, of all tokens if none flips."""
    values = indicators(flips, "flips")
    found = np.flatnonzero(values)
    return int(found[0]) if found.size else values.size


def max_token_kl(kl: ArrayLike) -> float:
    """Return the largest divergence of any position, on which trust-region bounds depend."""
    values = column(kl, "kl")
    if values.min() < 0:
        raise NotMeasurable("kl: a divergence is never negative")
    return float(values.max())


def composed_tv(tv: ArrayLike) -> float:
    """Return 1 - prod(1 - tau_t), which bounds the total variation of sequences.

    The bound holds only if each tau_t bounds the total variation of step t for *every* history;
    values measured on one text describe that text alone. At 1 it is vacuous.
    """
    values = column(tv, "tv")
    if values.min() < 0 or values.max() > 1:
        raise NotMeasurable("tv: a total variation lies in [0, 1]")
    with np.errstate(divide="ignore"):
        return -math.expm1(math.fsum(np.log1p(-values))) if values.max() < 1 else 1.0


def tail_mass(sums: ArrayLike) -> float:
    """Return the share of sequences whose weight e^sum lies outside [1/2, 2]."""
    return float(np.mean(np.abs(column(sums, "sums of ln w")) > math.log(2)))
