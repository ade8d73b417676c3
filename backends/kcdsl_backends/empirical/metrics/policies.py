"""The next-token distributions of both kernels in float64: divergences of two laws, calibration.

p is the policy of the training kernel, q that of the inference kernel, both in float64. Logits are
widened to float64 before anything is subtracted. `full_logits` measures whole policies faster;
these forms serve samples, scores and lists of the likeliest tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kcdsl.metrics.definition import BINS, CONFIDENCES, RANKS
from kcdsl_backends.empirical.statistics.estimates import Array, NotMeasurable

NORMALISATION_TOLERANCE = 1e-9
"""Largest |sum p - 1| for which the Bregman form of KL holds."""
_SLACK = 1e-6
"""Largest excess of a sum of recorded probabilities over one, by their rounding."""
_SERIES_LIMIT = 1e-3
_LARGE = 50.0


class Unnormalised(ValueError):
    """The probabilities of a row do not sum to one, so no divergence may be formed from them."""


@dataclass(frozen=True, slots=True)
class PolicyPair:
    """Both kernels' logits and log-probabilities at the same N positions, all [N, V], float64."""

    train_logits: Tensor
    infer_logits: Tensor
    train_log: Tensor
    infer_log: Tensor

    @property
    def log_difference(self) -> Tensor:
        """Return d = ln q - ln p, 0 where both are impossible, [N, V]."""
        both = torch.isneginf(self.train_log) & torch.isneginf(self.infer_log)
        return torch.where(both, 0.0, self.infer_log - self.train_log)


def policy_pair(train_logits: Tensor, infer_logits: Tensor, temperature: float) -> PolicyPair:
    """Form pi(y) = softmax(z / T) of both kernels in float64.

    Both inputs are [N, V], of any float type. Rows with NaN stay NaN; a row of finite logits whose
    probabilities do not sum to one within 1e-9 raises `Unnormalised`. Other shapes and T <= 0
    raise ValueError.
    """
    if train_logits.ndim != 2 or train_logits.shape != infer_logits.shape:
        raise ValueError(
            f"logits must be two [N, V] arrays of one shape, not {tuple(train_logits.shape)} and "
            f"{tuple(infer_logits.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    train = train_logits.to(torch.float64)
    infer = infer_logits.to(torch.float64)
    pair = PolicyPair(
        train,
        infer,
        torch.log_softmax(train / temperature, dim=-1),
        torch.log_softmax(infer / temperature, dim=-1),
    )
    check_normalised(pair.train_log)
    check_normalised(pair.infer_log)
    return pair


def check_normalised(log_probabilities: Tensor) -> None:
    """Raise `Unnormalised` where a row of log-probabilities [N, V] does not sum to one.

    Rows with NaN are left to the finiteness test, which names them.
    """
    total = log_probabilities.exp().sum(dim=-1)
    off = (total - 1).abs() > NORMALISATION_TOLERANCE
    if bool(off.any()):
        row = int(off.nonzero()[0, 0])
        raise Unnormalised(f"the probabilities of row {row} sum to {float(total[row])!r}, not 1")


def bregman(d: Tensor) -> Tensor:
    """Return e^d - 1 - d >= 0 elementwise, by its series near zero."""
    series = d * d * (0.5 + d * (1 / 6 + d / 24))
    return torch.where(d.abs() < _SERIES_LIMIT, series, torch.expm1(d) - d)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) = sum p (e^d - 1 - d), d = ln q - ln p, over the last dimension.

    Both inputs must be normalised (`check_normalised`); +inf if q is 0 at a token where p is not.
    """
    impossible = torch.isneginf(log_p)
    d = torch.where(impossible & torch.isneginf(log_q), 0.0, log_q - log_p)
    p, q = log_p.exp(), log_q.exp()
    near = p * bregman(d.clamp(max=_LARGE))
    far = (q - p) - p * d
    term = torch.where(d > _LARGE, far, near)
    return torch.where(p == 0, q, term).sum(dim=-1)


def total_variation(pair: PolicyPair) -> Tensor:
    """Return TV = 1/2 sum |p - q|."""
    d = pair.log_difference
    larger = torch.where(d > 0, pair.infer_log.exp(), pair.train_log.exp())
    return 0.5 * (larger * -torch.expm1(-d.abs())).sum(dim=-1)


# --- lists of the likeliest tokens --------------------------------------------------------------


def lumped_pair(train_log: Tensor, infer_log: Tensor) -> PolicyPair:
    """Return the laws of k tokens and the rest, [N, k + 1], from log-probabilities [N, k].

    Lumping tokens together never raises a divergence (data processing): each divergence of these
    laws is a **lower bound** of that of the policies.

    Both inputs hold ln of the probabilities of the *same* k tokens at N positions, raw (neither
    truncated nor renormalised). The rest is 1 minus their sum. Raises NotMeasurable for no
    positions, shapes that differ, NaN, values above 0 and sums above 1.
    """
    if train_log.ndim != 2 or train_log.shape != infer_log.shape or train_log.numel() == 0:
        raise NotMeasurable(
            f"log-probabilities must be two [N, k] arrays of one shape, not "
            f"{tuple(train_log.shape)} and {tuple(infer_log.shape)}"
        )
    sides = [_with_rest(side.to(torch.float64)) for side in (train_log, infer_log)]
    return PolicyPair(sides[0], sides[1], sides[0], sides[1])


def _with_rest(log_probabilities: Tensor) -> Tensor:
    if bool(log_probabilities.isnan().any()) or bool((log_probabilities > _SLACK).any()):
        raise NotMeasurable("log-probabilities must be numbers of at most 0")
    taken = log_probabilities.exp().sum(dim=-1)
    if bool((taken > 1 + _SLACK).any()):
        raise NotMeasurable("the probabilities of a position sum to more than 1")
    left = 1 - taken
    noise = 2.0**-52 * (log_probabilities.shape[-1] + 1)  # of a list of all tokens
    rest = torch.log(torch.where(left > noise, left, torch.zeros_like(left)))
    whole = torch.cat([log_probabilities, rest[:, None]], dim=-1)
    return torch.where((taken > 1)[:, None], whole - taken.clamp(min=1.0).log()[:, None], whole)


def topk_tail_kl(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return KL(train || infer) of the lumped laws, [N] nats: at most the KL of the policies."""
    pair = lumped_pair(train_log, infer_log)
    return kl(pair.train_log, pair.infer_log)


