"""Dynamic quantisation to nearest: codes that are known, times a scale that they share (section 3).

Where few codes can be met, x̂ = c·s with c known or nearly so. The scale s of a group is one number,
the same for all its elements: it is an entry of its own, and linear in the error of the element of
largest magnitude where it is certain which one that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.numerics import Activations
from kcdsl_backends.affine.adjoint import Adjoint, at, whole
from kcdsl_backends.affine.cases import Cases, Together
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.storing import half_step
from kcdsl_backends.affine.tape import PASS, SAFE, Entry
from kcdsl_backends.interval.box import Box, down, gamma, up
from kcdsl_backends.interval.quantisers import (
    CODES,
    LEAST_SCALE,
    ROUNDING,
    Codes,
    codes,
    quantised_hull,
    scale_range,
)

Pulled = Sequence[tuple[int, Adjoint]]
SHARE = 2.0**-2
"""Up to this share of Q a scale may move its elements: else they are better known than it is."""
_SHARED = ("per_token", "per_tensor")


@dataclass(frozen=True, slots=True)
class _Scale:
    """The scales of a tensor: reference and reach at every element, and the entry they are."""

    reference: Tensor
    reach: Tensor
    index: int | None


def quantise(run: KernelRun, name: str, index: int, x: Entry, error: Tensor) -> Entry | None:
    """Return the entry of a quantised operand; None where nothing is known beside its error (Q).

    Args:
        name: the linear that reads it.
        index, x: the operand before.
        error: Q, elementwise.
    """
    spec, kernel = run.rounding.numerics.activations, run.rounding
    if kernel.free or spec.format not in CODES:
        return None
    box = Box(x.reference - x.reach * SAFE, x.reference + x.reach * SAFE)
    around = scale_range(box, spec.format, spec.scale)
    known = around.lo >= LEAST_SCALE
    safe = Box(torch.where(known, around.lo, 1.0), torch.where(known, around.hi, 1.0))
    found, hull = codes(box, safe, spec.format), quantised_hull(box, safe, spec.format)
    each = found if x.cases is None else _in_cases(x.cases, found, safe, spec.format)
    if x.cases is not None:
        found = Codes(each.low.amin(0), each.high.amax(0))
    middle, half = (found.low + found.high) / 2, (found.high - found.low) / 2
    rounding = ROUNDING * torch.maximum(found.low.abs(), found.high.abs()) * safe.hi * SAFE
    scale = _scale(run, name, index, x, box, safe)
    if scale.index is None:
        rounding = (rounding + middle.abs() * scale.reach) * SAFE
    own = (half * safe.hi + rounding) * SAFE
    least = own
    if x.cases is not None:
        least = (((each.high - each.low) / 2).amax(0) * safe.hi + rounding) * SAFE
    along = middle.abs() * scale.reach
    stairs = known & (least <= error)
    if scale.index is not None:
        stairs &= along <= SHARE * error
    error = torch.where(known, torch.minimum(error, _widest_step(spec, found, safe, x)), error)
    keep = (~stairs).to(own.dtype)
    weights = torch.where(stairs, middle, 0.0)
    carried = torch.zeros_like(own) if scale.index is None else torch.where(stairs, along, 0.0)
    reference = torch.where(stairs, middle * scale.reference, x.reference)
    reach = torch.where(stairs, own + carried, x.reach + error) * SAFE
    apart = up(torch.maximum(hull.hi - reference, reference - hull.lo), 2)
    reach = torch.where(known, torch.minimum(reach, apart), reach)
    radius = torch.where(stairs, own + gamma(own.numel() + PASS) * carried, error) * SAFE
    straight = bool(stairs.all())
    grouped = tuple(range(1, 1 + own.dim())) if spec.scale == "per_tensor" else (-1,)

    def pull(a: Adjoint) -> Pulled:
        parts = [] if straight else [(index, a.times(keep))]
        if scale.index is not None:
            values = (a.values * weights[at(a.window)]).sum(grouped, keepdim=True)
            shape = _scale_shape(tuple(own.shape), spec.scale)
            window = whole(shape) if spec.scale == "per_tensor" else (*a.window[:-1], (0, 1))
            parts.append((scale.index, Adjoint(values, window, shape)))
        return parts

    kept, together = not bool(stairs.any()), None
    if x.cases is not None:
        steps = _steps(each, middle, safe, rounding, stairs)
        rest = torch.where(stairs, gamma(own.numel() + PASS) * carried, error) * SAFE
        together = Together(Cases(steps.lo, steps.hi, x.cases.width), rest)
    return Entry(
        f"{name}/input", reference, reach, pull, None, radius, kept=kept, together=together
    )


def _in_cases(cases: Cases, found: Codes, scale: Box, format: str) -> Codes:
    """Return the codes [C, ...] in every case, within those that are found without cases."""
    each = codes(Box(cases.low, cases.high), scale, format)
    low = torch.minimum(torch.maximum(each.low, found.low), found.high)
    return Codes(low, torch.maximum(torch.minimum(each.high, found.high), found.low))


def _widest_step(spec: Activations, found: Codes, scale: Box, x: Entry) -> Tensor:
    """Bound |x̂ - x|: half a step of the codes that are met, times the scale, and roundings.

    A scale of mx may cut numbers off, which then have the largest code: there is no such bound.
    """
    form, largest = CODES[spec.format], torch.maximum(found.low.abs(), found.high.abs())
    off = half_step(largest, form) * scale.hi
    off = (off + 4 * ROUNDING * (largest * scale.hi + x.size)) * SAFE
    return torch.where(largest < form.largest, off, torch.inf) if spec.scale == "mx" else off


def _steps(each: Codes, middle: Tensor, scale: Box, rounding: Tensor, stairs: Tensor) -> Box:
    """Return (c - ĉ)·s in every case, with its rounding; 0 where there are no stairs."""
    low, high = each.low - middle, each.high - middle
    least = torch.minimum(low * scale.lo, low * scale.hi) - rounding
    most = torch.maximum(high * scale.lo, high * scale.hi) + rounding
    return Box(torch.where(stairs, down(least, 2), 0.0), torch.where(stairs, up(most, 2), 0.0))


def _scale_shape(shape: tuple[int, ...], scale: str) -> tuple[int, ...]:
    return (1,) * len(shape) if scale == "per_tensor" else (*shape[:-1], 1)


def _scale(run: KernelRun, name: str, index: int, x: Entry, box: Box, around: Box) -> _Scale:
    """Append the entry of the scales, where a group shares one that is not exactly known."""
    spec = run.rounding.numerics.activations
    middle = around.lo / 2 + around.hi / 2
    reach = up(torch.maximum(around.hi - middle, middle - around.lo), 2)
    if spec.scale not in _SHARED:
        return _Scale(middle, reach, None)
    shape, top = _scale_shape(x.shape, spec.scale), CODES[spec.format].largest
    rows = (-1, x.shape[-1]) if spec.scale == "per_token" else (1, -1)
    least = torch.maximum(box.lo, -box.hi).reshape(rows)
    most = box.mag().reshape(rows)
    first = least.argmax(-1, keepdim=True)
    others = most.scatter(-1, first, -torch.inf).amax(-1, keepdim=True)
    certain = (least.gather(-1, first) >= others) & (least.gather(-1, first) > 0)
    chosen = x.reference.reshape(rows).gather(-1, first)
    moved = x.reach.reshape(rows).gather(-1, first) / top * SAFE
    first_row = [t.reshape(rows)[:, :1] for t in (middle, reach, around.hi)]
    slack = 2 * ROUNDING * first_row[2]
    reference = torch.where(certain, chosen.abs() / top, first_row[0]).reshape(shape)
    radius = torch.where(certain, slack, first_row[1]).reshape(shape)
    wide = torch.where(certain, (moved + slack) * SAFE, first_row[1]).reshape(shape)
    selector = torch.zeros_like(most).scatter(-1, first, torch.sign(chosen) / top * certain)
    selector = selector.reshape(x.shape)

    def pull(a: Adjoint) -> Pulled:
        if spec.scale == "per_tensor":
            return [(index, Adjoint.full(a.values * selector))]
        window = (*a.window[:-1], (0, x.shape[-1]))
        return [(index, Adjoint(a.values * selector[at(window)], window, x.shape))]

    place = run.tape.add(Entry(f"{name}/scale", reference, wide, pull, None, radius))
    return _Scale(reference.expand(x.shape), wide.expand(x.shape), place)
