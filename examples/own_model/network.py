"""A user's own architecture, for `model: {module: network:build, checkpoint: …}`.

kcdsl needs a factory that takes the configuration and returns a module on token ids [T]. Everything
here is plain PyTorch: a norm written out by hand, attention through
`scaled_dot_product_attention`, a gate written as x * sigmoid(x), and a head tied to the embedding.
The names of the parameters are the keys of the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RootNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised [T, D]."""
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain


class Attention(nn.Module):
    """Causal attention with one key-value head per pair of heads, and rotated positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query = nn.Linear(width, width)
        self.pair = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width)
        steps = 100.0 ** -(torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(positions), torch.cat((steps, steps)))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Return [H, T, d] turned by position."""
        length = x.shape[-2]
        left, right = x.chunk(2, dim=-1)
        turned = torch.cat((-right, left), dim=-1)
        return x * self.cos[:length] + turned * self.sin[:length]

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, D]."""
        length = x.shape[0]
        q = self.query(x).view(length, self.heads, self.size).transpose(0, 1)
        k, v = self.pair(x).view(length, self.heads, self.size).transpose(0, 1).chunk(2)
        q, k, v = (t.unsqueeze(0) for t in (self.rotate(q), self.rotate(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        joined: Tensor = self.out(mixed.squeeze(0).transpose(0, 1).flatten(1))
        return joined


class Gate(nn.Module):
    """A gated feed-forward, one matrix for both halves."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, D]."""
        gate, value = self.up(x).chunk(2, dim=-1)
        lowered: Tensor = self.down(gate * torch.sigmoid(gate) * value)
        return lowered


class Network(nn.Module):
    """One layer between an embedding and a head that is tied to it."""

    def __init__(self, vocabulary: int, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = RootNorm(width)
        self.attention = Attention(width, heads, positions)
        self.gate = Gate(width, 2 * width)

    def hidden(self, ids: Tensor) -> Tensor:
        """Return the states [T, D] that enter the head."""
        x = self.embedding(ids)
        x = x + self.attention(self.norm(x))
        states: Tensor = x + self.gate(x)
        return states

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits [T, V]."""
        return F.linear(self.hidden(ids), self.embedding.weight)

    def blocks(self) -> dict[str, nn.Module]:
        """Return the parts that a contract may speak of."""
        return {"norm_0": self.norm, "attn_0": self.attention, "mlp_0": self.gate}


def build(config: dict[str, Any]) -> nn.Module:
    """Return the module for a configuration."""
    return Network(
        config["vocab_size"], config["width"], config["heads"], config["max_position_embeddings"]
    )
