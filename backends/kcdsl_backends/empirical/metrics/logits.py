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


def logit_rel_l2(pair: PolicyPair) -> Tensor:
    """Return ||dz||_2 / ||z_train||_2, 0 where nothing differs."""
    length = row_l2(pair.train_logits)
    norm = logit_l2(pair)
    return torch.where(norm == 0, norm, norm / length)


def logit_cosine(pair: PolicyPair) -> Tensor:
    """Return the cosine of both vectors of logits, 1 where nothing differs.

    The form by the length of the difference keeps the digits of a cosine near one.
    """
    norm = logit_l2(pair)
    train, infer = row_l2(pair.train_logits), row_l2(pair.infer_logits)
    away = (norm - (train - infer)) * (norm + (train - infer)) / (2 * train * infer)
    return torch.where(norm == 0, 1.0, (1 - away).clamp(-1.0, 1.0))


def stable_fraction(pair: PolicyPair) -> Tensor:
    """Return 1 where the margin exceeds 2 max |dz|, so that no such drift changes the best token.

    Its mean is the share of stable positions.
    """
    best = margin(pair)
    stable = (best > 2 * logit_linf(pair)).to(torch.float64)
    return torch.where(best.isnan(), torch.nan, stable)


def noise_ratio(train: Tensor, infer: Tensor, gold: Tensor) -> Tensor:
    """Return ||z_infer - z_gold||_2 / ||z_train - z_gold||_2 of each position, [N].

    All inputs are logits [N, V] of the same tokens; `gold` comes from a run in float32 or wider.
    About 1 says that the inference kernel errs as the training kernel does; 0/0 is 1, and a kernel
    beside an exact training kernel is infinitely worse. Raises ValueError for shapes that differ
    and for no positions.
    """
    if train.ndim != 2 or not train.shape == infer.shape == gold.shape or train.shape[0] == 0:
        raise ValueError(
            f"logits must be three [N, V] arrays of one shape, not {tuple(train.shape)}, "
            f"{tuple(infer.shape)} and {tuple(gold.shape)}"
        )
    exact = gold.to(torch.float64)
    theirs, own = row_l2(infer.to(torch.float64) - exact), row_l2(train.to(torch.float64) - exact)
    return torch.where((theirs == 0) & (own == 0), 1.0, theirs / own)
