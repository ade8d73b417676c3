"""Terms and axioms as expressions of an algebra: of a solver, of SMT-LIB, or exact numbers.

Every translation of contracts into logic, and every evaluation of a requirement under given values,
interprets terms here, so that a term has one meaning. An algebra constructs expressions; the
translation supplies the values of measured terms and norms.

A percentile of a metric of tokens represents each request by its largest or its smallest token,
whichever is worse for the comparison (`side`). Where the sign of a factor decides which one makes a
term large, both are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce
from typing import Final, Generic, Literal, Protocol, TypeVar, assert_never

from kcdsl.ir.terms import Abs, Arith, Metric, Norm, Number, Statistic, TableValue, Term
from kcdsl.logic.axioms import (
    Axiom,
    ConditionalBound,
    ConstantValues,
    ExtremeMean,
    LinearBound,
    LowerBound,
    NegatedBound,
    QuantileBound,
    UnionBounds,
    UpperBound,
)

Side = Literal["largest", "smallest"]
LARGEST: Final[Side] = "largest"
SMALLEST: Final[Side] = "smallest"

N = TypeVar("N")
B = TypeVar("B")


def other(side: Side) -> Side:
    """Return the other side."""
    return SMALLEST if side == LARGEST else LARGEST


class Algebra(Protocol[N, B]):
    """Constructs expressions of numbers (N) and truth values (B)."""

    def real(self, value: Fraction) -> N:
        """Return a constant."""
        ...

    def arithmetic(self, op: str, left: N, right: N) -> N:
        """Return `left op right` with op one of + - * /."""
        ...

    def negative(self, of: N) -> N:
        """Return the negative of a number."""
        ...

    def compare(self, op: str, left: N, right: N) -> B:
        """Return `left op right` with op one of <= < >= > ==."""
        ...

    def choose(self, test: B, first: N, second: N) -> N:
        """Return the first number where the test holds, else the second."""
        ...

    def every(self, parts: Sequence[B]) -> B:
        """Return the conjunction."""
        ...

    def some(self, parts: Sequence[B]) -> B:
        """Return the disjunction."""
        ...

    def implies(self, premise: B, conclusion: B) -> B:
        """Return the implication."""
        ...

    def same(self, left: N, right: N) -> bool:
        """Return whether two numbers are the same expression."""
        ...


@dataclass(frozen=True, slots=True)
class Terms(Generic[N, B]):
    """Interprets terms in an algebra. `divisors` collects the terms that must not be zero."""

    algebra: Algebra[N, B]
    measured: Callable[[Metric | Statistic, Side], N]
    """Returns the expression of a measured term, on the given side if it has two."""
    norm: Callable[[Norm], N]
    divisors: list[N] = field(default_factory=list)

    def value(self, term: Term, side: Side) -> N:
        """Return the expression of a term, on the given side if it has two.

        Raises ValueError for a table, which may only be a whole side of a comparison.
        """
        algebra = self.algebra
        match term:
            case Number(value):
                return algebra.real(value)
            case Metric() | Statistic():
                return self.measured(term, side)
            case Norm():
                return self.norm(term)
            case Abs(of):
                return self._magnitude(self._readings(of), side)
            case Arith("+" | "-" as op, left, right):
                second = other(side) if op == "-" else side
                return algebra.arithmetic(op, self.value(left, side), self.value(right, second))
            case Arith("*" | "/" as op, left, right):
                lefts = self._factor(left, right, side)
                rights = self._factor(right, left if op == "*" else None, side)
                if op == "/" and not (isinstance(right, Number) and right.value):
                    self.divisors.extend(rights)
                found = [algebra.arithmetic(op, a, b) for a in lefts for b in rights]
                return self._worst(found, side)
            case Arith(op):
                raise ValueError(f"{op!r} is no operation")
            case TableValue(name):
                raise ValueError(f"the table {name} was not written out")
            case _:
                assert_never(term)

    def _readings(self, term: Term) -> list[N]:
        """Return a term by its largest and by its smallest tokens; one reading if both are
        equal."""
        one, two = self.value(term, LARGEST), self.value(term, SMALLEST)
        return [one] if self.algebra.same(one, two) else [one, two]

    def _factor(self, term: Term, by: Term | None, side: Side) -> list[N]:
        """Return the readings of a term that is multiplied or divided by another; the sign of a
        constant factor decides which one makes the result large."""
        if not isinstance(by, Number) or not by.value:
            return self._readings(term)
        return [self.value(term, side if by.value > 0 else other(side))]

    def _magnitude(self, readings: list[N], side: Side) -> N:
        """Return the largest or the smallest magnitude in the range of the readings."""
        algebra, zero = self.algebra, self.algebra.real(Fraction(0))
        sizes = [
            algebra.choose(algebra.compare(">=", one, zero), one, algebra.negative(one))
            for one in readings
        ]
        size = self._worst(sizes, side)
        if side == LARGEST or len(readings) == 1:
            return size
        apart = algebra.some(
            [algebra.every([algebra.compare(op, x, zero) for x in readings]) for op in (">", "<")]
        )
        return algebra.choose(apart, size, zero)

    def _worst(self, readings: Sequence[N], side: Side) -> N:
        """Return the largest or the smallest of several readings of a term."""
        algebra, op = self.algebra, ">=" if side == LARGEST else "<="
        return reduce(lambda a, b: algebra.choose(algebra.compare(op, a, b), a, b), readings)


def axiom(law: Axiom, variables: Sequence[N], algebra: Algebra[N, B]) -> B:
    """Return a law as an expression; `variables` are the quantities in order."""
    real, compare = algebra.real, algebra.compare
    match law:
        case LowerBound(quantity, limit):
            return compare("<=", real(limit), variables[quantity])
        case UpperBound(quantity, limit):
            return compare("<=", variables[quantity], real(limit))
        case LinearBound(small, factor, large):
            return compare("<=", variables[small], scaled(factor, variables[large], algebra))
        case NegatedBound(small, large):
            return compare("<=", algebra.negative(variables[small]), variables[large])
        case ConditionalBound(large, bound, small, limit):
            premise = compare("<=", variables[large], real(bound))
            return algebra.implies(premise, compare("<=", variables[small], real(limit)))
        case ExtremeMean(mean, another, limit, low):
            op, end = "<=" if low else ">=", real(limit)
            premise = compare(op, variables[mean], end)
            return algebra.implies(premise, compare(op, variables[another], end))
        case ConstantValues(mean, extreme, another):
            premise = compare("==", variables[mean], variables[extreme])
            conclusion = compare("==", variables[another], variables[extreme])
            return algebra.implies(premise, conclusion)
        case QuantileBound(mean, quantile, q, low):
            end, high = real(low), variables[quantile]
            above = algebra.arithmetic("-", high, end)
            share = algebra.arithmetic("*", real(1 - q), above)
            beyond = compare("<", share, algebra.arithmetic("-", variables[mean], end))
            return algebra.implies(compare("<", end, high), beyond)
        case UnionBounds(whole, parts, above, below):
            own, limits = variables[whole], []
            if above:
                limits.append(algebra.some([compare("<=", own, variables[p]) for p in parts]))
            if below:
                limits.append(algebra.some([compare("<=", variables[p], own) for p in parts]))
            return algebra.every(limits)
        case _:
            assert_never(law)


def scaled(factor: Fraction, of: N, algebra: Algebra[N, B]) -> N:
    """Return a multiple of a number; the number itself for a factor of 1."""
    return of if factor == 1 else algebra.arithmetic("*", algebra.real(factor), of)
