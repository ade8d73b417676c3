"""The input of a linear as a kernel quantises it, in float32 (relational-interval.md, 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.formats import FORMATS
from kcdsl.model.numerics import Activations, Numerics
from kcdsl.model.weights import LEAST_FULL_SCALE, MX_EXPONENT, QMAX
from kcdsl_backends.attack.sums import nearest_to
from kcdsl_backends.interval.box import Box
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.rounding import Rounding, power_of_two
from kcdsl_backends.interval.rules.linear import activation_error
from kcdsl_backends.interval.scales import Quantiser, group_maximum, static_quantiser

_STEPS = 255.0
_INTEGERS = {"int8": (-127.0, 127.0), "int8_full": (-128.0, 127.0)}


class Exceeded(ArithmeticError):
    """An input is beyond what its static scale, or a format without scale, holds."""


def moved_by(x: Tensor, numerics: Numerics, weight: str, share: Tensor) -> Tensor:
    """Return x + share·Q, with Q of the values of this run.

    Args:
        x: the input of the linear whose weight is called `weight`.
        share: numbers in (-1, 1), of the shape of x.

    Raises:
        Exceeded: there is no admitted run.
    """
    try:
        error = activation_error(Box.point(x.detach()), Rounding(numerics), weight, weight)
    except NoBound as reason:
        raise Exceeded(str(reason)) from None
    return x if error is None else x + share * error


def to_nearest(x: Tensor, numerics: Numerics, weight: str) -> Tensor:
    """Return the values of the codes of x, each step rounded to nearest; the gradient is that of x.

    Raises:
        Exceeded: there is no admitted run.
    """
    spec, v = numerics.activations, x.detach()
    if spec.format == "none":
        return x
    if spec.format == "uint8":
        step, zero = _asymmetric(v, spec, weight)
        value = ((torch.round(_single(v / step)) + zero).clamp(0, _STEPS) - zero) * step
    elif spec.format in _INTEGERS:
        scale = _scale(v, spec, weight)
        whole = spec.format == "int8_full" and spec.scale != "static"
        ratio = _single(v * _single(1.0 / scale)) if whole else _single(v / scale)
        value = torch.round(ratio).clamp(*_INTEGERS[spec.format]) * scale
    else:
        form, scale = FORMATS[spec.format], _scale(v, spec, weight)
        ratio = _single(v / scale)
        value = nearest_to(ratio.clamp(-form.largest, form.largest), form) * scale
    return x + (_single(value) - v)


def _asymmetric(v: Tensor, spec: Activations, weight: str) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of uint8."""
    if spec.scale == "static":
        by = _static(v, spec, weight)
        return by.scale.lo, by.tops.below.lo
    low = -group_maximum((-v).clamp_min(0), spec.scale)
    high = group_maximum(v.clamp_min(0), spec.scale)
    step = _single(_single(high - low) / _STEPS)
    step = torch.where(step > 0, step, torch.ones_like(step))
    return step, torch.round(_single(-low / step)).clamp(0, _STEPS)


def _scale(v: Tensor, spec: Activations, weight: str) -> Tensor:
    """Return the float32 scale of every element; 1 where a group is 0."""
    magnitude = v.abs()
    match spec.scale:
        case "static":
            return _static(v, spec, weight).scale.lo
        case "none":
            return torch.ones_like(magnitude[..., :1])
        case "mx":
            top = group_maximum(magnitude, spec.scale)
            _, exponent = torch.frexp(top)
            power = (exponent - 1 - MX_EXPONENT[spec.format]).clamp(-127, 127)
            scale = power_of_two(power)
        case _:
            top = group_maximum(magnitude, spec.scale)
            scale = _single(top / QMAX[spec.format])
    if spec.format == "int8_full":
        return scale.clamp_min(LEAST_FULL_SCALE)
    return torch.where((top > 0) & (scale > 0), scale, torch.ones_like(scale))


def _static(v: Tensor, spec: Activations, weight: str) -> Quantiser:
    try:
        return static_quantiser(Box.point(v), spec, weight, weight)
    except NoBound as reason:
        raise Exceeded(str(reason)) from None


def _single(x: Tensor) -> Tensor:
    """Return numbers rounded to float32."""
    return x.to(torch.float32).to(torch.float64)
