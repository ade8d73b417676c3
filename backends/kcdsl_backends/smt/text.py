"""The chain of a derivation in words, every number rounded to the safe side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

from kcdsl.inequalities import round_down, round_up
from kcdsl.ir.printer import term_text
from kcdsl.ir.terms import Clause, HasFields, NoFlip, Statistic, Term
from kcdsl_backends.smt.model import ImpliedBound, ProvedDrift
from kcdsl_backends.smt.premises import FORMULAS, Premises
from kcdsl_certs.reals import real_text

_DIGITS = 4
_NORM_TEXT = {"inf": "norm_inf", "2": "norm_2", "span": "span"}
_CONVERSIONS = {"inf": "2 norm_inf", "2": "sqrt(2) norm_2"}


def outward(value: Fraction, *, up: bool) -> float:
    """Return a float at or beyond an exact number, upwards or downwards."""
    return round_up(value) if up else round_down(value)


def number(value: float, *, up: bool = True, within: Fraction | None = None) -> str:
    """Write a float with four digits rounded outward, or more where `within` would be passed."""
    if not math.isfinite(value):
        return str(value)
    exact = Decimal(value)
    for digits in (_DIGITS, 8, 17):
        context = Context(prec=digits, rounding=ROUND_CEILING if up else ROUND_FLOOR)
        shown = context.create_decimal(exact)
        if within is None or (Fraction(shown) <= within if up else Fraction(shown) >= within):
            return _plain(shown)
    return _plain(exact)


def _plain(value: Decimal) -> str:
    """Write a decimal as people do: 0.0123, 3.1e-4, 250."""
    value = value.normalize(Context(prec=1200))
    if value == 0:
        return "0"
    if -3 <= value.adjusted() < 6:
        return f"{value:f}"
    digits = "".join(str(digit) for digit in value.as_tuple().digits)
    mantissa = digits[0] + (f".{digits[1:]}" if len(digits) > 1 else "")
    return f"{'-' if value < 0 else ''}{mantissa}e{value.adjusted()}"


def derivation(
    clause: Clause,
    slice_name: str,
    proof: ProvedDrift,
    bounds: Premises,
    used: Sequence[str],
    shown: Sequence[ImpliedBound],
) -> tuple[str, ...]:
    """Return the steps from the proved drift to the clause."""
    drift = f"{_NORM_TEXT[proof.norm]}(drift({proof.block}))"
    steps = [f"{drift} <= {number(bounds.norm_bound)} ({proof.clause_id})"]
    if slice_name != proof.slice:
        steps.append(f"every row of slice {slice_name} is a row of slice {proof.slice}")
    if proof.norm in _CONVERSIONS:
        conversion = _CONVERSIONS[proof.norm]
        steps.append(f"span(drift({proof.block})) <= {conversion} <= {number(bounds.span)}")
    steps.append(f"s = span/T <= {number(bounds.s)} (T = {real_text(bounds.temperature)})")
    for metric in used:
        limit = bounds.known[metric].high
        if limit is not None and metric in FORMULAS:
            steps.append(f"{FORMULAS[metric]} <= {number(float(limit))}")
    for found in shown:
        upper = found.comparison.op in ("<=", "<")
        limit = found.comparison.threshold
        bound = number(found.bound, up=upper, within=limit)
        end = _extreme(found.comparison.quantity, upper=upper)
        middle = "<=" if upper else ">="
        through = f"{middle} {end} " if end else ""
        target = (
            f" {found.comparison.op} {real_text(found.comparison.threshold)}"
            if found.decides
            else ""
        )
        steps.append(f"{found.quantity} {through}{middle} {bound}{target}")
    if len(shown) != 1:
        steps.append(f"hence {clause.text or clause.id}")
    return tuple(steps)


def _extreme(quantity: Term | NoFlip | HasFields, *, upper: bool) -> str | None:
    """Return the extreme that a mean or quantile cannot pass: p99(tv) gives max(tv)."""
    match quantity:
        case Statistic("mean" | "rate" | "quantile", of):
            return term_text(Statistic("max" if upper else "min", of))
        case _:
            return None
