"""Drift of the logits at each position (tier A: exact). Inputs [N, V] float64, results [N]."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics.policies import PolicyPair


def difference(pair: PolicyPair) -> Tensor:
    """Return z_infer - z_train, [N, V]; 0 where both are the same infinity."""
    same = pair.infer_logits == pair.train_logits
    return torch.where(same, 0.0, pair.infer_logits - pair.train_logits)


def logit_l2(pair: PolicyPair) -> Tensor:
    """Return ||dz||_2. Not shift invariant: adding c to every logit moves it by |c| sqrt(V)."""
    return torch.linalg.vector_norm(difference(pair), dim=-1)


def logit_l2_centered(pair: PolicyPair) -> Tensor:
    """Return ||dz - mean(dz)||_2, unchanged when a constant is added to every logit."""
    d = difference(pair)
    return torch.linalg.vector_norm(d - d.mean(dim=-1, keepdim=True), dim=-1)


def logit_linf(pair: PolicyPair) -> Tensor:
    """Return max |dz|."""
    return difference(pair).abs().amax(dim=-1)


def logit_span(pair: PolicyPair) -> Tensor:
    """Return max dz - min dz, the quantity that every bound of the chain reads."""
    d = difference(pair)
    return d.amax(dim=-1) - d.amin(dim=-1)


def margin(pair: PolicyPair) -> Tensor:
    """Return the training kernel's best logit minus its second best."""
    best = pair.train_logits.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]
