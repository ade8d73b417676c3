"""Both kernels of a block: the drift between them, from the errors of each (section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph
from kcdsl_backends.affine.adjoint import Adjoint
from kcdsl_backends.affine.energy import norm
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.propagate import coarsest, write
from kcdsl_backends.affine.reaches import on_row, unit_functionals
from kcdsl_backends.affine.tape import Entry, Range
from kcdsl_backends.interval.box import Box, down, gamma, up
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.parameters import StoredParameters


@dataclass(frozen=True, slots=True)
class Drift:
    """The box of the output's drift, and for every computed node (largest size, largest drift)."""

    box: Box
    witness: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Both:
    """The reference runs of both kernels, with the tapes of their errors."""

    output: str
    train: KernelRun
    infer: KernelRun

    @property
    def ends(self) -> tuple[Entry, Entry]:
        """Return the entries of the output, training and inference."""
        return output_entry(self.train, self.output), output_entry(self.infer, self.output)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the output."""
        return self.ends[0].shape

    @property
    def known(self) -> Box:
        """Return the difference of the references, with the rounding of its subtraction."""
        one, two = self.ends
        return Box.point(two.reference) - Box.point(one.reference)

    def errors(self, functionals: Adjoint) -> Box:
        """Bound a·e_infer - a·e_train for functionals of the output [B]."""
        a = self.train.tape.bound(self.train.computed[self.output], functionals)
        if self.infer is self.train:
            b = a
        else:
            b = self.infer.tape.bound(self.infer.computed[self.output], functionals)
        moved = _region_difference(a, b, self.train.tape.radius)
        return Box(down(b.low - a.high - moved), up(b.high - a.low + moved))

    def box(self) -> Box:
        """Bound the drift of every element of the output.

        Raises:
            NoBound: a bound is not finite.
        """
        one, _ = self.ends
        low, high = torch.empty_like(one.reference), torch.empty_like(one.reference)
        for i, start, stop, functionals in unit_functionals(one.shape, low.device):
            found = self.errors(functionals)
            low[i].view(-1)[start:stop] = found.lo
            high[i].view(-1)[start:stop] = found.hi
        box = self.known + Box(low, high)
        if not bool((torch.isfinite(box.lo) & torch.isfinite(box.hi)).all()):
            raise NoBound(self.output, "a bound is not finite")
        return box

    def length(self, row: tuple[int, ...]) -> float:
        """Bound the Euclidean norm of the drift of a row: of what is known, and of both errors."""
        known = self.known.mag()[row]
        unit = torch.eye(known.numel(), dtype=known.dtype, device=known.device)
        functionals = on_row(unit, row, self.shape)
        sides = [self.train] if self.infer is self.train else [self.train, self.infer]
        sizes = [norm(side.tape, side.computed[self.output], functionals) for side in sides]
        centre = float(known.square().sum().sqrt() * (1 + 2 * gamma(known.numel() + 4)))
        total = centre + sizes[0] + sizes[-1]
        return total * (1 + 2.0**-50)

    def witness(self) -> dict[str, tuple[float, float]]:
        """Return for every computed node (largest size, largest drift)."""
        found: dict[str, tuple[float, float]] = {}
        for name, index in self.train.computed.items():
            one = self.train.tape.entries[index]
            two = self.infer.tape.entries[self.infer.computed[name]]
            moved = (two.reference - one.reference).abs() + one.reach + two.reach
            found[name] = float(one.size.amax()), float(up(moved, 4).amax())
        return found


def output_entry(run: KernelRun, output: str) -> Entry:
    """Return the entry of the output in one kernel."""
    return run.tape.entries[run.computed[output]]


def both(
    graph: BlockGraph,
    train: StoredParameters,
    infer: StoredParameters,
    centre: Tensor | None,
    radius: Tensor,
) -> Both:
    """Run both kernels at the centre of [centre - radius, centre + radius], with their errors.

    Where both have the same numerics, their runs are the same set and one tape serves both.

    Args:
        graph: the block.
        train, infer: what both kernels store; their numerics are the kernels'.
        centre: [T, D] float64; None for a block on token ids.
        radius: broadcastable to [T, D], float64, >= 0.

    Raises:
        NoBound: some result has no finite bound.
    """
    grain = coarsest(graph, train, infer)
    one = write(graph, train, centre, radius, grain)
    two = one if _same(train, infer) else write(graph, infer, centre, radius, grain)
    if graph.output not in one.computed or graph.output not in two.computed:
        raise NoBound(graph.output, "the output does not depend on the input")
    return Both(graph.output, one, two)


def drift(
    graph: BlockGraph,
    train: StoredParameters,
    infer: StoredParameters,
    centre: Tensor | None,
    radius: Tensor,
) -> Drift:
    """Bound the drift of every output element; arguments and errors are those of `both`."""
    pair = both(graph, train, infer, centre, radius)
    return Drift(pair.box(), pair.witness())


def _same(train: StoredParameters, infer: StoredParameters) -> bool:
    """Say whether both kernels admit the same runs: the same numbers under the same numerics."""
    stored = train.tensors is infer.tensors and train.constants is infer.constants
    return stored and replace(infer.numerics, preset=train.numerics.preset) == train.numerics


def _region_difference(a: Range, b: Range, radius: Tensor) -> Tensor:
    """Bound |(α_infer - α_train)·(x - centre)|: the input is the same for both kernels."""
    zero = torch.zeros_like(a.low)
    if a is b or not bool((radius > 0).any()):
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
