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

from kcdsl_backends.affine.adjoint import Adjoint, at, whole
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.tape import PASS, SAFE, Entry
from kcdsl_backends.interval.box import Box, gamma, up
from kcdsl_backends.interval.quantisers import (
    CODES,
    ROUNDING,
    codes,
    quantised_hull,
    scale_range,
)

Pulled = Sequence[tuple[int, Adjoint]]
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
    known = around.lo > 0
    safe = Box(torch.where(known, around.lo, 1.0), torch.where(known, around.hi, 1.0))
    found, hull = codes(box, safe, spec.format), quantised_hull(box, safe, spec.format)
    middle, half = (found.low + found.high) / 2, (found.high - found.low) / 2
    largest = torch.maximum(found.low.abs(), found.high.abs())
    own = (half + ROUNDING * largest) * safe.hi * SAFE
    scale = _scale(run, name, index, x, box, safe)
    if scale.index is None:
        own = (own + middle.abs() * scale.reach) * SAFE
    stairs = known & (own <= error)
    keep = (~stairs).to(own.dtype)
    weights = torch.where(stairs, middle, 0.0)
    carried = weights.abs() * scale.reach if scale.index is not None else torch.zeros_like(own)
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

    kept = not bool(stairs.any())
    return Entry(f"{name}/input", reference, reach, pull, None, radius, kept=kept)


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
