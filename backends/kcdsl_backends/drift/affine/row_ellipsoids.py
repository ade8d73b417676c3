"""Ellipsoids that products and activations ask of their operands (Rule 3.9)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import stretch
from kcdsl_backends.drift.affine.ellipsoids import Energy, Squares
from kcdsl_backends.drift.affine.error_bounds import surround_rows
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.tape import INPUT
from kcdsl_backends.drift.boxes import SAFE

LARGEST = 2**27
"""Numbers in the ellipsoids of an operand; where there would be more, none are found."""


def squares(run: KernelRun, node: Node, index: int, needed: Tensor) -> Squares | None:
    """Return what bounds weighted squares of an operand's errors in the rows [..., 1] needed, by
    ellipsoids from passes that stop at those of the cut; None without these, or where they would
    be too large."""
    tape, entry = run.tape, run.tape.entries[index]
    if entry.squares is not None or tape.chance is not None or tape.near == INPUT:
        return entry.squares
    numbers = entry.reference.numel() * entry.shape[-1]
    if numbers > LARGEST or not run.passing(node, index, "ellipsoid", needed, tape.near):
        return None
    tape.tighten(index, surround_rows(tape, index, needed, tape.near, lengths=False)[0])
    entry, length = tape.entries[index], _length(run, index)
    found = Squares(
        {row: Energy.of(matrix, float(length[row])) for row, matrix in entry.ellipsoids.items()}
    )
    tape.entries[index] = replace(entry, squares=found)
    return found


def _length(run: KernelRun, index: int) -> Tensor:
    """Bound the norms of the rows of an entry [..., 1]: of the image of one that are bounded."""
    entry = run.tape.entries[index]
    nothing = torch.full_like(entry.error_bound[..., :1], torch.inf)
    linear = run.nodes.get(entry.name)
    if linear is None or linear.op != "linear" or run.quantises(linear) or entry.radius is None:
        return nothing
    below = run.operand(linear, 0).index
    length = None if below is None else run.tape.entries[below].length
    if length is None or not entry.kept:
        return nothing
    weight = run.parameters.kept(run.source(linear, 1)).to(torch.float64)
    found: Tensor = stretch(weight) * length + entry.radius.norm(dim=-1, keepdim=True)
    return found * SAFE * SAFE
