"""Tokens drawn from the inference policy, and the estimators that need more than one operation.

delta = ln p(y) - ln q(y) of sampled tokens y, w = e^delta; `kcdsl.metrics.sampled` defines what
each of them estimates.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics.policies import PolicyPair, bregman, kl

_NEAR, _LARGE = 1e-3, 300.0
_FAR = 700.0
"""w ln w - w of |delta| beyond this is no part of 1 in float64, and e^-delta soon overflows."""


def request_seed(seed: int, request: str) -> int:
    """Return the 63-bit seed of one request, so that no result depends on the order of requests."""
    digest = hashlib.sha256(f"{seed}|{request}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def sample_tokens(pair: PolicyPair, seed: int) -> Tensor:
    """Draw one token per position from the inference policy q, [N] int64.

    The same seed gives the same tokens on every device: uniforms come from numpy's PCG64.
    """
    rows = pair.infer_log.shape[0]
    uniform = torch.from_numpy(np.random.default_rng(seed).random(rows)).to(pair.infer_log.device)
    cumulative = pair.infer_log.exp().cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)
    return drawn[:, 0].clamp(max=cumulative.shape[-1] - 1)


def w_log_w_minus(delta: Tensor) -> Tensor:
    """Return w ln w - w + 1 = e^delta (e^-delta - 1 + delta), 1 where w is next to nothing."""
    return torch.where(delta < -_FAR, 1.0, delta.exp() * bregman(-delta))


def jsd_is(delta: Tensor) -> Tensor:
    """Return (w ln(2w/(1 + w)) + ln(2/(1 + w))) / 2 >= 0, the contribution of one token to JS.

    With m = ln((1 + w)/2) = delta/2 + ln cosh(delta/2) the value is (w (delta - m) - m)/2; near
    delta = 0 it is delta^2/8 (1 + delta/2 + ...), which nothing cancels in.
    """
    half = delta.abs() / 2
    near = half.clamp(max=_LARGE)
    mean = delta / 2 + torch.log1p(torch.sinh(near) ** 2) / 2 + (half - near)
    direct = (delta.exp() * (delta - mean) - mean) / 2
    direct = torch.where(torch.isneginf(delta), math.log(2) / 2, direct)
    series = delta**2 / 8 * (1 + delta / 2 + delta**2 / 8)
    return torch.where(delta.abs() < _NEAR, series, direct).clamp(min=0.0)


def prob_absdiff(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return |p(y) - q(y)|, also the total variation of "y or not y".

    A difference of *probabilities of the sampled token*, not of policies: it is blind to tokens of
    low probability, about a fifth of TV under Gaussian noise.
    """
    larger = torch.maximum(train_log, infer_log)
    return larger.exp() * -torch.expm1(-(train_log - infer_log).abs())


def binary_kl(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return the larger of both KL divergences of "y or not y", at most the larger of the full."""
    train = torch.stack([train_log, _log_rest(train_log)], dim=-1)
    infer = torch.stack([infer_log, _log_rest(infer_log)], dim=-1)
    return torch.maximum(kl(train, infer), kl(infer, train))


def _log_rest(log_p: Tensor) -> Tensor:
    """Return ln(1 - p)."""
    return torch.log(-torch.expm1(log_p))
