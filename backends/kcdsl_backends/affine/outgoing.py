"""Ellipsoids around the drift of a link's output, for the link behind it (docs/chains.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl_backends.affine.ellipsoids import around_sum
from kcdsl_backends.affine.energy import ellipsoid
from kcdsl_backends.affine.handing import Around
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.pair import Both, output_entry
from kcdsl_backends.affine.reaches import on_row
from kcdsl_backends.affine.tape import INPUT, SAFE

LARGEST = 2**29
"""Numbers in the ellipsoids of a state; where there would be more, none are handed on."""
FAINT = 2.0**-16
"""Up to this share of the larger error of a row the other one is known well enough by its box."""


def around(forms: Both) -> Around | None:
    """Return ellipsoids around the drift of the rows of the output; None where they would be large.

    D = (h̃_i - h̃_t) + e_i - e_t, and each error lies in one of its own.
    """
    shape = forms.shape
    if len(shape) != 2 or shape[0] * shape[1] ** 2 > LARGEST:
        return None
    middle, off = forms.known.midpoint()
    ends = forms.ends
    shapes = []
    for row in range(shape[0]):
        sizes = [float(end.reach[row].norm()) for end in ends]
        parts = [
            _box(end.reach[row]) if size <= FAINT * max(sizes) else _error(run, forms.output, row)
            for run, end, size in zip((forms.train, forms.infer), ends, sizes, strict=True)
        ]
        slip = float(off[row].norm()) * SAFE
        unit = torch.eye(shape[1], dtype=torch.float64, device=middle.device)
        shapes.append(around_sum([*parts, slip**2 * unit]))
    return Around(middle, torch.stack(shapes))


def _error(run: KernelRun, output: str, row: int) -> Tensor:
    """Return an ellipsoid around the error of a row of the output in one kernel."""
    entry, index = output_entry(run, output), run.computed[output]
    if (row,) in entry.ellipsoids:
        return entry.ellipsoids[(row,)]
    unit = torch.eye(entry.shape[-1], dtype=torch.float64, device=entry.reference.device)
    floor = run.tape.cut if run.tape.cut < index else INPUT
    return ellipsoid(run.tape, index, on_row(unit, (row,), entry.shape), floor)


def _box(reach: Tensor) -> Tensor:
    """Return an ellipsoid around a box: (Σ ρ)·diag(ρ)."""
    return torch.diag(reach) * float(reach.sum()) * SAFE
