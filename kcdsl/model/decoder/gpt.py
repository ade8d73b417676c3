"""The common part of GPT-2 and GPT-NeoX: layers with layer norms and GELU, and a head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor, nn

FORMS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}
"""The form of GELU by the name of the activation."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of modules as checkpoints have them; `layers` and `last_norm` are parts of `stack`,
    `parts` those of a layer: norm, attention, norm, feed-forward."""

    stack: str
    layers: str
    last_norm: str
    head: str
    parts: tuple[str, str, str, str]


class Sizes(Protocol):
    """The limits of a configuration on inputs."""

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens."""
        ...

    @property
    def positions(self) -> int:
        """Return the longest sequence."""
        ...


class GPTModel(nn.Module):
    """A causal language model: a stack on ids [..., T], and a head on its states."""

    encoder_only = False
    names: ClassVar[Names]

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.settings = config

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the logits [..., T, V] of token ids [..., T]; `keys` [..., T] is False at
        padding."""
        logits: Tensor = self.get_submodule(self.names.head)(self.hidden(ids, keys))
        return logits

    def hidden(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the hidden states [..., T, D] that enter the head."""
        states: Tensor = self.get_submodule(self.names.stack)(ids, keys)
        return states

    @property
    def limits(self) -> tuple[int, int]:
        """Return the vocabulary size and the longest sequence."""
        return self.settings.vocabulary, self.settings.positions

    def blocks(self) -> dict[str, nn.Module]:
        """Return every block by name, in order of application."""
        found: dict[str, nn.Module] = {}
        stack = self.get_submodule(self.names.stack)
        layers = tuple(stack.get_submodule(self.names.layers).children())
        for i, layer in enumerate(layers):
            blocks = (f"norm_{2 * i}", f"attn_{i}", f"norm_{2 * i + 1}", f"mlp_{i}")
            for block, part in zip(blocks, self.names.parts, strict=True):
                found[block] = layer.get_submodule(part)
            found[f"layer_{i}"] = layer
        found[f"norm_{2 * len(layers)}"] = stack.get_submodule(self.names.last_norm)
        return found | {"head": self.get_submodule(self.names.head), "model": self}
