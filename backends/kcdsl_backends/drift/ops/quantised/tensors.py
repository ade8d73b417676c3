"""Static quantisers of tensors: relational-interval.md, Rule 2.22, and affine-forms.md, 2.13."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics import StaticQuantiser
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.cases import beyond
from kcdsl_backends.drift.affine.independent import Roundings
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.tape import Adjoints, TapeEntry
from kcdsl_backends.drift.boxes import SAFE, Box, NoBound, up
from kcdsl_backends.drift.boxes.quantisers import SLACK, single
from kcdsl_backends.drift.boxes.rounding import StoredResult
from kcdsl_backends.drift.boxes.state import State, Step, combine

LAST = 255
"""The last code; the first one is 0."""
_HALF, _SLIP = 0.5 + 2.0**-12, 2.0**-12
"""Half a step, and a bound of the roundings of a ratio and of a product, in steps."""


def quantised_box(x: Box, by: StaticQuantiser) -> StoredResult:
    """Return a quantised tensor as it is read back, and its error."""
    scale, first, last = by.scale, -by.zero_point, LAST - by.zero_point

    def read(ratio: Tensor) -> Tensor:
        return single(torch.round(ratio).clamp(first, last) * scale)

    ends = x.lo / scale, x.hi / scale
    low, high = (read(r + side * SLACK * r.abs()) for r, side in zip(ends, (-1, 1), strict=True))
    below = (x.hi - last * scale) + _SLIP * scale
    above = (first * scale - x.lo) + _SLIP * scale
    error = Box(-up(below.clamp_min(_HALF * scale), 4), up(above.clamp_min(_HALF * scale), 4))
    return StoredResult(Box(low, high), (Box(low, high) - x).meet(error))


def interval_quantise(step: Step) -> State:
    """Bound a tensor as both kernels read it; one without a quantiser for it reads the operand.

    Raises:
        NoBound: the graph is read at any number of rows.
    """
    x, node, zero = step.operand(0), step.node, torch.zeros_like(step.operand(0).drift.lo)
    if step.kernels.rows is not None:
        raise NoBound(node.name, "a quantised tensor of sequences of any length")
    sides = []
    for kernel, own, apart in zip(
        (step.kernels.train, step.kernels.infer), (x.train, x.infer), x.apart, strict=True
    ):
        by = kernel.numerics.quantiser(node)
        passed = StoredResult(own, Box(zero, zero), apart)
        sides.append(passed if by is None else quantised_box(own, by))
    return combine(node.name, x.drift, *sides)


def affine_tensor(run: KernelRun, node: Node, by: StaticQuantiser) -> None:
    """Append a quantised tensor as a kernel reads it: the same value for all readers, computed from
    one reading of the operand."""
    name = node.inputs[0]
    index = run.reading(name, node.name) if name in run.private else run.entry(node, 0)[0]
    x = run.tape.entries[index]
    spread = x.error_bound * SAFE
    found = quantised_box(beyond(Box(x.reference - spread, x.reference + spread)), by)
    low, high, error = found.value.lo, found.value.hi, found.error
    middle, shift = low / 2 + high / 2, error.lo / 2 + error.hi / 2
    half = up(torch.maximum(high - middle, middle - low), 2)
    wide = up(torch.maximum(error.hi - shift, shift - error.lo), 2)
    by_steps = half <= wide
    moved = x.reference + shift
    keep = (~by_steps).to(wide.dtype)
    reference = torch.where(by_steps, middle, moved)
    radius = torch.where(by_steps, half, wide + 2.0**-52 * moved.abs()) * SAFE
    farthest = up(torch.maximum(high - reference, reference - low), 2)
    error_bound = torch.minimum((x.error_bound * keep + radius) * SAFE, farthest)

    def vjp(a: Adjoint) -> Adjoints:
        return [] if bool(by_steps.all()) else [(index, a.times(keep))]

    certain = None if run.tape.chance is None else Roundings.none(radius)
    entry = TapeEntry(
        node.name, reference, error_bound, vjp, None, radius,
        kept=not bool(by_steps.any()), roundings=certain,
    )  # fmt: skip
    run.computed[node.name] = run.tape.add(entry)
