"""Agreement of the most probable tokens (tier A: exact). Ties go to the smaller token id."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics.policies import PolicyPair


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest logits of each row, [N, k]; ties by the smaller id.

    Raises ValueError if the vocabulary has fewer than k tokens.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(
            f"top-{k} needs at least {k} tokens, the vocabulary has {logits.shape[-1]}"
        )
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]


def top_overlap(pair: PolicyPair, k: int) -> Tensor:
    """Return |Top_k(p) and Top_k(q)| / k, [N]; NaN where a logit of the row is NaN."""
    train, infer = top_tokens(pair.train_logits, k), top_tokens(pair.infer_logits, k)
    shared = (train[:, :, None] == infer[:, None, :]).any(dim=-1).sum(dim=-1)
    undefined = (pair.train_logits.isnan() | pair.infer_logits.isnan()).any(dim=-1)
    return torch.where(undefined, torch.nan, shared.to(torch.float64) / k)


def top1_agreement(pair: PolicyPair) -> Tensor:
    """Return 1 where both kernels put the same token first, else 0."""
    return top_overlap(pair, 1)
