"""Ellipsoids from link to link of a chain: how far rows of a state may drift (docs/chains.md).

Of the drift of a link's output more is known than a box: the errors of both kernels lie in
ellipsoids, row by row. The link behind reads a symbol of its own for the drift; with them it knows
which of its elements move together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Adjoint, by_rows
from kcdsl_backends.drift.affine.eigenvalues import Ellipsoids, around_sum, longest, reached
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.tape import Entry, Nonlinear
from kcdsl_backends.drift.boxes.box import SAFE


@dataclass(frozen=True, slots=True)
class InterfaceEllipsoids:
    """Where the rows of a tensor lie: row t in middle[t] + {e: |a·e| <= √(aᵀ P[t] a) for all a}.

    `middle` is [T, n] and `shapes` [T, n, n], float64.
    """

    middle: Tensor
    shapes: Tensor

    def on(self, device: torch.device) -> InterfaceEllipsoids:
        """Return it on a device."""
        return InterfaceEllipsoids(self.middle.to(device), self.shapes.to(device))


def drift_entry(
    run: KernelRun, handed: InterfaceEllipsoids, middle: Tensor, own: Tensor, reference: Tensor
) -> int:
    """Append the drift of an input as an entry of its own; return its index.

    Args:
        middle: of the box of the drift.
        own: half its width, with what `reference` was rounded by.
        reference: the input's centre + middle, as rounded.
    """
    shifts = handed.middle - middle
    slips = 2.0**-51 * reference.abs()  # what the shifts lost is less than around_sum adds
    unit = torch.eye(middle.shape[-1], dtype=torch.float64, device=middle.device)
    found: Ellipsoids = {
        (t,): around_sum(
            [
                handed.shapes[t],
                torch.outer(shifts[t], shifts[t]),
                float(slips[t].norm()) ** 2 * unit,
            ]
        )
        for t in range(middle.shape[0])
    }

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        size = reached(found, own, a)
        return -size, size

    def together(a: Adjoint) -> float:
        total = 0.0
        for row, part in by_rows(a):
            columns = slice(*part.window[-1])
            by_box = float(part.magnitude(own).norm())
            total += min(longest(found[row][columns, columns], part.values.flatten(1)), by_box)
        return total * SAFE

    zero = torch.zeros_like(own)
    nonlinear = Nonlinear(between, together)
    entry = Entry("drift", zero, own, lambda a: [], nonlinear=nonlinear, ellipsoids=found)
    return run.tape.add(entry)
