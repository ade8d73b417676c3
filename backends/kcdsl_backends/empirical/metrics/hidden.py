"""Drift of hidden states and sentence embeddings (encoders have no logits)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.bert import sentence_embedding
from kcdsl_backends.empirical.metrics.norms import row_l2, row_linf


def hidden_l2(train: Tensor, infer: Tensor) -> Tensor:
    """Return ||h_infer - h_train||_2 of each token; inputs [T, D], result [T]."""
    return row_l2(_difference(train, infer))


def hidden_linf(train: Tensor, infer: Tensor) -> Tensor:
    """Return max |h_infer - h_train| of each token; inputs [T, D], result [T]."""
    return row_linf(_difference(train, infer))


def embedding_cosine(train: Tensor, infer: Tensor) -> Tensor:
    """Return the cosine of the two sentence embeddings as 1 - ||a - b||^2 / 2, shape [1].

    The form by the difference keeps the digits of a cosine near one.
    """
    return 1 - embedding_l2(train, infer) ** 2 / 2


def embedding_l2(train: Tensor, infer: Tensor) -> Tensor:
    """Return the distance of the two unit sentence embeddings, shape [1]."""
    return row_l2(sentence_embedding(infer) - sentence_embedding(train)).reshape(1)


def _difference(train: Tensor, infer: Tensor) -> Tensor:
    if train.ndim != 2 or train.shape != infer.shape:
        raise ValueError(
            f"hidden states must be two [T, D] arrays of one shape, not {tuple(train.shape)} and "
            f"{tuple(infer.shape)}"
        )
    return infer.to(torch.float64) - train.to(torch.float64)
