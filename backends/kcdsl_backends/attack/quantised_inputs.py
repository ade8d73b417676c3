"""Quantised inputs of linears, computed in float32 as kernels do (relational-interval.md, 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics import Activations, Numerics, StaticQuantiser
from kcdsl.model.numerics.formats import LAYOUTS
from kcdsl.model.numerics.weights import nested_codes
from kcdsl_backends.attack.operations import straight_through
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.quantisers import (
    Quantiser,
    group_maximum,
    scale_range,
    static_quantiser,
    static_scale,
)
from kcdsl_backends.drift.boxes.rounding import Rounding
from kcdsl_backends.drift.ops.quantised.inputs import activation_error
from kcdsl_backends.drift.ops.quantised.tensors import LAST
from kcdsl_backends.drift.ops.view import ANY, arranged, as_linears, cache_quantiser, replaced


class Exceeded(ArithmeticError):
    """An input exceeds the range of its static scale, or of a format without scale."""


def moved_by(x: Tensor, numerics: Numerics, weight: str, share: Tensor) -> Tensor:
    """Return x + share·Q, where Q is the quantiser's error bound at the values of this run.

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
    """Quantise x to nearest and return the dequantised values; the gradient is that of x.

    Raises:
        Exceeded: there is no admitted run.
    """
    spec, v = numerics.activations, x.detach()
    if not spec.quantised:
        return x
    if spec.codes.zero_point:
        step, zero = _asymmetric(v, spec, weight)
        last = spec.codes.above
        value = ((torch.round(_single(v / step)) + zero).clamp(0, last) - zero) * step
    elif spec.nested:
        value = _nested(v, spec, weight)
    else:
        form, scale = spec.codes, _scale(v, spec, weight)
        times = form.reciprocal and not spec.static
        ratio = _single(v * _single(1.0 / scale)) if times else _single(v / scale)
        code = straight_through(ratio.clamp(-form.below, form.above), form.grid.nearest)
        value = code.clamp(-form.below, form.above) * scale
    return _single(value) + (x - v)  # the value to the last bit


def cached(x: Tensor, node: Node, numerics: Numerics, share: Tensor | None) -> Tensor:
    """Quantise keys or values to nearest, or return x + share·Q if `share` is given.

    Raises:
        Exceeded: there is no admitted run.
    """
    try:
        spec = cache_quantiser(node, numerics)
    except NoBound as reason:
        raise Exceeded(str(reason)) from None
    if spec is None:
        return x
    inside, rows = as_linears(numerics, spec), arranged(x, node, numerics)
    if share is None:
        return replaced(to_nearest(rows, inside, ANY), node, numerics, x)
    return replaced(moved_by(rows, inside, ANY, arranged(share, node, numerics)), node, numerics, x)


def quantised_tensor(x: Tensor, by: StaticQuantiser) -> Tensor:
    """Quantise a tensor to nearest and return its values; the gradient is 0 where it is clipped."""
    first, last = -by.zero_point, LAST - by.zero_point
    inside = x.clamp(first * by.scale, last * by.scale)
    code = torch.round(_single(x.detach() / by.scale)).clamp(first, last)
    value = _single(code * by.scale)
    return value + (inside - inside.detach())


def _asymmetric(v: Tensor, spec: Activations, weight: str) -> tuple[Tensor, Tensor]:
    """Return the scale and the zero point of uint8."""
    if spec.static:
        by = _static(v, spec, weight)
        return by.scale.lo, by.tops.below.lo
    low = -group_maximum((-v).clamp_min(0), spec.layout)
    high = group_maximum(v.clamp_min(0), spec.layout)
    step = _single(_single(high - low) / spec.codes.divisor)
    step = torch.where(step > 0, step, torch.ones_like(step))
    return step, torch.round(_single(-low / step)).clamp(0, spec.codes.above)


def _nested(v: Tensor, spec: Activations, weight: str) -> Tensor:
    """Quantise with group scales that are multiples of a tensor scale; return the values."""
    whole = None
    if spec.input_scale:
        try:
            whole = static_scale(v, spec, weight, weight).to(torch.float32)
        except NoBound as reason:
            raise Exceeded(str(reason)) from None
    layout, rows = LAYOUTS[spec.scale], v.to(torch.float32).flatten(0, -2)
    whole = None if whole is None else whole.flatten(0, -2)
    found = nested_codes(rows, spec.codes, layout, whole)
    return found.reshape(v.shape).to(torch.float64)


def _scale(v: Tensor, spec: Activations, weight: str) -> Tensor:
    """Return the float32 scale of every element; 1 for groups of zeros."""
    if spec.static:
        return _static(v, spec, weight).scale.lo
    found = scale_range(Box.point(v), spec).lo
    return torch.where(found > 0, found, torch.ones_like(found))


def _static(v: Tensor, spec: Activations, weight: str) -> Quantiser:
    try:
        return static_quantiser(Box.point(v), spec, weight, weight)
    except NoBound as reason:
        raise Exceeded(str(reason)) from None


def _single(x: Tensor) -> Tensor:
    """Return numbers rounded to float32."""
    return x.to(torch.float32).to(torch.float64)
