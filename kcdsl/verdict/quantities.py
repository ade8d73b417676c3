"""Formatting of values in base units for people.

A value next to a threshold is printed in the unit of the threshold, with enough digits to differ
from it: 0.05001 is not 0.05, and 99.999 % is not 100 %.
"""

from __future__ import annotations

import math
from fractions import Fraction

UNREACHED = "–"
"""The text for a missing value."""
DIGITS, MORE, STATED = 3, (6, 10, 17), 10
"""Significant digits of a value, larger numbers to try next, and those of a stated threshold."""
_SMALL = 1e-4
"""Shares below this are not shown as percentages."""


def quantity(value: float | None, unit: str, digits: int = DIGITS) -> str:
    """Return a value in base units with a readable unit: 12.3 ms, 1.5 GB, 99.2%, 4.1e-05.

    With `unit` "%", a share is always a percentage, however small it is.
    """
    if value is None or not math.isfinite(value):
        return UNREACHED
    match unit:
        case "s":
            short = 0 < abs(value) < 1
            return f"{value * 1e3:.{digits}g} ms" if short else f"{_plain(value, digits)} s"
        case "B":
            large = value >= 1e9
            return f"{_plain(value / 1e9, digits)} GB" if large else f"{value / 1e6:.{digits}g} MB"
        case "tok/s":
            whole = digits == DIGITS and value >= 10
            return f"{value:.0f} tok/s" if whole else f"{value:.{digits}g} tok/s"
        case "%":
            return _percent(value, digits)
        case "ratio" if value == 0 or abs(value) >= _SMALL:
            return _percent(value, digits)
        case _:
            return f"{value:.{digits}g}"


def _plain(value: float, digits: int) -> str:
    """Return a number without an exponent, rounded to an integer if it is large: 1,234."""
    text = f"{value:,.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def _percent(value: float, digits: int) -> str:
    """Return a share in percent; 100% only where it is 1."""
    for enough in range(min(17, digits + (abs(value) >= 0.01)), 18):
        text = f"{value * 100:.{enough}g}"
        if value == 1 or float(text) != 100:
            break
    return f"{text}%"


def stated(threshold: float | None, unit: str) -> str:
    """Return a threshold as its author stated it, without rounding."""
    return quantity(threshold, unit, STATED)


def distinct_text(value: float | None, threshold: float | None, unit: str) -> str:
    """Return a value with enough digits to differ from a threshold that it does not equal."""
    if value is None or threshold is None or not math.isfinite(threshold):
        return quantity(value, unit)
    if value == threshold:
        return stated(threshold, unit)
    for digits in (DIGITS, *MORE):
        text = quantity(value, unit, digits)
        if text != quantity(threshold, unit, digits):
            break
    return text


def scale(unit: str, threshold: float | None) -> str:
    """Return the display unit of values next to a threshold: "%" if the threshold is a
    percentage."""
    if unit != "ratio" or threshold is None:
        return unit
    return "1" if 0 < abs(threshold) < _SMALL else "%"


def rate_text(rate: float) -> str:
    """Return a pass rate in percent; never 100 % unless all passed, nor 0 % unless none did."""
    if rate in (0.0, 1.0):
        return f"{100 * rate:.0f}%"
    return f"{min(99.9, max(0.1, 100 * rate)):.1f}%"


def nearest_double(exact: Fraction) -> float:
    """Return the nearest double; infinite where it overflows."""
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf
