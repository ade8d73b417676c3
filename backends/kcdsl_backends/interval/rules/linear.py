"""Linear maps and products of matrices (section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.formats import FORMATS
from kcdsl_backends.interval.box import Box, gamma, magnitude_product, matmul, up
from kcdsl_backends.interval.context import Step
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.rounding import Rounding
from kcdsl_backends.interval.state import State

_DIVISION = 1.0 + 2.0**-20
_MX_EXPONENT = {"fp8_e4m3": 8, "fp8_e5m2": 15}


def linear(step: Step) -> State:
    """Bound x @ weight.T + bias with the stored weights of both kernels."""
    x = step.operand(0)
    weight = step.kernels.linear(step.operand_node(1))
    bias = step.kernels.plain(step.operand_node(2)) if len(step.node.inputs) > 2 else None
    name = step.node.name
    shift_train = activation_error(x.train, step.kernels.train, name)
    shift_infer = activation_error(x.infer, step.kernels.infer, name)
    x_train, x_infer, drift_in = x.train, x.infer, x.drift
    if shift_train is not None:
        x_train, drift_in = x_train.widen(shift_train), drift_in.widen(shift_train)
    if shift_infer is not None:
        x_infer, drift_in = x_infer.widen(shift_infer), drift_in.widen(shift_infer)
    train = product_train = matmul(x_train, Box.point(weight.train.T))
    infer = product_infer = matmul(x_infer, Box.point(weight.infer.T))
    difference = weight.difference
    transposed = Box(difference.lo.T, difference.hi.T)
    drift = matmul(drift_in, Box.point(weight.infer.T)) + matmul(x_train, transposed)
    if bias is not None:
        train = train + Box.point(bias.train)
        infer = infer + Box.point(bias.infer)
        drift = drift + bias.difference
    added = (None, None) if bias is None else (bias.train, bias.infer)
    return step.finish(
        train,
        infer,
        drift,
        _linear_error(x_train, product_train, train, weight.train, added[0], step.kernels.train),
        _linear_error(x_infer, product_infer, infer, weight.infer, added[1], step.kernels.infer),
        accumulates=True,
    )


def _linear_error(
    x: Box, product: Box, result: Box, weight: Tensor, bias: Tensor | None, kernel: Rounding
) -> Tensor:
    """Return E of a linear: any order of summation, and a free cast before the bias."""
    total = magnitude_product(x.mag(), weight.T.abs())
    if bias is not None:
        total = up(total + bias.abs())
    error = accumulation_error(total, result.mag(), weight.shape[-1], kernel)
    error = error + flushing_error(x.mag(), weight.T.abs(), kernel)
    if bias is not None and kernel.free and kernel.coarse:
        stored = kernel.compute
        error = error + up(stored.unit_roundoff * (product.mag() + error) + stored.underflow, 4)
    return up(error, 4)


def accumulation_error(
    total: Tensor, result: Tensor, steps: int, kernel: Rounding, before: int = 2
) -> Tensor:
    """Return A_k,j(S, Y), the error of a sum in the accumulator; infinite where one may overflow.

    Args:
        total: S, the magnitudes of the terms.
        result: mag(Y), the magnitude of the exact sum.
        steps: k, the roundings of partial sums.
        before: j, the roundings of a term before it is added.
    """
    roundings = steps + before
    each = gamma(roundings, kernel.u_accumulate) / roundings * (1.0 + 2.0**-50)
    size = steps * (total + result) / 2 + before * total
    error = up(each * size + roundings * kernel.eta_accumulate, 8)
    largest = FORMATS[kernel.numerics.accumulate].largest
    return torch.where(total + error <= largest, error, torch.inf)


def flushing_error(left: Tensor, right: Tensor, kernel: Rounding) -> Tensor | float:
    """Return how much a product loses where subnormal numbers count as zero.

    Matrix units of coarse formats may do so with operands, products and partial sums:
    2^-126·(Σ|a| + Σ|b| + 2n + 4) per element. Nothing for kernels that compute in float32.
    """
    if not kernel.coarse:
        return 0.0
    sizes = left.sum(-1, keepdim=True) + right.sum(-2, keepdim=True) + (2 * left.shape[-1] + 4)
    return up(2.0**-126 * (sizes * _DIVISION), 2)


def activation_error(x: Box, kernel: Rounding, node: str) -> Tensor | None:
    """Return Q, the error of dynamic quantisation of a linear's input; None without it.

    Raises:
        NoBound: a format without scale may overflow.
    """
    spec = kernel.numerics.activations
    if spec.format == "none":
        return None
    magnitude = x.mag()
    largest = _group_maximum(magnitude, spec.scale)
    if spec.format == "uint8":
        return up(2.0 * largest / 255.0 * _DIVISION + magnitude * 2.0**-20, 4)
    if spec.format == "int8":
        return up((largest / 127.0 / 2 + magnitude * 2.0**-20) * _DIVISION, 4)
    target = FORMATS[spec.format]
    match spec.scale:
        case "none":
            if not bool((magnitude <= target.largest).all()):
                limit = f"{target.largest:g} ({target.name})"
                raise NoBound(node, f"overflow reachable: input above {limit}")
            scale = torch.ones_like(largest)
        case "mx":
            scale = largest * 2.0 ** -_MX_EXPONENT[spec.format]
        case _:
            scale = up(largest / target.largest)
    rounded = (target.unit_roundoff * magnitude + scale * target.underflow) * _DIVISION
    if spec.scale != "mx":
        return up(rounded, 4)
    return up(torch.maximum(rounded, _saturation(x, spec.format)), 4)


def _saturation(x: Box, format: str) -> Tensor:
    """Return how much of a number an mx scale may cut off.

    The scale is 2^(floor(log2 amax) - emax), so at least qmax·2^-(emax+1) = 7/8 of the block's own
    maximum is kept, and that maximum is known from both sides only: a number is cut by at most 1/8
    of itself, and not at all below 7/8 of the least possible maximum.
    """
    kept = FORMATS[format].largest * 2.0 ** -(_MX_EXPONENT[format] + 1)
    magnitude = x.mag()
    least = torch.maximum(x.lo, -x.hi).clamp_min(0)
    certain = kept * _group_maximum(least, "mx") * (1 - 2.0**-20)
    cut = torch.minimum(magnitude * (1 - kept), (magnitude - certain).clamp_min(0))
    return cut + magnitude * 2.0**-20


def _group_maximum(magnitude: Tensor, scale: str) -> Tensor:
    """Return the largest magnitude of the group that shares an element's scale."""
    if scale in ("none", "per_tensor"):
        return magnitude.amax().expand_as(magnitude)
    if scale == "per_token":
        return magnitude.amax(-1, keepdim=True).expand_as(magnitude)
    width = magnitude.shape[-1]
    padded = torch.nn.functional.pad(magnitude, (0, -width % 32))
    blocks = padded.reshape(*magnitude.shape[:-1], -1, 32).amax(-1)
    return blocks.repeat_interleave(32, dim=-1)[..., :width]


def product(step: Step) -> State:
    """Bound a @ b where both operands vary: Δ(ab) = (a + Δa/2) Δb + Δa (b + Δb/2)."""
    a, b = step.operand(0), step.operand(1)
    drift = matmul(a.middle, b.drift) + matmul(a.drift, b.middle)
    train, infer = matmul(a.train, b.train), matmul(a.infer, b.infer)
    return step.finish(
        train,
        infer,
        drift,
        _matmul_error(step, a.train, b.train, train, step.kernels.train),
        _matmul_error(step, a.infer, b.infer, infer, step.kernels.infer),
        accumulates=True,
    )


def _matmul_error(step: Step, a: Box, b: Box, result: Box, kernel: Rounding) -> Tensor:
    scaled_apart = step.node.role == "scores" and kernel.numerics.attention.style == "fused"
    total = magnitude_product(a.mag(), b.mag())
    before = 6 if scaled_apart else 2
    summed = accumulation_error(total, result.mag(), a.shape[-1], kernel, before)
    return up(summed + flushing_error(a.mag(), b.mag(), kernel), 2)
