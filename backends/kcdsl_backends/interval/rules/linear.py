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
_INTEGER_MAX = {"int8": 127.0}


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
    train = matmul(x_train, Box.point(weight.train.T))
    infer = matmul(x_infer, Box.point(weight.infer.T))
    difference = weight.difference
    transposed = Box(difference.lo.T, difference.hi.T)
    drift = matmul(drift_in, Box.point(weight.infer.T)) + matmul(x_train, transposed)
    if bias is not None:
        train = train + Box.point(bias.train)
        infer = infer + Box.point(bias.infer)
        drift = drift + bias.difference
    return step.finish(
        train,
        infer,
        drift,
        _product_error(x_train, weight.train, bias.train if bias else None, step.kernels.train),
        _product_error(x_infer, weight.infer, bias.infer if bias else None, step.kernels.infer),
    )


def _product_error(x: Box, weight: Tensor, bias: Tensor | None, kernel: Rounding) -> Tensor:
    """Return E of a linear: any order of summation, and a free cast before the bias."""
    terms = weight.shape[-1]
    total = magnitude_product(x.mag(), weight.T.abs())
    if bias is not None:
        total = up(total + bias.abs())
    error = gamma(terms + 2, kernel.u_accumulate) * total + (terms + 2) * kernel.eta_accumulate
    if bias is not None and kernel.free and kernel.coarse:
        error = error + (
            kernel.compute.unit_roundoff * (1.0 + 2.0**-10) * total + kernel.compute.underflow
        )
    return up(error, 4)


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
    if spec.format in _INTEGER_MAX:
        step = largest / _INTEGER_MAX[spec.format]
        return up((step / 2 + magnitude * 2.0**-20) * _DIVISION, 4)
    target = FORMATS[spec.format]
    relative = target.unit_roundoff * _DIVISION * magnitude
    if spec.scale == "none":
        if not bool((magnitude <= target.largest).all()):
            raise NoBound(
                node, f"overflow reachable: input above {target.largest:g} ({target.name})"
            )
        scale = torch.ones_like(largest)
        excess = torch.zeros_like(magnitude)
    elif spec.scale == "mx":
        scale = largest * 2.0 ** -_exponent_of_largest(spec.format)
        excess = (magnitude - target.largest * scale / 2).clamp_min(0)
    else:
        scale = up(largest / target.largest)
        excess = torch.zeros_like(magnitude)
    return up(relative + scale * target.underflow * _DIVISION + excess, 4)


def _exponent_of_largest(format: str) -> int:
    return {"fp8_e4m3": 8, "fp8_e5m2": 15}[format]


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
    return step.finish(
        matmul(a.train, b.train),
        matmul(a.infer, b.infer),
        drift,
        _matmul_error(step, a.train, b.train, step.kernels.train),
        _matmul_error(step, a.infer, b.infer, step.kernels.infer),
    )


def _matmul_error(step: Step, a: Box, b: Box, kernel: Rounding) -> Tensor:
    terms = a.shape[-1]
    scaled_apart = step.node.role == "scores" and kernel.numerics.attention.style == "fused"
    factor = gamma(terms + (6 if scaled_apart else 2), kernel.u_accumulate)
    total = magnitude_product(a.mag(), b.mag())
    return up(factor * total + (terms + 2) * kernel.eta_accumulate, 4)
