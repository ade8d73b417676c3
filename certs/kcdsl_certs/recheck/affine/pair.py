"""Both kernels together: the drift of the output, element by element, and the sizes of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.adjoint import merged, units
from kcdsl_certs.recheck.affine.form import Form, Walk, numeric, raised
from kcdsl_certs.recheck.affine.kernel import walk
from kcdsl_certs.recheck.affine.reaches import room
from kcdsl_certs.recheck.affine.tape import Bound
from kcdsl_certs.recheck.box import Box, Floats
from kcdsl_certs.recheck.rules.state import Mask, Scene

_WIDEST = 256  # unit functionals of an output row at a time


@dataclass(frozen=True, slots=True)
class Drift:
    """The box of inference minus training of the output, and (largest value, drift) by node."""

    output: Box
    sizes: Mapping[str, tuple[float, float]]


def drift(scene: Scene) -> Drift:
    """Return what the affine forms of both kernels say.

    Raises:
        Rejection: naming the node.
    """
    train = walk(scene, scene.train)
    infer = train if scene.infer == scene.train else walk(scene, scene.infer)
    t, i = numeric(train.forms[scene.block.output]), numeric(infer.forms[scene.block.output])
    apart = box.sub(box.exact(i.reference), box.exact(t.reference))
    reaches = raised(t.reach + i.reach)
    around = box.widen(apart, reaches)
    lo, hi = around.lo.copy(), around.hi.copy()
    step = min(_WIDEST, room(train), room(infer))
    for row in np.ndindex(*t.shape[:-1]):
        for first in range(0, t.shape[-1], step):
            count = min(step, t.shape[-1] - first)
            where = (*row, slice(first, first + count))
            found = _row(train, infer, (t, i), row, first, count)
            lo[where] = np.maximum(lo[where], box.add_down(apart.lo[where], found.lo))
            hi[where] = np.minimum(hi[where], box.add_up(apart.hi[where], found.hi))
    output = box.checked(Box(lo, hi), "the drift of the output")
    return Drift(output, {name: _sizes(train, infer, name) for name in train.forms})


def _row(
    train: Walk, infer: Walk, forms: tuple[Form, Form], row: tuple[int, ...], first: int, count: int
) -> Box:
    """Return the box of e_i - e_t of some elements of one row of the output."""
    t = _bound(train, forms[0], row, first, count)
    i = t if infer is train else _bound(infer, forms[1], row, first, count)
    middle = box.sub(box.exact(i.centre), box.exact(t.centre))
    wide = raised(t.radius + i.radius)
    region = train.tape.region
    if region is not None and i is not t and region.any():
        wide = raised(wide + _apart(t, i, region, count))
    return box.widen(middle, wide)


def _bound(at: Walk, form: Form, row: tuple[int, ...], first: int, count: int) -> Bound:
    if form.place is None:
        return Bound(np.zeros(count), np.zeros(count), None)
    return at.tape.bound(form.place, units(form.shape, row, first, count))


def _apart(t: Bound, i: Bound, region: Floats, count: int) -> Floats:
    """Return Σ |α_i - α_t|·radius of the region, the sums of float64 included."""
    if t.input is None or i.input is None:
        one = t.input or i.input
        return np.zeros(count) if one is None else one.sizes(region) * (1 + region.size * 2.0**-51)
    minus = type(t.input)(-t.input.values, t.input.start)
    apart = merged(i.input, minus)
    return apart.sizes(region) * (1 + (region.size + 8) * 2.0**-51)


def _sizes(train: Walk, infer: Walk, name: str) -> tuple[float, float]:
    """Return the largest |h̃_t| + ρ_t and the largest |h̃_i - h̃_t| + ρ_i + ρ_t of a node."""
    t, i = train.forms[name], infer.forms[name]
    if isinstance(t, Mask) or isinstance(i, Mask):
        return 0.0, 0.0
    apart = raised(np.abs(i.reference - t.reference)) + t.reach + i.reach
    size = np.abs(t.reference) + t.reach
    return float(raised(size).max()), float(raised(apart).max())
