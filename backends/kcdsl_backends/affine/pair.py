"""The drift between two kernels, from the errors of each (section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph
from kcdsl_backends.affine.adjoint import Adjoint
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.propagate import write
from kcdsl_backends.affine.reaches import unit_functionals
from kcdsl_backends.affine.tape import Range
from kcdsl_backends.interval.box import Box, down, gamma, up
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.parameters import StoredParameters


@dataclass(frozen=True, slots=True)
class Drift:
    """The box of the output's drift, and for every computed node (largest size, largest drift)."""

    box: Box
    witness: Mapping[str, tuple[float, float]]


def drift(
    graph: BlockGraph,
    train: StoredParameters,
    infer: StoredParameters,
    centre: Tensor | None,
    radius: Tensor,
) -> Drift:
    """Bound the drift of every output element for inputs in [centre - radius, centre + radius].

    Args:
        graph: the block.
        train, infer: what both kernels store; their numerics are the kernels'.
        centre: [T, D] float64; None for a block on token ids.
        radius: broadcastable to [T, D], float64, >= 0.

    Raises:
        NoBound: no finite bound exists.
    """
    runs = tuple(write(graph, side, centre, radius) for side in (train, infer))
    if any(graph.output not in run.computed for run in runs):
        raise NoBound(graph.output, "the output does not depend on the input")
    return Drift(_output(graph.output, *runs), _witness(*runs))


def _output(name: str, train: KernelRun, infer: KernelRun) -> Box:
    first, second = train.computed[name], infer.computed[name]
    one, two = train.tape.entries[first], infer.tape.entries[second]
    low, high = torch.empty_like(one.reference), torch.empty_like(one.reference)
    region = train.tape.radius
    for i, start, stop, functionals in unit_functionals(one.shape, low.device):
        a = train.tape.bound(first, functionals)
        b = infer.tape.bound(second, functionals)
        moved = _region_difference(a, b, region)
        low[i].view(-1)[start:stop] = down(b.low - a.high - moved)
        high[i].view(-1)[start:stop] = up(b.high - a.low + moved)
    known = Box.point(two.reference) - Box.point(one.reference)
    box = known + Box(low, high)
    if not bool((torch.isfinite(box.lo) & torch.isfinite(box.hi)).all()):
        raise NoBound(name, "a bound is not finite")
    return box


def _region_difference(a: Range, b: Range, radius: Tensor) -> Tensor:
    """Bound |(α_infer - α_train)·(x - centre)|: the input is the same for both kernels."""
    zero = torch.zeros_like(a.low)
    if not bool((radius > 0).any()):
        return zero
    match a.region, b.region:
        case None, None:
            return zero
        case Adjoint() as one, None:
            both, sizes = one, one.magnitude(radius)
        case None, Adjoint() as one:
            both, sizes = one, one.magnitude(radius)
        case Adjoint() as one, Adjoint() as two:
            both = one.times(-1.0).plus(two)
            sizes = one.magnitude(radius) + two.magnitude(radius)
        case _:
            raise AssertionError("a region is an adjoint or None")
    terms = both.values[0].numel() + 8
    return both.magnitude(radius) * (1 + 2 * gamma(terms)) + 2.0**-52 * sizes


def _witness(train: KernelRun, infer: KernelRun) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for name, index in train.computed.items():
        one, two = train.tape.entries[index], infer.tape.entries[infer.computed[name]]
        moved = (two.reference - one.reference).abs() + one.reach + two.reach
        found[name] = float(one.size.amax()), float(up(moved, 4).amax())
    return found
