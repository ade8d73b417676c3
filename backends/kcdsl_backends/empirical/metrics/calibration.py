"""Calibration: does the confidence of the first token match how often it is right?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl_backends.empirical.metrics.policies import PolicyPair

BINS = 15

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Confidences:
    """Per position: the probability of the best token and whether it is the next token of the text.

    All arrays are [N] float64; `right` holds 0 and 1.
    """

    train: Array
    train_right: Array
    infer: Array
    infer_right: Array


def confidences(pair: PolicyPair, labels: Tensor) -> Confidences:
    """Read the confidences of both kernels at N positions whose next tokens are `labels` [N]."""
    if labels.shape != pair.train_log.shape[:1]:
        raise ValueError(f"{tuple(labels.shape)} labels for {pair.train_log.shape[0]} positions")

    def side(log_probabilities: Tensor) -> tuple[Array, Array]:
        best, token = log_probabilities.max(dim=-1)
        right = (token == labels.to(token.device)).to(torch.float64)
        return best.exp().cpu().numpy(), right.cpu().numpy()

    train, train_right = side(pair.train_log)
    infer, infer_right = side(pair.infer_log)
    return Confidences(train, train_right, infer, infer_right)


def join(parts: list[Confidences]) -> Confidences:
    """Join the positions of several requests."""
    return Confidences(
        np.concatenate([p.train for p in parts]),
        np.concatenate([p.train_right for p in parts]),
        np.concatenate([p.infer for p in parts]),
        np.concatenate([p.infer_right for p in parts]),
    )


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


def ece_gap(values: Confidences, bins: int = BINS) -> float:
    """Return |ECE_train - ECE_infer| over the same positions."""
    train = expected_calibration_error(values.train, values.train_right, bins)
    infer = expected_calibration_error(values.infer, values.infer_right, bins)
    return abs(train - infer)
