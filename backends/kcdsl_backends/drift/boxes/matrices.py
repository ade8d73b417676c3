"""Large matrices of weights: kept in the narrowest format that has their numbers, and made float64
some rows at a time when they are multiplied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

KEPT_WIDE = 2**21
"""Numbers of a matrix up to which it is kept as float64; about so many are made float64 at a time
of a larger one."""


def narrowest(value: Tensor) -> Tensor:
    """Return float32 numbers in a format of 16 bits where it has them all."""
    for kind in (torch.bfloat16, torch.float16):
        narrow = value.to(kind)
        if torch.equal(narrow.to(value.dtype), value):
            return narrow
    return value


def row_parts(weight: Tensor) -> Iterator[Tensor]:
    """Yield a matrix as float64: whole where it is kept so, else some rows at a time."""
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
    """Return results of parts of the rows of a weight as those of all of its rows."""
    return [torch.cat(each, -1) for each in zip(*parts, strict=True)]


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """|W|ᵀ [in, out] of a matrix W [out, in] that is kept narrow, as a right factor of sums."""

    weight: Tensor

    @staticmethod
    def of(weight: Tensor) -> Tensor | Magnitudes:
        """Return the magnitudes of a matrix as it is kept: float64 where that is."""
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
