"""Roundings inside an operation, beside those of sums and of storing (sections 4 and 6 there).

What the model admits is a little larger: a norm's squares, for instance, are exact here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics import Numerics

ELEMENTWISE = frozenset(
    {"add", "sub", "mul", "scale", "divide", "shift", "gelu", "silu", "tanh", "rope"}
)
"""Operations with a rounding inside of every element."""
NORMS = frozenset({"layer_norm", "rms_norm"})
"""Operations with one rounding of the inverse root for each row."""


def element_error(node: Node, value: Tensor, operands: Sequence[Tensor]) -> Tensor:
    """Return how far elements may be off, in units of u_f: of this run's value and operands."""
    match node.op:
        case "add" | "sub" | "mul":
            return value.abs()
        case "scale" | "divide":
            return 3 * value.abs()
        case "shift":
            return value.abs() + abs(float(node.attrs["offset"]))
        case "gelu":
            return 16 * operands[0].abs()
        case "silu" | "tanh":
            return 16 * value.abs()
        case "rope":
            x, half = operands[0].abs(), value.shape[-1] // 2
            turned = torch.cat([x[..., half:], x[..., :half]], -1)
            return 4 * (x * operands[1].abs() + turned * operands[2].abs())
        case _:
            raise ValueError(f"{node.op} has no rounding of its elements")


def root_error(node: Node, x: Tensor, numerics: Numerics) -> Tensor:
    """Return θ [..., 1], the relative error of a norm's inverse root; 0 where it has no bound."""
    u = unit(numerics)
    n = x.shape[-1]
    if node.op == "rms_norm":
        return torch.full_like(x[..., :1], _gamma(n + 3, u) + 8 * u)
    with torch.no_grad():
        variance = x.var(-1, correction=0, keepdim=True) + float(node.attrs["eps"])
        kappa = 4 * _gamma(n + 6, u) * x.square().mean(-1, keepdim=True) / variance
        theta = (1 + 8 * u) / torch.sqrt((1 - kappa).clamp_min(2.0**-20)) - 1
    return torch.where(kappa < 1 - 2.0**-20, theta, torch.zeros_like(theta))


def unit(numerics: Numerics) -> float:
    """Return u_f, the unit roundoff inside operations."""
    return 2.0**-53 if numerics.compute == "float64" else 2.0**-24


def _gamma(count: int, u: float) -> float:
    return count * u / (1 - count * u)
