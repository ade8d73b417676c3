"""Whether the largest columns of the output stay the largest, in every run of both kernels.

For a row with the set S of the k largest columns of the training reference, and each kernel by
itself: z_a - z_b = (h̃_a - h̃_b) + (e_a - e_b) is bounded for a in S and b outside, first by boxes
of the elements, and where these leave the sign open by reverse passes (section 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.affine.functionals import Row, differences
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.pair import Both, output_entry
from kcdsl_backends.affine.reaches import BATCH, on_row, rows
from kcdsl_backends.affine.tape import Entry
from kcdsl_backends.interval.box import Box, down, up

MOST = 2**14
"""Pairs of columns of a row that are bounded one by one, in one kernel."""


def margins(
    pair: Both, k: int, known: tuple[Box, Box] | None = None, factor: float = 1.0
) -> Tensor:
    """Bound from below how far k columns stay above all others, in every row of the output.

    A positive margin shows that all runs of both kernels, on every input of the region, have the
    same set of k largest columns in this row.

    Args:
        pair: both kernels.
        k: how many columns; where the row has not more than k, nothing is shown.
        known: boxes of the output in the training and the inference kernel, if there are any.
        factor: by how much the widths of all bounds are enlarged.

    Returns:
        One number for each row; -infinity where there is no bound.
    """
    train, _ = pair.ends
    found = torch.full(train.shape[:-1], -torch.inf, dtype=torch.float64)
    if not 0 < k < train.shape[-1]:
        return found
    sides = {id(run): run for run in (pair.train, pair.infer)}.values()
    boxes = (None, None) if known is None else known
    kernels = [
        (values, values.box(box))
        for run, box in zip(sides, boxes, strict=False)
        for values in (Values(run, pair.output, factor),)
    ]
    for row in rows(train.shape):
        chosen = train.reference[row].topk(k).indices
        outside = torch.ones(train.shape[-1], dtype=torch.bool, device=chosen.device)
        outside[chosen] = False
        others = outside.nonzero()[:, 0]
        least = torch.stack(
            [_margin(values, box, row, chosen, others) for values, box in kernels]
        ).amin()
        found[row] = least if bool(torch.isfinite(least)) else -torch.inf
    return found


@dataclass(frozen=True, slots=True)
class Values:
    """The output of one kernel; bounds of its errors are made wider by a factor."""

    run: KernelRun
    output: str
    factor: float = 1.0

    @property
    def entry(self) -> Entry:
        """Return the entry of the output."""
        return output_entry(self.run, self.output)

    @property
    def reference(self) -> Tensor:
        """Return the output without roundings, about."""
        return self.entry.reference

    def elements(self, row: Row, columns: Tensor) -> Box:
        """Bound columns of a row [B], by reverse passes."""
        unit = torch.zeros(columns.numel(), self.reference.shape[-1], dtype=torch.float64)
        unit = unit.to(columns.device)
        unit[torch.arange(columns.numel(), device=columns.device), columns] = 1.0
        return Box.point(self.reference[row][columns]) + self._errors(row, unit)

    def differences(self, row: Row, first: Tensor, second: Tensor) -> Box:
        """Bound z_first - z_second of a row, for pairs of columns [B], by reverse passes."""
        reference = self.reference[row]
        known = Box.point(reference[first]) - Box.point(reference[second])
        return known + self._errors(row, differences(first, second, reference.numel()))

    def box(self, known: Box | None) -> Box:
        """Bound all elements, met with a box that is known."""
        box = Box.point(self.reference).widen(up(self.entry.reach * self.factor))
        if known is None:
            return box
        return box.meet(known.widen(up((self.factor - 1.0) * (known.hi - known.lo), 2)))

    def _errors(self, row: Row, functionals: Tensor) -> Box:
        """Bound functionals [B, n] of the errors of a row, for every input of the region."""
        tape, index, found = self.run.tape, self.run.computed[self.output], []
        for part in torch.split(functionals, BATCH):
            adjoint = on_row(part, row, self.entry.shape)
            low, high = tape.bound(index, adjoint).with_region(tape.radius)
            more = (self.factor - 1.0) * torch.maximum(low.abs(), high.abs())
            found.append(Box(down(low - more), up(high + more)))
        return Box(torch.cat([b.lo for b in found]), torch.cat([b.hi for b in found]))


def _margin(values: Values, box: Box, row: Row, chosen: Tensor, others: Tensor) -> Tensor:
    """Bound the least difference of a chosen and another column of a row from below."""
    lo, hi = box.lo[row].clone(), box.hi[row].clone()
    inside, outside = _open(lo, hi, chosen, others)
    if inside.numel() * outside.numel() > 2 * (inside.numel() + outside.numel()):
        some = torch.cat([inside, outside])
        found = values.elements(row, some)
        lo[some], hi[some] = torch.maximum(lo[some], found.lo), torch.minimum(hi[some], found.hi)
        inside, outside = _open(lo, hi, chosen, others)
    if inside.numel() * outside.numel() > MOST:
        return down(lo[chosen].amin() - hi[others].amax())
    settled = _settled(lo, hi, chosen, others, inside, outside)
    pairs = torch.cartesian_prod(inside, outside).reshape(-1, 2)
    apart = down(lo[pairs[:, 0]] - hi[pairs[:, 1]])
    still = ~(apart > 0)
    if bool(still.any()):
        asked = values.differences(row, *pairs[still].unbind(-1)).lo
        apart[still] = torch.maximum(asked, apart[still])
    return torch.minimum(settled, apart.amin()) if apart.numel() else settled


def _open(lo: Tensor, hi: Tensor, chosen: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen columns that are not above all others, the others not below all chosen."""
    inside = chosen[~(lo[chosen] > hi[others].amax())]
    return inside, others[~(hi[others] < lo[chosen].amin())]


def _settled(
    lo: Tensor, hi: Tensor, chosen: Tensor, others: Tensor, inside: Tensor, outside: Tensor
) -> Tensor:
    """Bound the least difference of the pairs of which one column is not open."""
    above, below = lo.clone(), hi.clone()
    above[inside], below[outside] = torch.inf, -torch.inf
    one = above[chosen].amin() - hi[others].amax()
    two = lo[chosen].amin() - below[others].amax()
    return down(torch.minimum(one, two))
