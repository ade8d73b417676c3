"""One place where z3 is asked, and where its "unknown" becomes a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from fractions import Fraction
from typing import Any

import z3

Expression = Any
"""A z3 expression; z3 ships no types."""


class Outcome(Enum):
    """The answer of the solver."""

    SAT = "sat"
    UNSAT = "unsat"
    UNKNOWN = "unknown"


class Solver:
    """A z3 solver in a context of its own, so that runs in parallel share nothing."""

    def __init__(self, context: z3.Context, timeout_ms: int) -> None:
        if timeout_ms <= 0:
            raise ValueError(f"the timeout is {timeout_ms} ms; it must be positive")
        self._context = context
        self._solver = z3.Solver(ctx=context)
        self._solver.set("timeout", timeout_ms)

    def add(self, facts: Iterable[Expression]) -> None:
        """Assert facts for good."""
        for fact in facts:
            self._solver.add(fact)

    def decide(self, *goals: Expression) -> Outcome:
        """Decide the facts together with goals that are dropped again afterwards."""
        return self._ask(goals, ())[0]

    def decide_named(self, goals: Mapping[str, Expression]) -> tuple[Outcome, frozenset[str]]:
        """Decide the facts together with named goals; if UNSAT, also which goals it took."""
        switches = {name: z3.Bool(name, self._context) for name in goals}
        switched = [z3.Implies(switches[name], goal) for name, goal in goals.items()]
        return self._ask(switched, tuple(switches.values()))

    def _ask(
        self, goals: Sequence[Expression], assumptions: Sequence[Expression]
    ) -> tuple[Outcome, frozenset[str]]:
        self._solver.push()
        try:
            self._solver.add(*goals)
            answer = self._solver.check(*assumptions)
            if answer == z3.unsat:
                return Outcome.UNSAT, frozenset(str(name) for name in self._solver.unsat_core())
            return (Outcome.SAT if answer == z3.sat else Outcome.UNKNOWN), frozenset()
        except z3.Z3Exception:
            return Outcome.UNKNOWN, frozenset()
        finally:
            self._solver.pop()


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
