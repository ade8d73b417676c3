"""Metrics of the importance ratio on tokens y sampled from the inference kernel (tier C).

w = p(y)/q(y), training over inference; delta = ln w is formed from log-probabilities, never as
ln(p/q).
What each per-token value estimates under y ~ q:

| name | value | estimates |
|---|---|---|
| log_ratio | delta | -KL(infer || train) |
| k1 | -delta | KL(infer || train), unbiased |
| k2 | delta^2 / 2 | KL(infer || train), biased |
| k3 | e^delta - 1 - delta | KL(infer || train), unbiased, >= 0 |
| w_log_w | w delta | KL(train || infer), unbiased |
| w_log_w_minus | w delta - w + 1 | KL(train || infer), unbiased, >= 0 |
| tv_is | |w - 1| / 2 | TV, unbiased |
| chi2_token | w^2 - 1 | chi2(train || infer), unbiased |
| chi2_is | (w - 1)^2 | chi2(train || infer), unbiased, >= 0 |
| jsd_is | (w ln(2w/(1 + w)) + ln(2/(1 + w)))/2 | JS, unbiased, >= 0 |
| is_variance_inflation | w^2 | 1 + chi2(train || infer) = n/ESS |
| mult_prob_error | e^|delta| | about 1 + 2 TV where the drift is small |
| binary_tv, binary_kl | of "y or not y" | at most TV and the larger KL at each position |

"Unbiased" rests on E_q w = 1, hence on q covering p and on no filtered sampling (`support_check`).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics.distribution import bregman, kl
from kcdsl_backends.empirical.metrics.policies import PolicyPair

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


def log_ratio(pair: PolicyPair, tokens: Tensor) -> Tensor:
    """Return delta = ln p(y) - ln q(y) of the given tokens, [N]."""
    at = tokens[:, None]
    return (pair.train_log.gather(-1, at) - pair.infer_log.gather(-1, at))[:, 0]


def k1(delta: Tensor) -> Tensor:
    """Return -delta."""
    return -delta


def k2(delta: Tensor) -> Tensor:
    """Return delta^2 / 2."""
    return delta * delta / 2


def k3(delta: Tensor) -> Tensor:
    """Return e^delta - 1 - delta."""
    return bregman(delta)


def w_log_w(delta: Tensor) -> Tensor:
    """Return w ln w, 0 where w = 0."""
    return torch.where(torch.isneginf(delta), 0.0, delta.exp() * delta)


def w_log_w_minus(delta: Tensor) -> Tensor:
    """Return w ln w - w + 1 = e^delta (e^-delta - 1 + delta), 1 where w is next to nothing."""
    return torch.where(delta < -_FAR, 1.0, delta.exp() * bregman(-delta))


def tv_is(delta: Tensor) -> Tensor:
    """Return |w - 1| / 2."""
    return torch.expm1(delta).abs() / 2


def importance_ratio(delta: Tensor) -> Tensor:
    """Return w."""
    return delta.exp()


def chi2_token(delta: Tensor) -> Tensor:
    """Return w^2 - 1."""
    return torch.expm1(2 * delta)


def chi2_is(delta: Tensor) -> Tensor:
    """Return (w - 1)^2, the same mean as w^2 - 1 and never negative."""
    return torch.expm1(delta) ** 2


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


def is_variance_inflation(delta: Tensor) -> Tensor:
    """Return w^2, by whose mean the variance of an importance-weighted mean grows."""
    return (2 * delta).exp()


def mult_prob_error(delta: Tensor) -> Tensor:
    """Return e^|delta| >= 1."""
    return delta.abs().exp()


# --- of the probabilities themselves -------------------------------------------------------------


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
