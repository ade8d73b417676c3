"""Roundings inside an operation, beside those of sums and of storing.

The formulas are those of docs/relational-interval.md (sections 4 to 6), taken at the values of one
run instead of a box. Where docs/affine-forms.md knows more - one mean and one inverse root for each
row of a norm - that is what a run may have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl.model.formats import FORMATS
from kcdsl.model.graph import Node
from kcdsl.model.numerics import Numerics
from kcdsl_backends.drift.boxes.box import NoBound
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.ops.norms.interval import written

NORMS = frozenset({"layer_norm", "rms_norm"})
"""Operations with one rounding of the inverse root for each row."""
ELEMENTWISE = NORMS | {"add", "sub", "mul", "scale", "divide", "shift", "gelu", "silu", "tanh"}
ELEMENTWISE |= {"rope"}
"""Operations with a rounding inside of every element."""


def normalised(node: Node, x: Tensor, rows: Tensor) -> Tensor:
    """Return what a norm makes of x before its gain; mean and root are those of `rows`."""
    c = x - rows.mean(-1, keepdim=True) if node.op == "layer_norm" else x
    return c * inverse_root(node, rows)


def probabilities(scores: Tensor, rows: Tensor) -> Tensor:
    """Return e^scores over the sums of e^rows; -inf where a mask forbids a column."""
    most = rows.detach().amax(-1, keepdim=True)
    return (scores - most).exp() / (rows - most).exp().sum(-1, keepdim=True)


def element_error(node: Node, value: Tensor, operands: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return how far elements may be off, in units of u_f: of this run's value and operands, and of
    what the mean and the root of a norm are of."""
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
            return 4 * turned_sizes(operands)
        case "layer_norm" | "rms_norm":
            return _norm_elements(node, value, operands, rows)
        case _:
            raise ValueError(f"{node.op} has no rounding of its elements")


def turned_sizes(operands: Sequence[Tensor]) -> Tensor:
    """Return P = |x|·|cos| + |turned x|·|sin| of a rope."""
    x, half = operands[0].abs(), operands[0].shape[-1] // 2
    turned = torch.cat([x[..., half:], x[..., :half]], -1)
    return x * operands[1].abs() + turned * operands[2].abs()


def written_error(
    node: Node, x: Tensor, rows: Tensor, kernel: Rounding, moved: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Return what a norm that is written out is off by, before its gain: of the inverse root, of
    the mean and of every element, each times a symbol; mean and root are those of `rows`. Nothing
    where it has no bound."""
    r = inverse_root(node, rows)
    v = r.square().reciprocal()
    mean = torch.zeros_like(r) if node.op == "rms_norm" else rows.mean(-1, keepdim=True)
    c, y = rows - mean, normalised(node, x, rows)
    try:
        found = written(node, kernel, rows.abs(), c.abs(), mean.abs(), v, v, torch.zeros_like(x))
    except NoBound:
        return torch.zeros_like(x)
    each, row, root = moved
    return root * found.theta * y + row * found.mean * r + each * found.apart(y.abs(), r)


def _norm_elements(node: Node, value: Tensor, operands: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Return 5|y·gain| + 3|bias|, and 4|x·r·gain| where a mean was taken off."""
    bias = operands[2] if len(operands) > 2 else torch.zeros_like(value[..., :1])
    size = 5 * (value - bias).abs() + 3 * bias.abs()
    if node.op == "rms_norm":
        return size
    gain = operands[1].abs() if len(operands) > 1 else 1.0
    return size + 4 * operands[0].abs() * inverse_root(node, rows) * gain


def inverse_root(node: Node, x: Tensor) -> Tensor:
    """Return r [..., 1], the exact inverse root of a norm."""
    eps = float(node.attrs["eps"])
    if node.op == "rms_norm":
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return torch.rsqrt(x.var(-1, correction=0, keepdim=True) + eps)


def mean_error(node: Node, x: Tensor, numerics: Numerics) -> Tensor:
    """Return how far y = (x - mean)·r may be off by the mean of a row, [..., 1]."""
    off = _gamma(x.shape[-1] + 6, numerics.function_format.unit_roundoff) * x.abs().mean(
        -1, keepdim=True
    )
    return off * inverse_root(node, x)


def root_error(node: Node, x: Tensor, numerics: Numerics) -> Tensor:
    """Return θ [..., 1], the relative error of a norm's inverse root; 0 where it has no bound."""
    u = numerics.function_format.unit_roundoff
    n = x.shape[-1]
    if node.op == "rms_norm":
        return torch.full_like(x[..., :1], _gamma(n + 3, u) + 8 * u)
    variance = x.var(-1, correction=0, keepdim=True) + float(node.attrs["eps"])
    kappa = 4 * _gamma(n + 6, u) * x.square().mean(-1, keepdim=True) / variance
    theta = (1 + 8 * u) / torch.sqrt((1 - kappa).clamp_min(2.0**-20)) - 1
    return torch.where(kappa < 1 - 2.0**-20, theta, torch.zeros_like(theta))


def probability_error(scores: Tensor, numerics: Numerics) -> Tensor:
    """Return Θ [..., 1], the relative error of probabilities before they are stored.

    `scores` are those of the run, -inf where a mask forbids a column; Θ is 0 where it has no bound.
    """
    attention, u, columns = (
        numerics.attention,
        numerics.function_format.unit_roundoff,
        scores.shape[-1],
    )
    allowed = torch.isfinite(scores)
    known = torch.where(allowed, scores, torch.zeros_like(scores))
    highest = scores.amax(-1, keepdim=True)
    argument = torch.where(allowed, highest - known, torch.zeros_like(known)).amax(-1, keepdim=True)
    if attention.fused:
        argument = argument + 2 * known.abs().amax(-1, keepdim=True)
    exponential, one = 2 * attention.exp_ulps * u, u / (1 - u)
    each = u * argument + exponential / (1 - exponential) + one
    total = 2 * attention.tiles(columns) * each + (columns + 8) * one
    stored = FORMATS[attention.probabilities]
    if attention.fused and stored.coarse:
        roundoff = numerics.cast.unit(stored)
        lost = (1 + roundoff) * columns * numerics.cast.faint(stored)
        if lost >= 1:
            return torch.zeros_like(total)
        total = total + roundoff / (1 - roundoff) + lost / (1 - lost)
    return torch.expm1(total)


def _gamma(count: int, u: float) -> float:
    return count * u / (1 - count * u)
