"""Large matrices of weights: stored in the narrowest format that holds their numbers, and converted
to float64 some rows at a time when they are multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

KEPT_WIDE = 2**21
"""Most numbers of a matrix that is kept as float64; of a larger one about as many are converted to
float64 at a time."""


def narrowest(value: Tensor) -> Tensor:
    """Return float32 numbers in a 16-bit format if it holds all of them."""
    for kind in (torch.bfloat16, torch.float16):
        narrow = value.to(kind)
        if torch.equal(narrow.to(value.dtype), value):
            return narrow
    return value


def row_parts(weight: Tensor) -> Iterator[Tensor]:
    """Yield a matrix as float64: whole if it is kept as float64, else some rows at a time."""
    if weight.dtype == torch.float64:
        yield weight
        return
    step = max(1, KEPT_WIDE // max(1, weight.shape[1]))
    for start in range(0, len(weight), step):
        yield weight[start : start + step].to(torch.float64)


def products(weight: Tensor, left: Tensor, *sizes: Tensor) -> list[Tensor]:
    """Return left @ Wᵀ, and size @ |W|ᵀ for each of `sizes`, float64.

    Args:
        weight: W [out, in] as it is kept.
    """
    found: list[list[Tensor]] = []
    for part in row_parts(weight):
        mine = [left @ part.T]
        part = part.abs()
        found.append([*mine, *(size @ part.T for size in sizes)])
    return found[0] if len(found) == 1 else joined(found)


def joined(parts: list[list[Tensor]]) -> list[Tensor]:
    """Concatenate results for parts of the rows of a weight to those for all rows."""
    return [torch.cat(each, -1) for each in zip(*parts, strict=True)]


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """|W|ᵀ [in, out] of a matrix W [out, in] that is kept narrow, as a right factor of sums."""

    weight: Tensor

    @staticmethod
    def of(weight: Tensor) -> Tensor | Magnitudes:
        """Return the magnitudes of a matrix: a float64 tensor if the matrix is one."""
        return weight.abs().T if weight.dtype == torch.float64 else Magnitudes(weight)

    def __getitem__(self, place: tuple[EllipsisType, slice, slice]) -> Tensor:
        """Return rows of |W|ᵀ."""
        return self.weight[:, place[1]].to(torch.float64).abs().T

    def amax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """Return the largest number, or that of every column [1, out]."""
        sizes = self.weight.abs()
        found = sizes.amax() if dim is None else sizes.amax(-1)[None]
        return found.to(torch.float64)

    def sum(self, dim: int, keepdim: bool) -> Tensor:
        """Return the sum of every column, [1, out]."""
        return torch.cat([part.abs().sum(-1) for part in row_parts(self.weight)])[None]
