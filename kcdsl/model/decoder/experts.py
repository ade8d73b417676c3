"""Mixtures of experts: a router chooses k of E feed-forward networks for each position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kcdsl.model.decoder.config import DecoderConfig, Mixture
from kcdsl.model.decoder.parts import GatedMLP


@torch.library.custom_op("kcdsl::route", mutates_args=())
def routed(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the router logits [..., T, E] unchanged; records the chosen experts [T, k] in
    exports."""
    return logits.clone()


@routed.register_fake
def _(logits: Tensor, chosen: Tensor) -> Tensor:
    return torch.empty_like(logits)


class MixtureOfExperts(nn.Module):
    """Experts, their router, and a shared network where the configuration has one.

    A block graph has no data-dependent control flow, so an export needs a fixed route (`take`).
    """

    chosen: Tensor | None = None
    """The experts [T, k] of every position, in ascending order; None: the router chooses."""

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

    def take(self, route: Tensor | None) -> None:
        """Fix the experts [T, k], in ascending order; None lets the router choose.
        Raises ValueError for an invalid choice."""
        if route is not None:
            shape, most = (*route.shape[:-1], self.mixture.chosen), self.mixture.experts
            ascending = bool((route[..., 1:] > route[..., :-1]).all())
            within = bool((route >= 0).all()) and bool((route < most).all())
            if tuple(route.shape) != shape or not (ascending and within):
                raise ValueError(f"a route is {shape[-1]} of {most} experts, in ascending order")
        self.chosen = route
        self.numbers = [] if route is None else sorted(set(route.flatten().tolist()))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., T, D]. Raises RuntimeError in an export without a route."""
        logits = self.gate(x)
        if self.chosen is not None:
            return self._with_shared(x, self._along(x, logits, self.chosen))
        if torch.compiler.is_exporting():
            raise RuntimeError("a router chooses experts by the values of its input")
        chosen = logits.topk(self.mixture.chosen, dim=-1)
        if self.mixture.renormalised:
            shares = torch.softmax(chosen.values, dim=-1)
        else:
            shares = torch.softmax(logits, dim=-1).gather(-1, chosen.indices)
        results = self._each(x, chosen.indices)
        summed: Tensor = (shares.unsqueeze(-2) @ results).squeeze(-2)
        return self._with_shared(x, summed)

    def _along(self, x: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of the given experts, each computed for all positions."""
        logits = routed(logits, chosen)
        mask = torch.zeros(chosen.shape[0], self.mixture.experts, dtype=torch.bool)
        mask = mask.scatter(-1, chosen, torch.ones_like(chosen, dtype=torch.bool))
        if self.mixture.renormalised:
            shares = torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1)
        else:
            shares = torch.softmax(logits, dim=-1) * mask.to(logits.dtype)
        numbers = self.numbers
        if len(numbers) < self.mixture.experts:
            shares = torch.cat([shares[..., n : n + 1] for n in numbers], dim=-1)
        results = torch.stack([self.experts[n](x) for n in numbers], dim=-2)
        return (shares.unsqueeze(-2) @ results).squeeze(-2)

    def _with_shared(self, x: Tensor, summed: Tensor) -> Tensor:
        """Add the result of the shared network, if there is one."""
        if self.mixture.shared_width is None:
            return summed
        gate = self.shared_expert_gate(x)
        if self.chosen is None:
            share = torch.sigmoid(gate)
        else:  # block graphs have no sigmoid: sigmoid(gate) = softmax((gate, 0))[0]
            share = torch.softmax(
                torch.cat([gate, torch.zeros(gate.shape, dtype=gate.dtype)], -1), -1
            )[..., :1]
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
    """Return the feed-forward sub-layer of layer `number`."""
    mixture = config.mixture
    if mixture is None or not mixture.layers[number]:
        return GatedMLP(config)
    return MixtureOfExperts(config, mixture)
