"""Ellipsoids around the operands of products and activations, and balls around images by a linear
of rows of bounded norm (Rule 3.9)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import MORE, Row
from kcdsl_backends.drift.affine.ellipsoids import FAINT, Excess, Maps, RowSquares, WeightedSquares
from kcdsl_backends.drift.affine.error_bounds import each_ellipsoid, rows
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.tape import INPUT, TapeEntry
from kcdsl_backends.drift.boxes import SAFE

LARGEST = 2**27
"""Most numbers in the ellipsoids of an operand; larger ones are not made."""
MANY_WEIGHTS = 2**21
"""Weights of a linear from which on norms of its input may bound its errors without passes."""
WEIGHTS = 2**20
"""Weights from which on they bound norms of its result in any case."""
FAR = 8.0
"""Ratio of error bounds to a result above which they do; in the training kernel it is 1."""


def squares(run: KernelRun, node: Node, index: int, needed: Tensor) -> RowSquares | None:
    """Return bounds of weighted squares of an operand's errors in the rows [..., 1] needed, by
    ellipsoids from passes that stop at those of the cut; None without these, or if they were too
    large. No passes are made for a linear that is bounded by lengths."""
    tape, entry = run.tape, run.tape.entries[index]
    alone = entry.name in run.by_length
    if entry.squares is not None or tape.chance is not None or (tape.near == INPUT and not alone):
        return entry.squares
    image, found = LinearImage.of(run, entry), dict[Row, WeightedSquares | Excess]()
    if image is not None and alone:
        found = {row: image.ball(row) for row in rows(entry.shape)}
    else:
        numbers = entry.reference.numel() * entry.shape[-1]
        if numbers > LARGEST or not run.passing(node, index, "ellipsoid", needed, tape.near):
            return None
        single = torch.full_like(entry.error_bound, torch.inf)
        for row, matrix, elements in each_ellipsoid(tape, index, needed, tape.near):
            if image is not None and image.smaller(row, matrix):
                found[row] = image.ball(row)
            else:
                length = torch.inf if image is None else float(image.lengths[row])
                found[row] = WeightedSquares.of(matrix, length)
            single[row] = elements
        tape.tighten(index, single)
    known = RowSquares(found)
    tape.entries[index] = replace(tape.entries[index], squares=known)
    if image is not None:
        tape.tighten(index, image.elements)
    return known


def bounded_by_length(run: KernelRun, node: Node, entry: TapeEntry) -> LinearImage | None:
    """Return the image that bounds the error of a linear, which is not on the tape yet, in place of
    passes: of a large one with error bounds far above its result. None of others."""
    error, size = (x.sum(-1) for x in (entry.error_bound, entry.reference.abs()))
    far = FAR if run.other is None else 1.0
    if not run.rounding.free or run.tape.chance is not None or not bool((error > far * size).any()):
        return None
    image = LinearImage.of(run, entry)
    if image is None or len(image.maps.norms) * image.maps.inputs < MANY_WEIGHTS:
        return None
    run.by_length.add(node.name)
    return image


def known_lengths(run: KernelRun, node: Node, entry: TapeEntry) -> Tensor | None:
    """Return bounds [..., 1] of the norms of the rows of a linear with many weights by those of its
    input, in place of passes; None of others."""
    if node.op != "linear" or run.parameters.kept(run.source(node, 1)).numel() < WEIGHTS:
        return None
    image = LinearImage.of(run, entry)
    return None if image is None else image.lengths


@dataclass(frozen=True, slots=True)
class LinearImage:
    """Rows W e_x + o with |e_x|₂ <= `length` [..., 1] and |o| <= `own` [..., n]."""

    maps: Maps
    length: Tensor
    own: Tensor

    @staticmethod
    def of(run: KernelRun, entry: TapeEntry) -> LinearImage | None:
        """Return the image by a linear of rows of bounded norm; None for other entries.

        The entry of a reading has the distance from the common value alone: its radius is added.
        """
        linear = run.nodes.get(entry.name)
        if linear is None or linear.op != "linear" or run.quantises(linear):
            return None
        below = run.operand(linear, 0).index
        length = None if below is None else run.tape.entries[below].length
        own = run.own(linear.name) if linear.name in run.private else entry.radius
        if length is None or own is None or not entry.kept:
            return None
        maps = run.maps.get(linear.name)
        if maps is None:
            weight = run.parameters.kept(run.source(linear, 1)).to(torch.float64)
            maps = run.maps[linear.name] = Maps.of(weight)
        return LinearImage(maps, length, own)

    @property
    def elements(self) -> Tensor:
        """Return bounds of the errors element by element."""
        found: Tensor = (self.maps.norms * self.length + self.own) * SAFE * SAFE
        return found

    @property
    def lengths(self) -> Tensor:
        """Return bounds [..., 1] of the norms of the rows."""
        own = self.own.norm(dim=-1, keepdim=True) * SAFE
        found: Tensor = (self.maps.largest * self.length + own) * SAFE
        return found

    def smaller(self, row: Row, matrix: Tensor) -> bool:
        """Return whether the ellipsoid of `ball` has a smaller trace than another one."""
        return sum(self._roots(row)) ** 2 < float(matrix.trace())

    def ball(self, row: Row) -> Excess:
        """Return bounds of a row by an ellipsoid around sums of two: l² W Wᵀ and |o|² 1."""
        image, own = self._roots(row)
        length, radius = float(self.length[row]), float(self.own[row].norm()) * SAFE
        one = (image + own) / image * length**2 if image > 0 else 0.0
        two = (image + own) / own * radius**2 if own > 0 else 0.0
        rows = one**2 * self.maps.crossed + 2 * one * two * self.maps.norms.square() + two**2
        return Excess(float(self.lengths[row]) ** 2 * SAFE + FAINT, rows * MORE + FAINT**2)

    def _roots(self, row: Row) -> tuple[float, float]:
        """Return the roots of the traces of both parts of a row: of W e_x, and of o."""
        own = float(self.own[row].norm()) * math.sqrt(self.own.shape[-1])
        return self.maps.whole * float(self.length[row]), own
