"""Exact real numbers as text: decimals, ratios and hexadecimal floats."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction
from typing import Any, Literal

from kcdsl_certs.encoding.rejected import Rejected

Rounding = Literal["up", "down", "nearest"]

_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?(e[+-]?[0-9]{1,3})?", re.ASCII)
_RATIO = re.compile(r"-?[1-9][0-9]*/[1-9][0-9]*", re.ASCII)
_HEX = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}", re.ASCII)
_LONGEST = 2400
_SHOWN_DIGITS = 6
_MODES = {"up": ROUND_CEILING, "down": ROUND_FLOOR, "nearest": ROUND_HALF_EVEN}


def parse_real(text: str) -> Fraction:
    """Return the exact value of a decimal ("0.05", "1e-6"), a ratio ("1/3") or a hex float."""
    if len(text) <= _LONGEST:
        if _HEX.fullmatch(text) is not None:
            return Fraction(parse_hex(text))
        if _DECIMAL.fullmatch(text) is not None:
            return Fraction(text)
        if _RATIO.fullmatch(text) is not None:
            return Fraction(text)
    raise Rejected("number/malformed", f"{text[:40]!r} is not a decimal, a ratio or a hex float")


def real_text(value: Fraction) -> str:
    """Write an exact number: a decimal where one of at most 2,400 places exists, else a ratio."""
    denominator, twos, fives = value.denominator, 0, 0
    while denominator % 2 == 0:
        denominator, twos = denominator // 2, twos + 1
    while denominator % 5 == 0:
        denominator, fives = denominator // 5, fives + 1
    places = max(twos, fives)
    if denominator != 1 or places > _LONGEST:
        return f"{value.numerator}/{value.denominator}"
    if places == 0:
        return str(value.numerator)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}"


def parse_hex(text: str) -> float:
    """Return the double of a hexadecimal float in the spelling of `float.hex`; finite only."""
    if _HEX.fullmatch(text) is None:
        raise Rejected("number/malformed", f"{text[:40]!r} is not a hexadecimal float")
    try:
        value = float.fromhex(text)
    except OverflowError:
        raise Rejected("number/malformed", f"{text[:40]!r} is outside the doubles") from None
    if value.hex() != text or text.startswith("-0x0.0p"):
        raise Rejected(
            "number/not-canonical", f"{text!r} should be written {(value + 0.0).hex()!r}"
        )
    return value


@dataclass(frozen=True, slots=True)
class Measured:
    """A double: exact as a hexadecimal float, and as a decimal rounded outwards for people."""

    value: float
    rounding: Rounding

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise Rejected("number/not-finite", f"{self.value} is no evidence")

    @property
    def exact(self) -> Fraction:
        """Return the exact value."""
        return Fraction(self.value)

    def to_json(self) -> dict[str, str]:
        """Return the two spellings."""
        return {
            "decimal": decimal_text(self.value, self.rounding),
            "hex": (self.value + 0.0).hex(),
        }

    @staticmethod
    def from_json(record: Any, rounding: Rounding) -> Measured:
        """Read the two spellings; the decimal must be the outward rounding of the exact value."""
        if not (isinstance(record, dict) and record.keys() == {"decimal", "hex"}):
            raise Rejected("number/malformed", "a measured number has exactly decimal and hex")
        if not isinstance(record["hex"], str):
            raise Rejected("number/malformed", "a hexadecimal float is text")
        value = parse_hex(record["hex"])
        if record["decimal"] != decimal_text(value, rounding):
            raise Rejected(
                "number/rounded-inwards",
                f"{record['decimal']!r} should be {decimal_text(value, rounding)!r}",
            )
        return Measured(value, rounding)


def decimal_text(value: float, rounding: Rounding) -> str:
    """Write a double with six significant digits, rounded in the given direction."""
    context = Context(prec=_SHOWN_DIGITS, rounding=_MODES[rounding])
    rounded = context.create_decimal(Decimal(value + 0.0)).normalize(context)
    if -7 < rounded.adjusted() < 16:
        return format(rounded, "f")
    return str(rounded).lower()
