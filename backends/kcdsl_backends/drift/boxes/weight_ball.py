"""Parameters as kernels store them if the weights are anywhere in a ball around the checkpoint's.

The region around the weights (docs/proofs/weights-region.md): every float32 element θ' with
|θ' - θ| <= ρ|θ|. Both kernels store the same θ', each in its own format and with its own scales.
For every element the stored number and its difference from θ' are enclosed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from kcdsl.inequalities import round_up
from kcdsl.model.graph import Node
from kcdsl.model.numerics import Numerics, Weights
from kcdsl.model.numerics.formats import (
    CASTS,
    E8M0_EXPONENTS,
    FORMATS,
    LAYOUTS,
    CodeFormat,
    Format,
    ScaleLayout,
)
from kcdsl.model.numerics.weights import group_amax
from kcdsl_backends.drift.boxes import Box, NoBound, down, refuse_overflow, up
from kcdsl_backends.drift.boxes.quantisers import (
    LEAST_SCALE,
    code_error,
    known_steps,
    quantised_hull,
)
from kcdsl_backends.drift.boxes.rounding import power_of_two

_FLOAT32 = FORMATS["float32"]


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Boxes of the stored value of every element, and of its difference from the element."""

    value: Box
    error: Box


@dataclass(frozen=True, slots=True)
class BallTensor:
    """One parameter as both kernels store it, and inference minus training."""

    train: Box
    infer: Box
    difference: Box

    @property
    def alike(self) -> bool:
        """Return whether both kernels store it alike, so the same number for every θ'."""
        return self.train is self.infer


@dataclass(frozen=True, slots=True)
class WeightBall:
    """All parameters in a ball around those of a checkpoint, as two kernels store them.

    Args:
        rho: ρ, in (0, 1/2].
        tensors: checkpoint tensors by key, float32.
        train, infer: the specifications of the kernels.
        device: the device of the boxes.
    """

    rho: Fraction
    tensors: Mapping[str, Tensor]
    train: Numerics
    infer: Numerics
    device: torch.device
    _moved: dict[tuple[str, str], BallTensor] = field(default_factory=dict, repr=False)

    def held(self, node: Node, *, linear: bool) -> BallTensor:
        """Return a parameter as both kernels store it: the weight [out, in] of a linear, or another
        one."""
        name = str(node.attrs["key"])
        key = (name, "linear" if linear else "plain")
        if key not in self._moved:
            source = self.tensors[name].detach().to("cpu", torch.float32).to(torch.float64)
            around = near(source.to(self.device), self.rho)
            kernels = self.train, self.infer
            if linear:
                kernels = self.train.serving(name), self.infer.serving(name)
            self._moved[key] = _pair(around, *kernels, name, linear=linear)
        return self._moved[key]


def near(w: Tensor, rho: Fraction) -> Box:
    """Return the least and the greatest float32 number that each element may be.

    `w` holds float32 numbers (float64). The ends exceed ρ|w| by less than one float32 step.
    """
    spread = up(round_up(rho) * w.abs())
    low, high = down(w - spread), up(w + spread)
    zero = w == 0
    return Box(torch.where(zero, w, -_below(-low)), torch.where(zero, w, _below(high)))


def _below(x: Tensor) -> Tensor:
    """Return the greatest float32 number that is not above x, float64."""
    single = x.to(torch.float32)
    lower = torch.nextafter(single, torch.full_like(single, -torch.inf))
    return torch.where(single.to(torch.float64) > x, lower, single).to(torch.float64)


def _pair(w: Box, train: Numerics, infer: Numerics, name: str, *, linear: bool) -> BallTensor:
    held = [held_linear(w, n, name) if linear else held_plain(w, n, name) for n in (train, infer)]
    ways = [_storage(n, linear=linear) for n in (train, infer)]
    if ways[0] == ways[1]:
        zero = torch.zeros_like(w.lo)
        return BallTensor(held[0].value, held[0].value, Box.point(zero))
    difference = (held[1].error - held[0].error).meet(held[1].value - held[0].value)
    return BallTensor(held[0].value, held[1].value, difference)


def _storage(numerics: Numerics, *, linear: bool) -> tuple[str, ...]:
    """Return a key of how a kernel stores a parameter: kernels with equal keys store equal numbers.

    A cast to a format that holds all its operands is not part of the key.
    """
    stored, way, held = numerics.weights, [], _FLOAT32
    if linear and stored.layout is not None:
        way = [stored.format, stored.scale, stored.scale_format]
        casts = [numerics.compute] if not numerics.activations.quantised else []
    else:
        casts = [stored.format, numerics.compute] if linear else [numerics.compute]
    for name in casts:
        if not _contains(FORMATS[name], held):
            held = FORMATS[name]
            way += [name, stored.rounding]
    return tuple(way)


def held_plain(w: Box, numerics: Numerics, name: str) -> StoredRange:
    """Return a parameter that is not a linear weight as a kernel stores it."""
    return _rounded(w, StoredRange(w, _zero(w)), FORMATS[numerics.compute], numerics.weights, name)


