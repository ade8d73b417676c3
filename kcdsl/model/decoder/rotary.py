"""Rotary position embeddings: their tables, and the module that rotates queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kcdsl.model.decoder.config import Rotation


class Rotary(nn.Module):
    """Rotation of the two halves of each head by position (half-rotation RoPE), or of the first
    `width` numbers of each head.

    The tables are computed in float64 on the CPU and stored as float32, so that every device and
    every kernel starts from the same numbers.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, rotation: Rotation, width: int, positions: int) -> None:
        super().__init__()
        steps, size = frequencies(rotation, width)
        angles = torch.outer(torch.arange(positions, dtype=torch.float64), steps)
        for name, function in (("cos", torch.cos), ("sin", torch.sin)):
            half = (function(angles) * size).to(torch.float32)
            self.register_buffer(name, torch.cat((half, half), dim=-1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rotated [..., H, T, d]; the arithmetic is at least float32, rounded once."""
        length, width = x.shape[-2], self.cos.shape[-1]
        part = x if width == x.shape[-1] else x[..., :width]
        wide, half = part.to(torch.promote_types(x.dtype, torch.float32)), width // 2
        turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
        rotated = (wide * self.cos[:length] + turned * self.sin[:length]).to(x.dtype)
        return rotated if part is x else torch.cat((rotated, x[..., width:]), dim=-1)


def frequencies(rotation: Rotation, head_width: int) -> tuple[Tensor, float]:
    """Return the angular step per position of each pair, float64 [d/2], and the multiplier of both
    tables."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    steps = rotation.theta**-exponents
    scaling = dict(rotation.scaling)
    match rotation.kind:
        case "linear":
            return steps / scaling["factor"], 1.0
        case "llama3":
            return _llama3(steps, scaling), 1.0
        case "yarn":
            return _yarn(steps, scaling, rotation.theta), scaling["attention"]
        case "longrope":
            divisors = torch.tensor(rotation.factors, dtype=torch.float64)
            return steps / divisors, scaling["attention"]
        case _:
            return steps, 1.0


def _llama3(steps: Tensor, scaling: dict[str, float]) -> Tensor:
    """Apply the published Llama 3.1 rule: wavelengths beyond the old context are multiplied by
    `factor`, short ones are unchanged, and those between are interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * steps / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * steps / scaling["factor"] + share * steps


def _yarn(steps: Tensor, scaling: dict[str, float], theta: float) -> Tensor:
    """Apply YaRN (arXiv:2309.00071, section 3.2): wavelengths of pairs with more than `fast` turns
    over the original length are unchanged, those with less than `slow` turns are multiplied by
    `factor`, and those between are interpolated linearly in the index of the pair."""
    pairs = len(steps)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(scaling["original"] / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling["fast"]), pair_that_turns(scaling["slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last += 0.001 if first == last else 0.0
    stretched = ((torch.arange(pairs, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return stretched * steps / scaling["factor"] + (1 - stretched) * steps
