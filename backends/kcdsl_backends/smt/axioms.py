"""The variables of a translation and the axioms about them, each with its reason.

`kcdsl.logic.axioms` states the axioms of measured quantities; this module turns them into z3
expressions and text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, assert_never

import z3

from kcdsl.inequalities import round_down, round_up
from kcdsl.ir.printer import region_text, term_text
from kcdsl.ir.terms import Drift, Norm, Region, Statistic, Term
from kcdsl.logic.algebra import Side, axiom
from kcdsl.logic.axioms import (
    Axiom,
    ConditionalBound,
    ConstantValues,
    ContractFacts,
    ExtremeMean,
    LinearBound,
    LowerBound,
    NegatedBound,
    QuantileBound,
    UnionBounds,
    UpperBound,
    axioms_of,
)
from kcdsl.logic.relations import NORMS
from kcdsl_backends.smt.solver import Expression, Z3Algebra, real
from kcdsl_certs.encoding.reals import real_text

if TYPE_CHECKING:
    from kcdsl_backends.smt.translation import Translator


_SHOWN_DIGITS = 4


def outward(value: Fraction, *, up: bool) -> float:
    """Return a float at or beyond an exact number, upwards or downwards."""
    return round_up(value) if up else round_down(value)


def number(value: float, *, up: bool = True, within: Fraction | None = None) -> str:
    """Format a float with four digits, rounded outward; use more digits to stay within `within`."""
    if not math.isfinite(value):
        return str(value)
    exact = Decimal(value)
    for digits in (_SHOWN_DIGITS, 8, 17):
        context = Context(prec=digits, rounding=ROUND_CEILING if up else ROUND_FLOOR)
        shown = context.create_decimal(exact)
        if within is None or (Fraction(shown) <= within if up else Fraction(shown) >= within):
            return _plain(shown)
    return _plain(exact)


def _plain(value: Decimal) -> str:
    """Format a decimal in fixed or scientific notation by its size: 0.0123, 3.1e-4, 250."""
    value = value.normalize(Context(prec=1200))
    if value == 0:
        return "0"
    if -3 <= value.adjusted() < 6:
        return f"{value:f}"
    digits = "".join(str(digit) for digit in value.as_tuple().digits)
    mantissa = digits[0] + (f".{digits[1:]}" if len(digits) > 1 else "")
    return f"{'-' if value < 0 else ''}{mantissa}e{value.adjusted()}"


# --- variables ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Quantity:
    """A measured number on a slice; `kind` is that of a Statistic, or "value".

    `side` says whether the largest or the smallest token value represents a request; "" if the
    quantity has one meaning.
    """

    slice: str
    kind: str
    q: Fraction | None
    of: Term
    side: Side | Literal[""] = ""

    @property
    def term(self) -> Term:
        return self.of if self.kind == "value" else Statistic(self.kind, self.of, self.q)

    def __str__(self) -> str:
        """Return the term in the syntax of the language, with its slice."""
        return term_text(self.term) + (f" on {self.slice}" if self.slice else "")


@dataclass(frozen=True, slots=True)
class UnknownInput:
    """An unknown input of a region: its generic one, or that of an existential quantifier."""

    region: Region
    site: str = ""

    def __str__(self) -> str:
        """Return the input in words."""
        return f"an input of {region_text(self.region)}"


# --- axioms ---------------------------------------------------------------------------------------


_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Assumption:
    """An axiom that holds for all kernels, with its reason as text."""

    expression: Expression
    reason: str


def assumptions(translator: Translator) -> Iterator[Assumption]:
    """Yield the axioms about the variables that the translator has created so far."""
    quantities = list(translator.quantities)
    setting = ContractFacts(
        translator.inside,
        translator.temperature,
        translator.division,
        dict(translator.known),
        translator.by_request,
        translator.one_request,
    )
    compared = [translator.constants.get(quantity, set()) for quantity in quantities]
    written = _Writer(quantities)
    variables = [translator.quantities[quantity] for quantity in quantities]
    algebra = Z3Algebra(translator.context)
    for law in axioms_of(quantities, [quantity.term for quantity in quantities], compared, setting):
        yield Assumption(axiom(law, variables, algebra), written.words(law))
    yield from _norms(translator)


@dataclass(frozen=True, slots=True)
class _Writer:
    """Formats laws about quantities as text."""

    quantities: list[Quantity]

    def words(self, law: Axiom) -> str:
        """Return a law and its reason as text."""
        match law:
            case LowerBound(quantity, limit):
                return f"{self.quantities[quantity]} is never below {real_text(limit)}"
            case UpperBound(quantity, limit):
                return f"{self.quantities[quantity]} is never above {real_text(limit)}"
            case LinearBound(small, factor, large, why):
                scale = "" if factor == 1 else f"{_rounded_up(factor)} "
                shown = f"{self._named(small, large)} <= {scale}{self._named(large, small)}"
                return _because(shown, why)
            case NegatedBound(small, large, why):
                return _because(f"-{self._text(small)} <= {self._text(large)}", why)
            case ConditionalBound(large, bound, small, limit, why):
                shown = f"{self._named(large, small)} <= {real_text(bound)} gives "
                shown += f"{self._named(small, large)} <= {_rounded_up(limit)}"
                return _because(shown, why)
            case ExtremeMean(mean, other, limit, low, why):
                op = "<=" if low else ">="
                shown = f"{self._text(mean)} {op} {real_text(limit)} gives "
                return _because(f"{shown}{self._text(other)} {op} {real_text(limit)}", why)
            case ConstantValues(mean, extreme, other, why):
                shown = f"{self._text(mean)} == {self._text(extreme)} gives "
                return _because(f"{shown}{self._text(other)} == {self._text(extreme)}", why)
            case QuantileBound(mean, quantile, q, low, why):
                shown = f"{real_text(1 - q)} of {self._text(quantile)} - {real_text(low)} is below "
                return _because(f"{shown}{self._text(mean)} - {real_text(low)}", why)
            case UnionBounds(whole, parts):
                own = self.quantities[whole]
                names = ", ".join(self.quantities[part].slice for part in parts)
                made_up = f"every request of {own.slice} is in one of {names}"
                return f"{made_up}, so {term_text(own.term)} does not go beyond theirs"
            case _:
                assert_never(law)

    def _text(self, index: int) -> str:
        return term_text(self.quantities[index].term)

    def _named(self, index: int, other: int) -> str:
        """Return a quantity as text, with its slice if that of the other quantity differs."""
        quantity, second = self.quantities[index], self.quantities[other]
        return str(quantity) if quantity.slice != second.slice else term_text(quantity.term)


def _because(words: str, why: tuple[str, ...]) -> str:
    return f"{words}: {'; '.join(dict.fromkeys(why))}" if why else words


def _rounded_up(value: Fraction) -> str:
    exact = real_text(value)
    return exact if len(exact) <= _DIGITS and "/" not in exact else number(outward(value, up=True))


def _norms(translator: Translator) -> Iterator[Assumption]:
    for key, (least, some, largest) in translator.norms.items():
        ordered_ends = z3.And(least >= 0, least <= some, some <= largest)
        yield Assumption(ordered_ends, f"{_norm_text(key)} is a norm of every admitted run")
    for key, ends in translator.norms.items():
        witness, block, measured, kind = key
        for small, factor, large in NORMS:
            other_key = (witness, block, measured, large)
            other = translator.norms.get(other_key)
            if kind == small and other is not None:
                scale = real(factor, translator.context)
                shown = "" if factor == 1 else f"{real_text(factor)} "
                why = f"{_norm_text(key)} <= {shown}{_norm_text(other_key)}: norms of one drift"
                pairs = zip(ends, other, strict=True)
                yield Assumption(z3.And(*(a <= scale * b for a, b in pairs)), why)


def _norm_text(key: tuple[UnknownInput, str, bool, str]) -> str:
    witness, block, measured, kind = key
    norm = term_text(Norm(kind, Drift(block, "x", measured)))
    return f"{norm} in {region_text(witness.region)}"
