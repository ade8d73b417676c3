"""Calibration: the confidence of the likeliest tokens against how often they are right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kcdsl.metrics.arrays import CONFIDENCES
from kcdsl_backends.empirical.metrics.columns import Array, Unmeasured
from kcdsl_backends.empirical.metrics.policies import PolicyPair

BINS = 15


def confidences(pair: PolicyPair, labels: Tensor) -> dict[str, Array]:
    """Return the confidences of both kernels at N positions whose next tokens are `labels` [N].

    Four arrays [N] float64 under the names `arrays.CONFIDENCES`.
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
    """Return |ECE_train - ECE_infer| over the same positions: `arrays.CONFIDENCES`."""
    if train.size < BINS:
        raise Unmeasured(f"{train.size} positions cannot fill {BINS} bins")
    return abs(
        expected_calibration_error(train, train_right)
        - expected_calibration_error(infer, infer_right)
    )


# --- beyond the first token ----------------------------------------------------------------------

RANKS = 5
"""The likeliest tokens that `ace_gap` compares."""


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
    """Return |ACE_train - ACE_infer| of flattened [N, 5] arrays: `arrays.RANKED`."""
    if any(part.size % RANKS for part in ranked):
        raise Unmeasured(f"the vocabulary has fewer than {RANKS} tokens")
    train, train_hits, infer, infer_hits = (part.reshape(-1, RANKS) for part in ranked)
    if train.shape[0] < BINS:
        raise Unmeasured(f"{train.shape[0]} positions cannot fill {BINS} bins")
    return abs(
        adaptive_calibration_error(train, train_hits)
        - adaptive_calibration_error(infer, infer_hits)
    )


def magnitude_of_mean(values: Array) -> float:
    """Return the absolute value of the mean of paired scores."""
    if values.size == 0 or not bool(np.isfinite(values).all()):
        raise Unmeasured("the scores are missing or not finite")
    return abs(math.fsum(values) / values.size)


def _array(values: Tensor) -> Array:
    found: Array = values.cpu().numpy()
    return found
