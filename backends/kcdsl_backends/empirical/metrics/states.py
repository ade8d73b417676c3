"""Norms of drifts: of hidden states, of sentence embeddings, and relative to a gold run."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.architectures.bert import sentence_embedding


def row_l2(rows: Tensor) -> Tensor:
    """Return the Euclidean length of each row: [..., N] to [...]."""
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return length


def row_linf(rows: Tensor) -> Tensor:
    """Return the largest magnitude in each row: [..., N] to [...]."""
    return rows.abs().amax(dim=-1)


def row_span(rows: Tensor) -> Tensor:
    """Return the largest minus the smallest element of each row: [..., N] to [...]."""
    return rows.amax(dim=-1) - rows.amin(dim=-1)


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


def noise_ratio(train: Tensor, infer: Tensor, gold: Tensor) -> Tensor:
    """Return ||z_infer - z_gold||_2 / ||z_train - z_gold||_2 of each position, [N].

    All inputs are logits [N, V] of the same tokens; `gold` comes from a run in float32 or wider.
    About 1 means that both kernels have errors of the same size; 0/0 is 1, and the ratio to an
    exact training kernel is infinite. Raises ValueError for shapes that differ and for no
    positions.
    """
    if train.ndim != 2 or not train.shape == infer.shape == gold.shape or train.shape[0] == 0:
        raise ValueError(
            f"logits must be three [N, V] arrays of one shape, not {tuple(train.shape)}, "
            f"{tuple(infer.shape)} and {tuple(gold.shape)}"
        )
    exact = gold.to(torch.float64)
    theirs, own = row_l2(infer.to(torch.float64) - exact), row_l2(train.to(torch.float64) - exact)
    return torch.where((theirs == 0) & (own == 0), 1.0, theirs / own)
