"""Ellipsoids around the operands of products and activations (Rule 3.9)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Row
from kcdsl_backends.drift.affine.ellipsoids import (
    RankOne,
    RowSquares,
    WeightedSquares,
    around_sum,
    product_of,
    stretch,
)
from kcdsl_backends.drift.affine.error_bounds import each_ellipsoid
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.tape import INPUT
from kcdsl_backends.drift.boxes import SAFE

LARGEST = 2**27
"""Most numbers in the ellipsoids of an operand; larger ones are not made."""


def squares(run: KernelRun, node: Node, index: int, needed: Tensor) -> RowSquares | None:
    """Return bounds of weighted squares of an operand's errors in the rows [..., 1] needed, by
    ellipsoids from passes that stop at those of the cut; None without these, or if they were too
    large."""
    tape, entry = run.tape, run.tape.entries[index]
    if entry.squares is not None or tape.chance is not None or tape.near == INPUT:
        return entry.squares
    numbers = entry.reference.numel() * entry.shape[-1]
    if numbers > LARGEST or not run.passing(node, index, "ellipsoid", needed, tape.near):
        return None
    image, single = LinearImage.of(run, index), torch.full_like(entry.error_bound, torch.inf)
    found = {}
    for row, matrix, elements in each_ellipsoid(tape, index, needed, tape.near):
        found[row] = (
            WeightedSquares.of(matrix, torch.inf)
            if image is None
            else image.weighted_squares(row, matrix)
        )
        single[row] = elements
    tape.tighten(index, single)
    known = RowSquares(found)
    tape.entries[index] = replace(tape.entries[index], squares=known)
    if image is not None:
        tape.tighten(index, image.elements)
    return known


@dataclass(frozen=True, slots=True)
class LinearImage:
    """Rows W e_x + o with |e_x|₂ <= `length` [..., 1] and |o| <= `own` [..., n].

    `products` is W Wᵀ, `largest` bounds the largest singular value of W.
    """

    products: Tensor
    largest: float
    length: Tensor
    own: Tensor

    @staticmethod
    def of(run: KernelRun, index: int) -> LinearImage | None:
        """Return the image by a linear of rows of bounded norm; None for other entries."""
        entry = run.tape.entries[index]
        linear = run.nodes.get(entry.name)
        if linear is None or linear.op != "linear" or run.quantises(linear):
            return None
        below = run.operand(linear, 0).index
        length = None if below is None else run.tape.entries[below].length
        if length is None or entry.radius is None or not entry.kept:
            return None
        weight = run.parameters.kept(run.source(linear, 1)).to(torch.float64)
        return LinearImage(product_of(weight), stretch(weight), length, entry.radius)

    def weighted_squares(self, row: Row, matrix: Tensor) -> WeightedSquares:
        """Return the weighted squares of a row's errors by an ellipsoid or by that of the image,
        whichever has the smaller trace."""
        length, own = float(self.length[row]), float(self.own[row].norm()) * SAFE
        norm = (self.largest * length + own) * SAFE
        by_length = math.sqrt(float(self.products.trace())) * length
        if (by_length + own * math.sqrt(len(matrix))) ** 2 >= float(matrix.trace()):
            return WeightedSquares.of(matrix, norm)  # whose trace is less than that of the other
        rest = RankOne(self.own[row], 0.0, own**2)
        ball = around_sum([self.products * (length**2 * SAFE), rest])
        return WeightedSquares.of(ball, norm)

    @property
    def elements(self) -> Tensor:
        """Return bounds of the errors element by element."""
        return (self.products.diagonal().sqrt() * self.length + self.own) * SAFE * SAFE
