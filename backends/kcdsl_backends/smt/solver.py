"""The interface to z3, with "unknown" as a value; emptiness and inclusion of slices.

A field of a request may be text, a number, true/false, or none of these (absent, null, NaN, a
list). Two questions are free variables of the query, so that an answer is right either way: whether
true and false count as the numbers 1 and 0, and whether `!=` holds for a field of another kind.
Every other comparison with a value of another kind is false.

Text is modelled as a real number: its rank among the texts in the predicates. This admits more
requests than exist, so "empty" and "implies" are never claimed wrongly.

`selects_nothing` and `selects_within` assume that every request has the fields that slices test, of
the right kind; an evaluation rejects other requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from time import monotonic
from typing import Any

import z3

from kcdsl.ir import predicates as selection
from kcdsl.ir.terms import AllOf, AnyOf, FieldTest, NoneOf, Predicate, Program, Slice

Expression = Any
"""A z3 expression; z3 ships no types."""


class Outcome(Enum):
    """The answer of the solver."""

    SAT = "sat"
    UNSAT = "unsat"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Clock:
    """Time limits: `question_ms` for each question, `total_ms` for all (None: no limit).

    A question after the total limit gets the answer UNKNOWN at once.
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
        """Return the time limit of the next question in milliseconds; 0 if no time is left."""
        self.asked += 1
        if self.total_ms is None:
            return self.question_ms
        left = self.total_ms - int(1000 * (monotonic() - self._start))
        if left <= 0:
            self.refused += 1
            return 0
        return min(self.question_ms, left)


class Solver:
    """A z3 solver with its own context, so that parallel runs share no state."""

    def __init__(self, context: z3.Context, timeout: int | Clock) -> None:
        self._context = context
        self._clock = timeout if isinstance(timeout, Clock) else Clock(timeout)
        self._solver = z3.Solver(ctx=context)
        self._solver.set("random_seed", 0)
        self._switches: dict[str, Expression] = {}
        self._names: dict[int, str] = {}
        self._allowed = 0

    def add(self, facts: Iterable[Expression]) -> None:
        """Assert facts permanently."""
        for fact in facts:
            self._solver.add(fact)

    def name(self, name: str, goal: Expression) -> None:
        """Give a goal a name, by which `decide_all` asserts it for one question."""
        switch = z3.Bool(f"switch {name}", self._context)
        self._switches[name] = switch
        self._names[switch.get_id()] = name
        self._solver.add(z3.Implies(switch, goal))

    def decide(self, *goals: Expression) -> Outcome:
        """Decide the facts and these goals; the goals are not kept."""
        return self._ask(goals, ())[0]

    def decide_all(self, names: Iterable[str]) -> tuple[Outcome, frozenset[str]]:
        """Decide the facts and named goals; if UNSAT, also return the names in the core."""
        outcome, core = self._check(tuple(self._switches[name] for name in names))
        return outcome, frozenset(self._names[switch.get_id()] for switch in core)

    def model(self, *goals: Expression) -> tuple[Outcome, z3.ModelRef | None]:
        """Decide the facts and these goals; if SAT, also return the model."""
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


def emptiness(where: Predicate, timeout: int | Clock) -> Outcome:
    """Return UNSAT if no request can satisfy the predicate."""
    encoding = _Encoding(where)
    solver = Solver(encoding.context, timeout)
    goal = encoding.formula(where)
    solver.add(encoding.facts())
    return solver.decide(goal)


def implies(inner: Predicate, outer: Predicate, timeout: int | Clock) -> bool:
    """Return whether every request that satisfies `inner` is proved to satisfy `outer`."""
    if inner == outer or outer == AllOf():
        return True
    encoding = _Encoding(inner, outer)
    solver = Solver(encoding.context, timeout)
    goals = (encoding.formula(inner), z3.Not(encoding.formula(outer)))
    solver.add(encoding.facts())
    return solver.decide(*goals) is Outcome.UNSAT


def lies_inside(program: Program, inner: Slice, outer: Slice, timeout: int | Clock) -> bool:
    """Return whether every row of one slice is proved to be a row of the other."""
    if inner.name == outer.name:
        return True
    same_data = (inner.data or program.data) == (outer.data or program.data)
    return same_data and implies(inner.where, outer.where, timeout)


