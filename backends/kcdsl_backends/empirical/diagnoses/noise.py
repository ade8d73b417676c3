"""The error of each kernel beside what the numerics that it claims allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.empirical.diagnoses.distances import size
from kcdsl_backends.empirical.diagnoses.model import BEYOND, SIDES, Probe

_FLOOR = 64 * 2.0**-53
"""Error, relative to the size of the outputs, that float64 itself makes."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Distances from the run without roundings, of train and of infer (`distances.size`).

    `expected` is that of a plain program in the claimed formats, plus what two runs of the kernel
    differ by.
    """

    observed: tuple[float, float]
    expected: tuple[float, float]

    def ratio(self, side: int) -> float:
        """Return how many times what its claim allows a side errs."""
        return self.observed[side] / self.expected[side]

    @property
    def beyond(self) -> tuple[int, ...]:
        """Return the sides that err more than their claims explain."""
        return tuple(side for side in (0, 1) if self.ratio(side) > BEYOND)

    def shown(self, side: int) -> str:
        """Return the figures of a side in words."""
        return (
            f"{SIDES[side]} lies {self.observed[side]:.2g} from the model without roundings, "
            f"{self.ratio(side):.2g} times what its numerics explain"
        )


def noise_of(probes: Sequence[Probe], *, states: bool) -> Noise | None:
    """Return the noise of both kernels; None without a reference run."""
    known = [(p, p.gold, p.claimed) for p in probes if p.gold is not None and p.claimed is not None]
    finite = [(p, g, c) for p, g, c in known if all_finite(p.train, p.infer, g, *c)]
    if not finite:
        return None
    observed, expected = [], []
    for side in (0, 1):
        seen = [size(g, p.side(side), states=states) for p, g, _ in finite]
        allowed = [
            size(g, c[side], states=states) + p.wobble[side] + floor(g) for p, g, c in finite
        ]
        observed.append(sum(seen) / len(finite))
        expected.append(sum(allowed) / len(finite))
    return Noise((observed[0], observed[1]), (expected[0], expected[1]))


def floor(gold: Tensor) -> float:
    """Return the error that a run in float64 may have."""
    return _FLOOR * float(gold.square().mean().sqrt()) + 1e-300


def all_finite(*outputs: Tensor) -> bool:
    """Say whether every number of every output is finite."""
    return all(bool(torch.isfinite(output).all()) for output in outputs)
