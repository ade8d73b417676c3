"""Are the logits of both kernels the same numbers, bit for bit, and how far apart if not?

Distances count the numbers between two values of one format: units in the last place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def integer_views(train: Tensor, infer: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the bit patterns of both sides as signed integers on the CPU.

    Where the formats differ, both are widened exactly: to float32, or to float64 if a side is that.
    Raises TypeError for a format without a place here.
    """
    if train.dtype != infer.dtype:
        wide = torch.float64 if torch.float64 in (train.dtype, infer.dtype) else torch.float32
        train, infer = train.to(wide), infer.to(wide)
    if train.dtype not in _INTEGERS:
        raise TypeError(f"logits of the format {train.dtype} have no units in the last place here")
    to = _INTEGERS[train.dtype]
    first, second = (side.detach().cpu().contiguous().view(to).numpy() for side in (train, infer))
    return first, second


def bit_metrics(train: NDArray[Any], infer: NDArray[Any], out: NDArray[np.float64]) -> None:
    """Write `bitwise_mismatch_count` and `ulp_max` of rows [R, V] of integer views into [2, R].

    -0 and +0 differ in their bits and are 0 ulps apart. A row with NaN must be told by the caller.
    """
    out[:] = 0.0
    for row in range(train.shape[0]):
        a, b = train[row], infer[row]
        count = np.count_nonzero(a != b)
        if count:
            out[0, row] = count
            out[1, row] = _furthest(a, b, np.flatnonzero((a ^ b) < 0))


def _furthest(a: NDArray[Any], b: NDArray[Any], opposite: NDArray[np.intp]) -> float:
    """Return the largest distance of two rows, whose signs differ at the places `opposite`.

    The bits of floats of one sign are in the order of their magnitudes, so the difference of the
    bits is their distance; across zero it is the sum of both magnitudes.
    """
    between = a - b
    across = 0.0
    if opposite.size:
        between[opposite] = 0
        magnitudes = np.iinfo(a.dtype).max
        x, y = (side[opposite] & magnitudes for side in (a, b))
        across = float((x.astype(np.float64) + y).max())
    return max(across, float(between.max()), -float(between.min()))


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first pair of elements that differs: its place in the arrays, and both values."""

    place: tuple[int, ...]
    train: float
    infer: float


def first_mismatch(
    train: Tensor, infer: Tensor, relative: float = 0.0, absolute: float = 0.0
) -> Mismatch | None:
    """Return the first element, in row order, with |b - a| > absolute + relative |a|, or None.

    With both tolerances 0 any element whose bits differ counts, so -0 differs from +0. NaN against
    anything but the same bits always counts. Raises ValueError for empty or misaligned arrays.
    """
    if train.shape != infer.shape or train.numel() == 0:
        raise ValueError(f"shapes {tuple(train.shape)} and {tuple(infer.shape)} cannot be compared")
    a, b = integer_views(train, infer)
    differs = (a != b).reshape(-1)
    x = train.detach().to("cpu", torch.float64).reshape(-1).numpy()
    y = infer.detach().to("cpu", torch.float64).reshape(-1).numpy()
    if relative or absolute:
        with np.errstate(all="ignore"):
            near = np.abs(y - x) <= absolute + relative * np.abs(x)
        differs &= ~(near | (x == y))
    found = np.flatnonzero(differs)
    if not found.size:
        return None
    place = tuple(int(i) for i in np.unravel_index(found[0], tuple(train.shape)))
    return Mismatch(place, float(x[found[0]]), float(y[found[0]]))
