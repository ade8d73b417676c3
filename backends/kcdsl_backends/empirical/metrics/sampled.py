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
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics.distribution import bregman
from kcdsl_backends.empirical.metrics.policies import PolicyPair


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
    """Return w ln w."""
    return delta.exp() * delta


def w_log_w_minus(delta: Tensor) -> Tensor:
    """Return w ln w - w + 1 = e^delta (e^-delta - 1 + delta)."""
    return delta.exp() * bregman(-delta)


def tv_is(delta: Tensor) -> Tensor:
    """Return |w - 1| / 2."""
    return torch.expm1(delta).abs() / 2


def importance_ratio(delta: Tensor) -> Tensor:
    """Return w."""
    return delta.exp()
