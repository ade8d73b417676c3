"""Sums over rows whose bits do not depend on threads, on the number of rows or on where they lie.

numpy's elementwise loops treat every element alike wherever it stands. Products are summed by
BLAS, which may share long vectors among threads and sums float32 in float32: rows are cut into
blocks, the same whatever stands beside them, and the sums of blocks are added in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = NDArray[Any]

_BLOCK = 2048
"""Longest product that is summed in the format of its factors: short enough for float32, and for no
BLAS to share it among threads (OpenBLAS does from 10,000 elements on)."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How rows of `width` elements are cut: `count` blocks of `each`, the last one filled up."""

    width: int
    count: int
    each: int

    @property
    def padded(self) -> int:
        """Return the length of a row with what fills its last block."""
        return self.count * self.each

    def of(self, rows: Numbers) -> Numbers:
        """View padded rows [R, padded] as blocks [R, count, each]."""
        return rows.reshape(rows.shape[0], self.count, self.each)


def blocks_of(width: int) -> Blocks:
    """Return how rows of so many elements are cut."""
    count = -(-width // _BLOCK)
    return Blocks(width, count, -(-width // count))


def total(products: Numbers) -> Array:
    """Return the sums over the last dimension, [..., count] float32 or float64, in float64."""
    found: Array = np.add.reduce(products, axis=-1, dtype=np.float64)
    return found