def selects_nothing(where: Predicate, clock: Clock) -> bool:
    """Return whether it is proved that no request with the tested fields is selected."""
    return selection.is_empty(where) is True or emptiness(where, clock) is Outcome.UNSAT


def selects_within(program: Program, inner: Slice, outer: Slice, clock: Clock) -> bool:
    """Return whether every row of one slice is proved to be a row of the other, if every request
    has the tested fields."""
    if inner.name == outer.name:
        return True
    if (inner.data or program.data) != (outer.data or program.data):
        return False
    return selection.implies(inner.where, outer.where) is True or implies(
        inner.where, outer.where, clock
    )


class _Encoding:
    """Variables for the fields of one request."""

    def __init__(self, *predicates: Predicate) -> None:
        self.context = z3.Context()
        tests = [test for predicate in predicates for test in _tests(predicate)]
        texts = sorted({test.value for test in tests if isinstance(test.value, str)})
        self._place = {text: Fraction(index) for index, text in enumerate(texts)}
        self._number = {name: n for n, name in enumerate(sorted({test.field for test in tests}))}
        self._truth_is_number = z3.Bool("truth-is-number", self.context)
        self._unequal_kinds_differ = z3.Bool("unequal-kinds-differ", self.context)

    def facts(self) -> Iterator[Expression]:
        """Yield the axioms that a field has at most one kind."""
        for name in self._number:
            kinds = [self._kind(name, kind) for kind in ("text", "number", "truth")]
            yield z3.AtMost(*kinds, 1)

    def formula(self, predicate: Predicate) -> Expression:
        """Return the predicate as a formula."""
        match predicate:
            case FieldTest():
                return self._test(predicate)
            case AllOf(parts):
                true = z3.BoolVal(True, self.context)
                return z3.And(true, *(self.formula(part) for part in parts))
            case AnyOf(parts):
                false = z3.BoolVal(False, self.context)
                return z3.Or(false, *(self.formula(part) for part in parts))
            case NoneOf(part):
                return z3.Not(self.formula(part))

    def _test(self, test: FieldTest) -> Expression:
        name, op, value = test.field, test.op, test.value
        other = self._unequal_kinds_differ if op == "!=" else z3.BoolVal(False, self.context)
        number = self._value(name, "number")
        truth = z3.If(z3.Bool(self._name(name, "is-true"), self.context), *self._one_and_zero())
        text_case, number_case, truth_case = other, other, other
        match value:
            case bool():
                constant = real(Fraction(int(value)), self.context)
                in_kind = compare(op, truth, constant)
                truth_case = (
                    in_kind if op in ("==", "!=") else z3.If(self._truth_is_number, in_kind, other)
                )
                number_case = z3.If(self._truth_is_number, compare(op, number, constant), other)
            case str():
                place = real(self._place[value], self.context)
                text_case = compare(op, self._value(name, "text"), place)
            case Fraction():
                constant = real(value, self.context)
                number_case = compare(op, number, constant)
                truth_case = z3.If(self._truth_is_number, compare(op, truth, constant), other)
        return z3.If(
            self._kind(name, "text"),
            text_case,
            z3.If(
                self._kind(name, "number"),
                number_case,
                z3.If(self._kind(name, "truth"), truth_case, other),
            ),
        )

    def _one_and_zero(self) -> tuple[Expression, Expression]:
        return real(Fraction(1), self.context), real(Fraction(0), self.context)

    def _name(self, field: str, part: str) -> str:
        return f"field-{self._number[field]}-{part}"

    def _kind(self, field: str, kind: str) -> Expression:
        return z3.Bool(self._name(field, f"is-{kind}"), self.context)

    def _value(self, field: str, kind: str) -> Expression:
        return z3.Real(self._name(field, kind), self.context)


def _tests(predicate: Predicate) -> Iterator[FieldTest]:
    match predicate:
        case FieldTest():
            yield predicate
        case AllOf(parts) | AnyOf(parts):
            for part in parts:
                yield from _tests(part)
        case NoneOf(part):
            yield from _tests(part)
