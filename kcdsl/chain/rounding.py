"""Directed rounding in plain floats, and the domain of the bound chain."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

RELATIVE_MARGIN = 1e-11
"""Covers the error of a few library calls (each below 2^-50) many times over."""
_SMALLEST = 5e-324
_GRID_BITS = 38


class ChainDomainError(ValueError):
    """The bound chain says nothing here: NaN, infinite or negative input, no temperature."""


def round_up(value: Fraction) -> float:
    """Return the least float that is not below an exact number; +inf above the largest float."""
    try:
        nearest = float(value)
    except OverflowError:
        return math.inf if value > 0 else -1.7976931348623157e308
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def round_down(value: Fraction) -> float:
    """Return the largest float that is not above an exact number."""
    return -round_up(-value)


def outward_up(value: float) -> float:
    """Enlarge a computed value >= 0 beyond the error of its computation."""
    return value * (1.0 + RELATIVE_MARGIN) + 4 * _SMALLEST


def outward_down(value: float) -> float:
    """Lower a computed value >= 0 beyond the error of its computation, not below 0."""
    return max(0.0, value * (1.0 - RELATIVE_MARGIN) - 4 * _SMALLEST)


def onto_grid(s: float) -> float:
    """Round s >= 0 up to 38 significant bits.

    On this grid neighbouring arguments are so far apart that the error of the evaluation cannot
    turn round the order of two values: this is what makes the computed bounds monotone.
    """
    if s == 0.0 or s > 1e300:
        return s
    mantissa, exponent = math.frexp(s)
    return math.ldexp(math.ceil(math.ldexp(mantissa, _GRID_BITS)), exponent - _GRID_BITS)


def require_nonnegative(value: float, what: str, *, finite: bool = True) -> float:
    """Return the value as a float >= 0; raise ChainDomainError for anything else."""
    number = _number(value, what)
    if math.isnan(number) or number < 0.0 or (finite and math.isinf(number)):
        raise ChainDomainError(f"{what} is {number!r}; it must be a number >= 0")
    return number + 0.0


def require_finite(values: Iterable[float], what: str, *, at_least: int = 1) -> list[float]:
    """Return the values as finite floats; raise ChainDomainError for too few, NaN or infinity."""
    numbers = [_number(value, what) for value in values]
    if len(numbers) < at_least:
        raise ChainDomainError(f"{what}: {len(numbers)} values, at least {at_least} are needed")
    for index, number in enumerate(numbers):
        if not math.isfinite(number):
            raise ChainDomainError(f"{what}[{index}] is {number!r}")
    return numbers


def require_temperature(temperature: float | Fraction) -> Fraction:
    """Return the exact temperature > 0; at T = 0 (greedy decoding) only rank stability holds."""
    number = _number(temperature, "the temperature")
    if not math.isfinite(number) or temperature <= 0:
        raise ChainDomainError(f"the temperature is {temperature!s}; the chain needs T > 0")
    return Fraction(temperature)


def _number(value: float | Fraction, what: str) -> float:
    if isinstance(value, (bool, str, bytes)):
        raise ChainDomainError(f"{what} is {value!r}, not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ChainDomainError(f"{what} is {value!r}, not a finite number") from error
