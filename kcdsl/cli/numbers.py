"""Numbers of the command line: what an option may be, said where it is not."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction

LARGEST_SEED = 2**63 - 1
"""What every generator of random numbers takes."""
MOST_DIGITS = 400
"""How far from 1 a number may lie, in powers of ten: farther than any float64."""


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the reader of a whole number between two ends."""
    ends = f"of at least {least}" if most is None else f"between {least} and {most}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be a whole number {ends}, not {text!r}")
        return value

    return read


def seed(text: str) -> int:
    """Return a seed."""
    return whole(0, LARGEST_SEED)(text)


def count(text: str) -> int:
    """Return how many of something, at least one."""
    return whole(1)(text)


def positive(text: str) -> float:
    """Return a positive, finite number."""
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
    return value


def not_negative(text: str) -> float:
    """Return a finite number that is not negative."""
    value = _finite(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be a number that is not negative, not {text!r}")
    return value


def fraction(text: str) -> Fraction | None:
    """Return the exact value of a decimal number or a quotient of two whole ones; None for what is
    neither, and for what no float64 comes near."""
    try:
        above, quotient, below = text.partition("/")
        numbers = [Decimal(part.strip()) for part in ((above, below) if quotient else (above,))]
    except InvalidOperation:
        return None
    if not all(n.is_finite() and abs(n.adjusted()) <= MOST_DIGITS for n in numbers):
        return None
    first, *rest = map(Fraction, numbers)
    if not rest:
        return first
    return None if rest[0] == 0 else first / rest[0]


def _finite(text: str) -> float:
    """Return a number; NaN, infinities and what is no number as -1."""
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if abs(value) < float("inf") else -1.0
