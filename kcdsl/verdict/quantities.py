"""Values in base units as people read them."""

from __future__ import annotations

import math

UNREACHED = "–"
"""Stands where there is no value."""


def quantity(value: float | None, unit: str) -> str:
    """Return a value in base units as people read it: 12.3 ms, 1.5 GB, 99.2%, 4.1e-05."""
    if value is None or not math.isfinite(value):
        return UNREACHED
    match unit:
        case "s":
            return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
        case "B":
            return f"{value / 1e9:.3g} GB" if value >= 1e9 else f"{value / 1e6:.3g} MB"
        case "tok/s":
            return f"{value:.0f} tok/s" if value >= 10 else f"{value:.3g} tok/s"
        case "ratio" if value == 0 or abs(value) >= 1e-4:
            return f"{value * 100:.4g}%"
        case _:
            return f"{value:.3g}"
