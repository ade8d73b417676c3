"""Checks of recorded arrays: not empty, of one length, and finite.

Nothing to measure, arrays that do not belong together and numbers that are none raise `Unmeasured`;
none of them is ever a value, least of all zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


class Unmeasured(ValueError):
    """The arrays support no value; the text says why."""


def column(values: ArrayLike, name: str, *, fewest: int = 1) -> Array:
    """Return values as a float64 array of one dimension.

    Raises Unmeasured for other shapes, fewer than `fewest` values, and NaN or infinities.
    """
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1:
        raise Unmeasured(f"{name} must be one value per row, not of shape {found.shape}")
    if found.size < fewest:
        raise Unmeasured(f"{name}: {found.size} values, needs at least {fewest}")
    bad = int(np.count_nonzero(~np.isfinite(found)))
    if bad:
        raise Unmeasured(f"{name}: {bad} of {found.size} values are not finite")
    return found


def columns(fewest: int = 1, /, **values: ArrayLike) -> tuple[Array, ...]:
    """Return several columns of one length, in the order given; raises Unmeasured otherwise."""
    found = tuple(column(v, name, fewest=fewest) for name, v in values.items())
    sizes = {name: v.size for name, v in zip(values, found, strict=True)}
    if len(set(sizes.values())) > 1:
        raise Unmeasured(f"columns of different lengths: {sizes}")
    return found


def indicators(values: ArrayLike, name: str, *, fewest: int = 1) -> Array:
    """Return a column of zeros and ones; raises Unmeasured for any other value."""
    found = column(values, name, fewest=fewest)
    if not bool(np.isin(found, (0.0, 1.0)).all()):
        raise Unmeasured(f"{name} must hold 0 or 1 only")
    return found


def sequences(values: Any, name: str) -> list[Array]:
    """Return one column per sequence, none of them empty; raises Unmeasured otherwise."""
    found = [column(row, f"{name}[{i}]") for i, row in enumerate(values)]
    if not found:
        raise Unmeasured(f"{name}: there are no sequences")
    return found
