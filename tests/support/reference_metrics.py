"""The metrics of full logits by their definitions in torch, without the fused pass.

Each is a sum of non-negative terms, so nothing cancels. Each function takes a `PolicyPair` of [N,
V] and returns [N] float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics import ranks
from kcdsl_backends.empirical.metrics.measures import LIST_METRICS
from kcdsl_backends.empirical.metrics.policies import PolicyPair, kl, total_variation
from kcdsl_backends.empirical.metrics.states import row_l2, row_linf, row_span

_LARGE = 50.0


def kl_train_infer(pair: PolicyPair) -> Tensor:
    """Return KL(train || infer) = KL(p || q), the drift d_KL of the contract."""
    return kl(pair.train_log, pair.infer_log)


def kl_infer_train(pair: PolicyPair) -> Tensor:
    """Return KL(infer || train) = KL(q || p)."""
    return kl(pair.infer_log, pair.train_log)


def jeffreys(pair: PolicyPair) -> Tensor:
    """Return KL(p || q) + KL(q || p)."""
    return kl_train_infer(pair) + kl_infer_train(pair)


def jensen_shannon(pair: PolicyPair) -> Tensor:
    """Return JS = 1/2 KL(p || m) + 1/2 KL(q || m), m = (p + q)/2; at most ln 2."""
    d = pair.log_difference
    mixture_p = pair.train_log + _log_mean(d)
    mixture_q = pair.infer_log + _log_mean(-d)
    mixture = torch.where(d > 0, mixture_q, mixture_p)
    return 0.5 * kl(pair.train_log, mixture) + 0.5 * kl(pair.infer_log, mixture)


def _log_mean(d: Tensor) -> Tensor:
    """Return ln((1 + e^d)/2) for d <= 0 without cancellation (clamped above, where not read)."""
    return torch.log1p(torch.expm1(d.clamp(max=0.0)) / 2)


def hellinger_squared(pair: PolicyPair) -> Tensor:
    """Return 1 - sum sqrt(p q) = 1/2 sum (sqrt p - sqrt q)^2."""
    d = pair.log_difference
    larger = torch.where(d > 0, pair.infer_log.exp(), pair.train_log.exp())
    return 0.5 * (larger * torch.expm1(-d.abs() / 2) ** 2).sum(dim=-1)


def log_ratio_linf(pair: PolicyPair) -> Tensor:
    """Return max |ln p - ln q| over the vocabulary."""
    return pair.log_difference.abs().amax(dim=-1)


def chi2(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return chi2(p || q) = sum (p - q)^2 / q, +inf where q excludes what p allows."""
    impossible = torch.isneginf(log_p)
    d = torch.where(impossible & torch.isneginf(log_q), 0.0, log_q - log_p)
    p, q = log_p.exp(), log_q.exp()
    ratio = torch.where(impossible, 0.0, (log_p - d).exp())
    near = ratio * torch.expm1(d.clamp(max=_LARGE)) ** 2
    far = (q - p) + (ratio - p)
    return torch.where(p == 0, q, torch.where(d > _LARGE, far, near)).sum(dim=-1)


def chi2_train_infer(pair: PolicyPair) -> Tensor:
    """Return chi2(train

    infer) = E_infer w^2 - 1; importance sampling has ESS/n = 1/(1 + chi2).
    """
    return chi2(pair.train_log, pair.infer_log)


def chi2_infer_train(pair: PolicyPair) -> Tensor:
    """Return chi2(infer || train)."""
    return chi2(pair.infer_log, pair.train_log)


def renyi_infinity(pair: PolicyPair) -> Tensor:
    """Return max (ln p - ln q), the Renyi divergence of order infinity of train from infer."""
    return (-pair.log_difference).amax(dim=-1)


def entropy_gap(pair: PolicyPair) -> Tensor:
    """Return H(p) - H(q), negative where the inference policy is the more uncertain one.

    The form KL(q || p) + sum p (e^d - 1) ln p keeps the digits of a small difference.
    """
    d = pair.log_difference
    p = pair.train_log.exp()
    weight = torch.where(d > _LARGE, pair.infer_log.exp() - p, p * torch.expm1(d.clamp(max=_LARGE)))
    tilt = torch.where(torch.isneginf(pair.train_log), 0.0, weight * pair.train_log)
    return kl_infer_train(pair) + tilt.sum(dim=-1)


