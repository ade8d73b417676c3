"""The pair of next-token distributions that every distribution metric reads.

p is the policy of the training kernel, q that of the inference kernel, both in float64. Logits are
widened to float64 before anything is subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NORMALISATION_TOLERANCE = 1e-9
"""Largest |sum p - 1| that the Bregman form of KL may be used with."""


class Unnormalised(ValueError):
    """The probabilities of a row do not sum to one, so no divergence may be formed from them."""


@dataclass(frozen=True, slots=True)
class PolicyPair:
    """Both kernels' logits and log-probabilities at the same N positions, all [N, V], float64."""

    train_logits: Tensor
    infer_logits: Tensor
    train_log: Tensor
    infer_log: Tensor

    @property
    def log_difference(self) -> Tensor:
        """Return d = ln q - ln p, 0 where both are impossible, [N, V]."""
        both = torch.isneginf(self.train_log) & torch.isneginf(self.infer_log)
        return torch.where(both, 0.0, self.infer_log - self.train_log)

    def swapped(self) -> PolicyPair:
        """Return the pair with the kernels exchanged."""
        return PolicyPair(self.infer_logits, self.train_logits, self.infer_log, self.train_log)


def policy_pair(train_logits: Tensor, infer_logits: Tensor, temperature: float) -> PolicyPair:
    """Form pi(y) = softmax(z / T) of both kernels in float64.

    Both inputs are [N, V], of any float type. Rows with NaN stay NaN; a row of finite logits whose
    probabilities do not sum to one within 1e-9 raises `Unnormalised`. Other shapes and T <= 0
    raise ValueError.
    """
    if train_logits.ndim != 2 or train_logits.shape != infer_logits.shape:
        raise ValueError(
            f"logits must be two [N, V] arrays of one shape, not {tuple(train_logits.shape)} and "
            f"{tuple(infer_logits.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    train = train_logits.to(torch.float64)
    infer = infer_logits.to(torch.float64)
    pair = PolicyPair(
        train,
        infer,
        torch.log_softmax(train / temperature, dim=-1),
        torch.log_softmax(infer / temperature, dim=-1),
    )
    check_normalised(pair.train_log)
    check_normalised(pair.infer_log)
    return pair


def check_normalised(log_probabilities: Tensor) -> None:
    """Raise `Unnormalised` where a row of log-probabilities [N, V] does not sum to one.

    Rows with NaN are left to the finiteness test, which names them.
    """
    total = log_probabilities.exp().sum(dim=-1)
    off = (total - 1).abs() > NORMALISATION_TOLERANCE
    if bool(off.any()):
        row = int(off.nonzero()[0, 0])
        raise Unnormalised(f"the probabilities of row {row} sum to {float(total[row])!r}, not 1")
