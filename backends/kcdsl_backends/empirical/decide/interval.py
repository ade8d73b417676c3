"""Exact interval arithmetic on estimates: a value with the limits that the sample supports.

Fractions hold every float64 exactly, so a comparison with a threshold never rounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from kcdsl_backends.empirical.statistics.estimates import Estimate, NotMeasurable

Outcome = Literal["held", "violated", "unknown"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value in [low, high]; None is a limit at infinity."""

    value: Fraction
    low: Fraction | None
    high: Fraction | None

    @staticmethod
    def point(value: Fraction) -> Interval:
        """Return the interval of a constant."""
        return Interval(value, value, value)

    @staticmethod
    def of(estimate: Estimate) -> Interval:
        """Return the interval of an estimate."""
        return Interval(estimate.rational, _fraction(estimate.low), _fraction(estimate.high))

    def as_point(self) -> Interval:
        """Return the value alone, for statements about exactly what was measured."""
        return Interval.point(self.value)

    def negate(self) -> Interval:
        """Return the interval of the opposite number."""
        return Interval(
            -self.value,
            None if self.high is None else -self.high,
            None if self.low is None else -self.low,
        )

    def magnitude(self, surer: Interval) -> Interval:
        """Return the interval of the absolute value.

        `surer` is the same number with limits at half the error: chance may lead away from 0 on
        either side, so that two limits are asked whether the number lies beyond it. The upper limit
        needs no correction: it fails only where the limit on the side of the number does.
        """
        low = Fraction(0)
        if surer.low is not None and surer.low > 0:
            low = surer.low
        if surer.high is not None and surer.high < 0:
            low = -surer.high
        ends = [end for end in (self.low, self.high) if end is not None]
        if self.low is not None and self.low >= 0:
            high = self.high
        elif self.high is not None and self.high <= 0:
            high = None if self.low is None else -self.low
        else:
            high = max(map(abs, ends)) if len(ends) == 2 else None
        return Interval(abs(self.value), low, high)

    def combine(self, op: str, other: Interval) -> Interval:
        """Return `self op other`; raises `NotMeasurable` for a division by what may be zero."""
        match op:
            case "+":
                return Interval(
                    self.value + other.value,
                    _sum(self.low, other.low),
                    _sum(self.high, other.high),
                )
            case "-":
                return self.combine("+", other.negate())
            case "*":
                return self._times(other)
            case "/":
                return self._times(other._inverse())
        raise ValueError(f"unknown operation {op!r}")

    def _times(self, other: Interval) -> Interval:
        corners = [_product(a, b) for a in self._ends() for b in other._ends()]
        low, high = min(corners), max(corners)
        return Interval(self.value * other.value, _end(low), _end(high))

    def _ends(self) -> tuple[Fraction | float, Fraction | float]:
        """Return both limits, infinite where there is none."""
        return (
            -math.inf if self.low is None else self.low,
            math.inf if self.high is None else self.high,
        )

    def _inverse(self) -> Interval:
        if self.value == 0:
            raise NotMeasurable("division by zero")
        if self.low is not None and self.low > 0:
            least = Fraction(0) if self.high is None else 1 / self.high
            return Interval(1 / self.value, least, 1 / self.low)
        if self.high is not None and self.high < 0:
            return self.negate()._inverse().negate()
        return Interval(1 / self.value, None, None)


def _product(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    """Return a product of limits; 0 times any number, however large, is 0."""
    if a == 0 or b == 0:
        return Fraction(0)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    return math.inf if (a > 0) == (b > 0) else -math.inf


def _end(limit: Fraction | float) -> Fraction | None:
    return limit if isinstance(limit, Fraction) else None


def compare(left: Interval, op: str, right: Interval) -> Outcome:
    """Compare two intervals: held or violated only where every pair of values agrees."""
    match op:
        case "<=":
            return _order(left, right, strict=False)
        case "<":
            return _order(left, right, strict=True)
        case ">=":
            return _order(right, left, strict=False)
        case ">":
            return _order(right, left, strict=True)
        case "==":
            return _equal(left, right)
    raise ValueError(f"unknown comparison {op!r}")


def _order(small: Interval, large: Interval, *, strict: bool) -> Outcome:
    if _below(small.high, large.low) or (not strict and _same(small.high, large.low)):
        return "held"
    if _below(large.high, small.low) or (strict and _same(large.high, small.low)):
        return "violated"
    return "unknown"


def _below(a: Fraction | None, b: Fraction | None) -> bool:
    return a is not None and b is not None and a < b


def _same(a: Fraction | None, b: Fraction | None) -> bool:
    return a is not None and a == b


def _equal(left: Interval, right: Interval) -> Outcome:
    below, above = _order(left, right, strict=False), _order(right, left, strict=False)
    if "violated" in (below, above):
        return "violated"
    return "held" if below == above == "held" else "unknown"


def _sum(a: Fraction | None, b: Fraction | None) -> Fraction | None:
    return None if a is None or b is None else a + b


def _fraction(limit: float | None) -> Fraction | None:
    return None if limit is None else Fraction(limit)
