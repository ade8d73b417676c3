"""Bound the functional of a clause from bounds of the output (Rule 7.2; affine: 1.11, 1.12)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.drift.affine.adjoint import Row
from kcdsl_backends.drift.affine.error_bounds import BATCH, on_row, rows
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.tape import TapeEntry
from kcdsl_backends.drift.affine_forms import AffineForms, output_entry
from kcdsl_backends.drift.boxes import Box, down, gamma, up
from kcdsl_backends.drift.boxes.state import State


def drift_bound(drift: Box, kind: str) -> float:
    """Return a bound of the functional of the drift, the largest over all rows.

    Args:
        drift: box of the drift of the block output, rows along the last dimension.
        kind: "inf" (largest element), "2" (largest row l2 norm), "span" (largest minus smallest).
    """
    found = row_bounds(drift, kind)
    number = float(found.amax()) if found.numel() else math.inf
    return number if math.isfinite(number) else math.inf


def row_bounds(drift: Box, kind: str) -> Tensor:
    """Return a bound of the functional of every row of the drift [..., n] -> [...]."""
    match kind:
        case "inf":
            return drift.mag().amax(-1)
        case "2":
            mag = drift.mag()
            length = torch.sqrt((mag * mag).sum(-1) * (1 + 2 * gamma(mag.shape[-1] + 4)))
            return up(length, 2)
        case "span":
            return up(drift.hi.amax(-1) - drift.lo.amin(-1))
        case _:
            raise ValueError(f"unknown functional {kind!r}")


def top_margin(output: State, k: int, factor: float = 1.0) -> float:
    """Return the margin of k columns above all others, least over all rows and both kernels.

    A positive margin shows that no run of either kernel changes the set of the k largest columns
    of any row. The boxes are first made wider by `factor` >= 1; the result is rounded down.
    """
    middle = (output.train.lo + output.train.hi) / 2
    if not 0 < k < middle.shape[-1]:
        return -math.inf
    chosen = torch.zeros_like(middle, dtype=torch.bool)
    chosen.scatter_(-1, middle.topk(k, -1).indices, True)
    margins = [
        down(
            torch.where(chosen, box.lo, torch.inf).amin(-1)
            - torch.where(chosen, -torch.inf, box.hi).amax(-1)
        ).amin()
        for box in (_wider(output.train, factor), _wider(output.infer, factor))
    ]
    worst = float(torch.stack(margins).amin())
    return worst if math.isfinite(worst) else -math.inf


def _wider(box: Box, factor: float) -> Box:
    return box.widen(up((factor - 1.0) * (box.hi - box.lo), 2))


WIDEST = 2048
"""Most columns of a row whose joint norm is bounded."""
ENDS = 64
"""Columns with the largest bounds, and as many with the least, of which pairs are made."""
PAIRS = 512
"""Most pairs of columns of a row that are bounded one by one."""
Enough = Callable[[float], bool]
"""Returns whether a bound is small enough that none smaller is needed."""


def functional_bound(pair: AffineForms, drift: Box, kind: str, enough: Enough) -> float:
    """Bound a functional of the output's drift, the largest over all rows.

    Args:
        pair: both kernels.
        drift: a box of the drift of the output.
        kind: "inf", "2" or "span", of every row of the last dimension.
        enough: returns whether a bound of a row is small enough.

    Returns:
        Infinity where there is no finite bound.
    """
    found = row_bounds(drift, kind)
    for row in rows(pair.shape):
        if kind == "inf" or enough(float(found[row])):
            continue
        if kind == "span":
            found[row] = _smaller(float(found[row]), _span(pair, drift, row, enough))
        elif pair.shape[-1] <= WIDEST:
            found[row] = _smaller(float(found[row]), pair.length(row))
    value = float(found.amax()) if found.numel() else math.inf
    return value if math.isfinite(value) else math.inf


def contrasts(pair: AffineForms, row: Row, first: Tensor, second: Tensor) -> Box:
    """Bound the drift of z_first - z_second in one row, for pairs of columns [B]."""
    known = pair.known
    apart = Box(known.lo[row][first], known.hi[row][first]) - Box(
        known.lo[row][second], known.hi[row][second]
    )
    found = [
        pair.errors(on_row(differences(a, b, pair.shape[-1]), row, pair.shape))
        for a, b in zip(torch.split(first, BATCH), torch.split(second, BATCH), strict=True)
    ]
    return apart + Box(torch.cat([box.lo for box in found]), torch.cat([box.hi for box in found]))


def differences(first: Tensor, second: Tensor, columns: int) -> Tensor:
    """Return the functionals e_first - e_second [B, columns]."""
    values = torch.zeros(first.numel(), columns, dtype=torch.float64, device=first.device)
    count = torch.arange(first.numel(), device=first.device)
    values[count, first] += 1.0
    values[count, second] -= 1.0
    return values


def _span(pair: AffineForms, drift: Box, row: Row, enough: Enough) -> float:
    """Bound the largest difference of two drifts of a row."""
    whole, centred = Box(drift.lo[row], drift.hi[row]), deviations(pair, row)
    if not math.isfinite(_width(whole)) or not math.isfinite(_width(centred)):
        return math.inf
    ends = min(whole, centred, key=_width)
    bound = _width(ends)
    count = min(ENDS, pair.shape[-1])
    if enough(bound):
        return bound
    top, bottom = ends.hi.topk(count).indices, (-ends.lo).topk(count).indices
    pairs = torch.cartesian_prod(top, bottom)
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    first, second = pairs[:, 0], pairs[:, 1]
    apart = torch.minimum(
        up(whole.hi[first] - whole.lo[second]), up(centred.hi[first] - centred.lo[second])
    )
    order = apart.argsort(descending=True)
    apart, first, second = apart[order], first[order], second[order]
    rest = max(0.0, _other_differences(ends, top, bottom))
    for start in range(0, min(PAIRS, apart.numel()), BATCH):
        part = slice(start, start + BATCH)
        asked = contrasts(pair, row, first[part], second[part]).hi.nan_to_num(math.inf, math.inf)
        rest = max(rest, float(torch.minimum(asked, apart[part]).amax()))
        after = float(apart[part.stop]) if part.stop < apart.numel() else 0.0
        bound = _smaller(bound, max(rest, after))
        if enough(bound) or rest >= after:
            break
    return bound


def deviations(pair: AffineForms, row: Row) -> Box:
    """Bound the drifts of a row minus about their mean, the same number for all columns."""
    n = pair.shape[-1]
    share = math.ldexp(round(2**30 / n), -30)  # so that 1 - share is exact
    values = torch.eye(n, dtype=torch.float64, device=pair.known.lo.device) - share
    found = [pair.errors(on_row(part, row, pair.shape)) for part in torch.split(values, BATCH)]
    errors = Box(torch.cat([box.lo for box in found]), torch.cat([box.hi for box in found]))
    return Box(pair.known.lo[row], pair.known.hi[row]) + errors


def _width(box: Box) -> float:
    return float(up(box.hi.amax() - box.lo.amin()))


def _other_differences(ends: Box, top: Tensor, bottom: Tensor) -> float:
    """Return the largest difference of a pair with a column that is not chosen."""
    above, below = ends.hi.clone(), ends.lo.clone()
    above[top], below[bottom] = -torch.inf, torch.inf
    one = up(above.amax() - ends.lo.amin())
    two = up(ends.hi.amax() - below.amin())
    return float(torch.maximum(one, two))


def _smaller(one: float, two: float) -> float:
    """Return the smaller number; `one` if `two` is NaN."""
    return two if two < one else one


MOST = 2**14
"""Most pairs of columns of a row that are bounded one by one, in one kernel."""


def order_margins(
    pair: AffineForms, k: int, known: tuple[Box, Box] | None = None, factor: float = 1.0
) -> Tensor:
    """Return lower bounds of the margin of k columns above all others, for every row of the output.

    A positive margin shows that all runs of both kernels, on every input of the region, have the
    same set of k largest columns in this row.

    Args:
        pair: both kernels.
        k: the number of columns; a row of at most k columns has no margin.
        known: boxes of the output in the training and the inference kernel, if there are any.
        factor: the factor by which the widths of all bounds are enlarged.

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
    def entry(self) -> TapeEntry:
        return output_entry(self.run, self.output)

    @property
    def reference(self) -> Tensor:
        """Return the output of the reference run."""
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
        box = Box.point(self.reference).widen(up(self.entry.error_bound * self.factor))
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
    inside, outside = _not_separated(lo, hi, chosen, others)
    if inside.numel() * outside.numel() > 2 * (inside.numel() + outside.numel()):
        some = torch.cat([inside, outside])
        found = values.elements(row, some)
        lo[some], hi[some] = torch.maximum(lo[some], found.lo), torch.minimum(hi[some], found.hi)
        inside, outside = _not_separated(lo, hi, chosen, others)
    if inside.numel() * outside.numel() > MOST:
        return down(lo[chosen].amin() - hi[others].amax())
    settled = _separated_margin(lo, hi, chosen, others, inside, outside)
    pairs = torch.cartesian_prod(inside, outside).reshape(-1, 2)
    apart = down(lo[pairs[:, 0]] - hi[pairs[:, 1]])
    still = ~(apart > 0)
    if bool(still.any()):
        asked = values.differences(row, *pairs[still].unbind(-1)).lo
        apart[still] = torch.maximum(asked, apart[still])
    return torch.minimum(settled, apart.amin()) if apart.numel() else settled


def _not_separated(lo: Tensor, hi: Tensor, chosen: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen columns that are not above all others, the others not below all chosen."""
    inside = chosen[~(lo[chosen] > hi[others].amax())]
    return inside, others[~(hi[others] < lo[chosen].amin())]


def _separated_margin(
    lo: Tensor, hi: Tensor, chosen: Tensor, others: Tensor, inside: Tensor, outside: Tensor
) -> Tensor:
    """Bound the least difference of the pairs that have a column which is not open."""
    above, below = lo.clone(), hi.clone()
    above[inside], below[outside] = torch.inf, -torch.inf
    one = above[chosen].amin() - hi[others].amax()
    two = lo[chosen].amin() - below[others].amax()
    return down(torch.minimum(one, two))