def topk_tail_tv(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return the total variation of the lumped laws, [N], a lower bound."""
    return total_variation(lumped_pair(train_log, infer_log))


# --- calibration ----------------------------------------------------------------------------------


def confidences(pair: PolicyPair, labels: Tensor) -> dict[str, Array]:
    """Return the confidences of both kernels at N positions whose next tokens are `labels` [N].

    Four arrays [N] float64 under the names `CONFIDENCES`.
    """
    if labels.shape != pair.train_log.shape[:1]:
        raise ValueError(f"{tuple(labels.shape)} labels for {pair.train_log.shape[0]} positions")

    def side(log_probabilities: Tensor) -> tuple[Array, Array]:
        best, token = log_probabilities.max(dim=-1)
        right = (token == labels.to(token.device)).to(torch.float64)
        return best.exp().cpu().numpy(), right.cpu().numpy()

    return dict(zip(CONFIDENCES, (*side(pair.train_log), *side(pair.infer_log)), strict=True))


def expected_calibration_error(confidence: Array, right: Array, bins: int = BINS) -> float:
    """Return ECE = sum over equal-mass bins of |mean confidence - accuracy| * share.

    Positions are ordered by (confidence, right), so the value does not depend on their order.
    Raises ValueError with fewer positions than bins; NaN in, NaN out.
    """
    if confidence.size < bins:
        raise ValueError(f"{confidence.size} positions cannot fill {bins} bins")
    order = np.lexsort((right, confidence))
    gaps = [
        abs(float(np.sum(confidence[part]) - np.sum(right[part])))
        for part in np.array_split(order, bins)
    ]
    return sum(gaps) / confidence.size


def ece_gap(train: Array, train_right: Array, infer: Array, infer_right: Array) -> float:
    """Return |ECE_train - ECE_infer| over the same positions: `CONFIDENCES`."""
    if train.size < BINS:
        raise NotMeasurable(f"{train.size} positions cannot fill {BINS} bins")
    return abs(
        expected_calibration_error(train, train_right)
        - expected_calibration_error(infer, infer_right)
    )


# --- beyond the first token --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scores:
    """Proper scores at N labelled positions, as differences infer - train, and ranked confidences.

    `brier` and `nll` are [N]; `train_ranked` and `infer_ranked` are [N, 5] probabilities of the
    likeliest tokens, `train_hits` and `infer_hits` [N, 5] say which of them is the label.
    """

    brier: Array
    nll: Array
    train_ranked: Array
    train_hits: Array
    infer_ranked: Array
    infer_hits: Array


def scores(pair: PolicyPair, labels: Tensor) -> Scores:
    """Read the scores of both kernels at N positions whose next tokens are `labels` [N]."""
    if labels.shape != pair.train_log.shape[:1] or labels.numel() == 0:
        raise ValueError(f"{tuple(labels.shape)} labels for {pair.train_log.shape[0]} positions")
    at = labels.to(pair.train_log.device)[:, None]
    ranks = min(RANKS, pair.train_log.shape[-1])

    def side(log_probabilities: Tensor) -> tuple[Array, Array, Array, Array]:
        p = log_probabilities.exp()
        own = log_probabilities.gather(-1, at)[:, 0]
        brier = (p * p).sum(dim=-1) - 2 * own.exp() + 1
        tokens = torch.sort(log_probabilities, dim=-1, descending=True, stable=True).indices
        best = tokens[:, :ranks]
        hits = (best == at).to(torch.float64)
        return _array(brier), _array(-own), _array(p.gather(-1, best)), _array(hits)

    brier, nll, ranked, hits = side(pair.train_log)
    other_brier, other_nll, other_ranked, other_hits = side(pair.infer_log)
    return Scores(other_brier - brier, other_nll - nll, ranked, hits, other_ranked, other_hits)


def adaptive_calibration_error(ranked: Array, hits: Array, bins: int = BINS) -> float:
    """Return ACE: the mean over ranks and equal-mass bins of |mean confidence - accuracy|.

    The classes of Nixon et al. (2019) are the ranks of the likeliest tokens: the classes of a
    vocabulary are too rare to be binned. `ranked` and `hits` are [N, K]. Raises ValueError with
    fewer positions than bins; NaN in, NaN out.
    """
    if ranked.ndim != 2 or ranked.shape != hits.shape or ranked.shape[0] < bins:
        raise ValueError(f"{ranked.shape[0]} positions cannot fill {bins} bins")
    gaps = []
    for rank in range(ranked.shape[1]):
        confidence, hit = ranked[:, rank], hits[:, rank]
        order = np.lexsort((hit, confidence))
        gaps += [
            abs(float(np.mean(confidence[part]) - np.mean(hit[part])))
            for part in np.array_split(order, bins)
        ]
    return sum(gaps) / len(gaps)


def ace_gap(*ranked: Array) -> float:
    """Return |ACE_train - ACE_infer| of flattened [N, 5] arrays: `RANKED`."""
    if any(part.size % RANKS for part in ranked):
        raise NotMeasurable(f"the vocabulary has fewer than {RANKS} tokens")
    train, train_hits, infer, infer_hits = (part.reshape(-1, RANKS) for part in ranked)
    if train.shape[0] < BINS:
        raise NotMeasurable(f"{train.shape[0]} positions cannot fill {BINS} bins")
    return abs(
        adaptive_calibration_error(train, train_hits)
        - adaptive_calibration_error(infer, infer_hits)
    )


def magnitude_of_mean(values: Array) -> float:
    """Return the absolute value of the mean of paired scores."""
    if values.size == 0 or not bool(np.isfinite(values).all()):
        raise NotMeasurable("the scores are missing or not finite")
    return abs(math.fsum(values) / values.size)


def _array(values: Tensor) -> Array:
    found: Array = values.cpu().numpy()
    return found
