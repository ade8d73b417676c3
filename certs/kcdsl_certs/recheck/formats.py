"""Rounding to a format in float64 numpy: to nearest with ties to even, or toward zero."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck.spec import Format, Kernel

Floats = NDArray[np.float64]


def nearest(values: Floats, target: Format) -> Floats:
    """Return the nearest numbers of `target`, ties to even; ±inf beyond its largest number.

    The exponent range is taken as unbounded above while rounding, so a value that rounds to a
    number beyond the largest becomes infinite, whatever the format would do with it.
    """
    if target.precision == 53:
        return values
    return _on_grid(values, target, np.rint)


def cut(values: Floats, target: Format) -> Floats:
    """Return the numbers of `target` next to values on the side of zero; ±inf from where on the
    unbounded grid of `target` has a number beyond its largest."""
    if target.precision == 53:
        return values
    return _on_grid(values, target, np.trunc)


def stepped(values: Floats, target: Format, kernel: Kernel) -> Floats:
    """Return what a kernel's cast makes of values, where it is a step function."""
    return (cut if kernel.inward else nearest)(values, target)


def _on_grid(values: Floats, target: Format, whole: Callable[[Floats], Floats]) -> Floats:
    _, exponent = np.frexp(values)
    spacing = np.maximum(exponent - 1, target.least) - (target.precision - 1)
    # Two steps each way: 2^±spacing alone may leave the range of doubles.
    half = spacing // 2
    scaled = np.ldexp(np.ldexp(values, -half), half - spacing)
    rounded = np.ldexp(np.ldexp(whole(scaled), half), spacing - half)
    beyond = np.abs(rounded) > target.largest
    return np.where(beyond, np.copysign(np.inf, values), rounded)


def saturated(values: Floats, target: Format) -> Floats:
    """Return the nearest numbers of `target`, the largest one in place of anything beyond it."""
    return np.clip(nearest(values, target), -target.largest, target.largest)