def held_linear(w: Box, numerics: Numerics, name: str) -> StoredRange:
    """Return the weight [out, in] of a linear as a kernel stores it.

    Raises:
        NoBound: a number may leave its format, or a scale is too small.
    """
    stored = numerics.weights
    if stored.applied != "weights":
        raise NoBound(name, "there is no region around weights whose scales come after the sum")
    if stored.layout is None:
        first = _rounded(w, StoredRange(w, _zero(w)), FORMATS[stored.format], stored, name)
        if _contains(FORMATS[numerics.compute], FORMATS[stored.format]):
            return first
        return _rounded(w, first, FORMATS[numerics.compute], stored, name)
    held = _scaled(w, stored, name)
    if numerics.activations.quantised:
        return held
    return _rounded(w, held, FORMATS[numerics.compute], stored, name)


def _zero(w: Box) -> Box:
    return Box.point(torch.zeros_like(w.lo))


def _contains(wide: Format, narrow: Format) -> bool:
    """Return whether `wide` holds every number of `narrow` (overflow is refused elsewhere)."""
    return (
        wide.precision >= narrow.precision
        and wide.min_exponent - wide.precision <= narrow.min_exponent - narrow.precision
    )


def _rounded(w: Box, held: StoredRange, format: Format, stored: Weights, name: str) -> StoredRange:
    """Return numbers cast to a format; float32 numbers are unchanged if it is as precise.

    A cast toward zero may have twice the error of one to nearest.
    """
    if _contains(format, _FLOAT32):
        return held
    before = held.value
    casts = CASTS[stored.rounding]
    value = Box(casts.step(before.lo, format), casts.step(before.hi, format))
    refuse_overflow(name, value.mag(), format)
    cast = casts.units * torch.maximum(
        up(format.unit_roundoff * before.mag()), torch.full_like(before.lo, format.underflow)
    )
    return StoredRange(value, (value - w).meet(held.error.widen(cast)))


def _scaled(w: Box, stored: Weights, name: str) -> StoredRange:
    """Return codes times scales, both of which move with the weights."""
    form, layout = stored.codes, LAYOUTS[stored.scale]
    if not form.ball or layout.rule not in ("amax", "floor"):
        raise NoBound(name, f"there is no region around weights of {form.name} {layout.name}")
    if FORMATS[stored.scale_format].coarse:
        raise NoBound(name, "there is no region around weights whose scales are rounded")
    least, most = torch.minimum(w.lo.abs(), w.hi.abs()), w.mag()
    low, high = (_scale(group_amax(size, layout), form, layout) for size in (least, most))
    if not bool((low >= LEAST_SCALE).all()):
        raise NoBound(name, "a scale of the weights is too small")
    scales = Box(low, high)
    off = _off(most, high, form, layout)
    if form.reciprocal:
        value = _full_range(w, scales, form)
    else:
        value = quantised_hull(w, known_steps(form, w, scales))
    value = value.meet(w.widen(off))
    return StoredRange(value, (value - w).meet(Box.around(off)))


def _scale(amax: Tensor, form: CodeFormat, layout: ScaleLayout) -> Tensor:
    """Return the float32 scale of a maximum, in which it is monotone; 1 for a maximum of 0."""
    if layout.rule == "floor":
        _, exponent = torch.frexp(amax)
        found = power_of_two((exponent - 1 - form.top_exponent).clamp(*E8M0_EXPONENTS))
    else:
        found = (amax.to(torch.float32) / form.divisor).to(torch.float64)
    found = found.clamp_min(form.least_scale)
    return torch.where(amax == 0, torch.ones_like(found), found)


def _off(size: Tensor, scale: Tensor, form: CodeFormat, layout: ScaleLayout) -> Tensor:
    """Return a bound of |code·scale - v| for numbers |v| <= size."""
    rounding = code_error(form, size, scale, least=form.reciprocal)
    if form.integer or not layout.cuts:
        return up(rounding, 4)
    kept = form.above * 2.0 ** -(form.top_exponent + 1)
    return up(torch.maximum(rounding, size * (1 - kept) + size * 2.0**-20), 4)


def _full_range(w: Box, scale: Box, form: CodeFormat) -> Box:
    """Return a box of float32(code·s), code = float32(w·float32(1/s)) to the nearest integer.

    The scale of a group of zeros is 1 here and 2^-23 in the kernel; its codes are 0 either way.
    """
    inverse = Box(*(_single(1.0 / _single(end)) for end in (scale.hi, scale.lo)))

    def code(x: Tensor, r: Tensor) -> Tensor:
        return torch.round(_single(x * r)).clamp(-form.below, form.above)

    low = torch.where(w.lo >= 0, code(w.lo, inverse.lo), code(w.lo, inverse.hi))
    high = torch.where(w.hi >= 0, code(w.hi, inverse.hi), code(w.hi, inverse.lo))
    return Box(
        torch.where(low >= 0, _single(low * scale.lo), _single(low * scale.hi)),
        torch.where(high >= 0, _single(high * scale.hi), _single(high * scale.lo)),
    )


def _single(x: Tensor) -> Tensor:
    return x.to(torch.float32).to(torch.float64)


def at_rows(moved: BallTensor, ids: Tensor) -> BallTensor:
    """Return the rows of a table at the token ids."""

    def rows(box: Box) -> Box:
        low = box.lo[ids]
        return Box(low, low) if box.lo is box.hi else Box(low, box.hi[ids])

    return replace(
        moved, train=rows(moved.train), infer=rows(moved.infer), difference=rows(moved.difference)
    )