def difference(pair: PolicyPair) -> Tensor:
    """Return z_infer - z_train, [N, V]; 0 where both are the same infinity."""
    same = pair.infer_logits == pair.train_logits
    return torch.where(same, 0.0, pair.infer_logits - pair.train_logits)


def logit_l2(pair: PolicyPair) -> Tensor:
    """Return

    dz

    _2, which is not shift invariant: adding c to all logits moves it by |c| sqrt(V).
    """
    return row_l2(difference(pair))


def logit_l2_centered(pair: PolicyPair) -> Tensor:
    """Return

    dz - mean(dz)

    _2, which is invariant to a constant added to every logit.
    """
    d = difference(pair)
    return row_l2(d - d.mean(dim=-1, keepdim=True))


def logit_linf(pair: PolicyPair) -> Tensor:
    """Return max |dz|."""
    return row_linf(difference(pair))


def logit_span(pair: PolicyPair) -> Tensor:
    """Return max dz - min dz, the quantity that every bound of the chain depends on."""
    return row_span(difference(pair))


def margin(pair: PolicyPair) -> Tensor:
    """Return the training kernel's best logit minus its second best."""
    best = pair.train_logits.topk(2, dim=-1).values
    return best[:, 0] - best[:, 1]


def logit_rel_l2(pair: PolicyPair) -> Tensor:
    """Return

    dz

    _2 /

    z_train

    _2, or 0 if dz = 0.
    """
    length = row_l2(pair.train_logits)
    norm = logit_l2(pair)
    return torch.where(norm == 0, norm, norm / length)


def logit_cosine(pair: PolicyPair) -> Tensor:
    """Return the cosine of the two logit vectors, or 1 if they are equal.

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


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest logits of each row, [N, k]; ties by the smaller id.

    Raises ValueError if the vocabulary has fewer than k tokens.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(
            f"top-{k} needs at least {k} tokens, the vocabulary has {logits.shape[-1]}"
        )
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :k]


def top1_agreement(pair: PolicyPair) -> Tensor:
    """Return 1 where both kernels put the same token first, else 0."""
    return of_pair(pair, partial(ranks.overlap, k=1), 1)


def of_pair(pair: PolicyPair, metric: Callable[..., np.ndarray], k: int) -> Tensor:
    """Return a metric of lists of tokens for both policies, [N]; NaN where a logit is NaN."""
    train, infer = (
        top_tokens(side, k).cpu().numpy() for side in (pair.train_logits, pair.infer_logits)
    )
    undefined = (pair.train_logits.isnan() | pair.infer_logits.isnan()).any(dim=-1).cpu()
    return torch.where(undefined, torch.nan, torch.from_numpy(metric(train, infer)))


def _flip(pair: PolicyPair) -> Tensor:
    return 1.0 - top1_agreement(pair)


PAIR_FUNCTIONS: Mapping[str, Callable[[PolicyPair], Tensor]] = {
    "logit_l2": logit_l2,
    "logit_l2_centered": logit_l2_centered,
    "logit_linf": logit_linf,
    "logit_span": logit_span,
    "logit_rel_l2": logit_rel_l2,
    "logit_cosine": logit_cosine,
    "margin": margin,
    "stable_fraction": stable_fraction,
    "kl": kl_train_infer,
    "kl_infer_train": kl_infer_train,
    "jeffreys": jeffreys,
    "js": jensen_shannon,
    "tv": total_variation,
    "hellinger2": hellinger_squared,
    "chi2_train_infer": chi2_train_infer,
    "chi2_infer_train": chi2_infer_train,
    "renyi_inf": renyi_infinity,
    "log_ratio_linf": log_ratio_linf,
    "entropy_gap": entropy_gap,
    "top1_overlap": top1_agreement,
    "top1_flip": _flip,
    "flip_hazard": lambda pair: 1000.0 * _flip(pair),
    **{
        name: partial(of_pair, metric=function, k=k) for name, (function, k) in LIST_METRICS.items()
    },
}
"""The reference of the fused pass."""
