"""Divergences of the two policies at each position (tier A: exact).

Every form is a sum of non-negative terms, so nothing cancels: the naive `sum p (ln p - ln q)` in
float32 returns values 200 times too large, or negative ones, at small drift.
All functions take a `PolicyPair` and return [N] in nats (TV, Hellinger and JS without a unit).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics.policies import PolicyPair

_SERIES_LIMIT = 1e-3
_LARGE = 50.0


def bregman(d: Tensor) -> Tensor:
    """Return e^d - 1 - d >= 0 elementwise, by its series near zero."""
    series = d * d * (0.5 + d * (1 / 6 + d / 24))
    return torch.where(d.abs() < _SERIES_LIMIT, series, torch.expm1(d) - d)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q) = sum p (e^d - 1 - d), d = ln q - ln p, over the last dimension.

    Both inputs must be normalised (`check_normalised`); +inf where q excludes what p allows.
    """
    impossible = torch.isneginf(log_p)
    d = torch.where(impossible & torch.isneginf(log_q), 0.0, log_q - log_p)
    p, q = log_p.exp(), log_q.exp()
    near = p * bregman(d.clamp(max=_LARGE))
    far = (q - p) - p * d
    term = torch.where(d > _LARGE, far, near)
    return torch.where(p == 0, q, term).sum(dim=-1)


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


def total_variation(pair: PolicyPair) -> Tensor:
    """Return TV = 1/2 sum |p - q|."""
    d = pair.log_difference
    larger = torch.where(d > 0, pair.infer_log.exp(), pair.train_log.exp())
    return 0.5 * (larger * -torch.expm1(-d.abs())).sum(dim=-1)


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
    """Return chi2(train || infer) = E_infer w^2 - 1; importance sampling has ESS/n = 1/(1 + it)."""
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
