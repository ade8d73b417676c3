"""One place where z3 is asked, and where its "unknown" becomes a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from time import monotonic
from typing import Any

import z3

Expression = Any
"""A z3 expression; z3 ships no types."""


class Outcome(Enum):
    """The answer of the solver."""

    SAT = "sat"
    UNSAT = "unsat"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Clock:
    """How long questions may take: each `question_ms`, and all of them `total_ms` (None: no end).

    A question that is asked when all the time is spent is answered with UNKNOWN at once.
    """

    question_ms: int
    total_ms: int | None = None
    asked: int = 0
    refused: int = 0
    _start: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        for limit in (self.question_ms, self.total_ms):
            if limit is not None and limit <= 0:
                raise ValueError(f"the timeout is {limit} ms; it must be positive")

    def allowance(self) -> int:
        """Return the milliseconds that the next question may take; 0 where none are left."""
        self.asked += 1
        if self.total_ms is None:
            return self.question_ms
        left = self.total_ms - int(1000 * (monotonic() - self._start))
        if left <= 0:
            self.refused += 1
            return 0
        return min(self.question_ms, left)


class Solver:
    """A z3 solver in a context of its own, so that runs in parallel share nothing."""

    def __init__(self, context: z3.Context, timeout: int | Clock) -> None:
        self._context = context
        self._clock = timeout if isinstance(timeout, Clock) else Clock(timeout)
        self._solver = z3.Solver(ctx=context)
        self._solver.set("random_seed", 0)
        self._switches: dict[str, Expression] = {}
        self._names: dict[int, str] = {}
        self._allowed = 0

    def add(self, facts: Iterable[Expression]) -> None:
        """Assert facts for good."""
        for fact in facts:
            self._solver.add(fact)

    def name(self, name: str, goal: Expression) -> None:
        """Give a goal a name, by which `decide_all` asserts it for one question."""
        switch = z3.Bool(f"switch {name}", self._context)
        self._switches[name] = switch
        self._names[switch.get_id()] = name
        self._solver.add(z3.Implies(switch, goal))

    def decide(self, *goals: Expression) -> Outcome:
        """Decide the facts together with goals that are dropped again afterwards."""
        return self._ask(goals, ())[0]

    def decide_all(self, names: Iterable[str]) -> tuple[Outcome, frozenset[str]]:
        """Decide the facts together with goals that were named; if UNSAT, also which it took."""
        outcome, core = self._check(tuple(self._switches[name] for name in names))
        return outcome, frozenset(self._names[switch.get_id()] for switch in core)

    def model(self, *goals: Expression) -> tuple[Outcome, z3.ModelRef | None]:
        """Decide the facts together with goals; if SAT, also the values that satisfy them."""
        self._solver.push()
        try:
            self._solver.add(*goals)
            outcome, _ = self._check(())
            return outcome, self._solver.model() if outcome is Outcome.SAT else None
        finally:
            self._solver.pop()

    def _ask(
        self, goals: Sequence[Expression], assumptions: Sequence[Expression]
    ) -> tuple[Outcome, tuple[Expression, ...]]:
        self._solver.push()
        try:
            self._solver.add(*goals)
            return self._check(assumptions)
        finally:
            self._solver.pop()

    def _check(self, assumptions: Sequence[Expression]) -> tuple[Outcome, tuple[Expression, ...]]:
        allowed = self._clock.allowance()
        if allowed == 0:
            return Outcome.UNKNOWN, ()
        if allowed != self._allowed:
            self._solver.set("timeout", allowed)
            self._allowed = allowed
        try:
            answer = self._solver.check(*assumptions)
            if answer == z3.unsat:
                return Outcome.UNSAT, tuple(self._solver.unsat_core())
            return (Outcome.SAT if answer == z3.sat else Outcome.UNKNOWN), ()
        except z3.Z3Exception:
            return Outcome.UNKNOWN, ()


def real(value: Fraction, context: z3.Context) -> Expression:
    """Return an exact rational constant."""
    return z3.RealVal(f"{value.numerator}/{value.denominator}", context)


def compare(op: str, left: Expression, right: Expression) -> Expression:
    """Return `left op right` for reals."""
    match op:
        case "<=":
            return left <= right
        case "<":
            return left < right
        case ">=":
            return left >= right
        case ">":
            return left > right
        case "==":
            return left == right
        case "!=":
            return left != right
        case _:
            raise ValueError(f"{op!r} is no comparison")


@dataclass(frozen=True, slots=True)
class Z3Algebra:
    """Expressions of one z3 context (`kcdsl.logic.algebra.Algebra`)."""

    context: z3.Context

    def real(self, value: Fraction) -> Expression:
        return real(value, self.context)

    def arithmetic(self, op: str, left: Expression, right: Expression) -> Expression:
        match op:
            case "+":
                return left + right
            case "-":
                return left - right
            case "*":
                return left * right
            case _:
                return left / right

    def negative(self, of: Expression) -> Expression:
        return -of

    def compare(self, op: str, left: Expression, right: Expression) -> Expression:
        return compare(op, left, right)

    def choose(self, test: Expression, first: Expression, second: Expression) -> Expression:
        return z3.If(test, first, second)

    def every(self, parts: Sequence[Expression]) -> Expression:
        return z3.And(*parts)

    def some(self, parts: Sequence[Expression]) -> Expression:
        return z3.Or(*parts)

    def implies(self, premise: Expression, conclusion: Expression) -> Expression:
        return z3.Implies(premise, conclusion)

    def same(self, left: Expression, right: Expression) -> bool:
        return bool(left.eq(right))
