"""Drift of the logits at each position (tier A: exact). Inputs [N, V] float64, results [N]."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics.norms import row_l2, row_linf, row_span
from kcdsl_backends.empirical.metrics.policies import PolicyPair


def difference(pair: PolicyPair) -> Tensor:
    """Return z_infer - z_train, [N, V]; 0 where both are the same infinity."""
    same = pair.infer_logits == pair.train_logits
    return torch.where(same, 0.0, pair.infer_logits - pair.train_logits)


def logit_l2(pair: PolicyPair) -> Tensor:
    """Return ||dz||_2. Not shift invariant: adding c to every logit moves it by |c| sqrt(V)."""
    return row_l2(difference(pair))


def logit_l2_centered(pair: PolicyPair) -> Tensor:
    """Return ||dz - mean(dz)||_2, unchanged when a constant is added to every logit."""
    d = difference(pair)
    return row_l2(d - d.mean(dim=-1, keepdim=True))


def logit_linf(pair: PolicyPair) -> Tensor:
    """Return max |dz|."""
    return row_linf(difference(pair))


def logit_span(pair: PolicyPair) -> Tensor:
    """Return max dz - min dz, the quantity that every bound of the chain reads."""
    return row_span(difference(pair))


def margin(pair: PolicyPair) -> Tensor:
    """Return the training kernel's best logit minus its second best."""
    best = pair.train_logits.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]
