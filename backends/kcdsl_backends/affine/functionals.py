"""The functionals of the drift that a clause speaks of, row by row (section 1).

What the box of the drift says comes first; a row for which that is not enough is asked again, for
"2" by the norms of both errors, for "span" by deviations from the mean and then pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kcdsl_backends.affine.pair import Both
from kcdsl_backends.affine.reaches import BATCH, on_row, rows
from kcdsl_backends.interval.box import Box, up
from kcdsl_backends.interval.functionals import row_bounds

WIDEST = 2048
"""Columns of a row up to which the norm of all of them together is bounded."""
ENDS = 64
"""Columns that pairs of a row are made of: so many with the largest, so many with the least."""
PAIRS = 512
"""Pairs of columns of a row that are bounded one by one."""

Enough = Callable[[float], bool]
"""Says of a bound that a smaller one is of no use."""
Row = tuple[int, ...]


def functional_bound(pair: Both, drift: Box, kind: str, enough: Enough) -> float:
    """Bound a functional of the output's drift, the largest over all rows.

    Args:
        pair: both kernels.
        drift: a box of the drift of the output.
        kind: "inf", "2" or "span", of every row of the last dimension.
        enough: which bounds of a row to leave as they are.

    Returns:
        Infinity where there is no finite bound.
    """
    found = row_bounds(drift, kind)
    for row in rows(pair.shape):
        if kind == "inf" or enough(float(found[row])):
            continue
        if kind == "span":
            found[row] = _least(float(found[row]), _span(pair, drift, row, enough))
        elif pair.shape[-1] <= WIDEST:
            found[row] = _least(float(found[row]), pair.length(row))
    value = float(found.amax()) if found.numel() else math.inf
    return value if math.isfinite(value) else math.inf


def contrasts(pair: Both, row: Row, first: Tensor, second: Tensor) -> Box:
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


def _span(pair: Both, drift: Box, row: Row, enough: Enough) -> float:
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
    rest = max(0.0, _beyond(ends, top, bottom))
    for start in range(0, min(PAIRS, apart.numel()), BATCH):
        part = slice(start, start + BATCH)
        asked = contrasts(pair, row, first[part], second[part]).hi.nan_to_num(math.inf, math.inf)
        rest = max(rest, float(torch.minimum(asked, apart[part]).amax()))
        after = float(apart[part.stop]) if part.stop < apart.numel() else 0.0
        bound = _least(bound, max(rest, after))
        if enough(bound) or rest >= after:
            break
    return bound


def deviations(pair: Both, row: Row) -> Box:
    """Bound the drifts of a row, less a multiple of their sum that is the same for all."""
    n = pair.shape[-1]
    share = math.ldexp(round(2**30 / n), -30)  # so that 1 - share is exact
    values = torch.eye(n, dtype=torch.float64, device=pair.known.lo.device) - share
    found = [pair.errors(on_row(part, row, pair.shape)) for part in torch.split(values, BATCH)]
    errors = Box(torch.cat([box.lo for box in found]), torch.cat([box.hi for box in found]))
    return Box(pair.known.lo[row], pair.known.hi[row]) + errors


def _width(box: Box) -> float:
    return float(up(box.hi.amax() - box.lo.amin()))


def _beyond(ends: Box, top: Tensor, bottom: Tensor) -> float:
    """Return the largest difference of a pair with a column beyond those chosen."""
    above, below = ends.hi.clone(), ends.lo.clone()
    above[top], below[bottom] = -torch.inf, torch.inf
    one = up(above.amax() - ends.lo.amin())
    two = up(ends.hi.amax() - below.amin())
    return float(torch.maximum(one, two))


def _least(one: float, two: float) -> float:
    """Return the smaller number; NaN is no bound."""
    return two if two < one else one
