"""Routes of mixtures of experts: the experts that each router of a block chooses, by position.

A block graph has no data-dependent control flow, so a block with routers has a graph per route.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kcdsl.model.architecture import Model
from kcdsl.model.decoder.experts import MixtureOfExperts

Route = tuple[tuple[int, ...], ...]
"""The chosen experts of every position, each in ascending order."""
Routes = tuple[tuple[str, Route], ...]
"""The route of every router, by its name in the module of the model, in order of application."""


def routers(model: Model, block: str) -> dict[str, MixtureOfExperts]:
    """Return the mixtures of experts of a block, by their names in the module of the model."""
    inside = set(model.block(block).modules())
    return {
        name: part
        for name, part in model.module.named_modules()
        if isinstance(part, MixtureOfExperts) and part in inside
    }


def chosen_routes(model: Model, block: str, entering: Tensor) -> Routes:
    """Return the routes of a block in the training kernel, on hidden states [T, D] or token ids."""
    found = routers(model, block)
    part = model.block(block)
    if model.by_block:
        part = model.with_streamed_weights(part, model.weights)
    with torch.no_grad(), recorded(found) as seen:
        part(entering)
    return tuple(seen.items())


@contextmanager
def recorded(found: dict[str, MixtureOfExperts]) -> Iterator[dict[str, Route]]:
    """Record the routes of these mixtures in this context, by name."""
    seen: dict[str, Route] = {}

    def note(name: str, part: MixtureOfExperts, logits: Tensor) -> None:
        chosen = logits.topk(part.mixture.chosen, dim=-1).indices.sort(-1).values
        seen[name] = tuple(tuple(row) for row in chosen.tolist())

    def hook(name: str, part: MixtureOfExperts) -> RemovableHandle:
        return part.gate.register_forward_hook(lambda gate, args, logits: note(name, part, logits))

    handles = [hook(name, part) for name, part in found.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def along(module: nn.Module, routes: Routes) -> None:
    """Fix the experts of the mixtures of a model's module to these routes."""
    for name, route in routes:
        part = module.get_submodule(name)
        assert isinstance(part, MixtureOfExperts)
        part.take(torch.tensor(route))
