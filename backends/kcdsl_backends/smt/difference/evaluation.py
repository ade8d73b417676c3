"""The truth of a requirement under values of its quantities, by exact arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import assert_never

from kcdsl.ir.obligations import HOLDS
from kcdsl.ir.terms import (
    Compare,
    Connective,
    Formula,
    HasFields,
    Metric,
    NoFlip,
    Norm,
    Not,
    Number,
    Quantified,
    Statistic,
    Term,
)
from kcdsl.logic.algebra import LARGEST, SMALLEST, Side, Terms, other
from kcdsl_backends.smt.axioms import Quantity, Witness
from kcdsl_backends.smt.translation import Environment, Flag, NormKey, Translator, region_inside


class Unknown(Exception):
    """Raised where the values say nothing of a statement, or it is undefined."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Values of what a translator has made; norms at their least, at some run, at their largest."""

    translator: Translator
    quantities: Mapping[Quantity, Fraction]
    norms: Mapping[NormKey, tuple[Fraction, Fraction, Fraction]]
    flags: Mapping[Flag, bool]


def keeps(formula: Formula, slice_name: str, values: Assignment) -> bool:
    """Say whether values keep a requirement on a slice.

    A statement about every input of a region is looked at for the inputs that have values, one
    about some input is taken as kept. What has no values, or is divided by zero, is not kept.
    """
    try:
        return _Values(values, slice_name).holds(formula, {}, False)
    except Unknown:
        return False


@dataclass(frozen=True, slots=True)
class _Values:
    values: Assignment
    slice: str

    def holds(self, formula: Formula, at: Environment, turned: bool) -> bool:
        """Return the truth of a formula; every part is looked at."""
        match formula:
            case Compare():
                return self._compare(formula, at, turned)
            case NoFlip(block, variable, k):
                return self._flag((at[variable], block, k))
            case HasFields(fields):
                carried = [self._flag((self.slice, name)) for name in fields]
                return all(carried)
            case Not(of):
                return not self.holds(of, at, not turned)
            case Connective("implies", (left, right)):
                given, then = self.holds(left, at, not turned), self.holds(right, at, turned)
                return then or not given
            case Connective(op, parts):
                found = [self.holds(part, at, turned) for part in parts]
                return all(found) if op == "and" else any(found)
            case Quantified("forall", variable, region, body):
                inside = self.values.translator.inside
                known = [w for w in self._inputs() if region_inside(w.region, region, inside)]
                found = [self.holds(body, {**at, variable: w}, turned) for w in known]
                return all(found)
            case Quantified():
                return True
            case _:
                assert_never(formula)

    def _inputs(self) -> list[Witness]:
        found = [key[0] for key in self.values.norms]
        found += [key[0] for key in self.values.flags if isinstance(key[0], Witness)]
        return list(dict.fromkeys(found))

    def _flag(self, key: Flag) -> bool:
        if key not in self.values.flags:
            raise Unknown
        return self.values.flags[key]

    def _compare(self, compare: Compare, at: Environment, turned: bool) -> bool:
        op, left, right = compare.op, compare.left, compare.right
        match left, right:
            case Norm(), Number(value):
                least, _, largest = self._norm(left, at)
                return HOLDS[op](least, value) and HOLDS[op](largest, value)
        side: Side = LARGEST if (op not in (">=", ">")) != turned else SMALLEST
        return HOLDS[op](self._term(left, at, side), self._term(right, at, other(side)))

    def _norm(self, norm: Norm, at: Environment) -> tuple[Fraction, Fraction, Fraction]:
        drift = norm.of
        key = (at[drift.variable], drift.block, drift.measured, norm.kind)
        if key not in self.values.norms:
            raise Unknown
        return self.values.norms[key]

    def _term(self, term: Term, at: Environment, side: Side) -> Fraction:
        def measured(of: Metric | Statistic, end: Side) -> Fraction:
            quantity = self.values.translator.quantity(of, self.slice, end)
            if quantity not in self.values.quantities:
                raise Unknown
            return self.values.quantities[quantity]

        def norm(of: Norm) -> Fraction:
            return self._norm(of, at)[1]

        return Terms(EXACT, measured, norm).value(term, side)


class Exact:
    """Exact numbers and truth values (`kcdsl.logic.algebra.Algebra`)."""

    def real(self, value: Fraction) -> Fraction:
        return value

    def arithmetic(self, op: str, left: Fraction, right: Fraction) -> Fraction:
        match op:
            case "+":
                return left + right
            case "-":
                return left - right
            case "*":
                return left * right
            case _ if right == 0:
                raise Unknown
            case _:
                return left / right

    def negative(self, of: Fraction) -> Fraction:
        return -of

    def compare(self, op: str, left: Fraction, right: Fraction) -> bool:
        return HOLDS[op](left, right)

    def choose(self, test: bool, first: Fraction, second: Fraction) -> Fraction:
        return first if test else second

    def every(self, parts: Sequence[bool]) -> bool:
        return all(parts)

    def some(self, parts: Sequence[bool]) -> bool:
        return any(parts)

    def implies(self, premise: bool, conclusion: bool) -> bool:
        return conclusion or not premise

    def same(self, left: Fraction, right: Fraction) -> bool:
        return left == right


EXACT = Exact()
