"""Small networks with known weights, for use as the model of a contract."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SmallAttention(nn.Module):
    """Causal self-attention on [T, D] with two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 2
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, D]."""
        rows, width = x.shape
        shape = (rows, self.heads, width // self.heads)
        q, k, v = (f(x).view(shape).transpose(0, 1) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        result: Tensor = self.out(mixed[0].transpose(0, 1).flatten(1))
        return result


class Residual(nn.Module):
    """A residual connection, x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, D]."""
        result: Tensor = x + self.inner(x)
        return result


def _step(name: str, width: int) -> nn.Module:
    match name:
        case "linear":
            return nn.Linear(width, width)
        case "relu":
            return nn.ReLU()
        case "gelu":
            return nn.GELU()
        case "silu":
            return nn.SiLU()
        case "norm":
            return nn.LayerNorm(width)
        case "attention":
            return SmallAttention(width)
        case "residual":
            return Residual(nn.Sequential(nn.Linear(width, width), nn.ReLU()))
        case _:
            raise ValueError(f"no step: {name!r}")


STEPS = ("linear", "relu", "gelu", "silu", "norm", "attention", "residual")
"""Names of the parts of a block."""


class SmallNetwork(nn.Module):
    """One block, `mlp_0`, between an embedding and its result."""

    def __init__(self, vocabulary: int, width: int, steps: tuple[str, ...]) -> None:
        super().__init__()
        self.limits = (vocabulary, vocabulary)
        self.embedding = nn.Embedding(vocabulary, width)
        self.part = nn.Sequential(*(_step(name, width) for name in steps))

    def forward(self, ids: Tensor) -> Tensor:
        """Return [T, D]."""
        result: Tensor = self.part(self.embedding(ids))
        return result

    def blocks(self) -> dict[str, nn.Module]:
        """Return the block."""
        return {"mlp_0": self.part}


def build(config: Mapping[str, Any]) -> nn.Module:
    """Return the network of a configuration: `vocab_size`, `width` and `steps`."""
    return SmallNetwork(config["vocab_size"], config["width"], tuple(config["steps"]))


def drawn(config: Mapping[str, Any], seed: int, scale: float) -> dict[str, Tensor]:
    """Return random parameters, normal with deviation `scale`; gains of norms are around 1."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, value in build(config).named_parameters():
        found[name] = scale * torch.randn(value.shape, generator=generator)
    for number, step in enumerate(config["steps"]):
        if step == "norm":
            found[f"part.{number}.weight"] += 1
    found["embedding.weight"] /= scale
    return found
