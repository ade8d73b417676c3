"""Rounding to a format, to nearest with ties to even, in float64 numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck.spec import Format

Floats = NDArray[np.float64]


def nearest(values: Floats, target: Format) -> Floats:
    """Return the nearest numbers of `target`, ties to even; ±inf beyond its largest number.

    The exponent range is taken as unbounded above while rounding, so a value that rounds to a
    number beyond the largest becomes infinite, whatever the format would do with it.
    """
    if target.precision == 53:
        return values
    _, exponent = np.frexp(values)
    spacing = np.maximum(exponent - 1, target.least) - (target.precision - 1)
    # Two steps each way: 2^±spacing alone may leave the range of doubles.
    half = spacing // 2
    scaled = np.ldexp(np.ldexp(values, -half), half - spacing)
    rounded = np.ldexp(np.ldexp(np.rint(scaled), half), spacing - half)
    beyond = np.abs(rounded) > target.largest
    return np.where(beyond, np.copysign(np.inf, values), rounded)


def saturated(values: Floats, target: Format) -> Floats:
    """Return the nearest numbers of `target`, the largest one in place of anything beyond it."""
    return np.clip(nearest(values, target), -target.largest, target.largest)
