"""Readers of option values: texts that become numbers, or are refused with what they may be."""

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


count = whole(1)
"""Read how many of something, at least one."""
seed = whole(0, LARGEST_SEED)
"""Read a seed."""


def number(text: str) -> float:
    """Return a finite number, and NaN for what is none: no comparison with it holds."""
    try:
        found = float(text)
    except ValueError:
        return float("nan")
    return found if abs(found) < float("inf") else float("nan")


def positive(text: str) -> float:
    """Return a positive, finite number."""
    found = number(text)
    if not found > 0:
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text!r}")
    return found


def not_negative(text: str) -> float:
    """Return a finite number that is not negative."""
    found = number(text)
    if not found >= 0:
        raise argparse.ArgumentTypeError(f"must be a number that is not negative, not {text!r}")
    return found


def probability(text: str) -> float:
    """Return a number between 0 and 1, both left out."""
    found = number(text)
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, not {text!r}")
    return found


def seconds(text: str) -> float:
    """Return a time that a solver may take."""
    found = number(text)
    if not 0.001 <= found <= 1e6:
        raise argparse.ArgumentTypeError("a number of seconds from 0.001 to 1,000,000")
    return found


def gigabytes(text: str) -> int:
    """Return a size of memory in bytes."""
    found = not_negative(text)
    if not 0.1 <= found < 2**20:
        raise argparse.ArgumentTypeError("must be at least 0.1")
    return int(found * 2**30)


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


def percentile(text: str) -> Fraction:
    """Return a percentile as a share of 1."""
    found = fraction(text)
    if found is None or not 0 < found < 100 or (found * 10**7).denominator != 1:
        raise argparse.ArgumentTypeError("must be between 0 and 100, with at most 7 decimals")
    return found / 100


def requirement(text: str) -> tuple[str, str, Fraction]:
    """Return metric, comparison and limit of a requirement such as `kl <= 0.05`."""
    for op in ("<=", ">=", "<", ">"):
        name, found, limit = text.partition(op)
        if found:
            exact = fraction(limit)
            if name.strip() and exact is not None:
                return name.strip(), op, exact
            break
    raise argparse.ArgumentTypeError(
        f"must be METRIC <= NUMBER, or with >=, < or >, not {text!r}; numbers are in base units"
    )
