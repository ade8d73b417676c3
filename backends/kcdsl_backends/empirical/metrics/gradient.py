"""Bounds on the bias of the policy gradient, from exact policies (tier A)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl_backends.empirical.metrics.distribution import total_variation
from kcdsl_backends.empirical.metrics.policies import PolicyPair
from kcdsl_backends.empirical.metrics.segments import Array


def grad_bias_bound(pair: PolicyPair, advantage_max: float, score_norm_max: float) -> Tensor:
    """Return A_max G E_infer|w - 1| = 2 A_max G TV(p, q) at each position, [N]."""
    return 2 * advantage_max * score_norm_max * total_variation(pair)


def bias_of_tv(tv: Array, factor: float) -> Array:
    """Return 2 A_max G TV from total variations [N], `factor` being A_max G."""
    return 2 * factor * tv


def clipped_bias_bound(
    pair: PolicyPair, advantage_max: float, score_norm_max: float, clip: float
) -> Tensor:
    """Return A_max G E_infer|w - clip(w, 1 - c, 1 + c)| at each position, [N].

    c = 0 is the *biased* estimator (the ratio is 1 everywhere); a larger c removes bias.
    """
    w = (-pair.log_difference).exp()
    excess = (w - w.clamp(1 - clip, 1 + clip)).abs()
    weighted = torch.where(torch.isneginf(pair.infer_log), 0.0, pair.infer_log.exp() * excess)
    return advantage_max * score_norm_max * weighted.sum(dim=-1)


def reward_drift_bound(pair: PolicyPair, reward_range: float) -> Tensor:
    """Return osc(R) TV(p, q), which bounds |E_p R - E_q R|, [N]."""
    return reward_range * total_variation(pair)
