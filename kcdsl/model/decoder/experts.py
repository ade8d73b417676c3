"""Mixtures of experts: a router chooses some of several feed-forward networks for each position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kcdsl.model.decoder.config import DecoderConfig, Mixture
from kcdsl.model.decoder.parts import GatedMLP


class MixtureOfExperts(nn.Module):
    """Experts, their router, and a network for all positions where the configuration has one.

    No block graph speaks of a choice, so an export fails and says why.
    """

    def __init__(self, config: DecoderConfig, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        self.gate = nn.Linear(config.width, mixture.experts, bias=False)
        self.experts = nn.ModuleList(
            GatedMLP(config, mixture.inner_width) for _ in range(mixture.experts)
        )
        if mixture.shared_width is not None:
            self.shared_expert = GatedMLP(config, mixture.shared_width)
            self.shared_expert_gate = nn.Linear(config.width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., T, D]. Raises RuntimeError in an export."""
        if torch.compiler.is_exporting():
            raise RuntimeError("a router chooses experts by the values of its input")
        logits = self.gate(x)
        chosen = logits.topk(self.mixture.chosen, dim=-1)
        if self.mixture.renormalised:
            shares = torch.softmax(chosen.values, dim=-1)
        else:
            shares = torch.softmax(logits, dim=-1).gather(-1, chosen.indices)
        results = self._each(x, chosen.indices)
        summed: Tensor = (shares.unsqueeze(-2) @ results).squeeze(-2)
        if self.mixture.shared_width is None:
            return summed
        share = torch.sigmoid(self.shared_expert_gate(x))
        whole: Tensor = summed + share * self.shared_expert(x)
        return whole

    def _each(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return the results of the experts that are chosen at each position, [..., T, k, D]."""
        rows, places = x.flatten(0, -2), numbers.flatten(0, -2)
        results = x.new_zeros(*places.shape, x.shape[-1])
        for number in sorted(set(places.flatten().tolist())):
            row, place = (places == number).nonzero(as_tuple=True)
            results[row, place] = self.experts[number](rows[row])
        return results.view(*numbers.shape, x.shape[-1])


def feed_forward(config: DecoderConfig, number: int) -> nn.Module:
    """Return the feed-forward sub-layer of the layer of a number."""
    mixture = config.mixture
    if mixture is None or not mixture.layers[number]:
        return GatedMLP(config)
    return MixtureOfExperts(config, mixture)
