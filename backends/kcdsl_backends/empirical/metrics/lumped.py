"""Divergences of lumped laws: k tokens apart, everything else as one (tier B).

Lumping tokens together never raises a divergence (data processing), so each value is at most the
one of the full policies: a **lower bound**, which a small value does not make a pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics.distribution import (
    hellinger_squared,
    jensen_shannon,
    kl,
    total_variation,
)
from kcdsl_backends.empirical.metrics.evidence import Unmeasured
from kcdsl_backends.empirical.metrics.policies import PolicyPair

_SLACK = 1e-6
"""How far recorded probabilities may sum above one by their rounding."""


def lumped_pair(train_log: Tensor, infer_log: Tensor) -> PolicyPair:
    """Return the laws of k tokens and the rest, [N, k + 1], from log-probabilities [N, k].

    Both inputs hold ln of the probabilities of the *same* k tokens at N positions, raw (neither
    truncated nor renormalised). The rest is what they leave of one. Raises Unmeasured for no
    positions, shapes that differ, NaN, values above 0 and sums above 1.
    """
    if train_log.ndim != 2 or train_log.shape != infer_log.shape or train_log.numel() == 0:
        raise Unmeasured(
            f"log-probabilities must be two [N, k] arrays of one shape, not "
            f"{tuple(train_log.shape)} and {tuple(infer_log.shape)}"
        )
    sides = [_with_rest(side.to(torch.float64)) for side in (train_log, infer_log)]
    return PolicyPair(sides[0], sides[1], sides[0], sides[1])


def _with_rest(log_probabilities: Tensor) -> Tensor:
    if bool(log_probabilities.isnan().any()) or bool((log_probabilities > _SLACK).any()):
        raise Unmeasured("log-probabilities must be numbers of at most 0")
    taken = log_probabilities.exp().sum(dim=-1)
    if bool((taken > 1 + _SLACK).any()):
        raise Unmeasured("the probabilities of a position sum to more than 1")
    rest = torch.log((1 - taken).clamp(min=0.0))
    whole = torch.cat([log_probabilities, rest[:, None]], dim=-1)
    return torch.where((taken > 1)[:, None], whole - taken.clamp(min=1.0).log()[:, None], whole)


def topk_tail_kl(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return KL(train || infer) of the lumped laws, [N] nats: at most the KL of the policies."""
    pair = lumped_pair(train_log, infer_log)
    return kl(pair.train_log, pair.infer_log)


def topk_tail_kl_infer_train(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return KL(infer || train) of the lumped laws, [N] nats, a lower bound."""
    pair = lumped_pair(train_log, infer_log)
    return kl(pair.infer_log, pair.train_log)


def topk_tail_tv(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return the total variation of the lumped laws, [N], a lower bound."""
    return total_variation(lumped_pair(train_log, infer_log))


def topk_tail_js(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of the lumped laws, [N], a lower bound."""
    return jensen_shannon(lumped_pair(train_log, infer_log))


def topk_tail_hellinger2(train_log: Tensor, infer_log: Tensor) -> Tensor:
    """Return the squared Hellinger distance of the lumped laws, [N], a lower bound."""
    return hellinger_squared(lumped_pair(train_log, infer_log))
