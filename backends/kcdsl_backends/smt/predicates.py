"""Slice predicates in z3: can any request satisfy one, does one imply another.

A field of a request may be text, a number, true/false, or nothing of these (absent, null, NaN, a
list). Two things are left open and hold for the whole query, so that an answer is right under
either reading: whether true and false count as the numbers 1 and 0, and whether `!=` holds for a
field of another kind. Every other comparison with a value of another kind is false.

Text is modelled by its place among the texts that the predicates mention, as a real number. This
allows more requests than there are, so "empty" and "implies" are never claimed wrongly.

Where clauses are compared, every request has the fields that slices test, of their kind: an
evaluation stops at a request that has not. `selects_nothing` and `selects_within` count on that.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import z3

from kcdsl.ir import predicates as selection
from kcdsl.ir.terms import AllOf, AnyOf, FieldTest, NoneOf, Predicate, Program, Slice
from kcdsl_backends.smt.solver import Clock, Expression, Outcome, Solver, compare, real


def emptiness(where: Predicate, timeout: int | Clock) -> Outcome:
    """Return UNSAT if no request can satisfy the predicate."""
    encoding = _Encoding(where)
    solver = Solver(encoding.context, timeout)
    goal = encoding.formula(where)
    solver.add(encoding.facts())
    return solver.decide(goal)


def implies(inner: Predicate, outer: Predicate, timeout: int | Clock) -> bool:
    """Say whether it is proved that every request that satisfies `inner` satisfies `outer`."""
    if inner == outer or outer == AllOf():
        return True
    encoding = _Encoding(inner, outer)
    solver = Solver(encoding.context, timeout)
    goals = (encoding.formula(inner), z3.Not(encoding.formula(outer)))
    solver.add(encoding.facts())
    return solver.decide(*goals) is Outcome.UNSAT


def lies_inside(program: Program, inner: Slice, outer: Slice, timeout: int | Clock) -> bool:
    """Say whether every row of one slice is proved to be a row of the other."""
    if inner.name == outer.name:
        return True
    same_data = (inner.data or program.data) == (outer.data or program.data)
    return same_data and implies(inner.where, outer.where, timeout)


def selects_nothing(where: Predicate, clock: Clock) -> bool:
    """Say whether it is proved that no request whose fields can be tested satisfies a predicate."""
    return selection.is_empty(where) is True or emptiness(where, clock) is Outcome.UNSAT


def selects_within(program: Program, inner: Slice, outer: Slice, clock: Clock) -> bool:
    """Say whether it is proved that every row of one slice is a row of the other, where the fields
    of every request can be tested."""
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
        """Yield: a field is of one kind at most."""
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
