"""Values of plain scalars: exact numbers, and the core schema of YAML 1.2."""

from __future__ import annotations

import re
from fractions import Fraction

NUMBER_PATTERN = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_DECIMAL = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?(?:[eE]([+-]?[0-9]+))?")
_DIGITS_LIMIT = 60
_EXPONENT_LIMIT = 400
_MAGNITUDE_LIMIT = Fraction(10) ** 100


def exact(text: str) -> Fraction | None:
    """Return the exact value of a decimal spelling such as `12`, `.5` or `1e-3`.

    None for any other text, more than 60 digits, and magnitudes above 1e100 or (except 0) below
    1e-100: exact values of such numbers could exhaust the memory, and products of a few would
    overflow float64.
    """
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return None
    sign, whole, fraction, power = match[1], match[2], match[3] or "", match[4] or "0"
    digits = whole + fraction
    if not digits or len(digits) > _DIGITS_LIMIT or len(power) > 5:
        return None
    if abs(int(power)) > _EXPONENT_LIMIT:
        return None
    value = Fraction(int(digits)) * Fraction(10) ** (int(power) - len(fraction))
    if value and not 1 / _MAGNITUDE_LIMIT <= value <= _MAGNITUDE_LIMIT:
        return None
    return -value if sign == "-" else value


def decimal_text(value: Fraction) -> str:
    """Return the shortest plain decimal of a fraction, or `p/q` where no decimal is exact."""
    if value.denominator == 1:
        return str(value.numerator)
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    if rest != 1:
        return f"{value.numerator}/{value.denominator}"
    places = max(twos, fives)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    if places > 12:
        stripped = digits.lstrip("0")
        mantissa = stripped[0] + ("." + stripped[1:] if len(stripped) > 1 else "")
        return f"{sign}{mantissa}e{len(stripped) - 1 - places}"
    return f"{sign}{digits[:-places]}.{digits[-places:]}"


CORE_NULL = {"", "~", "null", "Null", "NULL"}
CORE_BOOL = {w: w.lower() == "true" for w in ("true", "True", "TRUE", "false", "False", "FALSE")}
CORE_INT = re.compile(r"[-+]?[0-9]+")
CORE_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_OLD_BOOL = re.compile(r"(?i:yes|no|on|off)")
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt \t].*)?")
_OCTAL = re.compile(r"[-+]?0[0-9_]+")
_GROUPED = re.compile(
    r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+][0-9]+)?)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
)
_PREFIXED = re.compile(r"[-+]?0[xXoObB][0-9a-fA-F_]+")


def ambiguity(text: str) -> str | None:
    """Return how other YAML readers parse an ambiguous plain scalar, or None."""
    if _OLD_BOOL.fullmatch(text):
        return "YAML 1.1 takes it for a truth value"
    if _BASE_60.fullmatch(text):
        return "YAML 1.1 takes it for a number in base 60"
    if _DATE.fullmatch(text):
        return "YAML 1.1 takes it for a date"
    if _OCTAL.fullmatch(text):
        return "YAML 1.1 takes it for an octal number"
    if "_" in text and _GROUPED.fullmatch(text):
        return "YAML 1.1 takes it for a number"
    if _PREFIXED.fullmatch(text):
        return "readers take it for a number in another base"
    if text == "=":
        return "YAML 1.1 takes it for a default value"
    return None
